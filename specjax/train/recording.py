"""The target's states of a text, kept while it is decoded: no pass is made for them alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import tree
from specjax.decoding import decode_recorded
from specjax.types import Drafter, Outcome, Params, Prefill, record

__all__ = ["Recording", "decode_with_states", "recorder"]


@record
class Recording:
    """States of each row's text, by position. Those of its last token are not known."""

    states: tuple[Array, ...]  # one [B, S, E] a layer
    lengths: Array  # [B] int32: tokens of the text


@functools.cache
def recorder(features: tuple[int, ...]) -> Drafter:
    """A drafter that never guesses, and keeps the target's states as they come by.

    Args:
      features: which states: i is what layer i reads, L the state after the final norm.
    """

    def init(params: Params, prefill: Prefill) -> Recording:
        read = prefill.tokens.shape[1]
        slots = max(prefill.slots, read)
        widen = lambda x: jnp.pad(x, ((0, 0), (0, slots - read), (0, 0)))
        return Recording(
            states=tuple(widen(x.astype(jnp.float32)) for x in prefill.features),
            lengths=prefill.lengths,
        )

    def draft(params, key, state, context):
        nothing = jnp.zeros((context.lengths.shape[0], 0), jnp.int32)
        return tree.chain_proposal(nothing, nothing.astype(bool)), state

    def update(params: Params, state: Recording, outcome: Outcome) -> Recording:
        at = state.lengths - 1  # the root: the last token that was committed before the round
        write = jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice(row, new, (i, 0)))
        roots = (x[:, :1].astype(jnp.float32) for x in outcome.scores.features)
        states = tuple(write(x, new, at) for x, new in zip(state.states, roots, strict=True))
        return Recording(states=states, lengths=outcome.lengths)

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="recorder",
        depth=0,
        nodes=0,
        features=features,
    )


def decode_with_states(
    params: Params, prompts: Sequence[Sequence[int]], features: Sequence[int], **options: Any
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Decodes plainly, and gives each row's whole text with the target's states.

    Args:
      params: from `specjax.load`; its drafter does not matter.
      prompts: token ids.
      features: which states, as for `recorder`.
      **options: as for `specjax.decode`.

    Returns:
      For each prompt the tokens `[T]` int32 of prompt and output, and a `[T - 1, E]` bfloat16 for
      each of `features`: nothing has read the last token.
    """
    features = tuple(features)
    plain = params.replace(draft=None, drafter=recorder(features))
    result, kept = decode_recorded(plain, prompts, **options)
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    states = [np.asarray(x.astype(jnp.bfloat16)) for x in kept.states]
    found = []
    for row, prompt in enumerate(prompts):
        whole = np.concatenate([np.asarray(prompt, np.int32), tokens[row, : lengths[row]]])
        found.append((whole, [x[row, : len(whole) - 1] for x in states]))
    return found
