"""Drafters of the parity folders, loaded, and the reference's numbers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import specjax
from specjax import checkpoints

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
_TARGETS = {"mtp-deepseek-v3": "."}


class Case(NamedTuple):
    """A parity folder."""

    folder: Path
    target: Path
    expected: dict[str, np.ndarray]


def case(shared: Path, name: str) -> Case:
    """A parity folder and its target."""
    folder = shared / "parity" / name
    manifest = json.loads((shared / "parity" / "MANIFEST.json").read_text())
    target = (folder / _TARGETS.get(name, manifest[name]["target"])).resolve()
    return Case(folder, target, dict(np.load(folder / "expected.npz")))


@functools.cache
def target(folder: Path) -> specjax.Params:
    """The target alone, in float32; read once."""
    return specjax.load(folder, dtype="float32")


def weights(found: checkpoints.DraftCheckpoint) -> dict[str, Any]:
    """All weights of a drafter, as a tree."""
    tree: dict[str, Any] = {}
    for dotted, read in found.weights.items():
        *parents, last = (int(p) if p.isdigit() else p for p in dotted.split("."))
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(read())
    return tree


def assert_rounds(out: specjax.DecodeResult, tokens_a_round: np.ndarray) -> None:
    """The rounds of a run of one row are those of the reference, of which each emitted so many
    tokens; the limit may have cut the last one."""
    length = int(out.lengths[0])
    rounds = int(np.argmax(np.cumsum(tokens_a_round) >= length)) + 1
    assert int(out.stats.rounds[0]) == rounds
    ours = np.asarray(out.stats.histogram[0])
    theirs = np.bincount(tokens_a_round[: rounds - 1] - 1, minlength=ours.size)
    left = ours - theirs
    assert left.sum() == 1
    assert np.all(left >= 0)
