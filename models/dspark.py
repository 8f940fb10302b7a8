"""DSpark's heads on a block network: what the token before a slot says, and how sure the slot is.

With x the token before a slot, h the slot's state and m = W1[x], the Markov head adds to the logits

    vanilla   W2 m
    gated     W2 (sigmoid(G [h; m]) * m)
    rnn       W2 tanh(o), where [g; c; o] = J [s; m; h]

where s is 0 at the start of a block, and sigmoid(g) s + (1 - sigmoid(g)) tanh(c) at the next slot.
The confidence is sigmoid(w [h; m] + b), or without m: the chance that the slot's draft stands, if
those before it do.

Reference: DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.layers import Linear, Table

__all__ = ["MARKOV_KINDS", "Confidence", "Markov"]

MARKOV_KINDS = ("vanilla", "gated", "rnn")


class Markov(nnx.Module):
    """A bias of rank R on the logits of a slot, from the token before it."""

    def __init__(
        self, kind: str, width: int, rank: int, vocab: int, draft_vocab: int, rngs: nnx.Rngs
    ):
        if kind not in MARKOV_KINDS:
            raise ValueError(f"markov_kind must be one of {', '.join(MARKOV_KINDS)}, got {kind!r}")
        self.kind = kind
        self.w1 = Table(vocab, rank, "vocab", rngs)
        self.w2 = Linear(("vocab", "embed"), (draft_vocab, rank), False, rngs)
        if kind == "gated":
            self.gate = Linear((None, "embed"), (rank, width + rank), True, rngs)
        if kind == "rnn":
            self.joint = Linear((None, "embed"), (3 * rank, 2 * rank + width), True, rngs)

    def before(self, tokens: Array) -> Array:
        """W1[x]: `[B]` int32 to `[B, R]` float32."""
        return self.w1(tokens)

    def __call__(self, state: Array, tokens: Array, hidden: Array) -> tuple[Array, Array]:
        """See `specjax.types.CorrectFn`."""
        m = self.before(tokens)
        if self.kind == "gated":
            m = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, m], axis=-1))) * m
        if self.kind == "rnn":
            joint = self.joint(jnp.concatenate([state, m, hidden], axis=-1))
            g, c, o = jnp.split(joint, 3, axis=-1)
            g = jax.nn.sigmoid(g)
            state, m = g * state + (1 - g) * jnp.tanh(c), jnp.tanh(o)
        return self.w2(m), state


class Confidence(nnx.Module):
    """The logit of a slot's confidence."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        self.proj = Linear((None, "embed"), (1, width + rank), True, rngs)

    def __call__(self, hidden: Array, before: Array | None) -> Array:
        """`[B, W]`, and `[B, R]` of the token before if it is wanted, to `[B]` float32."""
        x = hidden if before is None else jnp.concatenate([hidden, before], axis=-1)
        return self.proj(x)[..., 0]
