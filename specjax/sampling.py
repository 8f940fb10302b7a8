"""Logits to the distribution that tokens are drawn from: the one place for it.

Draft, verification, resampling and bonus token all come here, so that p and q follow one law.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import record

__all__ = [
    "Purpose",
    "Sampling",
    "at_positions",
    "check_sampling",
    "distribution",
    "draw",
    "probability_of",
    "row_keys",
    "sample",
]


@record
class Sampling:
    """How tokens are chosen. Every field is a scalar or one value a row.

    temperature: 0 is greedy; otherwise logits are divided by it.
    ignore_eos: end-of-sequence tokens do not end the row.
    """

    temperature: Any = 0.0  # [] or [B] float32
    ignore_eos: Any = False  # [] or [B] bool


class Purpose(enum.IntEnum):
    """What a random number is for."""

    DRAFT = 0
    ACCEPT = 1
    RESAMPLE = 2


# Row keys are folded with numbers from here on, draws with smaller ones: no two are ever equal.
_ROWS = 1 << 31


def check_sampling(sampling: Sampling, batch: int) -> None:
    """Refuses bad values before anything is compiled. Traced values are left alone.

    Raises:
      ValueError: a negative or non-finite temperature, or a field that is neither a scalar nor
        one value a row.
    """
    for name in ("temperature", "ignore_eos"):
        value = getattr(sampling, name)
        if isinstance(value, jax.core.Tracer):
            shape = value.shape
        else:
            value = np.asarray(value)
            shape = value.shape
            if value.dtype.kind not in "fiub":
                raise ValueError(f"sampling.{name} must be a number, got {value.dtype}")
            if name == "temperature" and not (np.isfinite(value).all() and (value >= 0).all()):
                raise ValueError(
                    f"sampling.temperature must be finite and >= 0 (0 is greedy), got {value}"
                )
        if shape not in ((), (batch,)):
            raise ValueError(
                f"sampling.{name} must be a scalar or have one value a row ({batch}), "
                f"got shape {shape}"
            )


def _per_row(value: Any, dims: int) -> Array:
    """A scalar or `[B]` field, shaped to broadcast against `dims` axes with B first."""
    value = jnp.asarray(value)
    return value.reshape(value.shape + (1,) * (dims - value.ndim))


def _scaled(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Logits over temperature, shifted to a maximum of 0, and whether the row is greedy."""
    logits = logits.astype(jnp.float32)
    temperature = _per_row(sampling.temperature, logits.ndim).astype(jnp.float32)
    greedy = temperature <= 0
    # Shifted first: a tiny temperature then gives 0 and -inf, never inf - inf.
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return shifted / jnp.where(greedy, 1.0, temperature), greedy


def distribution(logits: Array, sampling: Sampling) -> Array:
    """The law of the next token.

    softmax(logits / temperature); all mass on the (first) largest logit where temperature is 0.

    Args:
      logits: `[V]` or `[B, ..., V]`; -inf bans a token.
      sampling: fields that are `[B]` belong to the first axis.

    Returns:
      Probabilities, float32, shape of `logits`.

    Example:
      >>> logits = jnp.array([[2.0, 1.0], [2.0, 1.0]])
      >>> distribution(logits, Sampling(temperature=jnp.array([0.0, 1.0])))
      Array([[1.        , 0.        ],
             [0.7310586 , 0.26894143]], dtype=float32)
    """
    scaled, greedy = _scaled(logits, sampling)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(greedy, best, jax.nn.softmax(scaled, axis=-1))


def probability_of(logits: Array, tokens: Array, sampling: Sampling) -> Array:
    """`distribution(logits, sampling)` at one token each, without the whole distribution.

    Args:
      logits: `[B, N, V]`.
      tokens: `[B, N]` int32.

    Returns:
      `[B, N]` float32.
    """
    scaled, greedy = _scaled(logits, sampling)
    at = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    sampled = jnp.exp(at - jax.nn.logsumexp(scaled, axis=-1))
    best = (tokens == jnp.argmax(logits, axis=-1)).astype(jnp.float32)
    return jnp.where(greedy[..., 0], best, sampled)


def row_keys(key: Array, batch: int) -> Array:
    """One key a row: `key` itself for row 0, a key derived from it for each other row."""

    def one(row: Array) -> Array:
        return jax.lax.select(row == 0, key, jax.random.fold_in(key, row + np.uint32(_ROWS)))

    return jax.vmap(one)(jnp.arange(batch, dtype=jnp.uint32))


def at_positions(keys: Array, purpose: Purpose | Array, positions: Array) -> Array:
    """Keys for draws that depend on nothing but the row, the position and the purpose.

    Args:
      keys: `[B]`, one a row.
      purpose: one, or an array that broadcasts against `positions`.
      positions: `[B]` or `[B, N]` int32 below 2^29, where in the row the token will stand.

    Returns:
      Keys, shape of `positions`.
    """
    which = (positions * len(Purpose) + jnp.asarray(purpose, jnp.int32)).astype(jnp.uint32)
    fold = (
        jax.vmap(jax.random.fold_in, in_axes=(None, 0)) if which.ndim == 2 else jax.random.fold_in
    )
    return jax.vmap(fold)(keys, which)


def draw(keys: Array, probs: Array) -> Array:
    """One token a row from `probs [B, V]`, which need not be normalised.

    Rows whose mass is on one token need no randomness; when all rows are so, none is made.

    Args:
      keys: `[B]`.
      probs: `[B, V]` float32.

    Returns:
      `[B]` int32, always in the support.
    """
    best = jnp.argmax(probs, axis=-1)
    certain = jnp.all(jnp.max(probs, axis=-1) >= jnp.sum(probs, axis=-1))

    def gumbel(_) -> Array:
        noise = jax.vmap(lambda k: jax.random.gumbel(k, probs.shape[-1:]))(keys)
        return jnp.argmax(jnp.log(probs) + noise, axis=-1)

    return jax.lax.cond(certain, lambda _: best, gumbel, None).astype(jnp.int32)


def sample(keys: Array, logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Draws from `distribution(logits, sampling)`.

    Args:
      keys: `[B]`.
      logits: `[B, V]`.

    Returns:
      Tokens `[B]` int32 and their law `[B, V]` float32.
    """
    probs = distribution(logits, sampling)
    return draw(keys, probs), probs
