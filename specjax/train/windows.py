"""Windows of equal length, cut from texts and the target's states: what a step trains on.

Conversations stand one behind another, and a window is cut wherever its length ends. A batch is a
function of the seed and the step's number alone, so training that was killed goes on with the very
batches it would have had.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.train.texts import Shard, read_shards
from specjax.types import Forward, Model, PyTree, record, static

__all__ = [
    "Batch",
    "Windows",
    "batch_at",
    "held_out",
    "open_windows",
    "whole_windows",
    "with_states",
]


@record
class Batch:
    """Texts and the target's states in them.

    The state at a position gives the target's law of the token behind it.
    """

    tokens: Array  # [B, T] int32
    texts: Array  # [B, T] int32: number of the text that the token belongs to
    known: Array  # [B, T] bool: the states are known; those of a text's last token are not
    answer: Array  # [B, T] bool: the token is the target's answer
    states: tuple[Array, ...]  # one [B, T, E] a feature
    features: tuple[int, ...] = static()  # which: i is what layer i reads, L after the final norm

    def state(self, feature: int) -> Array:
        """The states that layer `feature` reads, `[B, T, E]` float32."""
        return self.states[self.features.index(feature)].astype(jnp.float32)


class Windows(NamedTuple):
    """Windows over shards; states are read from disk when a batch is made."""

    shards: tuple[Shard, ...]
    places: np.ndarray  # [W, 2]: shard and offset of each window
    features: tuple[int, ...]
    length: int  # T


def open_windows(
    folder: str | os.PathLike[str], length: int, features: Sequence[int] | None = None
) -> Windows:
    """The windows of a folder that `write_texts` made.

    Args:
      folder: of the texts, with states.
      length: T, tokens of a window.
      features: which states; None: all that are there; (): none, for `with_states`.

    Raises:
      ValueError: no texts, states that are not there, or not one whole window.
    """
    about = Path(folder) / "texts.json"
    held = tuple(json.loads(about.read_text())["features"]) if about.exists() else ()
    features = held if features is None else tuple(features)
    if set(features) - set(held):
        raise ValueError(
            f"the folder {str(folder)!r} holds states of the layers {list(held)}, wanted "
            f"{list(features)}; write its texts anew with features={list(features)}"
        )
    columns = [held.index(i) for i in features]
    shards, places = [], []
    for number, shard in enumerate(read_shards(folder)):
        shards.append(shard._replace(states=tuple(shard.states[i] for i in columns)))
        places += [(number, i * length) for i in range(len(shard.tokens) // length)]
    if not places:
        raise ValueError(f"the texts of {str(folder)!r} are shorter than one window of {length}")
    return Windows(tuple(shards), np.asarray(places), features, length)


def held_out(windows: Windows, share: float, seed: int = 0) -> tuple[Windows, Windows]:
    """Splits windows into those to train on and those to measure on, whole shards each.

    Raises:
      ValueError: there is only one window.
    """
    if len(windows.places) < 2:
        raise ValueError(
            f"the texts give one window of {windows.length} tokens; wanted two at least, one to "
            "measure on: give more tokens"
        )
    order = np.random.default_rng([seed, 2]).permutation(len(windows.shards))
    kept = set(order[: max(1, round(share * len(order)))].tolist())
    out = np.isin(windows.places[:, 0], list(kept))
    if out.all() or not out.any():  # one shard only
        count = len(windows.places)
        out = np.arange(count) >= min(count - 1, max(1, round(count * (1 - share))))
    return windows._replace(places=windows.places[~out]), windows._replace(
        places=windows.places[out]
    )


def batch_at(windows: Windows, step: int, rows: int, seed: int = 0) -> Batch:
    """The batch of a step: every window once an epoch, in an order of that epoch's own.

    Args:
      windows: to take from.
      step: number of the step, from 0.
      rows: B.
      seed: of the orders.
    """
    count, length = len(windows.places), windows.length
    parts = []
    for i in range(step * rows, (step + 1) * rows):
        epoch, place = divmod(i, count)
        number, at = windows.places[_order(count, seed, epoch)[place]].tolist()
        parts.append(_cut(windows.shards[number], at, length))
    tokens, texts, known, answer, states = zip(*parts, strict=True)
    return Batch(
        tokens=np.stack(tokens),
        texts=np.stack(texts),
        known=np.stack(known),
        answer=np.stack(answer),
        states=tuple(np.stack(one) for one in zip(*states, strict=True)),  # () without features
        features=windows.features,
    )


def with_states(model: Model, target: PyTree, batch: Batch, features: tuple[int, ...]) -> Batch:
    """The batch with the target's states, by one pass in which each text sees itself alone.

    Args:
      model: the target.
      target: its weights.
      batch: tokens `[B, T]`.
      features: which states.
    """
    same = batch.texts[:, :, None] == batch.texts[:, None, :]
    out = whole_windows(model, target, batch.tokens, same, features)
    return dataclasses.replace(batch, states=out.features, features=features)


def whole_windows(
    model: Model,
    weights: PyTree,
    tokens: Array,
    seen: Array | None = None,
    features: tuple[int, ...] = (),
) -> Forward:
    """One pass of a model over windows from their first place, without a cache.

    Args:
      model: any model.
      weights: its weights.
      tokens: `[B, T]`.
      seen: `[B, T, T]` bool: what each place may see of those before it; None: all.
      features: which states are wanted.
    """
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    mask = causal if seen is None else seen & causal
    cache = model.init_cache(weights, rows, 0)
    return model.forward(weights, tokens, positions, cache, mask, features=features)


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _cut(shard: Shard, at: int, length: int) -> tuple[np.ndarray, ...]:
    place = np.arange(at, at + length)
    ends = np.cumsum(shard.lengths)
    text = np.searchsorted(ends, place, side="right")
    answer = place - (ends - shard.lengths)[text] >= shard.prompts[text]
    known = place + 1 < ends[text]
    texts = (text - text[0]).astype(np.int32)
    states = tuple(x[at : at + length] for x in shard.states)
    return shard.tokens[at : at + length], texts, known, answer, states
