"""What drafters are trained to make small. p is the target's law, q the draft's.

All take logits `[..., V]` in any float type, compute in float32, and give one value a position,
`[...]`. Acceptance of one draft at temperature 1 is 1 - total variation, so `total_variation` is
what speculative sampling pays for, and the others are what is easier to descend.

Reference: Leviathan et al. 2023 (arXiv:2211.17192), corollary 3.6, for acceptance; Zhou et al. 2023
(arXiv:2310.08461), DistillSpec; Goel et al. 2024 (arXiv:2403.00858), TVD++.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

__all__ = [
    "acceptance",
    "binary_cross_entropy",
    "cross_entropy",
    "decayed",
    "kl",
    "reverse_kl",
    "smooth_l1",
    "soft_cross_entropy",
    "total_variation",
    "tvd_plus_plus",
    "weighted_mean",
]


def cross_entropy(draft: Array, ids: Array) -> Array:
    """-log q(x) of the tokens `ids [...]`."""
    log_q = _log_softmax(draft)
    return -jnp.take_along_axis(log_q, ids[..., None], axis=-1)[..., 0]


def soft_cross_entropy(target: Array, draft: Array) -> Array:
    """-sum_x p(x) log q(x): KL(p || q) up to the entropy of p."""
    return -_sum(jnp.exp(_log_softmax(target)), _log_softmax(draft))


def kl(target: Array, draft: Array) -> Array:
    """KL(p || q) = sum_x p(x) (log p(x) - log q(x)): q covers what p does."""
    log_p, log_q = _log_softmax(target), _log_softmax(draft)
    return _sum(jnp.exp(log_p), log_p - log_q)


def reverse_kl(target: Array, draft: Array) -> Array:
    """KL(q || p): q keeps to what p likes best."""
    return kl(draft, target)


def total_variation(target: Array, draft: Array) -> Array:
    """sum_x |p(x) - q(x)| / 2."""
    p, q = jax.nn.softmax(_float(target)), jax.nn.softmax(_float(draft))
    return 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)


def acceptance(target: Array, draft: Array) -> Array:
    """sum_x min(p(x), q(x)): the chance that one draft stands at temperature 1."""
    p, q = jax.nn.softmax(_float(target)), jax.nn.softmax(_float(draft))
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def tvd_plus_plus(target: Array, draft: Array, weights: Array) -> Array:
    """Total variation by its policy gradient, with rewards normalised over all positions.

    The gradient of the total variation is E_q[-r(x) grad log q(x)] with r(x) = 1 where p(x) > q(x),
    else 0. Here r is replaced by (r - mean r) / std r, both over x drawn from q and over the
    positions, so that steps keep their size when few tokens are rewarded. Only the gradient means
    something, the value does not. Expectations over x are exact sums.

    Args:
      target: logits of p.
      draft: logits of q.
      weights: `[...]`, of the positions, for mean and std.
    """
    p = jax.nn.softmax(_float(target))
    log_q = _log_softmax(draft)
    q = jax.lax.stop_gradient(jnp.exp(log_q))
    reward = (p > q).astype(jnp.float32)
    mean = weighted_mean(jnp.sum(q * reward, axis=-1), weights)
    variance = weighted_mean(jnp.sum(q * (reward - mean) ** 2, axis=-1), weights)
    advantage = (reward - mean) * jax.lax.rsqrt(variance + 1e-6)
    return -_sum(q * jax.lax.stop_gradient(advantage), log_q)


def smooth_l1(target: Array, draft: Array) -> Array:
    """Mean over the last axis of d^2 / 2 where |d| < 1, else |d| - 1/2, with d the difference."""
    d = jnp.abs(_float(target) - _float(draft))
    return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def binary_cross_entropy(logit: Array, chance: Array) -> Array:
    """-(c log s + (1 - c) log (1 - s)) with s = sigmoid(logit); least at s = c."""
    logit = _float(logit)
    return jax.nn.softplus(logit) - chance * logit


def decayed(values: Array, rate: float) -> Array:
    """sum_k rate^k v_k over the first axis: guesses further ahead count less."""
    steps = jnp.arange(values.shape[0], dtype=jnp.float32)
    return jnp.tensordot(rate**steps, values, axes=1)


def weighted_mean(values: Array, weights: Array) -> Array:
    """sum w v / sum w, and 0 where there is no weight. Values without weight may be NaN."""
    weights = jnp.broadcast_to(weights, values.shape).astype(jnp.float32)
    total = jnp.sum(jnp.where(weights > 0, weights * values, 0.0))
    return total / jnp.maximum(jnp.sum(weights), 1e-9)


def _float(x: Array) -> Array:
    return x.astype(jnp.float32)


def _log_softmax(logits: Array) -> Array:
    return jax.nn.log_softmax(_float(logits))


def _sum(weights: Array, values: Array) -> Array:
    """Terms without weight count as 0, also where the value is infinite (0 log 0)."""
    return jnp.sum(jnp.where(weights == 0, 0.0, weights * values), axis=-1)
