"""Log-probabilities of emitted and prompt tokens, from the passes that are made anyway."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax import seen as seen_lib
from specjax.sampling import Sampling
from specjax.seen import Seen
from specjax.types import Forward, Logprobs, Model, PyTree, Verdict

__all__ = ["Wanted", "empty", "of_prompt", "of_verdict", "trimmed", "written"]

_PIECE = 16  # prompt tokens whose logits are held at a time


class Wanted(NamedTuple):
    """Which log-probabilities a call asks for. Part of what a program is compiled for."""

    top: int | None = None  # alternatives beside each new token; None: nothing at all
    processed: bool = False  # of the law after all sampling controls, else of the raw model
    prompt_top: int | None = None  # the same for the prompt (always of the raw model)


def empty(batch: int, width: int, top: int) -> Logprobs:
    """Room for `width` tokens a row."""
    return Logprobs(
        tokens=jnp.zeros((batch, width), jnp.float32),
        top_ids=jnp.zeros((batch, width, top), jnp.int32),
        top=jnp.zeros((batch, width, top), jnp.float32),
    )


def _of(log_probs: Array, tokens: Array, top: int) -> Logprobs:
    """`[B, T, V]` log-probabilities, at `[B, T]` tokens."""
    best, ids = jax.lax.top_k(log_probs, top) if top else (log_probs[..., :0], tokens[..., None])
    return Logprobs(
        tokens=jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0],
        top_ids=ids[..., :top].astype(jnp.int32),
        top=best,
    )


def of_verdict(
    logits: Array, verdict: Verdict, controls: Sampling, seen: Seen, wanted: Wanted
) -> Logprobs:
    """For each token of a verdict, its log-probability at the node it follows.

    Args:
      logits: `[B, M, V]` of the verify pass.
      seen: at `[B, M]` places.

    Returns:
      T = K + 1; meaningless beyond what the verdict accepted.
    """
    picked = jnp.take_along_axis(logits, verdict.path[..., None], axis=1)
    if wanted.processed:
        there = seen_lib.at_nodes(seen, verdict.path)
        log_probs = sampling.log_law(sampling.adjusted(picked, controls, there), controls)
    else:
        log_probs = jax.nn.log_softmax(picked.astype(jnp.float32), axis=-1)
    return _of(log_probs, verdict.tokens, wanted.top)


def of_prompt(
    model: Model, weights: PyTree, following: Array, start: Array, out: Forward, top: int
) -> tuple[Array, Array, Array]:
    """Of one prefill pass: the raw model's log-probabilities of the tokens that follow.

    Args:
      following: `[B, P]` int32, at each position the next token of the prompt.
      start: position of the pass's first token.

    Returns:
      The fields of `Logprobs`, T = C, at the position *before* the token that they belong to.
    """
    batch, width, _ = out.hidden.shape
    tokens = jax.lax.dynamic_slice_in_dim(following, start, width, axis=1)
    size = width if width % _PIECE else _PIECE  # a traced prompt may have any width

    def piece(i: Array) -> tuple[Array, Array, Array]:
        hidden = jax.lax.dynamic_slice_in_dim(out.hidden, i, size, axis=1)
        some = jax.lax.dynamic_slice_in_dim(tokens, i, size, axis=1)
        log_probs = jax.nn.log_softmax(model.unembed(weights, hidden), axis=-1)
        part = _of(log_probs, some, top)
        return part.tokens, part.top_ids, part.top

    parts = jax.lax.map(piece, jnp.arange(0, width, size))  # [width / size, B, size, ...]
    return tuple(x.swapaxes(0, 1).reshape(batch, width, *x.shape[3:]) for x in parts)


def written(buffer: Logprobs, new: Logprobs, offset: Array) -> Logprobs:
    """Puts each row's new entries at its own `offset [B]`."""
    put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
    return jax.tree.map(lambda old, part: put(old, part, offset, 0), buffer, new)


def trimmed(buffer: Logprobs, width: int, real: Array) -> Logprobs:
    """The first `width` entries of each row, 0 where `real [B, width]` is False."""

    def cut(x: Array) -> Array:
        there = real.reshape(*real.shape, *(1,) * (x.ndim - 2))
        return jnp.where(there, x[:, :width], jnp.zeros((), x.dtype))

    return jax.tree.map(cut, buffer)
