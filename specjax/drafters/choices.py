"""Trees of one shape: each node is the token of some rank among those that may follow its parent.

A tree is written as the paths to its nodes, each a list of ranks, 0 the most likely:

    (0,) (1,) (0, 0) (0, 1)       the two best tokens, and the two best after the best one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["TREES", "StaticTree", "named_tree", "static_tree"]

Path = tuple[int, ...]
_LONGEST = 1024


class StaticTree(NamedTuple):
    """A tree of N nodes, a level after the other. Of each node:"""

    paths: tuple[Path, ...]  # its ranks from the root down; sorted by (length, ranks)
    parents: tuple[int, ...]  # its parent: 0 is the root, j the j-th node
    depths: tuple[int, ...]  # from 1 on
    ranks: tuple[int, ...]

    @property
    def levels(self) -> int:
        """K: the longest path."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Nodes of the largest level."""
        return max(self.depths.count(depth) for depth in set(self.depths))

    @property
    def places(self) -> np.ndarray:
        """`[N]`: which node of its level each is."""
        before = (self.depths[:node].count(depth) for node, depth in enumerate(self.depths))
        return np.fromiter(before, np.int32)

    @property
    def slots(self) -> np.ndarray:
        """`[N]`: where each node lies if every level is padded to `width`."""
        return (np.array(self.depths, np.int32) - 1) * self.width + self.places

    def by_level(self) -> tuple[np.ndarray, np.ndarray]:
        """Which node of the level above is the parent, and the rank: `[levels, width]` int32 each.

        0 where a level has no more nodes, and for parents in the first level.
        """
        places = np.concatenate([np.zeros(1, np.int32), self.places])
        origins = np.zeros((self.levels, self.width), np.int32)
        ranks = np.zeros_like(origins)
        origins.reshape(-1)[self.slots] = places[list(self.parents)]
        ranks.reshape(-1)[self.slots] = self.ranks
        return origins, ranks


def static_tree(choices: Iterable[Sequence[int]]) -> StaticTree:
    """The topology of a list of paths.

    Args:
      choices: paths of ranks in any order. Each but those of one rank must continue another one.

    Raises:
      ValueError: no path, one that is empty, twice there, has no prefix or a bad rank.

    Example:
      >>> tree = static_tree([(0,), (1,), (0, 1), (0, 0)])
      >>> tree.parents, tree.depths, tree.ranks
      ((0, 0, 1, 1), (1, 1, 2, 2), (0, 1, 0, 1))
    """
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise ValueError(f"choices must be paths of ranks, as in [(0,), (0, 0)], got {choices!r}")
    paths = sorted((_path(choice) for choice in choices), key=lambda path: (len(path), path))
    if not paths:
        raise ValueError("choices must hold at least one path, as in [(0,)]; got none")
    number = {(): 0}
    for path in paths:
        if path in number:
            raise ValueError(f"choices has the path {list(path)} twice; leave one of them out")
        if path[:-1] not in number:
            raise ValueError(
                f"choices has the path {list(path)} without {list(path[:-1])}, which it continues; "
                "add that path"
            )
        number[path] = len(number)
    return StaticTree(
        paths=tuple(paths),
        parents=tuple(number[path[:-1]] for path in paths),
        depths=tuple(len(path) for path in paths),
        ranks=tuple(path[-1] for path in paths),
    )


def named_tree(choices: str | int | Iterable[Sequence[int]]) -> StaticTree:
    """The tree that is meant.

    Args:
      choices: a name in `TREES`, an integer K for the chain of K best tokens, or paths.

    Raises:
      ValueError: an unknown name, K below 1, or paths that are no tree.

    Example:
      >>> named_tree(3).parents
      (0, 1, 2)
    """
    if isinstance(choices, str):
        if choices not in TREES:
            raise ValueError(f"choices {choices!r} is not known; known: {', '.join(TREES)}")
        return static_tree(TREES[choices])
    if isinstance(choices, int) and not isinstance(choices, bool):
        if not 1 <= choices <= _LONGEST:
            raise ValueError(f"choices must be from 1 to {_LONGEST} for a chain, got {choices}")
        return static_tree([(0,) * depth for depth in range(1, choices + 1)])
    return static_tree(choices)


def _path(choice: Sequence[int]) -> Path:
    path = tuple(choice) if isinstance(choice, Sequence) and not isinstance(choice, str) else ()
    if not path or not all(type(rank) is int and rank >= 0 for rank in path):
        raise ValueError(f"choices has {choice!r}; wanted ranks from 0 on, as in (0, 2)")
    return path


def _written(*levels: str) -> tuple[Path, ...]:
    """Paths whose ranks are single digits."""
    return tuple(tuple(map(int, path)) for level in levels for path in level.split())


# Published with Medusa: found on a calibration set, as the paths that are most often right.
TREES: Mapping[str, tuple[Path, ...]] = {
    "mc_sim_7b_63": _written(
        "0 1 2 3 4 5 6 7 8 9",
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90",
        "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 "
        "101 200",
        "0000 0001",
    ),
    "vicuna_7b_stage2": _written(
        "0 1 2 3 4 5 6 7 8 9",
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70",
        "000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 "
        "110 200",
        "0000 0001 0002 0003 0010 0020 0100",
    ),
}
