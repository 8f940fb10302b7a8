"""Drafts whose vocabulary is not the target's: ids there and back, and logits onto the target's.

A token that the draft lacks has q = 0 and is never drafted; since q is what the draft really draws
from, the output's law is the target's all the same.

Reference: Timor et al. 2025 (arXiv:2502.05202), token-level intersection; the offsets `d2t` are
those of EAGLE-3 checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import Params, PyTree, record

__all__ = [
    "VocabularyMap",
    "check_map",
    "draft_ids",
    "onto_target",
    "split_draft",
    "vocabulary_map",
]


@record
class VocabularyMap:
    """Which token of the target each token of the draft is, and back."""

    d2t: Array  # [DV] int32: target id minus draft id; the draft's own tokens lead to V or beyond
    t2d: Array  # [V] int32: draft id; for tokens that the draft lacks, some draft id


def vocabulary_map(d2t: Any, vocab_size: int, *, unknown: int = 0) -> VocabularyMap:
    """A map from offsets.

    Args:
      d2t: `[DV]` integers, target id minus draft id; where that is V or more, the target has no
        such token.
      vocab_size: V, of the target.
      unknown: the draft id that stands for tokens which the draft lacks, when it reads them.

    Raises:
      ValueError: a negative target id, or two draft tokens for one target token.

    Example:
      >>> held = vocabulary_map([0, 1, 3], 6)  # draft ids 0 1 2 are target ids 0 2 5
      >>> held.t2d.tolist()
      [0, 0, 1, 0, 0, 2]
      >>> onto_target(jnp.array([1.0, 2.0, 3.0]), 6, held.d2t).tolist()
      [1.0, -inf, 2.0, -inf, -inf, 3.0]
    """
    offsets = np.asarray(d2t)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError(f"d2t must be integers [DV], got {offsets.dtype} {offsets.shape}")
    ids = np.arange(offsets.size) + offsets.astype(np.int64)
    if (ids < 0).any():
        first = int(np.flatnonzero(ids < 0)[0])
        raise ValueError(f"d2t[{first}] = {offsets[first]} leads to the negative id {ids[first]}")
    if not 0 <= unknown < offsets.size:
        raise ValueError(f"unknown must be a draft id in 0..{offsets.size - 1}, got {unknown}")
    shared = np.flatnonzero(ids < vocab_size)
    if np.unique(ids[shared]).size != shared.size:
        values, counts = np.unique(ids[shared], return_counts=True)
        raise ValueError(f"d2t leads twice to the target's token {int(values[counts > 1][0])}")
    t2d = np.full(vocab_size, unknown, np.int32)
    t2d[ids[shared]] = shared
    return VocabularyMap(d2t=jnp.asarray(offsets, jnp.int32), t2d=jnp.asarray(t2d))


def onto_target(logits: Array, vocab_size: int, d2t: Array | None = None) -> Array:
    """Draft logits `[..., DV]` as logits over the target's tokens `[..., V]`.

    -inf where the draft lacks a token. Without `d2t` both number the tokens that they share alike,
    and rows beyond the target's vocabulary (padding) are dropped.
    """
    own = logits.shape[-1]
    if d2t is not None:
        ids = jnp.arange(own, dtype=jnp.int32) + d2t
        empty = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
        return empty.at[..., ids].set(logits, mode="drop")
    if own >= vocab_size:
        return logits[..., :vocab_size]
    gap = [(0, 0)] * (logits.ndim - 1) + [(0, vocab_size - own)]
    return jnp.pad(logits, gap, constant_values=-jnp.inf)


def draft_ids(tokens: Array, ids: VocabularyMap | None, draft_vocab: int) -> Array:
    """The draft's ids of the target's tokens; what it does not have reads as another token."""
    return jnp.minimum(tokens, draft_vocab - 1) if ids is None else ids.t2d[tokens]


def split_draft(params: Params, name: str, mapped: bool) -> tuple[PyTree, VocabularyMap | None]:
    """A drafter's weights, and how its vocabulary is mapped, from `params.draft`.

    Args:
      name: of the drafter, for messages.
      mapped: `params.draft` must be the pair of both.

    Raises:
      ValueError: there are no weights, or no map.
    """
    draft = params.draft
    if draft is None:
        raise ValueError(
            f"params.draft is None, but the drafter {name} needs the draft's weights; load them "
            "with specjax.load(target, drafter=...) or params.replace(draft=...)"
        )
    if not mapped:
        return draft, None
    if not (isinstance(draft, tuple) and len(draft) == 2 and isinstance(draft[1], VocabularyMap)):
        raise ValueError(
            f"params.draft must be (weights, vocabulary map) for {name}(..., mapped=True), "
            f"got {type(draft)}"
        )
    return draft


def check_map(params: Params, ids: VocabularyMap | None, draft_vocab: int) -> None:
    """Refuses a map that is not between these vocabularies.

    Raises:
      ValueError: the sizes differ.
    """
    if ids is None:
        return
    sizes = (draft_vocab, params.model.vocab_size)
    if (ids.d2t.size, ids.t2d.size) != sizes:
        raise ValueError(
            f"params.draft maps {ids.d2t.size} draft tokens to {ids.t2d.size}, but the "
            f"draft model has {sizes[0]} tokens and the target {sizes[1]}"
        )
