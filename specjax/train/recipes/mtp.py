"""Multi-token prediction: module k guesses the token k + 2 ahead from what module k - 1 made.

Reference: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.mtp import MtpConfig, mtp_axes, mtp_network, random_mtp
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
from specjax.train.windows import Batch
from specjax.types import Params

__all__ = ["mtp_recipe"]


def mtp_recipe(
    params: Params, config: MtpConfig, *, decay: float = 0.8, prompt_weight: float = 0.1
) -> Recipe:
    """Trains modules behind a target that stays as it is.

    Args:
      params: the target, whose embedding and head the modules use.
      config: the modules.
      decay: module k counts decay^k.
      prompt_weight: of tokens that are not answers.
    """
    network = mtp_network(config)
    decoder, last = params.model.config, params.model.config.num_layers

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        count, length = batch.tokens.shape
        embed = functools.partial(params.model.embed, frozen.target)
        positions = jnp.broadcast_to(jnp.arange(length), (count, length))
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        state = batch.state(last)
        found = []
        for k in range(config.modules):
            own = weights["modules"][k]
            embedded = network.embed(own, embed, aligned(batch.tokens, k + 1))
            cache = network.init_cache(own, count, 0)
            out = network.forward(own, embedded, state, positions, cache, causal)
            goal = aligned(batch.state(last), k + 1)
            target, draft = laws(frozen, decoder, choice, out.hidden, goal, None)
            known = same_text(batch, 0, k + 2) & aligned(batch.known, k + 1)
            answer = aligned(batch.answer, k + 2)
            found.append(Guess(target, draft, worth(known, answer, prompt_weight), answer))
            state = out.features[0]
        return found

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(folder, "mtp", config, weights, decoder)

    return Recipe(
        name="mtp",
        features=(last,),
        steps=config.modules,
        init=lambda key, params: random_mtp(config, key),
        guesses=guesses,
        loss=step_loss(guesses, decay=decay),
        logical_axes=mtp_axes(config),
        save=save,
    )
