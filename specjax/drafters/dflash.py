"""DFlash: a network fills a block of masks in one pass, and each slot is a draft.

The slots do not see each other's tokens, so that each is drawn from its own law q, and a chain of
them is verified as any other.

Reference: DFlash, 2026 (arXiv:2602.06036).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache, sampling, tree
from specjax import seen as seen_lib
from specjax.drafters.vocabulary import VocabularyMap, onto_target
from specjax.sampling import Purpose
from specjax.types import (
    BlockNetwork,
    Cache,
    Context,
    Drafter,
    Forward,
    InitFn,
    Outcome,
    Params,
    Prefill,
    PyTree,
    UpdateFn,
)

__all__ = ["BlockContext", "block_context", "dflash", "draft_depth"]


def draft_depth(network: BlockNetwork, num_speculative_tokens: int | None) -> int:
    """K, by default all that a block of the network holds.

    Raises:
      ValueError: it is not an integer from 1 to that.
    """
    most = network.block_size if network.from_anchor else network.block_size - 1
    depth = most if num_speculative_tokens is None else num_speculative_tokens
    if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= most:
        raise ValueError(
            f"num_speculative_tokens must be an integer from 1 to {most}, what a block of "
            f"{network.block_size} drafts, got {num_speculative_tokens!r}"
        )
    return depth


class BlockContext(NamedTuple):
    """What DFlash and DSpark share: the cache of what the target has read, and the block's pass.

    The cache holds keys and values for all committed tokens but the root, made from the target's
    states; a rejected draft leaves nothing in it.
    """

    init: InitFn
    update: UpdateFn
    hidden: Callable[[Params, Cache, Context], Array]  # of the block, [B, K or K + 1, W]
    logits: Callable[[Params, Array], Array]  # [..., W] to [..., DV]
    onto_target: Callable[[Params, Array], Array]  # [..., DV] to [..., V]
    weights: Callable[[Params], PyTree]  # of the network


def block_context(network: BlockNetwork, depth: int, mapped: bool, name: str) -> BlockContext:
    """The common functions of a drafter.

    Args:
      depth: K; the block is as long as it takes.
      mapped: the network has a vocabulary of its own, and `params.draft` is the pair
        `(weights, specjax.drafters.vocabulary_map(...))`.
      name: of the drafter, for messages.
    """

    def split(params: Params) -> tuple[PyTree, VocabularyMap | None]:
        if not mapped:
            return params.draft, None
        pair = params.draft
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], VocabularyMap)):
            raise ValueError(
                f"params.draft must be (weights, vocabulary map) for {name}(..., mapped=True), "
                f"got {type(pair)}"
            )
        return pair

    def embedded(params: Params, tokens: Array) -> Array:
        def target(tokens: Array) -> Array:
            if params.model.embed is None:
                raise ValueError(
                    f"{name} reads the target's embedding, but params.model.embed is None; use a "
                    "target that has one, or a network with its own"
                )
            return params.model.embed(params.target, tokens)

        return network.embed(split(params)[0], target, tokens)

    def init(params: Params, prefill: Prefill) -> Cache:
        if params.draft is None:
            raise ValueError(
                f"params.draft is None, but the drafter {name} needs its network's weights; load "
                "them with specjax.load(target, drafter=...) or params.replace(draft=...)"
            )
        weights, ids = split(params)
        sizes = (network.vocab_size, params.model.vocab_size)
        if ids is not None and (ids.d2t.size, ids.t2d.size) != sizes:
            raise ValueError(
                f"params.draft maps {ids.d2t.size} draft tokens to {ids.t2d.size}, but the "
                f"network has {sizes[0]} tokens and the target {sizes[1]}"
            )
        batch, total = prefill.tokens.shape

        def run(start: Array, held: Cache) -> Forward:
            part = tuple(
                jax.lax.dynamic_slice_in_dim(x, start, prefill.chunk, axis=1)
                for x in prefill.features
            )
            fused = network.fuse(weights, part)
            block = network.project(weights, fused, held)
            return Forward(hidden=fused, features=(), block=block)

        held = network.init_cache(weights, batch, prefill.slots)
        held, _ = cache.read_chunks(run, held, prefill.lengths - 1, total, prefill.chunk)
        return held

    def update(params: Params, held: Cache, outcome: Outcome) -> Cache:
        weights, _ = split(params)
        # The root and the accepted drafts are the tokens whose states are new.
        path = outcome.path[:, :, None]
        states = tuple(jnp.take_along_axis(x, path, axis=1) for x in outcome.scores.features)
        block = network.project(weights, network.fuse(weights, states), held)
        return cache.append(held, block, outcome.lengths - 1)

    def hidden(params: Params, held: Cache, context: Context) -> Array:
        weights, _ = split(params)
        root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        masks = depth - 1 if network.from_anchor else depth
        tokens = jnp.pad(root, ((0, 0), (0, masks)), constant_values=network.mask_token_id)
        return network.forward(weights, embedded(params, tokens), held)

    def logits(params: Params, hidden: Array) -> Array:
        target = functools.partial(params.model.unembed, params.target)
        return network.unembed(split(params)[0], target, hidden)

    def mapped_logits(params: Params, logits: Array) -> Array:
        ids = split(params)[1]
        return onto_target(logits, params.model.vocab_size, None if ids is None else ids.d2t)

    return BlockContext(
        init=init,
        update=update,
        hidden=hidden,
        logits=logits,
        onto_target=mapped_logits,
        weights=lambda params: split(params)[0],
    )


@functools.cache
def dflash(
    network: BlockNetwork, num_speculative_tokens: int | None = None, *, mapped: bool = False
) -> Drafter:
    """Drafts with the block network whose weights are `params.draft`.

    Tokens are drawn from the same law as the target's (`specjax.sampling`), and that law is kept
    as q. The state is the network's cache. A prompt of one token has no states of the target yet:
    its first round drafts nothing.

    Args:
      network: e.g. `specjax.models.block_decoder.block_network(...)`, without DSpark's Markov head.
      num_speculative_tokens: K; default and at most one less than the block's size, or the block's
        size if its first slot guesses too. A smaller K runs a smaller block.
      mapped: the network numbers its tokens in its own way. `params.draft` is then the pair
        `(weights, specjax.drafters.vocabulary_map(...))`.

    Raises:
      ValueError: a K that a block does not hold, or a network with a Markov head.
    """
    depth = draft_depth(network, num_speculative_tokens)
    if network.correct is not None:
        raise ValueError(
            "network has a Markov head, which dflash would leave out; use drafters.dspark(network)"
        )
    shared = block_context(network, depth, mapped, "dflash")

    def draft(params: Params, key: Array, held: Cache, context: Context):
        hidden = shared.hidden(params, held, context)[:, -depth:]
        logits = shared.logits(params, hidden)

        def slot(seen, at):
            i, logits = at
            sound = jnp.isfinite(jnp.max(logits, axis=-1))
            keys = sampling.at_positions(key, Purpose.DRAFT, context.lengths + i)
            own = shared.onto_target(params, logits)
            token, probs = sampling.sample(keys, own, context.sampling, seen)
            return seen_lib.after(seen, token), (token, probs, sound)

        slots = (jnp.arange(depth), logits.swapaxes(0, 1))
        _, (tokens, probs, sound) = jax.lax.scan(slot, context.seen, slots)
        # A draft without a law (NaN or +inf in its logits) ends there: no q, no losslessness.
        sound = sound.T & (held.lengths > 0)[:, None]
        valid = jnp.cumprod(sound, axis=1, dtype=jnp.int32).astype(bool)
        return tree.chain_proposal(tokens.T, valid, probs.swapaxes(0, 1)), held

    return Drafter(
        init=shared.init,
        draft=draft,
        update=shared.update,
        name="dflash",
        depth=depth,
        nodes=depth,
        features=network.features,
    )
