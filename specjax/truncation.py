"""Top-k, top-p and min-p by threshold search: which tokens of a law are kept, without sorting it.

All three keep the most likely tokens down to some threshold, so it is enough to find that. The
logits' bit patterns order them as integers; bisection over those integers finds the threshold
exactly, in 31 passes over the vocabulary, each a comparison and a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["truncate"]

_INF_BITS = 0x7F800000  # of +inf as float32: no finite distance has more


def truncate(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Sets the logits of tokens that are not kept to -inf, in the order top-k, top-p, min-p.

    top-k keeps the k largest logits. top-p then keeps the fewest most likely tokens whose mass,
    of what top-k kept, is at least p. min-p then keeps tokens at least min_p times as likely as
    the most likely one. Tokens that tie with a threshold are kept. The most likely token always
    is.

    Args:
      scaled: `[..., V]` float32 with a maximum of 0 (what temperature leaves).
      top_k: `[..., 1]` int32; values below 1 or above V keep everything.
      top_p, min_p: `[..., 1]` float32; top_p >= 1 and min_p <= 0 keep everything.

    Example:
      >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])) - jnp.log(0.5)
      >>> off, one, zero = jnp.array([0]), jnp.array([1.0]), jnp.array([0.0])
      >>> jnp.isfinite(truncate(logits, off, jnp.array([0.7]), zero)).astype(int)
      Array([1, 1, 0, 0], dtype=int32)
      >>> jnp.isfinite(truncate(logits, jnp.array([3]), one, jnp.array([0.5]))).astype(int)
      Array([1, 1, 0, 0], dtype=int32)
    """
    vocab, one_each = scaled.shape[-1], (*scaled.shape[:-1], 1)
    # Distances from the best token: not negative, so their bits order them.
    bits = jax.lax.bitcast_convert_type(jnp.abs(scaled.astype(jnp.float32)), jnp.int32)

    by_k = (top_k >= 1) & (top_k < vocab)

    def keep_k(bits: Array) -> Array:
        last = _smallest(lambda t: jnp.sum(bits <= t, axis=-1, keepdims=True) >= top_k, one_each)
        return jnp.where(by_k & (bits > last), _INF_BITS, bits)

    by_p = top_p < 1

    def keep_p(bits: Array) -> Array:
        mass = jnp.where(bits < _INF_BITS, jnp.exp(scaled), 0.0)
        wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)

        def enough(t: Array) -> Array:
            return jnp.sum(jnp.where(bits <= t, mass, 0.0), axis=-1, keepdims=True) >= wanted

        last = _smallest(enough, one_each)
        return jnp.where(by_p & (bits > last), _INF_BITS, bits)

    bits = jax.lax.cond(jnp.any(by_k), keep_k, lambda bits: bits, bits)
    bits = jax.lax.cond(jnp.any(by_p), keep_p, lambda bits: bits, bits)
    kept = (bits < _INF_BITS) & ((min_p <= 0) | (scaled >= jnp.log(jnp.maximum(min_p, 1e-38))))
    return jnp.where(kept, scaled, -jnp.inf)


def _smallest(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """The smallest t >= 0 for which a monotone condition holds, at most the bits of +inf."""

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the condition fails below `low`, holds at `high`
        middle = low + (high - low) // 2
        good = holds(middle)
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    bounds = jnp.zeros(shape, jnp.int32), jnp.full(shape, _INF_BITS, jnp.int32)
    return jax.lax.fori_loop(0, int(np.ceil(np.log2(_INF_BITS + 1))), halve, bounds)[1]
