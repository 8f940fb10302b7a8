"""Logits to the distribution that tokens are drawn from: the one place for it.

Draft, verification, resampling and bonus token all come here, so that p and q follow one law.
The controls act in the order of Hugging Face's processors: penalties, bias, bans (grammar and
minimum length among them), temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import controls
from specjax import seen as seen_lib
from specjax.controls import Sampling
from specjax.seen import Seen
from specjax.truncation import truncate

__all__ = [
    "Purpose",
    "Sampling",
    "adjusted",
    "at_positions",
    "distribution",
    "draw",
    "law",
    "log_law",
    "probability_of",
    "row_keys",
    "sample",
    "threefry",
]


class Purpose(enum.IntEnum):
    """What a random number is for."""

    DRAFT = 0
    ACCEPT = 1
    RESAMPLE = 2


_LARGE = 1e30  # of a penalised logit

# Row keys are folded with numbers from here on, draws with smaller ones: no two are ever equal.
_ROWS = 1 << 31

_STRETCH = 256  # tokens


def _per_row(value: Any, dims: int) -> Array:
    """A scalar or `[B]` field, shaped to broadcast against `dims` axes with B first."""
    value = jnp.asarray(value)
    return value.reshape(value.shape + (1,) * (dims - value.ndim))


def _per_id(value: Array, dims: int) -> Array:
    """A `[V]` or `[B, V]` field, shaped to broadcast against `dims` axes, B first and V last."""
    return value.reshape(value.shape[:-1] + (1,) * (dims - value.ndim) + value.shape[-1:])


def adjusted(logits: Array, sampling: Sampling, seen: Seen | None = None) -> Array:
    """Logits after penalties, bias and bans, before the temperature.

    With c the times that a token stands in what is seen:

        logit > 0: logit / repetition_penalty, else logit * repetition_penalty    where c > 0
        logit - frequency_penalty * c - presence_penalty * [c > 0]
        logit + logit_bias (banned tokens, and all but the allowed ones: -inf)

    Args:
      logits: `[V]` or `[B, ..., V]`.
      sampling: fields that are `[B]` belong to the first axis.
      seen: at the same places.

    Returns:
      float32, shape of `logits`; -inf where a token is banned.
    """
    logits = logits.astype(jnp.float32)
    sampling = controls.resolved(sampling, logits.shape[-1])
    dims = logits.ndim
    if seen is not None and seen.counts is not None and sampling.repetition_penalty is not None:
        there = seen.counts > 0
        factor = _per_row(sampling.repetition_penalty, dims)
        changed = jnp.where(logits > 0, logits / factor, logits * factor)
        changed = changed - _per_row(sampling.frequency_penalty, dims) * seen.counts
        changed = changed - _per_row(sampling.presence_penalty, dims)
        # Extreme penalties stay within what float32 can hold.
        changed = jnp.where(jnp.isfinite(logits), jnp.clip(changed, -_LARGE, _LARGE), logits)
        logits = jnp.where(there, changed, logits)
    unbanned = logits
    if sampling.logit_bias is not None:
        logits = logits + _per_id(sampling.logit_bias, dims)
    if seen is not None and seen.constraint is not None:
        allowed = seen.constraint.allowed(seen.constraint.data, seen.states)
        logits = jnp.where(allowed, logits, -jnp.inf)
        # A grammar has the last word: where bans leave it nothing, they do not hold.
        some = jnp.max(logits, axis=-1, keepdims=True) > -jnp.inf
        nan = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
        logits = jnp.where(some | nan, logits, jnp.where(allowed, unbanned, -jnp.inf))
    if seen is not None and seen.held is not None and sampling.min_new_tokens is not None:
        early = seen.emitted[..., None] < _per_row(sampling.min_new_tokens, dims)
        held = jnp.where(early & _per_id(seen.held, dims), -jnp.inf, logits)
        # A grammar that is complete allows nothing but the end.
        some = jnp.max(held, axis=-1, keepdims=True) > -jnp.inf
        logits = jnp.where(some, held, logits)
    return logits


def _scaled(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Adjusted logits over temperature, the best at 0, truncated; and whether the row is greedy."""
    temperature = _per_row(sampling.temperature, logits.ndim).astype(jnp.float32)
    greedy = temperature <= 0
    # Shifted first: a tiny temperature then gives 0 and -inf, never inf - inf.
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    scaled = shifted / jnp.where(greedy, 1.0, temperature)
    # A compiler may multiply by 1 / temperature, and -inf * 0 is NaN where that underflows.
    scaled = jnp.where(shifted == -jnp.inf, -jnp.inf, scaled)
    if sampling.top_k is not None:
        fields = sampling.top_k, sampling.top_p, sampling.min_p
        scaled = truncate(scaled, *(_per_row(x, logits.ndim) for x in fields))
    return scaled, greedy


def law(logits: Array, sampling: Sampling) -> Array:
    """The law of `adjusted` logits: temperature and truncation, then softmax.

    All mass on the (first) largest logit where temperature is 0.
    """
    scaled, greedy = _scaled(logits, controls.resolved(sampling, logits.shape[-1]))
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(greedy, best, jax.nn.softmax(scaled, axis=-1))


def log_law(logits: Array, sampling: Sampling) -> Array:
    """The logarithm of `law(logits, sampling)`, without going through small probabilities."""
    scaled, greedy = _scaled(logits, controls.resolved(sampling, logits.shape[-1]))
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(greedy, jnp.log(best), jax.nn.log_softmax(scaled, axis=-1))


