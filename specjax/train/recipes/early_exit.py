"""The target's first layers, taught to be left early: copies of them, trained with layer dropout.

Every exit reads its layer's state through one final norm and the target's head. A layer that is
dropped adds nothing to the residual stream; later layers are dropped more often, so that earlier
ones learn to do without them.

Reference: Elhoushi et al. 2024 (arXiv:2404.16710), LayerSkip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, final_norm
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
from specjax.train.recipes.distilled import shared_parts
from specjax.train.windows import Batch, whole_windows
from specjax.types import Params

__all__ = ["early_exit_recipe"]


def early_exit_recipe(
    params: Params,
    config: DecoderConfig,
    *,
    exits: tuple[int, ...],
    dropout: float = 0.2,
    prompt_weight: float = 0.1,
) -> Recipe:
    """Trains copies of the first layers as drafts of several depths at once.

    Args:
      params: the target.
      config: the first layers of the target.
      exits: after how many layers the head is asked; each counts as much.
      dropout: chance that the last layer is dropped in a step; the first never is, those between in
        proportion.
      prompt_weight: of tokens that are not answers.

    Raises:
      ValueError: an exit that is no layer, or a chance that is none.
    """
    decoder, count = params.model.config, config.num_layers
    if not exits or list(exits) != sorted(set(exits)) or not 1 <= exits[0] <= exits[-1] <= count:
        raise ValueError(f"exits must be increasing numbers of layers in 1..{count}, got {exits}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
    shared = shared_parts(config)
    model = decoder_model(config)

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        whole = {**weights, **{part: frozen.target[part] for part in shared}}
        # The state behind the last layer comes normed already.
        inner = tuple(i for i in exits if i < count)
        out = whole_windows(model, whole, batch.tokens, features=inner)
        states = [final_norm(config, weights, x) for x in out.features]
        states += [out.hidden] * (exits[-1] == count)
        answer = aligned(batch.answer, 1)
        here = worth(same_text(batch, 0, 1) & batch.known, answer, prompt_weight)
        goal = batch.state(decoder.num_layers)
        pairs = [laws(frozen, decoder, choice, state, goal, None) for state in states]
        return [Guess(target, draft, here, answer) for target, draft in pairs]

    def dropped(weights: Any, key: Array) -> Any:
        chance = dropout * jnp.arange(count) / max(count - 1, 1)
        return _without(weights, jax.random.uniform(key, (count,)) >= chance)

    def init(key: Array, params: Params) -> Any:
        return {
            "layers": {i: params.target["layers"][i] for i in range(count)},
            "norm": params.target["norm"],
        }

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(
            folder,
            "draft_model",
            config,
            weights,
            decoder,
            from_target={f"{part}.weight": part for part in shared},
        )

    return Recipe(
        name="early_exit",
        features=(decoder.num_layers,),
        steps=len(exits),
        init=init,
        guesses=guesses,
        loss=step_loss(guesses, before=dropped),
        logical_axes=tuple(pair for pair in model.logical_axes if pair[0][0] not in shared),
        save=save,
    )


def _without(weights: Any, kept: Array) -> Any:
    """The same weights, where what a dropped layer would add is 0."""

    def scaled(layer: Any, factor: Array) -> Any:
        attn = {**layer["attn"], "o": jax.tree.map(lambda x: x * factor, layer["attn"]["o"])}
        mlp = {**layer["mlp"], "down": jax.tree.map(lambda x: x * factor, layer["mlp"]["down"])}
        return {**layer, "attn": attn, "mlp": mlp}

    layers = {i: scaled(layer, kept[i]) for i, layer in weights["layers"].items()}
    return {**weights, "layers": layers}
