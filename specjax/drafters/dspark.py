"""DSpark: a block of DFlash's, in which each slot hears of the token before it, and says how sure
it is.

The network's pass is the same. Then slots are drawn from left to right, each from the law of its
own logits and a bias that depends on the token before it; a confidence, made before the slot's own
token is drawn, says whether the slot is worth verifying. A draft's length so depends only on what
was drafted before its end, and the law of the output stays the target's.

Reference: DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax import seen as seen_lib
from specjax.analysis.scheduling import verify_lengths
from specjax.drafters.dflash import block_context, draft_depth
from specjax.sampling import Purpose
from specjax.types import BlockNetwork, Cache, Context, Drafter, Params

__all__ = ["dspark"]


@functools.cache
def dspark(
    network: BlockNetwork,
    num_speculative_tokens: int | None = None,
    *,
    confidence_threshold: float = 0.0,
    confidence_temperatures: tuple[float, ...] | None = None,
    steps_per_second: tuple[float, ...] | None = None,
    mapped: bool = False,
) -> Drafter:
    """Drafts with the block network whose weights are `params.draft`.

    Tokens are drawn from the same law as the target's (`specjax.sampling`), and that law is kept
    as q. The state is the network's cache. A prompt of one token has no states of the target yet:
    its first round drafts nothing.

    Args:
      network: e.g. `specjax.models.block_decoder.block_network(...)`.
      num_speculative_tokens: K; default and at most what a block holds. A smaller K runs a smaller
        block.
      confidence_threshold: a draft ends before the first slot whose confidence is lower.
      confidence_temperatures: what each slot's confidence logit is divided by, from
        `specjax.analysis.sequential_temperature_scaling`; at least K of them.
      steps_per_second: how many steps a second a batch of 1, 2, ... verified tokens takes. Then
        drafts end where more tokens would lower the batch's throughput, as
        `specjax.analysis.verify_lengths` finds: a row's lengths depend on the rows beside it, the
        law of its text does not.
      mapped: the network numbers its tokens in its own way. `params.draft` is then the pair
        `(weights, specjax.drafters.vocabulary_map(...))`.

    Raises:
      ValueError: a K that a block does not hold, a bad threshold, temperature or speed, or one of
        them for a network without a confidence head.
    """
    depth = draft_depth(network, num_speculative_tokens)
    threshold = _checked(
        network, depth, confidence_threshold, confidence_temperatures, steps_per_second
    )
    shared = block_context(network, depth, mapped, "dspark")

    def draft(params: Params, key: Array, held: Cache, context: Context):
        weights = shared.weights(params)
        root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        block = shared.hidden(params, held, context)
        hidden = block[:, -depth:]
        state = jnp.zeros((root.shape[0], network.markov_rank), jnp.float32)
        if network.correct is not None and not network.from_anchor:
            # The first slot is not drafted, but the state passes through it.
            _, state = network.correct(weights, state, root, block[:, 0])

        def slot(carry, at):
            seen, token, state = carry
            i, logits, hidden = at
            confidence = None
            if network.confidence is not None:
                confidence = network.confidence(weights, hidden, token)
            if network.correct is not None:
                bias, state = network.correct(weights, state, token, hidden)
                logits = logits + bias
            sound = jnp.isfinite(jnp.max(logits, axis=-1))
            keys = sampling.at_positions(key, Purpose.DRAFT, context.lengths + i)
            own = shared.onto_target(params, logits)
            token, probs = sampling.sample(keys, own, context.sampling, seen)
            return (seen_lib.after(seen, token), token, state), (token, probs, sound, confidence)

        logits = shared.logits(params, hidden)
        slots = (jnp.arange(depth), logits.swapaxes(0, 1), hidden.swapaxes(0, 1))
        _, drawn = jax.lax.scan(slot, (context.seen, root, state), slots)
        tokens, probs, sound, confidence = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        # A draft without a law (NaN or +inf in its logits) ends there: no q, no losslessness.
        sound = sound & (held.lengths > 0)[:, None]
        valid = _prefix(sound)
        if confidence is not None:
            if confidence_temperatures is not None:
                scale = jnp.asarray(confidence_temperatures[:depth], jnp.float32)
                confidence = confidence / scale[None, :]
            confidence = jax.nn.sigmoid(confidence)
            valid = _prefix(sound & (confidence >= threshold))
            if steps_per_second is not None:
                known = jnp.where(valid, confidence, 0.0)
                length = verify_lengths(known, steps_per_second, context.active)
                valid = valid & (jnp.arange(depth)[None, :] < length[:, None])
        proposal = tree.chain_proposal(tokens, valid, probs)
        return dataclasses.replace(proposal, confidence=confidence), held

    return Drafter(
        init=shared.init,
        draft=draft,
        update=shared.update,
        name="dspark",
        depth=depth,
        nodes=depth,
        features=network.features,
    )


def _prefix(good: Array) -> Array:
    """`[B, K]` bool: slots that are good, and all before them."""
    return jnp.cumprod(good, axis=1, dtype=jnp.int32).astype(bool)


def _checked(
    network: BlockNetwork, depth: int, threshold: Any, temperatures: Any, speeds: Any
) -> float:
    """The threshold, with all options of the confidence head checked."""
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ValueError(f"confidence_threshold must be a number, got {threshold!r}")
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"confidence_threshold must be from 0 to 1, got {threshold!r}")
    named = {"confidence_temperatures": temperatures, "steps_per_second": speeds}
    for name, values in named.items():
        if values is None:
            continue
        good = isinstance(values, tuple) and len(values) > 0
        if not good or not all(_positive(value) for value in values):
            raise ValueError(f"{name} must be a tuple of positive numbers, got {values!r}")
    if temperatures is not None and len(temperatures) < depth:
        raise ValueError(
            f"confidence_temperatures must be at least {depth}, one a slot, got {len(temperatures)}"
        )
    if network.confidence is None:
        given = [name for name, values in named.items() if values is not None]
        given = ["confidence_threshold"] * (threshold > 0) + given
        if given:
            raise ValueError(
                f"{given[0]} needs a confidence head, which this network lacks; leave it out, or "
                "use a checkpoint with one"
            )
    return float(threshold)


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
