"""EAGLE-1 and EAGLE-3: several steps ahead on the head's own outputs.

A pair at place s holds a state and the token at s + 1, and guesses the token at s + 2. In the first
step the state is the target's. In step j it is what the head made of the pair before, so the head
learns from the very inputs that it will have when it drafts. A query of step j sees

    the target's pairs  ..., s - j     and its own  s - j + 1, ..., s   of steps 1 .. j

Reference: Li et al. 2025 (arXiv:2503.01840), EAGLE-3, training-time test; Li et al. 2024
(arXiv:2401.15077), EAGLE-1, whose loss adds a regression of states.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.attention import joined
from specjax.models.eagle import EagleConfig, eagle_network, random_eagle
from specjax.train import losses
from specjax.train.recipe import (
    Choice,
    Frozen,
    Guess,
    Recipe,
    aligned,
    laws,
    same_text,
    step_loss,
    worth,
)
from specjax.train.recipes.linear import solved, states_ahead, token_and_states
from specjax.train.windows import Batch
from specjax.types import Block, Params

__all__ = ["eagle_recipe", "fitted_eagle"]


def unrolled_mask(length: int, step: int) -> Array:
    """Which pairs a query of step j sees: `[1, T, (j + 1) T]`, the target's pairs first.

    T = 3, j = 1:   target's pairs   own
            s = 0   . . .            x . .
            s = 1   x . .            . x .
            s = 2   x x .            . . x
    """
    place = jnp.arange(length)
    back = place[:, None] - place[None, :]  # how far behind the query a pair lies
    parts = [back >= step] + [back == step - i for i in range(1, step + 1)]
    return jnp.concatenate(parts, axis=1)[None]


def eagle_recipe(
    params: Params,
    config: EagleConfig,
    *,
    steps: int = 4,
    decay: float = 0.8,
    own_head: bool = False,
    prompt_weight: float = 0.1,
    regression: float = 0.0,
    name: str = "eagle3",
) -> Recipe:
    """Trains an EAGLE head.

    Args:
      params: the target.
      config: the head.
      steps: how many steps ahead are unrolled; 1 is EAGLE-1's training.
      decay: a guess k steps ahead counts decay^k.
      own_head: the output matrix is trained; else it is the target's rows of the draft's tokens.
      prompt_weight: of tokens that are not answers.
      regression: weight of the smooth L1 between the head's output and the target's state.
      name: the method.
    """
    # A head that is not trained is no part of the weights.
    trained = config if own_head else dataclasses.replace(config, draft_vocab=None)
    network = eagle_network(trained)
    decoder, last = params.model.config, params.model.config.num_layers
    features = tuple(dict.fromkeys((*config.features, last)))
    embed_target = params.model.embed

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        count, length = batch.tokens.shape
        rows = weights["head"]["weight"] if own_head else None
        embed = functools.partial(embed_target, frozen.target)
        embedded = network.embed(weights, embed, aligned(batch.tokens, 1))
        state = network.fuse(weights, tuple(batch.state(i) for i in config.features))
        positions = jnp.broadcast_to(jnp.arange(length), (count, length))
        cache = network.init_cache(weights, count, 0)
        goal, answer = aligned(batch.state(last), 1), aligned(batch.answer, 2)
        earlier: Block | None = None
        found = []
        for step in range(steps):
            mask = unrolled_mask(length, step)
            out = network.forward(weights, embedded, state, positions, cache, mask, earlier)
            target, draft = laws(frozen, decoder, choice, out.hidden, goal, rows)
            known = same_text(batch, -step, 2) & aligned(batch.known, 1)
            here = worth(known, answer, prompt_weight)
            found.append(Guess(target, draft, here, answer, (goal, out.features[0])))
            state = aligned(out.features[0], -1)
            earlier = out.block if earlier is None else _behind(earlier, out.block)
        return found

    def value(guess: Guess) -> Array:
        value = losses.soft_cross_entropy(guess.target, guess.draft)
        return value + regression * losses.smooth_l1(*guess.extra) if regression else value

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(
            folder,
            name,
            config,
            weights,
            decoder,
            draft_ids=draft_ids if config.draft_vocab is not None else None,
            from_target={"head.weight": "head"}
            if config.draft_vocab is not None and not own_head
            else {},
        )

    return Recipe(
        name=name,
        features=features,
        steps=steps,
        init=lambda key, params: random_eagle(trained, key),
        guesses=guesses,
        loss=step_loss(guesses, value, decay),
        logical_axes=network.logical_axes,
        save=save,
    )


def _behind(earlier: Block, block: Block) -> Block:
    join = lambda old, new: tuple(joined(a, b) for a, b in zip(old, new, strict=True))
    return Block(keys=join(earlier.keys, block.keys), values=join(earlier.values, block.values))


def fitted_eagle(
    params: Params,
    config: EagleConfig,
    weights: dict[str, Any],
    batches: Callable[[], Iterable[Batch]],
    prompt_weight: float = 0.1,
) -> dict[str, Any]:
    """A mixed head that starts as the best linear guess: attention and feed-forward add nothing.

    Args:
      params: the target.
      config: of the head, with `mixed` and `fc_norm`.
      weights: freshly initialised.
      batches: gives them, with the states that the recipe wants.
      prompt_weight: of tokens that are not answers.
    """
    decoder, last = params.model.config, params.model.config.num_layers
    size = decoder.hidden_size

    def rows(target: Any, batch: Batch) -> tuple[Array, Array, Array]:
        x = token_and_states(params, target, batch, config.features)
        return x, *states_ahead(batch, last, 1, prompt_weight)

    found, x, _ = solved(params.target, rows, batches())
    token, states = found[:, :size], found[:, size:]
    rms = lambda y: np.sqrt(np.mean(y * y, axis=-1)).mean()
    fused, whole = rms(x[:, size:] @ states.T), rms(x @ found.T)
    flat = jnp.ones(size, jnp.float32)
    offset = decoder.norm_offset
    first = weights["layers"][0]
    first = {
        **first,
        "mix": {"weight": jnp.asarray(np.concatenate([token, np.eye(size)], axis=1), jnp.float32)},
        "state_norm": {**first["state_norm"], "scale": fused * flat - offset},
        "attn": {**first["attn"], "o": jax.tree.map(jnp.zeros_like, first["attn"]["o"])},
        "mlp": {**first["mlp"], "down": jax.tree.map(jnp.zeros_like, first["mlp"]["down"])},
    }
    return {
        **weights,
        "fc": {**weights["fc"], "weight": jnp.asarray(states)},
        "layers": {**weights["layers"], 0: first},
        "norm": {**weights["norm"], "scale": whole * flat - offset},
    }