def distribution(
    logits: Array,
    sampling: Sampling,
    context: Array | None = None,
    context_mask: Array | None = None,
) -> Array:
    """The law of the next token.

    Args:
      logits: `[V]` or `[B, ..., V]`; -inf bans a token.
      sampling: fields that are `[B]` belong to the first axis.
      context: `[..., C]` int32, the tokens that penalties see: with the leading axes of `logits`,
        or fewer (`[C]` or `[B, C]`, the same for all places of a row). None: no tokens.
      context_mask: `[..., C]` bool, shape of `context`: which of them count.

    Returns:
      Probabilities, float32, shape of `logits`.

    Raises:
      ValueError: a bad field of `sampling`, or a context whose shape does not fit.

    Example:
      >>> logits = jnp.array([[2.0, 1.0], [2.0, 1.0]])
      >>> distribution(logits, Sampling(temperature=jnp.array([0.0, 1.0])))
      Array([[1.        , 0.        ],
             [0.7310586 , 0.26894143]], dtype=float32)
    """
    logits = jnp.asarray(logits)
    vocab, lead = logits.shape[-1], logits.shape[:-1]
    controls.check_sampling(sampling, lead[0] if lead else None, vocab)
    sampling = controls.resolved(sampling, vocab)
    seen = None
    if context is not None:
        context = jnp.asarray(context)
        if not jnp.issubdtype(context.dtype, jnp.integer):
            raise ValueError(f"context must hold integer token ids, got {context.dtype}")
        front = context.shape[:-1]
        if context.ndim == 0 or front != lead[: len(front)]:
            raise ValueError(
                f"context must be [..., C] with leading axes of logits {lead}, "
                f"got shape {context.shape}"
            )
        if context_mask is not None:
            context_mask = jnp.asarray(context_mask, bool)
            if context_mask.shape != context.shape:
                raise ValueError(
                    f"context_mask must have the shape of context {context.shape}, "
                    f"got {context_mask.shape}"
                )
        counts = seen_lib.count_tokens(context, context_mask, vocab)
        counts = counts.reshape(front + (1,) * (len(lead) - len(front)) + (vocab,))
        seen = Seen(counts=counts)
    elif context_mask is not None:
        raise ValueError("context_mask needs a context")
    return law(adjusted(logits, sampling, seen), sampling)


def probability_of(logits: Array, tokens: Array, sampling: Sampling) -> Array:
    """`law(logits, sampling)` at one token each, without the whole distribution.

    Args:
      logits: `[B, N, V]`, `adjusted`.
      tokens: `[B, N]` int32.

    Returns:
      `[B, N]` float32.
    """
    scaled, greedy = _scaled(logits, controls.resolved(sampling, logits.shape[-1]))
    at = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    sampled = jnp.exp(at - jax.nn.logsumexp(scaled, axis=-1))
    best = (tokens == jnp.argmax(logits, axis=-1)).astype(jnp.float32)
    return jnp.where(greedy[..., 0], best, sampled)


def threefry(keys: Array) -> Array:
    """The same keys for the generator whose draws are a function of one key alone.

    Under `jax.vmap` draws of "rbg" keys depend on the whole batch, so a row's would on its
    neighbours. Keys of "threefry2x32" stay as they are.
    """
    if str(jax.random.key_impl(keys)) in ("threefry2x32", "fry"):
        return keys
    data = jax.random.key_data(keys)
    flat = data.reshape(-1, data.shape[-1])
    made = jax.random.wrap_key_data(flat[:, :2], impl="threefry2x32")
    for word in range(2, flat.shape[-1]):
        made = jax.vmap(jax.random.fold_in)(made, flat[:, word])
    return made.reshape(keys.shape)


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
    return jax.lax.cond(certain, lambda: best, lambda: _inverted(keys, probs)).astype(jnp.int32)


def _inverted(keys: Array, probs: Array) -> Array:
    """Inverts the distribution function twice: which stretch of tokens, and which token of it.

    Two numbers in [0, 1) a row, where noise on every token would cost more than the rest of a
    round. Two levels keep the rounding of sums, and of the numbers themselves, far below float32's.
    """
    batch, vocab = probs.shape
    width = min(_STRETCH, vocab)
    parts = jnp.pad(probs, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)
    at = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    part = _first_beyond(at[:, 0], jnp.sum(parts, axis=-1))
    inside = jnp.take_along_axis(parts, part[:, None, None], axis=1)[:, 0]
    return part * width + _first_beyond(at[:, 1], inside)


def _first_beyond(at: Array, mass: Array) -> Array:
    """The first place where the running sum of `mass [B, N]` is beyond `at [B]` of the whole.

    Always a place with mass, however sums are rounded.
    """
    total = jnp.cumsum(mass, axis=-1)
    beyond = (mass > 0) & (total > at[:, None] * total[:, -1:])
    last = mass.shape[-1] - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=-1)
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)


def sample(
    keys: Array, logits: Array, sampling: Sampling, seen: Seen | None = None
) -> tuple[Array, Array]:
    """Draws from the law of some logits.

    Args:
      keys: `[B]`.
      logits: `[B, V]`.
      seen: what stands before each row's token.

    Returns:
      Tokens `[B]` int32 and their law `[B, V]` float32.
    """
    probs = law(adjusted(logits, sampling, seen), sampling)
    return draw(keys, probs), probs
