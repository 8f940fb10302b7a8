"""The best linear guess, in closed form: where training starts from.

Of rows x, wanted y and weights w,

    A = argmin  sum w |y - A x|^2 + ridge |A|^2

takes one pass over the data. On a small target a linear guess of the next state from the token and
the target's states agrees with the target about as often as a head after a million tokens of
gradient steps, so these are better spent on what is not linear.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["least_squares", "unit_rms"]


def unit_rms(x: Array) -> Array:
    """`[..., E]` with a root mean square of 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def least_squares(
    batches: Iterable[tuple[Array, Array, Array]], ridge: float = 1e-4
) -> tuple[np.ndarray, float]:
    """Solves for A.

    Args:
      batches: x `[n, D]`, y `[n, E]`, w `[n]`; they are added up, never held.
      ridge: as a share of the mean diagonal of sum w x x^T.

    Returns:
      A `[E, D]` float32, and the share of y's second moment that it explains.

    Raises:
      ValueError: no row counts.
    """
    inner, cross, square, count = 0.0, 0.0, 0.0, 0.0
    for x, y, w in batches:
        xx, xy, yy, n = (np.asarray(part, np.float64) for part in _moments(x, y, w))
        inner, cross, square, count = inner + xx, cross + xy, square + yy, count + n
    if not count:
        raise ValueError("no place of the texts has a known state behind it: nothing to fit")
    level = ridge * np.trace(inner) / len(inner)
    found = np.linalg.solve(inner + level * np.eye(len(inner)), cross)  # [D, E]
    left = square - 2 * np.sum(found * cross) + np.sum(found * (inner @ found))
    return found.T.astype(np.float32), float(1 - left / square)


@jax.jit
def _moments(x: Array, y: Array, w: Array) -> tuple[Array, Array, Array, Array]:
    weighed = x * w[:, None]
    return x.T @ weighed, weighed.T @ y, jnp.sum(w * jnp.sum(y * y, axis=-1)), jnp.sum(w)
