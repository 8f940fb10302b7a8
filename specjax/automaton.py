"""Finite automata over token ids: built on the host, run on the device.

Most tokens of a vocabulary act alike, so the table has a column for each way to act and not for
each token. Stop sequences (`stopping`) and grammars (`constraints`) both become such a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import record

__all__ = [
    "Automaton",
    "advance",
    "allowed",
    "build",
    "columns_of_words",
    "hit",
    "joint_columns",
    "merge_columns",
    "trimmed",
]

_LARGEST = 1 << 28  # entries of a table, 1 GiB
_LEAST = 8  # states and columns of the smallest bucket


@record
class Automaton:
    """A table of states and tokens. It starts in state 0; state -1 is dead.

    S and C are powers of two, so that another automaton of about the same size has the same
    shapes. No token leads to a padded state, and no token has a padded column.
    """

    columns: Array  # [V] int32: the column of each token
    following: Array  # [S, C] int32: the next state; -1: the token is refused
    hits: Array | None = None  # [S, C] bool: reading the token completes a match; None: never


def advance(automaton: Automaton, states: Array, tokens: Array) -> Array:
    """Reads one token in each state.

    Args:
      states: [...] int32.
      tokens: [...] int32 in 0..V-1, shaped as `states`.

    Returns:
      [...] int32, the next states: -1 where the token is refused or the state was dead.

    Example:
      >>> a_then_b = build(np.array([[1, -1], [-1, 0]]))  # tokens 0 and 1 in turn
      >>> advance(a_then_b, jnp.array([0, 0, 1, -1]), jnp.array([0, 1, 1, 1])).tolist()
      [1, -1, 0, -1]
      >>> allowed(a_then_b, jnp.array([0, 1, -1])).tolist()
      [[True, False], [False, True], [True, True]]
    """
    following = automaton.following[jnp.maximum(states, 0), automaton.columns[tokens]]
    return jnp.where(states < 0, -1, following)


def allowed(automaton: Automaton, states: Array) -> Array:
    """Which tokens may follow.

    A dead state allows everything: no emitted text leads there, and what is drafted behind a
    refused token still needs a law that has mass.

    Args:
      states: [...] int32.

    Returns:
      [..., V] bool.
    """
    accepts = automaton.following[jnp.maximum(states, 0)] >= 0
    return jnp.take(accepts | (states < 0)[..., None], automaton.columns, axis=-1)


def hit(automaton: Automaton, states: Array, tokens: Array) -> Array:
    """Whether reading a token completes a match.

    Args:
      states: [...] int32, before the token.
      tokens: [...] int32 in 0..V-1, shaped as `states`.

    Returns:
      [...] bool; False in a dead state.
    """
    if automaton.hits is None:
        return jnp.zeros(jnp.shape(states), bool)
    return automaton.hits[jnp.maximum(states, 0), automaton.columns[tokens]] & (states >= 0)


def build(
    following: np.ndarray, columns: np.ndarray | None = None, hits: np.ndarray | None = None
) -> Automaton:
    """Merges equal columns, pads to a bucket and puts the tables on the device.

    Args:
      following: [S, C] next states, -1 where a token is refused.
      columns: [V] the column of each token; None: C is V, and each token has its own.
      hits: [S, C] bool, where a token completes a match.

    Returns:
      The automaton.

    Raises:
      ValueError: the merged table has more than 2^28 entries (1 GiB).

    Example:
      >>> automaton = build(np.array([[1, 0, 1], [1, 0, 1]]))
      >>> automaton.columns.tolist(), automaton.following.shape
      ([0, 1, 0], (8, 8))
    """
    if columns is None:
        columns = np.arange(following.shape[1])
    used, columns = np.unique(columns, return_inverse=True)
    following = np.asarray(following, np.int32)[:, used]
    value = following if hits is None else 2 * following + hits[:, used]
    index, first = merge_columns(value)
    shape = tuple(max(_LEAST, 1 << (n - 1).bit_length()) for n in (len(following), len(first)))
    _check_size(*shape)
    padded = np.full(shape, -1, np.int32)
    padded[: len(following), : len(first)] = following[:, first]
    padded_hits = None
    if hits is not None:
        padded_hits = np.zeros(shape, bool)
        padded_hits[: len(following), : len(first)] = hits[:, used[first]]
    # Concrete arrays also while something is traced, so that an automaton can be kept.
    with jax.ensure_compile_time_eval():
        return Automaton(
            columns=jnp.asarray(index[columns], jnp.int32),
            following=jnp.asarray(padded),
            hits=None if padded_hits is None else jnp.asarray(padded_hits),
        )


def trimmed(automaton: Automaton) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The tables on the host, without padding.

    Returns:
      columns [V], following [S, C] and hits [S, C] or None.
    """
    columns, following = np.asarray(automaton.columns), np.asarray(automaton.following)
    rows, width = max(int(following.max()), 0) + 1, int(columns.max()) + 1
    hits = None if automaton.hits is None else np.asarray(automaton.hits)[:rows, :width]
    return columns, following[:rows, :width], hits


