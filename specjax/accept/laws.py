"""The target's law at every node of a proposal, asked only where a rule needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.seen import Seen

__all__ = ["TargetLaw", "dense_law", "logits_law"]


class TargetLaw(NamedTuple):
    """The target's law p at every node, asked only where a rule needs it."""

    at: Callable[[Array, Array], Array]  # nodes, tokens, both [B, N] -> p_node(token) [B, N]
    row: Callable[[Array], Array]  # node [B] -> p_node [B, V]
    finite: Callable[[Array], Array]  # [B, M] bool -> [B] bool: those nodes' laws are laws


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


def logits_law(logits: Array, controls: sampling.Sampling, seen: Seen | None = None) -> TargetLaw:
    """The law that `specjax.sampling` gives to logits `[B, M, V]`, a row at a time.

    Probabilities of single tokens come from a logsumexp and a gather; the full distribution is
    made for the one node that a row stops at.

    Args:
      seen: what stands before the token that follows each node, `[B, M]` places.
    """
    logits = sampling.adjusted(logits, controls, seen)

    def at(nodes: Array, tokens: Array) -> Array:
        rows = jnp.take_along_axis(logits, nodes[..., None], axis=1)
        return sampling.probability_of(rows, tokens, controls)

    def row(node: Array) -> Array:
        picked = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        return sampling.law(picked, controls)

    def finite(nodes: Array) -> Array:
        top = jnp.max(logits, axis=-1)  # NaN spreads, +inf wins, all -inf has no law
        return jnp.all(jnp.isfinite(top) | ~nodes, axis=-1)

    return TargetLaw(at=at, row=row, finite=finite)
