"""What a verification rule is, and what the rules share.

`keep_probability` and `residual` are functions without a key; coins are tossed last.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from specjax.accept.laws import TargetLaw
from specjax.types import Proposal, Verdict

__all__ = ["Acceptance", "JudgeFn", "eligible", "keep_probability", "residual"]


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
    common: bool = False  # lossless only where all drafts that follow one text have one law q


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


def eligible(proposal: Proposal) -> Array:
    """`[B, N]` bool: nodes that may be tried: valid candidates that were drawn from a law q.

    A q with NaN or without mass is no law: nothing could have been drawn from it.
    """
    may = proposal.valid & proposal.candidate
    if proposal.probs is None:
        return may
    mass = jnp.sum(proposal.probs, axis=-1)
    return may & jnp.isfinite(mass) & (mass > 0)