def merge_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal columns.

    Args:
      table: [S, C].

    Returns:
      index [C], numbering the distinct columns in order of appearance, and the first column [D]
      of each number.

    Example:
      >>> index, first = merge_columns(np.array([[7, 7, 3, 7], [0, 1, 0, 0]]))
      >>> index.tolist(), first.tolist()
      ([0, 1, 2, 0], [0, 1, 2])
    """
    seen: dict[bytes, int] = {}
    rows = np.ascontiguousarray(table.T)
    index = np.fromiter((seen.setdefault(row.tobytes(), len(seen)) for row in rows), np.int64)
    return index, np.unique(index, return_index=True)[1]


def joint_columns(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The coarsest columns that tell apart what any of several automata tells apart.

    Args:
      parts: P times [V], the columns of each automaton.

    Returns:
      columns [V], and members [P, C]: the column of each automaton that makes the joint column.

    Example:
      >>> columns, members = joint_columns([np.array([0, 0, 1]), np.array([0, 1, 1])])
      >>> columns.tolist(), members.tolist()
      ([0, 1, 2], [[0, 0, 1], [0, 1, 1]])
    """
    columns = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        code = columns * (int(part.max()) + 1) + part
        _, first, columns = np.unique(code, return_index=True, return_inverse=True)
    return columns, np.stack([part[first] for part in parts])


def columns_of_words(
    table: np.ndarray, words: Sequence[bytes], starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Runs an automaton over bytes through each word from each state, merging on the way.

    All words are read together, byte by byte. Words whose beginnings lead from every state to the
    same state go on as one, so that no table of all states and all words is ever made.

    Args:
      table: [X, 256] next states, -1 where a byte is refused.
      words: V words.
      starts: [S] the states to start in.

    Returns:
      columns [V], and ends [S, C] int32: the state after a word of each column, -1 where a byte of
      it is refused.

    Raises:
      ValueError: the table of distinct beginnings has more than 2^28 entries (1 GiB).

    Example:
      >>> table = np.full((2, 256), -1)
      >>> table[0, ord("a")], table[1, ord("b")] = 1, 0  # a and b in turn
      >>> words = [b"a", b"b", b"ab", b"abab", b"aa"]
      >>> columns, ends = columns_of_words(table, words, np.array([0, 1]))
      >>> ends[:, columns].tolist()
      [[1, -1, 0, 0, -1], [-1, 0, -1, -1, -1]]
    """
    byte_class, first = merge_columns(table)
    classes = len(first)
    # State -1 reads the last row, which leads nowhere else.
    step = np.concatenate([table[:, first], np.full((1, classes), -1)]).astype(np.int32)
    identity = np.asarray(starts, np.int32)
    rows, numbers = [identity], {identity.tobytes(): 0}  # distinct beginnings

    def number(row: np.ndarray) -> int:
        found = numbers.setdefault(row.tobytes(), len(rows))
        if found == len(rows):
            _check_size(len(row), len(rows))
            rows.append(row.copy())
        return found

    text = np.frombuffer(b"".join(words), np.uint8)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    offsets = np.cumsum(lengths) - lengths
    columns = np.zeros(len(words), np.int64)
    reading = np.flatnonzero(lengths)
    place = 0
    while reading.size:
        code = columns[reading] * classes + byte_class[text[offsets[reading] + place]]
        codes, inverse = np.unique(code, return_inverse=True)
        columns[reading] = np.array(
            [number(step[rows[before], symbol]) for before, symbol in _pairs(codes, classes)]
        )[inverse]
        place += 1
        reading = reading[lengths[reading] > place]
    used, columns = np.unique(columns, return_inverse=True)
    return columns, np.stack([rows[i] for i in used], axis=1)


def _pairs(codes: np.ndarray, base: int) -> list[tuple[int, int]]:
    high, low = np.divmod(codes, base)
    return list(zip(high.tolist(), low.tolist(), strict=True))


def _check_size(states: int, columns: int) -> None:
    if states * columns > _LARGEST:
        raise ValueError(
            f"the automaton has {states} states and {columns} columns; wanted at most {_LARGEST} "
            "entries (1 GiB). Use a simpler pattern, with smaller bounds on repetitions."
        )
