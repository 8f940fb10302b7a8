"""A smaller model drafts, one token after the other, over a KV cache of its own.

Reference: Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache, sampling, tree
from specjax import seen as seen_lib
from specjax.drafters.vocabulary import (
    VocabularyMap,
    check_map,
    draft_ids,
    onto_target,
    split_draft,
)
from specjax.sampling import Purpose
from specjax.types import Cache, Context, Drafter, Model, Outcome, Params, Prefill, record

__all__ = ["draft_model"]


@record
class _State:
    """What the model has read: committed tokens, then the drafts of the round but the last."""

    cache: Cache
    drafts: Array  # [B, K - 1] int32


@functools.cache
def draft_model(model: Model, num_speculative_tokens: int = 4, *, mapped: bool = False) -> Drafter:
    """Drafts with `model`, whose weights are `params.draft`.

    Tokens are drawn from the same law as the target's (`specjax.sampling`), and that law is kept
    as q. The state is the draft's KV cache. It lacks the root, and after a round whose drafts all
    stood the last draft too: the first step of a round reads whichever of the two are missing. As
    a part of another drafter it also lacks what others guessed, and reads that with them.

    Args:
      model: any causal model. Its vocabulary may be smaller or larger than the target's, as long
        as both number the tokens that they share alike; tokens that it lacks have q = 0.
      num_speculative_tokens: K.
      mapped: it numbers its tokens in another way. `params.draft` is then the pair
        `(weights, specjax.drafters.vocabulary_map(...))`.

    Raises:
      ValueError: K below 1.
    """
    depth = num_speculative_tokens
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"num_speculative_tokens must be an integer of at least 1, got {depth!r}")

    def own(tokens: Array, ids: VocabularyMap | None) -> Array:
        return draft_ids(tokens, ids, model.vocab_size)

    def init(params: Params, prefill: Prefill):
        weights, ids = split_draft(params, "draft_model", mapped)
        check_map(params, ids, model.vocab_size)
        held, _ = cache.prefill(
            model,
            weights,
            model.init_cache(weights, prefill.tokens.shape[0], prefill.slots),
            own(prefill.tokens, ids),
            prefill.lengths - 1,
            chunk=prefill.chunk,
        )
        drafts = jnp.zeros((prefill.tokens.shape[0], depth - 1), jnp.int32)
        return _State(cache=held, drafts=drafts)

    def draft(params: Params, key: Array, state: _State, context: Context):
        weights, ids = split_draft(params, "draft_model", mapped)
        held = state.cache

        def step(held, seen, tokens, count, position):
            """Reads `count` of `tokens [B, T]` and draws the token at `position [B]`."""
            steps = tokens.shape[1]
            causal = jnp.tril(jnp.ones((1, steps, steps), bool))
            positions = held.lengths[:, None] + jnp.arange(steps)[None, :]
            out = model.forward(weights, own(tokens, ids), positions, held, causal)
            held = cache.append(held, out.block, held.lengths + count)
            last = jnp.take_along_axis(out.hidden, count[:, None, None] - 1, axis=1)[:, 0]
            logits = model.unembed(weights, last)
            sound = jnp.isfinite(jnp.max(logits, axis=-1))
            d2t = None if ids is None else ids.d2t
            logits = onto_target(logits, params.model.vocab_size, d2t)
            keys = sampling.at_positions(key, Purpose.DRAFT, position)
            token, probs = sampling.sample(keys, logits, context.sampling, seen)
            return held, seen_lib.after(seen, token), token, probs, sound

        alone = params.drafter.draft is draft
        most = 2 if alone else params.drafter.depth + 1
        missing = context.lengths - held.lengths  # [B], 1 or more
        index = held.lengths[:, None] + jnp.arange(most)[None, :]  # the last may be meaningless
        new = jnp.take_along_axis(context.tokens, index, axis=1)
        held, seen, token, probs, sound = step(held, context.seen, new, missing, context.lengths)

        def body(carry, i):
            held, seen, token = carry
            one = jnp.ones_like(missing)
            held, seen, token, probs, sound = step(
                held, seen, token[:, None], one, context.lengths + i
            )
            return (held, seen, token), (token, probs, sound)

        carry = (held, seen, token)
        (held, _, _), (tokens, laws, sounds) = jax.lax.scan(body, carry, jnp.arange(1, depth))
        tokens = jnp.concatenate([token[:, None], tokens.T], axis=1)
        # A draft without a law (NaN or +inf in its logits) ends there: no q, no losslessness.
        sound = jnp.concatenate([sound[:, None], sounds.T], axis=1)
        valid = jnp.cumprod(sound, axis=1, dtype=jnp.int32).astype(bool)
        probs = jnp.concatenate([probs[:, None], laws.swapaxes(0, 1)], axis=1)
        proposal = tree.chain_proposal(tokens, valid, probs)
        return proposal, _State(cache=held, drafts=tokens[:, :-1])

    def update(params: Params, state: _State, outcome: Outcome) -> _State:
        # Drafts stay as far as the text has them, whoever guessed it.
        held = state.cache
        before = held.lengths - (depth - 1)
        index = before[:, None] + jnp.arange(depth - 1)[None, :]
        same = jnp.take_along_axis(outcome.tokens, index, axis=1) == state.drafts
        stand = jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1)
        held = cache.truncate(held, jnp.minimum(before + stand, outcome.lengths - 1))
        return dataclasses.replace(state, cache=held)

    return Drafter(
        init=init, draft=draft, update=update, name="draft_model", depth=depth, nodes=depth
    )
