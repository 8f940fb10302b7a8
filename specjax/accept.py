"""Accept: which drafted tokens stand, and what follows them, so that the law is the target's.

With p the target's law, q the draft's and x ~ q: keep x with probability min(1, p(x) / q(x));
otherwise draw from norm(max(p - q, 0)). The token that results is distributed as p, whatever q.

`keep_probability` and `residual` are functions without a key; coins are tossed last.

Reference: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; Chen et al. 2023
(arXiv:2302.01318), Algorithm 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax.sampling import Purpose
from specjax.types import Proposal, Verdict, check_verdict

__all__ = [
    "Acceptance",
    "TargetLaw",
    "accept_and_resample",
    "chain_following",
    "chain_keep",
    "dense_law",
    "keep_probability",
    "logits_law",
    "residual",
    "speculative_sampling",
]


class TargetLaw(NamedTuple):
    """The target's law p at every node, asked only where a rule needs it."""

    at: Callable[[Array, Array], Array]  # nodes, tokens, both [B, N] -> p_node(token) [B, N]
    row: Callable[[Array], Array]  # node [B] -> p_node [B, V]
    finite: Callable[[Array], Array]  # [B, M] bool -> [B] bool: those nodes' laws are laws


class JudgeFn(Protocol):
    """Decides on a proposal whose rows' first drafted tokens would stand at `positions [B]`."""

    def __call__(
        self, key: Array, proposal: Proposal, law: TargetLaw, positions: Array, depth: int
    ) -> Verdict: ...


class Acceptance(NamedTuple):
    """A verification rule."""

    judge: JudgeFn
    name: str
    lossless: bool  # the output's law is exactly the target's
    chain: bool  # accepted nodes are always 1, 2, ..., a: the cache needs no gather


def dense_law(probs: Array) -> TargetLaw:
    """The law as an array `[B, M, V]` of probabilities."""

    def at(nodes: Array, tokens: Array) -> Array:
        rows = jnp.take_along_axis(probs, nodes[..., None], axis=1)
        return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]

    def row(node: Array) -> Array:
        return jnp.take_along_axis(probs, node[:, None, None], axis=1)[:, 0]

    def finite(nodes: Array) -> Array:
        good = jnp.all(jnp.isfinite(probs), axis=-1) & (jnp.sum(probs, axis=-1) > 0)
        return jnp.all(good | ~nodes, axis=-1)

    return TargetLaw(at=at, row=row, finite=finite)


def logits_law(logits: Array, controls: sampling.Sampling) -> TargetLaw:
    """The law that `specjax.sampling` gives to logits `[B, M, V]`, a row at a time.

    Probabilities of single tokens come from a logsumexp and a gather; the full distribution is
    made for the one node that a row stops at.
    """

    def at(nodes: Array, tokens: Array) -> Array:
        rows = jnp.take_along_axis(logits, nodes[..., None], axis=1)
        return sampling.probability_of(rows, tokens, controls)

    def row(node: Array) -> Array:
        picked = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        return sampling.distribution(picked, controls)

    def finite(nodes: Array) -> Array:
        top = jnp.max(logits, axis=-1)  # NaN spreads, +inf wins, all -inf has no law
        return jnp.all(jnp.isfinite(top) | ~nodes, axis=-1)

    return TargetLaw(at=at, row=row, finite=finite)


def keep_probability(p: Array, q: Array) -> Array:
    """min(1, p / q): how often a drafted token stands. 0 where p is 0.

    Args:
      p, q: probabilities of the drafted token, any equal shape.

    Example:
      >>> keep_probability(jnp.array([0.25, 0.5, 0.25]), jnp.array([0.5, 0.25, 0.25]))
      Array([0.5, 1. , 1. ], dtype=float32)
    """
    ratio = p / jnp.where(q > 0, q, 1.0)
    return jnp.where(p <= 0, 0.0, jnp.where(p >= q, 1.0, ratio))


def residual(p: Array, q: Array) -> Array:
    """norm(max(p - q, 0)): what follows a rejected draft; p itself where p - q has no mass.

    Args:
      p, q: `[..., V]` distributions.

    Example:
      >>> residual(jnp.array([0.25, 0.5, 0.25]), jnp.array([0.5, 0.25, 0.25]))
      Array([0., 1., 0.], dtype=float32)
    """
    left = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p)


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


@functools.partial(jax.jit, static_argnames=("acceptance",))
def accept_and_resample(
    key: Array,
    proposal: Proposal,
    probs: Array,
    *,
    positions: Array | None = None,
    acceptance: Acceptance | None = None,
) -> Verdict:
    """Decides on a proposal from the target's probabilities: sees neither models nor caches.

    Args:
      key: `[B]` keys, one a row, or one key, from which each row gets its own.
      proposal: N nodes a row.
      probs: `[B, M, V]` float32, p after each node (node 0 is the root).
      positions: `[B]` int32, where each row's first drafted token would stand (default 0); two
        calls for the same row must not give the same position an outcome twice.
      acceptance: the rule; default `speculative_sampling()`.

    Returns:
      The accepted path, and the tokens to emit: accepted drafts, then one more.
    """
    batch, nodes = proposal.tokens.shape
    rule = speculative_sampling() if acceptance is None else acceptance
    keys = sampling.row_keys(key, batch) if key.ndim == 0 else key
    if positions is None:
        positions = jnp.zeros(batch, jnp.int32)
    verdict = rule.judge(keys, proposal, dense_law(probs), positions, nodes)
    check_verdict(verdict, {"B": batch, "P": nodes + 1})
    return verdict
