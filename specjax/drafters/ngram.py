"""Prompt lookup: what followed the last tokens when they stood in the text before.

Reference: Saxena 2023, "Prompt Lookup Decoding"; matched on the device, over prompt and output.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.types import Context, Drafter

__all__ = ["lookup", "ngram"]


def lookup(
    tokens: Array, lengths: Array, num_tokens: int, shortest: int, longest: int
) -> tuple[Array, Array]:
    """Finds the longest earlier copy of each row's last tokens, and what followed it.

    The longest match between `shortest` and `longest` tokens wins, the most recent among equals.
    A copy that overlaps the end goes on periodically, so `a b a b a` is followed by `b a b ...`.

    Args:
      tokens: `[B, S]` int32.
      lengths: `[B]` int32; tokens beyond are ignored.

    Returns:
      Continuations `[B, num_tokens]` int32, and `[B]` bool: a match was found.

    Example:
      >>> lookup(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]), 3, 1, 2)
      (Array([[7, 8, 5]], dtype=int32), Array([ True], dtype=bool))
    """
    slots = tokens.shape[1]
    end = jnp.arange(slots)[None, :]  # a match is the tokens just before `end`
    run = jnp.zeros(tokens.shape, jnp.int32)  # how many tokens agree, going backwards
    agree = (end >= 1) & (end < lengths[:, None])  # something must follow the match
    before = tokens
    for n in range(1, longest + 1):
        before = jnp.pad(before, ((0, 0), (1, 0)))[:, :-1]  # tokens[end - n]
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths - n, 0)[:, None], axis=1)
        agree = agree & (before == last) & (end >= n) & (lengths[:, None] >= n)
        run = run + agree
    found = jnp.max(run, axis=1) >= shortest
    best = jnp.argmax(run * slots + end, axis=1)  # [B]
    period = jnp.maximum(lengths - best, 1)[:, None]
    offset = jnp.arange(num_tokens)[None, :] % period
    index = jnp.minimum(best[:, None] + offset, slots - 1)
    return jnp.take_along_axis(tokens, index, axis=1), found


def ngram(
    num_speculative_tokens: int = 5, *, prompt_lookup_min: int = 1, prompt_lookup_max: int = 3
) -> Drafter:
    """Drafts by lookup in the row's own prompt and output; no weights, no state.

    Args:
      num_speculative_tokens: K.
      prompt_lookup_min, prompt_lookup_max: shortest and longest match, in tokens.

    Raises:
      ValueError: a size below 1, or min above max.
    """
    sizes = {
        "num_speculative_tokens": num_speculative_tokens,
        "prompt_lookup_min": prompt_lookup_min,
        "prompt_lookup_max": prompt_lookup_max,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    if prompt_lookup_min > prompt_lookup_max:
        raise ValueError(
            f"prompt_lookup_min ({prompt_lookup_min}) must not be above "
            f"prompt_lookup_max ({prompt_lookup_max})"
        )
    return _ngram(num_speculative_tokens, prompt_lookup_min, prompt_lookup_max)


@functools.cache
def _ngram(num_tokens: int, shortest: int, longest: int) -> Drafter:
    def init(params, prefill):
        return ()

    def draft(params, key, state, context: Context):
        tokens, found = lookup(
            context.tokens,
            context.lengths,
            num_tokens,
            shortest,
            longest,
        )
        valid = jnp.broadcast_to(found[:, None], tokens.shape)
        return tree.chain_proposal(tokens, valid), state

    def update(params, state, outcome):
        return state

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="ngram",
        depth=num_tokens,
        nodes=num_tokens,
    )
