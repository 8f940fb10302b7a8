"""Plain decoding, as the drafter that never guesses."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax import tree
from specjax.types import Drafter

__all__ = ["plain"]


@functools.cache
def plain() -> Drafter:
    """No drafts: every round emits one token."""

    def init(params, prefill):
        return ()

    def draft(params, key, state, context):
        batch = context.lengths.shape[0]
        nothing = jnp.zeros((batch, 0), jnp.int32)
        return tree.chain_proposal(nothing, nothing.astype(bool)), state

    def update(params, state, outcome):
        return state

    return Drafter(init=init, draft=draft, update=update, name="plain", depth=0, nodes=0)
