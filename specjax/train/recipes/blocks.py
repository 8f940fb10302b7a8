"""DFlash and DSpark: blocks of masks behind random anchors.

An anchor is a token of the text; a block stands on it and on masks in place of what follows, and
sees the target's states of all that is before the anchor. Slot k of a block is judged by the law
that the target has there, given the text: so all slots learn in one pass.

    anchor at t          context  states of ..., t - 1
    slot k, DFlash       guesses the token at t + k       (k from 1)
    slot k, DSpark       guesses the token at t + k + 1

DSpark adds to the cross-entropy a total variation, which is what rejection costs, and teaches its
confidence to be the chance of acceptance, sum_x min(p, q).

Reference: DFlash, 2026 (arXiv:2602.06036); DSpark (DeepSeek-AI 2026, DeepSpec).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.block_decoder import BlockConfig, block_network, random_block
from specjax.train import losses
from specjax.train.least_squares import unit_rms
from specjax.train.recipe import Choice, Frozen, Guess, Recipe, laws, step_loss, worth
from specjax.train.recipes.linear import solved, states_ahead, token_and_states
from specjax.train.windows import Batch
from specjax.types import BlockNetwork, Cache, Params

__all__ = ["block_recipe", "fitted_blocks"]


def block_recipe(
    params: Params,
    config: BlockConfig,
    *,
    own_head: bool = False,
    anchors: int = 48,
    gamma: float = 4.0,
    cross_entropy: float = 1.0,
    total_variation: float = 0.0,
    confidence: float = 0.0,
    prompt_weight: float = 0.1,
) -> Recipe:
    """Trains a block network.

    Args:
      params: the target.
      config: the network. Its head, if it has one of its own, is the target's rows of the draft's
        tokens.
      own_head: that head is trained, too.
      anchors: blocks a window, at most its tokens less two.
      gamma: slot k counts exp(-k / gamma), so that early slots, which all later ones depend on,
        count most.
      cross_entropy: weight of -sum p log q.
      total_variation: weight of sum |p - q| / 2.
      confidence: weight of the confidence's cross-entropy.
      prompt_weight: of tokens that are not answers.

    Raises:
      ValueError: a weight for a confidence head that is not there; in `guesses`, more anchors than
        a window has places.
    """
    if confidence and not config.confidence:
        raise ValueError(f"confidence={confidence} needs a network with a confidence head")
    if own_head and not config.own_head:
        raise ValueError("own_head=True needs a network with a head of its own")
    # A head that is not trained is no part of the weights.
    trained = dataclasses.replace(config, own_head=own_head)
    network = block_network(trained)
    decoder, last = params.model.config, params.model.config.num_layers
    features = tuple(dict.fromkeys((*config.features, last)))
    name = "dspark" if config.markov_rank or config.confidence else "dflash"
    first = 0 if config.from_anchor else 1
    slots = config.block_size - first
    ahead = 1 if config.from_anchor else 0  # slot k guesses the token at t + k + ahead

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        count = batch.tokens.shape[0]
        at = _anchors(key, batch, anchors)  # [B, A]
        fused = network.fuse(weights, tuple(batch.state(i) for i in config.features))
        context = network.project(weights, fused, network.init_cache(weights, count, 0))
        root = jnp.take_along_axis(batch.tokens, at, axis=1).reshape(-1, 1)
        block = jnp.pad(
            root, ((0, 0), (0, config.block_size - 1)), constant_values=config.mask_token_id
        )
        embed = functools.partial(params.model.embed, frozen.target)
        embedded = network.embed(weights, embed, block)

        def forward(embedded: Array, lengths: Array) -> Array:
            seen = Cache(keys=context.keys, values=context.values, lengths=lengths)
            return network.forward(weights, embedded, seen)

        # All blocks of a window share its keys, each as far as its anchor.
        split = embedded.reshape(count, anchors, *embedded.shape[1:])
        hidden = jax.vmap(forward, in_axes=1, out_axes=1)(split, at)
        hidden = hidden.reshape(-1, *hidden.shape[2:])

        places = _places(batch, at, first + ahead, slots)
        before = places.before.reshape(count, -1, 1)
        states = jnp.take_along_axis(batch.state(last), before, axis=1)
        states = states.reshape(*places.before.shape, -1)
        rows = weights["head"]["weight"] if own_head else None
        target, draft = laws(frozen, decoder, choice, hidden[:, first:], states, rows)
        tokens = places.tokens
        if network.correct is not None:
            draft = draft + _corrections(network, weights, hidden, tokens, first)[..., choice.ids]
        here = worth(places.known, places.answer, prompt_weight)

        def slot(k: int) -> Guess:
            logit = None
            if network.confidence is not None:
                logit = network.confidence(weights, hidden[:, first + k], tokens[:, k])
            return Guess(target[:, k], draft[:, k], here[:, k], places.answer[:, k], logit)

        return [slot(k) for k in range(slots)]

    def value(guess: Guess) -> Array:
        value = cross_entropy * losses.soft_cross_entropy(guess.target, guess.draft)
        if total_variation:
            value = value + total_variation * losses.total_variation(guess.target, guess.draft)
        if confidence:
            chance = jax.lax.stop_gradient(losses.acceptance(guess.target, guess.draft))
            value = value + confidence * losses.binary_cross_entropy(guess.extra, chance)
        return value

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(
            folder,
            name,
            config,
            weights,
            decoder,
            draft_ids=draft_ids if config.own_head else None,
            from_target={"head.weight": "head"} if config.own_head and not own_head else {},
        )

    return Recipe(
        name=name,
        features=features,
        steps=slots,
        init=lambda key, params: random_block(trained, key),
        guesses=guesses,
        loss=step_loss(guesses, value, math.exp(-1 / gamma)),
        logical_axes=network.logical_axes,
        save=save,
    )


def fitted_blocks(
    params: Params,
    config: BlockConfig,
    weights: dict[str, Any],
    batches: Callable[[], Iterable[Batch]],
    prompt_weight: float = 0.1,
) -> dict[str, Any]:
    """A mixed network that starts as the best linear guesses: its layers add nothing.

    First the states are fused to what is best for the first guess; then each guess has the best
    product with the token and what the first layer keeps of the fused states.

    Args:
      params: the target.
      config: of the network, with `mixed`.
      weights: freshly initialised.
      batches: gives them, with the states that the recipe wants, twice.
      prompt_weight: of tokens that are not answers.
    """
    decoder, last = config.decoder, params.model.config.num_layers
    size = decoder.hidden_size

    def rows(target: Any, batch: Batch) -> tuple[Array, Array, Array]:
        x = token_and_states(params, target, batch, config.features)
        return x, *states_ahead(batch, last, 1, prompt_weight)

    found, x, _ = solved(params.target, rows, batches())
    level = np.sqrt(np.mean((x @ found.T) ** 2, axis=-1)).mean()
    fuse = jnp.asarray(found[:, size:])
    kept = weights["layers"][0]["attn"]["v"]["weight"]
    if kept.shape == (size, size):
        kept = jnp.eye(size, dtype=kept.dtype)  # nothing of the states is lost

    def again(target: Any, batch: Batch) -> tuple[Array, Array, Array]:
        x = token_and_states(params, target, batch, config.features)
        value = unit_rms(unit_rms(x[..., size:] @ fuse.T) @ kept.T)
        y, here = states_ahead(batch, last, config.mixed, prompt_weight)
        return jnp.concatenate([x[..., :size], value], axis=-1), y, here

    found, _, _ = solved(params.target, again, batches())

    def silent(layer: Any) -> Any:
        zeros = lambda part, name: {**part, name: jax.tree.map(jnp.zeros_like, part[name])}
        return {**layer, "attn": zeros(layer["attn"], "o"), "mlp": zeros(layer["mlp"], "down")}

    layers = {i: silent(layer) for i, layer in weights["layers"].items()}
    attn = layers[0]["attn"]
    layers[0] = {**layers[0], "attn": {**attn, "v": {**attn["v"], "weight": kept}}}
    scale = jnp.full(size, level - decoder.norm_offset, jnp.float32)
    return {
        **weights,
        "fc": {**weights["fc"], "weight": fuse},
        "layers": layers,
        "mix": {
            i: {"weight": jnp.asarray(found[i * size : (i + 1) * size])}
            for i in range(config.mixed)
        },
        "norm": {**weights["norm"], "scale": scale},
    }


class _Places(NamedTuple):
    """Where the slots of all blocks guess, `[B A, slots]` each."""

    before: Array  # the place before the guessed token, whose state gives its law
    tokens: Array  # the token there
    known: Array  # bool: within the window and the anchor's text, and the law is known
    answer: Array  # bool: the guessed token is part of an answer


def _places(batch: Batch, at: Array, ahead: int, slots: int) -> _Places:
    """Of blocks on the anchors `at [B, A]`, whose first guess stands `ahead` places behind."""
    length, anchors = batch.tokens.shape[1], at.shape[1]
    start = at.reshape(-1, 1)
    goal = start + ahead + jnp.arange(slots)[None, :]
    place = jnp.minimum(goal, length - 1)
    take = lambda x, where: jnp.take_along_axis(jnp.repeat(x, anchors, axis=0), where, axis=1)
    same = take(batch.texts, place) == take(batch.texts, start)
    return _Places(
        before=place - 1,
        tokens=take(batch.tokens, place - 1),
        known=(goal < length) & same & take(batch.known, place - 1),
        answer=take(batch.answer, place),
    )


def _anchors(key: Array, batch: Batch, count: int) -> Array:
    """Places with a context, `[B, A]`: answers first, others if there are not enough."""
    length = batch.tokens.shape[1]
    if count > length - 2:
        raise ValueError(
            f"anchors={count} is more than the places of a window of {length} tokens: "
            f"at most {length - 2}"
        )
    place = jnp.arange(length)[None, :]
    usable = (place > 0) & (place < length - 1)
    # A block on the last token before an answer is how every answer begins.
    good = batch.answer | jnp.roll(batch.answer, -1, axis=1)
    noise = jax.random.uniform(key, batch.tokens.shape)
    _, at = jax.lax.top_k(jnp.where(usable, noise + good, -1.0), count)
    return at


def _corrections(
    network: BlockNetwork, weights: Any, hidden: Array, before: Array, first: int
) -> Array:
    """What the text's own token before each slot adds to its logits, `[N, slots, DV]`."""
    state = jnp.zeros((hidden.shape[0], network.markov_rank), jnp.float32)
    found = []
    if first:
        # The first slot is not drafted, but the state passes through it.
        _, state = network.correct(weights, state, before[:, 0], hidden[:, 0])
    for k in range(before.shape[1]):
        bias, state = network.correct(weights, state, before[:, k], hidden[:, first + k])
        found.append(bias)
    return jnp.stack(found, axis=1)
