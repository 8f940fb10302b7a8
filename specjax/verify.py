"""Verify: one pass of the target over the root and every drafted node."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.types import Cache, Params, Proposal, Scores, check_block, check_scores

__all__ = ["verify_step"]


@functools.partial(jax.jit, inline=True)
def verify_step(params: Params, cache: Cache, root: Array, proposal: Proposal) -> Scores:
    """Scores a tree in one pass: each node sees the cache, its ancestors and itself.

    Args:
      params: target weights and model.
      cache: the committed tokens but for the root; read only.
      root: `[B]` int32, the last committed token, at position `cache.lengths`.
      proposal: N nodes a row.

    Returns:
      Logits `[B, M, V]` of what follows each of the M = N + 1 nodes, their hidden states, and
      their keys and values for the cache.
    """
    tokens = jnp.concatenate([root[:, None], proposal.tokens], axis=1)
    mask = tree.ancestors(proposal.parents)
    positions = cache.lengths[:, None] + tree.depths(mask)
    out = params.model.forward(
        params.target, tokens, positions, cache, mask, params.drafter.features
    )
    scores = Scores(
        logits=params.model.unembed(params.target, out.hidden),
        hidden=out.hidden,
        features=out.features,
        block=out.block,
    )
    batch, nodes = tokens.shape
    check_scores(scores, {"B": batch, "M": nodes, "V": params.model.vocab_size})
    check_block(scores.block, cache, nodes)
    return scores
