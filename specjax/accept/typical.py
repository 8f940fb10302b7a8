"""Typical acceptance: what the target finds plausible stands. Lossy: the law is not the target's.

    x stands after v  if  p_v(x) > min(epsilon, delta exp(-H(p_v))),   H(p) = -sum p log(p + 1e-5)

A flat p asks for little, a peaked one for much. The draft's law plays no part.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance
from specjax.accept.tree import Topology, topology, tree_verdict
from specjax.types import Proposal, Verdict

__all__ = ["typical_acceptance", "typical_best", "typical_keep"]


def typical_keep(
    proposal: Proposal, law: TargetLaw, shape: Topology, epsilon: float, delta: float
) -> tuple[Array, Array]:
    """Which nodes are plausible after their parents, `[B, M]` bool, and p of each, `[B, M]`.

    The root is always plausible, with p = 1.
    """
    nodes = shape.tokens.shape[1]
    p = law.at(shape.parents[:, 1:], shape.tokens[:, 1:])
    if nodes == 1:
        return ~shape.eligible, jnp.ones(shape.eligible.shape, p.dtype)

    def entropy(node: Array) -> Array:
        """H at one node of every row; 0 where it has no children to be asked about."""

        def of_rows() -> Array:
            row = law.row(jnp.full_like(shape.parents[:, 0], node))
            return -jnp.sum(row * jnp.log(row + 1e-5), axis=-1).astype(p.dtype)

        asked = jnp.any(shape.eligible & (shape.parents == node))
        return jax.lax.cond(asked, of_rows, lambda: jnp.zeros_like(p[:, 0]))

    entropies = jax.lax.map(entropy, jnp.arange(nodes, dtype=jnp.int32)).T  # [B, M]
    after = jnp.take_along_axis(entropies, shape.parents[:, 1:], axis=1)
    keep = shape.eligible[:, 1:] & (p > jnp.minimum(epsilon, delta * jnp.exp(-after)))
    return (
        jnp.pad(keep, ((0, 0), (1, 0)), constant_values=True),
        jnp.pad(p, ((0, 0), (1, 0)), constant_values=1),
    )


def typical_best(shape: Topology, keep: Array, p: Array) -> Array:
    """The deepest node whose path is kept: of several the likeliest path, then the first. `[B]`."""
    off_path = ~shape.mask
    whole = jnp.all(keep[:, None, :] | off_path, axis=-1)
    log_p = jnp.where(keep, jnp.log(jnp.where(keep, p, 1.0)), 0.0)
    score = jnp.sum(jnp.where(off_path, 0.0, log_p[:, None, :]), axis=-1)
    level = jnp.where(whole, shape.depth, -1)
    deepest = level == jnp.max(level, axis=1, keepdims=True)
    return jnp.argmax(jnp.where(deepest, score, -jnp.inf), axis=1).astype(jnp.int32)


def _judge_typical(
    key: Array,
    proposal: Proposal,
    law: TargetLaw,
    positions: Array,
    depth: int,
    *,
    epsilon: float,
    delta: float,
    greedy: bool,
) -> Verdict:
    shape = topology(proposal, depth)
    keep, p = typical_keep(proposal, law, shape, epsilon, delta)
    node = typical_best(shape, keep, p)
    row = law.row(node)

    def token_of(keys: Array) -> Array:
        if greedy:
            return jnp.argmax(row, axis=-1).astype(jnp.int32)
        return sampling.draw(keys, row)

    return tree_verdict(key, proposal, law, shape, positions, depth, node, token_of)


def typical_acceptance(
    epsilon: float = 0.09, delta: float = 0.3, next_token: Literal["greedy", "sample"] = "greedy"
) -> Acceptance:
    """Keeps what the target finds plausible, along the deepest path of a tree. Lossy.

    The equation stands at the head of this file; p is the law after temperature, top-k and so on.
    The next token is the target's most likely one, as in the paper, or drawn from p. Lossless for
    greedy rows only: their p is one-hot, so exactly the target's choices stand.

    Args:
      epsilon: no token above it is refused; in [0, 1).
      delta: how far below exp(-H) a token may be; at least 0.
      next_token: "greedy" or "sample".

    Raises:
      ValueError: a value outside these.

    Reference: Cai et al. 2024, Medusa (arXiv:2401.10774), section 2.3.2.
    """
    for name, value, most in (("epsilon", epsilon, 1), ("delta", delta, math.inf)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < most):
            below = " and below 1" if most == 1 else ""
            raise ValueError(f"{name} must be a finite number of at least 0{below}, got {value!r}")
    if next_token not in ("greedy", "sample"):
        raise ValueError(f'next_token must be "greedy" or "sample", got {next_token!r}')
    return _typical(float(epsilon), float(delta), next_token == "greedy")


@functools.cache
def _typical(epsilon: float, delta: float, greedy: bool) -> Acceptance:
    judge = functools.partial(_judge_typical, epsilon=epsilon, delta=delta, greedy=greedy)
    return Acceptance(judge=judge, name="typical_acceptance", lossless=False, chain=False)
