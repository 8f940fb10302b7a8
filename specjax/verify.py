"""Verify: one pass of the target over the root and every drafted node.

A draft may be shorter than it could be, and then a pass over fewer nodes is enough: a drafter's
`sizes` are those for which a pass of its own is compiled.
"""

from __future__ import annotations

import functools

import chex
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
    nodes = proposal.tokens.shape[1]
    sizes = (*params.drafter.sizes, nodes)
    # With other sizes a pass could be too short for what is valid.
    chex.assert_equal(sizes, tuple(sorted(set(sizes))))
    if len(sizes) == 1:
        scores = _scores(params, cache, root, proposal)
    else:
        passes = [functools.partial(_of_first, size, params) for size in sizes]
        number = jnp.arange(1, nodes + 1)[None, :]
        needed = jnp.max(jnp.where(proposal.valid, number, 0))
        which = jnp.sum(needed > jnp.asarray(sizes[:-1]), dtype=jnp.int32)
        scores = jax.lax.switch(which, passes, cache, root, proposal)
    check_scores(scores, {"B": root.shape[0], "M": nodes + 1, "V": params.model.vocab_size})
    check_block(scores.block, cache, nodes + 1)
    return scores


def _scores(params: Params, cache: Cache, root: Array, proposal: Proposal) -> Scores:
    tokens = jnp.concatenate([root[:, None], proposal.tokens], axis=1)
    mask = tree.ancestors(proposal.parents)
    positions = cache.lengths[:, None] + tree.depths(mask)
    out = params.model.forward(
        params.target, tokens, positions, cache, mask, params.drafter.features
    )
    return Scores(
        logits=params.model.unembed(params.target, out.hidden),
        hidden=out.hidden,
        features=out.features,
        block=out.block,
    )


def _of_first(size: int, params: Params, cache: Cache, root: Array, proposal: Proposal) -> Scores:
    """Scores of the root and the first nodes; zeros for the others, none of which is valid."""
    nodes = proposal.tokens.shape[1]
    shorter = tree.first_nodes(proposal, size)
    scores = _scores(params, cache, root, shorter)
    fill = lambda x, axis: jnp.pad(
        x, [(0, nodes - size if i == axis else 0) for i in range(x.ndim)]
    )
    states = functools.partial(jax.tree.map, lambda x: fill(x, 1))
    return Scores(
        logits=fill(scores.logits, 1),
        hidden=states(scores.hidden),
        features=states(scores.features),
        block=jax.tree.map(lambda x: fill(x, 2), scores.block),
    )
