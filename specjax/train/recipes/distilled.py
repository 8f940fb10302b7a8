"""A small model with the target's own embedding and head, distilled on the target's texts.

Reference: Zhou et al. 2023 (arXiv:2310.08461), DistillSpec; Goel et al. 2024 (arXiv:2403.00858) for
TVD++.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checkpoints import save_draft
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, random_weights
from specjax.models.quantized import as_array
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
from specjax.train.windows import Batch, whole_windows
from specjax.types import Params

__all__ = ["DIVERGENCES", "distilled_recipe", "shared_parts"]

# (target's logits, draft's logits, weights of the places) -> a value a place
DIVERGENCES: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "kl": lambda target, draft, weights: losses.soft_cross_entropy(target, draft),
    "reverse_kl": lambda target, draft, weights: losses.reverse_kl(target, draft),
    "total_variation": lambda target, draft, weights: losses.total_variation(target, draft),
    "tvd++": losses.tvd_plus_plus,
}


def shared_parts(config: DecoderConfig) -> tuple[str, ...]:
    """The parts of a draft that are the target's."""
    return ("embed",) if config.tie_embeddings else ("embed", "head")


def distilled_recipe(
    params: Params,
    config: DecoderConfig,
    *,
    divergence: str = "kl",
    layers: tuple[int, ...] | None = None,
    prompt_weight: float = 0.1,
) -> Recipe:
    """Trains a draft model.

    Args:
      params: the target.
      config: the draft. Its embedding and head are the target's, which are not trained.
      divergence: one of `DIVERGENCES`; "kl" is KL(p || q) up to the entropy of p.
      layers: which of the target's layers it starts from; None: from noise.
      prompt_weight: of tokens that are not answers.

    Raises:
      ValueError: an unknown divergence, a draft of another width or vocabulary than the target, or
        layers that the target does not have.
    """
    decoder = params.model.config
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence {divergence!r} is not known; known: {', '.join(DIVERGENCES)}")
    for name in ("hidden_size", "vocab_size", "tie_embeddings"):
        if getattr(config, name) != getattr(decoder, name):
            raise ValueError(
                f"the draft's {name} is {getattr(config, name)}, the target's "
                f"{getattr(decoder, name)}: the draft uses the target's embedding and head"
            )
    if layers is not None and (
        len(layers) != config.num_layers or not all(0 <= i < decoder.num_layers for i in layers)
    ):
        raise ValueError(
            f"layers must be {config.num_layers} of 0..{decoder.num_layers - 1}, got {layers}"
        )
    shared = shared_parts(config)
    model = decoder_model(config)
    last = decoder.num_layers

    def guesses(
        weights: Any, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]:
        whole = {**weights, **{part: frozen.target[part] for part in shared}}
        out = whole_windows(model, whole, batch.tokens)
        target, draft = laws(frozen, decoder, choice, out.hidden, batch.state(last), None)
        answer = aligned(batch.answer, 1)
        here = worth(same_text(batch, 0, 1) & batch.known, answer, prompt_weight)
        return [Guess(target, draft, here, answer)]

    def value(guess: Guess) -> Array:
        return DIVERGENCES[divergence](guess.target, guess.draft, guess.weights)

    def init(key: Array, params: Params) -> Any:
        weights = random_weights(config, key)
        for part in shared:
            del weights[part]
        if layers is not None:
            size = config.intermediate_size
            weights["layers"] = {
                i: _narrowed(params.target["layers"][j], size) for i, j in enumerate(layers)
            }
            weights["norm"] = params.target["norm"]
        return weights

    def save(folder: Path, weights: Any, draft_ids: np.ndarray) -> None:
        save_draft(
            folder,
            "draft_model",
            dataclasses.replace(config, max_position=decoder.max_position),
            weights,
            decoder,
            from_target={f"{part}.weight": part for part in shared},
        )

    axes = tuple((path, names) for path, names in model.logical_axes if path[0] not in shared)
    return Recipe(
        name="draft_model",
        features=(last,),
        steps=1,
        init=init,
        guesses=guesses,
        loss=step_loss(guesses, value),
        logical_axes=axes,
        save=save,
    )


def _narrowed(layer: Any, size: int) -> Any:
    """A layer whose feed-forward block keeps the `size` inner units with the largest weights."""
    mlp = layer["mlp"]
    wide = mlp["down"]["weight"].shape[1]
    if size == wide:
        return layer
    strength = jnp.linalg.norm(as_array(mlp["down"]["weight"]), axis=0)
    for name in mlp.keys() - {"down"}:
        strength = strength * jnp.linalg.norm(as_array(mlp[name]["weight"]), axis=1)
    kept = jnp.sort(jnp.argsort(-strength)[:size])

    def cut(name: str, path: str, leaf: Any) -> Any:
        if name != "down":
            return as_array(leaf)[kept]
        return as_array(leaf)[:, kept] if path == "weight" else leaf

    parts = {
        name: {path: cut(name, path, leaf) for path, leaf in part.items()}
        for name, part in mlp.items()
    }
    return {**layer, "mlp": parts}
