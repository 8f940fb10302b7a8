"""Multi-token prediction: module k guesses the token k + 2 places after the state that it reads.

Entry i of step k is the pair of what step k - 1 gave for entry i (the target's state at position i,
for step 0) and the token at i + k + 1. All steps have a cache of their own, and see only entries
of their own step. The token of the last entries of step k is a draft of this round, so these are
never kept, and are read again in the next one:

    L = 6 committed tokens, K = 3        entry  0 1 2 3 4
                                 step 0  token  1 2 3 4 5
                                 step 1  token  2 3 4 5 a        a, b: drafts
                                 step 2  token  3 4 5 a b
                                         kept   x x x . .

Reference: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache, sampling, tree
from specjax import seen as seen_lib
from specjax.drafters.eagle import check_target, reader_of
from specjax.drafters.growing import Reader
from specjax.drafters.vocabulary import split_draft
from specjax.sampling import Purpose
from specjax.types import (
    Block,
    Cache,
    Context,
    Drafter,
    FeatureNetwork,
    Forward,
    Outcome,
    Params,
    Prefill,
    record,
)

__all__ = ["mtp"]


@record
class _State:
    """`cache` holds the layers of all steps, one step after the other."""

    cache: Cache
    hidden: Array  # [B, R, W]: the target's states from position cache.lengths on
    known: Array  # [B] int32: positions whose states are known; L - 1


def mtp(network: FeatureNetwork, num_speculative_tokens: int = 1, *, modules: int = 1) -> Drafter:
    """Drafts with modules whose weights are `params.draft["modules"]`.

    Tokens are drawn from the same law as the target's, and that law is kept as q.

    Args:
      network: one module.
      num_speculative_tokens: K, steps. Step k is module k mod n.
      modules: n.

    Raises:
      ValueError: a number below 1.
    """
    for what, value in (("num_speculative_tokens", num_speculative_tokens), ("modules", modules)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")
    return _mtp(network, num_speculative_tokens, modules)


@functools.cache
def _mtp(network: FeatureNetwork, depth: int, modules: int) -> Drafter:
    def readers(params: Params) -> list[Reader]:
        weights, _ = split_draft(params, "mtp", False)
        each = [weights["modules"][i] for i in range(modules)]
        return [reader_of(network, params, each[k % modules], None) for k in range(depth)]

    def part(held: Cache, step: int) -> Cache:
        layers = len(held.keys) // depth
        cut = slice(step * layers, (step + 1) * layers)
        rings = held.rings[cut] if held.rings else ()
        return dataclasses.replace(held, keys=held.keys[cut], values=held.values[cut], rings=rings)

    def together(blocks: list[Block]) -> Block:
        return Block(
            keys=tuple(x for block in blocks for x in block.keys),
            values=tuple(x for block in blocks for x in block.values),
        )

    def init(params: Params, prefill: Prefill) -> _State:
        weights, _ = split_draft(params, "mtp", False)
        check_target(network, params, "mtp")
        batch, total = prefill.tokens.shape
        states = network.fuse(weights["modules"][0], prefill.features)
        causal = jnp.tril(jnp.ones((1, prefill.chunk, prefill.chunk), bool))

        def run(start: Array, held: Cache) -> Forward:
            cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, prefill.chunk, axis=1)
            positions = (start + jnp.arange(prefill.chunk))[None, :]
            positions = jnp.broadcast_to(positions, (batch, prefill.chunk))
            hidden, blocks = cut(states), []
            for k, reader in enumerate(readers(params)):
                tokens = cut(jnp.roll(prefill.tokens, -1 - k, axis=1))
                out = reader.forward(tokens, hidden, positions, part(held, k), causal)
                hidden = out.features[0]
                blocks.append(out.block)
            return Forward(hidden=hidden, features=(), block=together(blocks))

        ready = jnp.maximum(prefill.lengths - 1 - depth, 0)
        empty = [
            network.init_cache(weights["modules"][k % modules], batch, prefill.slots)
            for k in range(depth)
        ]
        held = Cache(
            keys=tuple(x for one in empty for x in one.keys),
            values=tuple(x for one in empty for x in one.values),
            lengths=empty[0].lengths,
            rings=tuple(x for one in empty for x in one.rings),
        )
        held, _ = cache.read_chunks(run, held, ready, total, prefill.chunk)
        room = depth + params.drafter.depth  # R: entries that a round may have to read
        at = jnp.minimum(ready[:, None] + jnp.arange(room)[None, :], total - 1)
        hidden = jnp.take_along_axis(states, at[..., None], axis=1)
        return _State(cache=held, hidden=hidden, known=prefill.lengths - 1)

    def draft(params: Params, key: Array, state: _State, context: Context):
        held, hidden = state.cache, state.hidden
        batch, room = hidden.shape[:2]
        count = state.known - held.lengths
        positions = held.lengths[:, None] + jnp.arange(room)[None, :]
        causal = jnp.tril(jnp.ones((1, room, room), bool))
        last = jnp.maximum(count - 1, 0)[:, None, None]
        # Room for drafts after the last token that a buffer can hold.
        text = jnp.pad(context.tokens, [(0, 0), (0, depth)])
        seen, sound = context.seen, count > 0
        blocks, tokens, laws, valid = [], [], [], []
        for k, reader in enumerate(readers(params)):
            at = jnp.minimum(positions + k + 1, text.shape[1] - 1)
            read = jnp.take_along_axis(text, at, axis=1)
            out = reader.forward(read, hidden, positions, part(held, k), causal)
            hidden = out.features[0]
            blocks.append(out.block)
            logits = reader.logits(jnp.take_along_axis(out.hidden, last, axis=1)[:, 0])
            sound = sound & jnp.isfinite(jnp.max(logits, axis=-1))
            keys = sampling.at_positions(key, Purpose.DRAFT, context.lengths + k)
            token, probs = sampling.sample(
                keys, reader.target_logits(logits), context.sampling, seen
            )
            seen = seen_lib.after(seen, token)
            text = text.at[jnp.arange(batch), context.lengths + k].set(token)
            tokens.append(token)
            laws.append(probs)
            valid.append(sound)
        kept = jnp.maximum(state.known - (depth - 1), held.lengths)
        hidden = _shifted(state.hidden, kept - held.lengths)
        held = cache.append(held, together(blocks), kept)
        stacked = (jnp.stack(x, axis=1) for x in (tokens, valid, laws))
        return tree.chain_proposal(*stacked), dataclasses.replace(state, cache=held, hidden=hidden)

    def update(params: Params, state: _State, outcome: Outcome) -> _State:
        weights, _ = split_draft(params, "mtp", False)
        at = outcome.path[..., None]
        states = tuple(jnp.take_along_axis(x, at, axis=1) for x in outcome.scores.features)
        new = network.fuse(weights["modules"][0], states)
        # What is known so far, then the new states.
        offset = state.known - state.cache.lengths
        place = jnp.arange(state.hidden.shape[1])[None, :]
        from_new = jnp.clip(place - offset[:, None], 0, new.shape[1] - 1)
        new = jnp.take_along_axis(new, from_new[..., None], axis=1)
        hidden = jnp.where((place < offset[:, None])[..., None], state.hidden, new)
        return _State(cache=state.cache, hidden=hidden, known=outcome.lengths - 1)

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="mtp",
        depth=depth,
        nodes=depth,
        features=network.features,
    )


def _shifted(hidden: Array, by: Array) -> Array:
    """Rows `[B, T, W]` moved `by [B]` places to the front."""
    at = jnp.arange(hidden.shape[1])[None, :] + by[:, None]
    at = jnp.minimum(at, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, at[..., None], axis=1)
