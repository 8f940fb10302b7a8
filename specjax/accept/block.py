"""Block verification: a chain is judged as a whole, and stands at least as long as by tokens.

Depth i has a weight: what the drafts up to it are worth, w_0 = 1, and with p, q the laws after
depth i - 1,

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)).

Each depth has one coin; the deepest one that passes is where the chain ends:

    S_i = sum_x max(w_i p(x) - q(x), 0)          p, q the laws after depth i
    h_i = S_i / (S_i + 1 - w_i)    for i < gamma, the number of drafts
    h_gamma = w_gamma

The next token follows norm(max(w_i p - q, 0)) at i < gamma, and p at gamma.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.accept.chain import chain_probabilities, chain_tried, chain_verdict, next_draft_law
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance, keep_probability, residual
from specjax.sampling import Purpose
from specjax.types import Proposal, Verdict

__all__ = [
    "block_following",
    "block_keep",
    "block_verification",
    "block_weights",
    "round_coins",
    "weighted_chance",
    "weighted_residual",
]


def weighted_chance(left: Array, weight: Array) -> Array:
    """S / (S + 1 - w): how often a node stands whose continuations have been given up.

    A node of weight 1 always stands, also where S is 0 (p = q). Any equal shapes.

    Example:
      >>> weighted_chance(jnp.array([0.0, 0.25, 0.5]), jnp.array([1.0, 0.75, 0.5]))
      Array([1. , 0.5, 0.5], dtype=float32)
    """
    sure = weight >= 1
    return jnp.where(sure, 1.0, left / jnp.where(sure, 1.0, left + 1 - weight))


def weighted_residual(p: Array, q: Array, weight: Array) -> Array:
    """norm(max(w p - q, 0)), `[..., V]`; p itself where that has no mass. `weight` is `[..., 1]`.

    Example:
      >>> p, q = jnp.array([0.25, 0.75]), jnp.array([0.25, 0.25])
      >>> weighted_residual(p, q, jnp.array([0.5]))
      Array([0., 1.], dtype=float32)
    """
    some = jnp.any(weight * p > q, axis=-1, keepdims=True)
    return jnp.where(some, residual(weight * p, q), p)


def round_coins(key: Array, positions: Array, nodes: Array) -> Array:
    """Uniform numbers for `nodes [B, n]` that no other round sees.

    A rule that looks beyond what it accepts tosses coins at positions that the next round comes to
    again, so they are made from where the round starts.
    """
    keys = sampling.at_positions(key, Purpose.ACCEPT, positions)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys, nodes)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def block_weights(proposal: Proposal, law: TargetLaw, depth: int) -> Array:
    """w_0, ..., w_K: `[B, K + 1]`; 0 beyond the drafts that are tried."""
    p, q = chain_probabilities(proposal, law, depth)
    tried = chain_tried(proposal, depth)
    weights = [jnp.ones(p.shape[0], p.dtype)]
    for i in range(depth):
        weight = keep_probability(weights[-1] * p[:, i], q[:, i])
        weights.append(jnp.where(tried[:, i] & (weight > 0), weight, 0.0))  # NaN is not above 0
    return jnp.stack(weights, axis=1)


def block_keep(proposal: Proposal, law: TargetLaw, weights: Array, depth: int) -> Array:
    """h_1, ..., h_K: `[B, K]`, how often each depth's coin passes; 0 beyond gamma."""
    if depth == 0:
        return weights[:, 1:]
    tried = chain_tried(proposal, depth)
    if proposal.probs is None:  # S_i = w_i (1 - p(x_{i+1})): no row is needed
        p, _ = chain_probabilities(proposal, law, depth)
        left = weights[:, 1:-1] * (1 - p[:, 1:])
    else:

        def one(i: Array) -> Array:
            after = jnp.full(proposal.tokens.shape[0], i, jnp.int32)
            p = law.row(after)
            q = next_draft_law(proposal, after, p.shape[-1])
            weight = jax.lax.dynamic_index_in_dim(weights, i, axis=1)
            return jnp.sum(jnp.maximum(weight * p - q, 0.0), axis=-1)

        left = jax.lax.map(one, jnp.arange(1, depth, dtype=jnp.int32)).T  # one row at a time
    left = jnp.where(left > 0, left, 0.0)  # NaN is not above 0
    inner = weighted_chance(left, weights[:, 1:-1])
    more = jnp.pad(tried[:, 1:], ((0, 0), (0, 1)))
    keep = jnp.where(more, jnp.pad(inner, ((0, 0), (0, 1))), weights[:, 1:])
    return jnp.where(tried, keep, 0.0)


def block_following(
    proposal: Proposal, law: TargetLaw, weights: Array, accepted: Array, depth: int
) -> Array:
    """The law of the token after `accepted [B]` drafts: `[B, V]`."""
    p = law.row(accepted)
    if depth == 0:
        return p
    more = jnp.pad(chain_tried(proposal, depth), ((0, 0), (0, 1)))
    more = jnp.take_along_axis(more, accepted[:, None], axis=1)
    weight = jnp.take_along_axis(weights, accepted[:, None], axis=1)
    q = next_draft_law(proposal, accepted, p.shape[-1]).astype(p.dtype)
    return jnp.where(more, weighted_residual(p, q, weight), p)


def _judge_block(
    key: Array, proposal: Proposal, law: TargetLaw, positions: Array, depth: int
) -> Verdict:
    weights = block_weights(proposal, law, depth)
    keep = block_keep(proposal, law, weights, depth)
    level = jnp.arange(1, depth + 1, dtype=jnp.int32)[None, :]
    passed = round_coins(key, positions, jnp.broadcast_to(level, keep.shape)) < keep
    accepted = jnp.max(jnp.where(passed, level, 0), axis=1, initial=0)
    following = block_following(proposal, law, weights, accepted, depth)
    return chain_verdict(key, proposal, law, positions, depth, accepted, following)


@functools.cache
def block_verification() -> Acceptance:
    """Judges a chain as a whole: lossless, and never shorter on average than token by token.

    The equations stand at the head of this file. Of a tree, only the chain of nodes 1, 2, ... is
    tried. Lossless for drafts drawn afresh each round: the verdict also depends on drafts beyond
    the accepted ones, so their random numbers must not come again in the next round.

    Reference: Sun, Mendlovic, Leviathan, Aharoni, Suresh 2024, "Block Verification Accelerates
    Speculative Decoding" (arXiv:2403.10444), Algorithm 2.
    """
    return Acceptance(judge=_judge_block, name="block_verification", lossless=True, chain=True)
