"""Medusa: heads over the target's last state, each for a token further ahead.

From the state at t, head i guesses the token at t + 2 + i, whose law is that of the state at
t + 1 + i.

Reference: Cai et al. 2024 (arXiv:2401.10774), section 2.2.1: the loss of head i counts 0.8^i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.medusa import MedusaConfig, medusa_heads, random_weights
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
from specjax.train.recipes.linear import solved, states_ahead
from specjax.train.windows import Batch
from specjax.types import Params

__all__ = ["fitted_medusa", "medusa_recipe"]


def medusa_recipe(
    params: Params,
    config: MedusaConfig,
    *,
    decay: float = 0.8,
    prompt_weight: float = 0.1,
) -> Recipe:
    """Trains Medusa heads, which use the target's output matrix.

    Args:
      params: the target.
      config: the heads, without outputs of their own.
      decay: head i counts decay^i.
      prompt_weight: of tokens that are not answers.

    Raises:
      ValueError: the heads have outputs of their own.
    """
    if config.own_output:
        raise ValueError("own_output must be False: heads are trained with the target's output")
    heads = medusa_heads(config)
    decoder, last = params.model.config, params.model.config.num_layers

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        states = batch.state(last)
        ready = heads.logits(weights, lambda z: z, states)  # [B, T, heads, E]
        found = []
        for i in range(config.num_heads):
            goal = aligned(states, 1 + i)
            target, draft = laws(frozen, decoder, choice, ready[:, :, i], goal, None)
            known = same_text(batch, 0, 2 + i) & aligned(batch.known, 1 + i)
            answer = aligned(batch.answer, 2 + i)
            here = worth(known, answer, prompt_weight)
            found.append(Guess(target, draft, here, answer))
        return found

    def init(key: Array, params: Params) -> Any:
        # Nothing is added to the state at first, so that each head starts as the target's own.
        weights = random_weights(config, key)
        for head in weights["heads"].values():
            for block in head["blocks"].values():
                block["weight"] = jnp.zeros_like(block["weight"])
                block["bias"] = jnp.zeros_like(block["bias"])
        return weights

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(folder, "medusa", config, weights, decoder)

    return Recipe(
        name="medusa",
        features=(last,),
        steps=config.num_heads,
        init=init,
        guesses=guesses,
        loss=step_loss(guesses, decay=decay),
        logical_axes=heads.logical_axes,
        save=save,
    )


def fitted_medusa(
    params: Params,
    config: MedusaConfig,
    weights: dict[str, Any],
    batches: Callable[[], Iterable[Batch]],
    prompt_weight: float = 0.1,
) -> dict[str, Any]:
    """Mixed heads that start as the best linear guesses: their blocks add nothing.

    Args:
      params: the target.
      config: of the heads, with `mixed`.
      weights: freshly initialised.
      batches: gives them, with the target's last states.
      prompt_weight: of tokens that are not answers.
    """
    last, size = params.model.config.num_layers, config.hidden_size

    def rows(target: Any, batch: Batch) -> tuple[Array, Array, Array]:
        return batch.state(last), *states_ahead(batch, last, config.num_heads, prompt_weight)

    found, _, _ = solved(params.target, rows, batches())
    heads = {
        i: {**head, "mix": {"weight": jnp.asarray(found[i * size : (i + 1) * size])}}
        for i, head in weights["heads"].items()
    }
    return {**weights, "heads": heads}
