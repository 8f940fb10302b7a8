"""A smaller model drafts, one token after the other, over a KV cache of its own.

Reference: Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache, sampling, tree
from specjax import seen as seen_lib
from specjax.sampling import Purpose
from specjax.types import Context, Drafter, Model, Outcome, Params, Prefill, Proposal

__all__ = ["draft_model"]


@functools.cache
def draft_model(model: Model, num_speculative_tokens: int = 4) -> Drafter:
    """Drafts with `model`, whose weights are `params.draft`.

    Tokens are drawn from the same law as the target's (`specjax.sampling`), and that law is kept
    as q. The state is the draft's KV cache. It lacks the root, and after a round whose drafts all
    stood the last draft too: the first step of a round reads whichever of the two are missing.

    Args:
      model: any causal model with the target's vocabulary.
      num_speculative_tokens: K.

    Raises:
      ValueError: K below 1.
    """
    depth = num_speculative_tokens
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"num_speculative_tokens must be an integer of at least 1, got {depth!r}")

    def init(params: Params, prefill: Prefill):
        if params.draft is None:
            raise ValueError(
                "params.draft is None, but the drafter draft_model needs the draft's weights; load "
                "them with specjax.load(target, drafter=...) or params.replace(draft=...)"
            )
        if model.vocab_size != params.model.vocab_size:
            raise ValueError(
                f"the draft model of params.drafter has {model.vocab_size} tokens, the target has "
                f"{params.model.vocab_size}; a draft model needs the target's vocabulary"
            )
        held, _ = cache.prefill(
            model,
            params.draft,
            model.init_cache(params.draft, prefill.tokens.shape[0], prefill.slots),
            prefill.tokens,
            prefill.lengths - 1,
            chunk=prefill.chunk,
        )
        return held

    def draft(params: Params, key: Array, held, context: Context):
        weights = params.draft

        def step(held, seen, tokens, count, position):
            """Reads `count` of `tokens [B, T]` and draws the token at `position [B]`."""
            steps = tokens.shape[1]
            causal = jnp.tril(jnp.ones((1, steps, steps), bool))
            positions = held.lengths[:, None] + jnp.arange(steps)[None, :]
            out = model.forward(weights, tokens, positions, held, causal)
            held = cache.append(held, out.block, held.lengths + count)
            last = jnp.take_along_axis(out.hidden, count[:, None, None] - 1, axis=1)[:, 0]
            logits = model.unembed(weights, last)
            keys = sampling.at_positions(key, Purpose.DRAFT, position)
            token, probs = sampling.sample(keys, logits, context.sampling, seen)
            sound = jnp.isfinite(jnp.max(logits, axis=-1))
            return held, seen_lib.after(seen, token), token, probs, sound

        missing = context.lengths - held.lengths  # [B], 1 or 2
        index = held.lengths[:, None] + jnp.arange(2)[None, :]  # the second may be meaningless
        pair = jnp.take_along_axis(context.tokens, index, axis=1)
        held, seen, token, probs, sound = step(held, context.seen, pair, missing, context.lengths)

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
        proposal = Proposal(
            tokens=tokens,
            parents=jnp.asarray(tree.chain(depth)),
            probs=jnp.concatenate([probs[:, None], laws.swapaxes(0, 1)], axis=1),
            valid=jnp.cumprod(sound, axis=1, dtype=jnp.int32).astype(bool),
            candidate=jnp.ones(tokens.shape, bool),
        )
        return proposal, held

    def update(params: Params, held, outcome: Outcome):
        return cache.truncate(held, outcome.lengths - 1)

    return Drafter(
        init=init, draft=draft, update=update, name="draft_model", depth=depth, nodes=depth
    )
