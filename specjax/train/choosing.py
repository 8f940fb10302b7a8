"""The draft's vocabulary, and the sample of it that a step compares laws on.

A softmax over a sample S of tokens, with log-weights w that make exp(w) count for those left out,

    Z = sum_(x in S) exp(l(x) + w(x)),

has the expectation of the whole sum. What a text holds is always in S, so that only the mass of
what is neither there nor frequent is estimated.

Reference: Bengio and Senecal 2008 (Adaptive importance sampling), for the estimate.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from specjax.train.recipe import Choice

__all__ = ["choose", "draft_vocabulary", "token_counts"]


def token_counts(texts: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each token occurs, `[V]` int64."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens in texts:
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> np.ndarray:
    """The most frequent tokens, as increasing target ids `[size]` int32.

    Args:
      counts: `[V]`.
      size: DV.
      always: tokens that are taken whatever their count, e.g. those that end a text.

    Raises:
      ValueError: size is not in 1..V, or too small for `always`.
    """
    must = sorted(set(always))
    if not max(1, len(must)) <= size <= counts.size:
        raise ValueError(
            f"the draft's vocabulary must have from {max(1, len(must))} to {counts.size} tokens, "
            f"got {size}"
        )
    counts = counts.astype(np.float64)
    counts[must] = np.inf
    # Ties are kept in the order of ids: small ids are frequent merges.
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def choose(
    tokens: np.ndarray, draft_ids: np.ndarray, frequent: np.ndarray, size: int, seed: list[int]
) -> Choice:
    """The tokens of one step.

    Args:
      tokens: the batch's, any shape.
      draft_ids: `[DV]`, increasing target ids.
      frequent: `[F]` draft ids that are always taken.
      size: C; at DV or more, all are taken and nothing is estimated.
      seed: of the others.
    """
    total = draft_ids.size
    if size >= total:
        return Choice(
            ids=jnp.arange(total, dtype=jnp.int32), log_weights=jnp.zeros(total, jnp.float32)
        )
    place = np.searchsorted(draft_ids, tokens.ravel())
    place = place[draft_ids[np.minimum(place, total - 1)] == tokens.ravel()]
    # The batch's own tokens first, should there be no room for all.
    sure = np.concatenate([np.unique(place), frequent])
    sure = sure[np.sort(np.unique(sure, return_index=True)[1])][: size // 4 * 3]
    others = np.setdiff1d(np.arange(total), sure)
    count = size - sure.size
    drawn = np.random.default_rng(seed).choice(others, count, replace=False)
    weights = np.zeros(size, np.float32)
    weights[sure.size :] = np.log(others.size / count)
    return Choice(
        ids=jnp.asarray(np.concatenate([sure, drawn]).astype(np.int32)),
        log_weights=jnp.asarray(weights),
    )
