"""Rules for chains: each draft is tried in turn, until one fails."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance, keep_probability, residual
from specjax.sampling import Purpose
from specjax.types import Proposal, Verdict

__all__ = ["chain_following", "chain_keep", "speculative_sampling"]


def chain_keep(proposal: Proposal, law: TargetLaw, depth: int) -> Array:
    """How likely each draft of the chain 1, 2, ..., depth stands, given that those before it do.

    Returns:
      `[B, K]` float32; 0 at and beyond the first node that is invalid, a rider, or off the chain.
    """
    nodes = jnp.broadcast_to(jnp.arange(depth, dtype=jnp.int32)[None, :], (_batch(proposal), depth))
    tokens = proposal.tokens[:, :depth]
    p = law.at(nodes, tokens)
    if proposal.probs is None:
        q = jnp.ones_like(p)
    else:
        q = jnp.take_along_axis(proposal.probs[:, :depth], tokens[..., None], axis=-1)[..., 0]
    return jnp.where(_tried(proposal, depth), keep_probability(p, q), 0.0)


def chain_following(proposal: Proposal, law: TargetLaw, accepted: Array, depth: int) -> Array:
    """The law of the token after `accepted` drafts: the residual if the next one was tried, else p.

    Args:
      accepted: `[B]` int32.

    Returns:
      `[B, V]` float32.
    """
    p = law.row(accepted)
    if depth == 0:
        return p
    slot = jnp.minimum(accepted, depth - 1)[:, None]
    failed = (accepted[:, None] < depth) & jnp.take_along_axis(
        _tried(proposal, depth), slot, axis=1
    )
    if proposal.probs is None:
        token = jnp.take_along_axis(proposal.tokens, slot, axis=1)[:, 0]
        q = jax.nn.one_hot(token, p.shape[-1], dtype=p.dtype)
    else:
        q = jnp.take_along_axis(proposal.probs, slot[..., None], axis=1)[:, 0]
    return jnp.where(failed, residual(p, q), p)


def _batch(proposal: Proposal) -> int:
    return proposal.tokens.shape[0]


def _tried(proposal: Proposal, depth: int) -> Array:
    """`[B, K]` bool: nodes 1, 2, ... while each is a valid candidate on the chain, with a law q."""
    chain = jnp.arange(depth, dtype=jnp.int32)[None, :]
    on_chain = jnp.atleast_2d(proposal.parents)[:, :depth] == chain
    tried = proposal.valid[:, :depth] & proposal.candidate[:, :depth] & on_chain
    if proposal.probs is not None:  # NaN or no mass: not a law, so nothing could be drawn from it
        mass = jnp.sum(proposal.probs[:, :depth], axis=-1)
        tried = tried & jnp.isfinite(mass) & (mass > 0)
    return jnp.cumprod(tried, axis=1, dtype=jnp.int32).astype(bool)


def _judge_chain(
    key: Array, proposal: Proposal, law: TargetLaw, positions: Array, depth: int
) -> Verdict:
    batch, nodes = proposal.tokens.shape
    step = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]
    keep = chain_keep(proposal, law, depth)
    # A coin for each draft, and a draw for each place where the chain may end.
    purposes = np.array([Purpose.ACCEPT] * depth + [Purpose.RESAMPLE] * (depth + 1), np.int32)
    offsets = jnp.concatenate([step[:, :depth], step], axis=1)
    keys = sampling.at_positions(key, purposes[None, :], positions[:, None] + offsets)
    kept = jax.vmap(jax.vmap(jax.random.uniform))(keys[:, :depth]) < keep
    accepted = jnp.sum(jnp.cumprod(kept, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)

    last = jax.vmap(lambda row, a: row[depth + a])(keys, accepted)
    following = sampling.draw(last, chain_following(proposal, law, accepted, depth))
    path = jnp.broadcast_to(step, (batch, depth + 1))
    padded = jnp.concatenate([proposal.tokens[:, :depth], following[:, None]], axis=1)
    asked = jnp.arange(nodes + 1)[None, :] <= accepted[:, None]
    return Verdict(
        accepted=accepted,
        path=path,
        tokens=jnp.where(path == accepted[:, None], following[:, None], padded),
        finite=law.finite(asked),
    )


@functools.cache
def speculative_sampling() -> Acceptance:
    """The exact rule for chains: keep with min(1, p / q), else resample from the residual.

    Where q is one-hot (deterministic drafts) a token is kept with probability p(x); where p is
    one-hot too (greedy rows) that is equality with the target's choice. Of a tree, only the chain
    of nodes 1, 2, ... is tried.

    Reference: Leviathan et al. 2023, Algorithm 1.
    """
    return Acceptance(judge=_judge_chain, name="speculative_sampling", lossless=True, chain=True)
