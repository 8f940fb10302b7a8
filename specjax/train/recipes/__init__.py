"""Which drafters can be trained, each with sizes that suit a target. A new one is a `Planner`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.block_decoder import BlockConfig
from specjax.models.config import DecoderConfig
from specjax.models.decoder import first_layers
from specjax.models.eagle import EagleConfig
from specjax.models.medusa import MedusaConfig
from specjax.models.mtp import MtpConfig
from specjax.train.recipe import Recipe
from specjax.train.recipes.blocks import block_recipe, fitted_blocks
from specjax.train.recipes.distilled import distilled_recipe
from specjax.train.recipes.eagle import eagle_recipe, fitted_eagle
from specjax.train.recipes.early_exit import early_exit_recipe
from specjax.train.recipes.medusa import fitted_medusa, medusa_recipe
from specjax.train.recipes.mtp import mtp_recipe
from specjax.train.windows import Batch
from specjax.types import Params, PyTree

__all__ = ["PLANNERS", "Plan", "Planner", "default_features"]


class Plan(NamedTuple):
    """A recipe, and what it starts from."""

    recipe: Recipe
    start: Callable[[Array], PyTree]  # key -> weights
    # (weights, what gives batches with the recipe's states) -> better ones, in closed form
    fit: Callable[[PyTree, Callable[[], Iterable[Batch]]], PyTree] | None = None


class Planner(NamedTuple):
    """How a plan for a target is made."""

    plan: Callable[..., Plan]  # (target, options by name)
    own_vocabulary: bool = False  # takes `draft_vocab`: the draft may have fewer tokens
    mask: bool = False  # takes `mask_token_id`: a token that no text holds


_HEAD_SCALE = 0.3  # of the target's last norm: a head that starts softer starts closer


def default_features(config: DecoderConfig) -> tuple[int, ...]:
    """States that every recipe finds its own among: from near the embedding to the final norm."""
    n = config.num_layers
    spread = {min(2, n) + round((n - min(2, n)) * i / 4) for i in range(5)}
    return tuple(sorted(spread | {max(n - 2, 0), n}))


def _some(config: DecoderConfig) -> tuple[int, ...]:
    """Three of them: a third of the way, two thirds, and near the end."""
    n, found = config.num_layers, default_features(config)[:-1]
    nearest = lambda share: min(found, key=lambda i: abs(i - share * n))
    return tuple(sorted({nearest(0.3), nearest(0.75), found[-1]}))


def _layers(config: DecoderConfig, count: int, **changes: Any) -> DecoderConfig:
    """Plain layers of the target's sizes, but for those changes that are not None."""
    changes = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(
        config,
        num_layers=count,
        windows=(),
        experts=None,
        expert_layers=(),
        **{"tie_embeddings": False, **changes},
    )


def _eagle3(
    params: Params,
    *,
    draft_vocab: int | None = None,
    features: tuple[int, ...] | None = None,
    steps: int = 4,
    intermediate_size: int | None = None,
    num_kv_heads: int | None = None,
    mixed: bool = True,
    **options: Any,
) -> Plan:
    config = params.model.config
    decoder = _layers(config, 1, intermediate_size=intermediate_size, num_kv_heads=num_kv_heads)
    if features is None:
        # What is linear in them is best guessed from the last ones.
        features = default_features(config)[-3:] if mixed else _some(config)
    made = EagleConfig(
        decoder=decoder,
        features=tuple(features),
        mixed=mixed,
        target_size=config.hidden_size,
        draft_vocab=draft_vocab,
        fc_norm=True,
    )
    recipe = eagle_recipe(params, made, steps=steps, **options)

    def start(key: Array) -> PyTree:
        weights = recipe.init(key, params)
        weights["norm"] = _softened(params)
        return weights

    return Plan(recipe, start, _fit(fitted_eagle, params, made, options) if mixed else None)


def _eagle(
    params: Params,
    *,
    steps: int = 1,
    regression: float = 10.0,
    **options: Any,
) -> Plan:
    config = params.model.config
    made = EagleConfig(
        decoder=_layers(config, 1),
        features=(config.num_layers,),
        target_size=config.hidden_size,
        fused=False,
        fc_bias=True,
    )
    recipe = eagle_recipe(params, made, steps=steps, regression=regression, name="eagle", **options)
    return Plan(recipe, lambda key: recipe.init(key, params))


def _mtp(params: Params, *, modules: int = 1, **options: Any) -> Plan:
    config = params.model.config
    made = MtpConfig(decoder=_layers(config, 1), target_layers=config.num_layers, modules=modules)
    recipe = mtp_recipe(params, made, **options)

    def start(key: Array) -> PyTree:
        weights = recipe.init(key, params)
        for module in weights["modules"].values():
            module["norm"] = _softened(params)
        return weights

    return Plan(recipe, start)


def _medusa(
    params: Params, *, num_heads: int = 4, num_layers: int = 1, mixed: bool = True, **options: Any
) -> Plan:
    config = params.model.config
    made = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target_layers=config.num_layers,
        own_output=False,
        mixed=mixed,
    )
    recipe = medusa_recipe(params, made, **options)
    fit = _fit(fitted_medusa, params, made, options) if mixed else None
    return Plan(recipe, lambda key: recipe.init(key, params), fit)


def _block(
    dspark: bool,
    params: Params,
    *,
    mask_token_id: int,
    draft_vocab: int | None = None,
    features: tuple[int, ...] | None = None,
    block_size: int = 8,
    num_layers: int = 1,
    mixed: int = 4,
    intermediate_size: int | None = None,
    num_kv_heads: int | None = None,
    markov_rank: int = 32,
    **options: Any,
) -> Plan:
    config = params.model.config
    if mixed and num_kv_heads is None and config.num_heads * config.head_dim == config.hidden_size:
        num_kv_heads = config.num_heads  # values have room for the whole state
    sizes = {"intermediate_size": intermediate_size, "num_kv_heads": num_kv_heads}
    heads = {"markov_rank": markov_rank, "confidence": True, "confidence_markov": True}
    default = default_features(config)[-3:] if mixed else _some(config)
    made = BlockConfig(
        decoder=_layers(config, num_layers, **sizes),
        features=default if features is None else tuple(features),
        mixed=mixed,
        target_size=config.hidden_size,
        draft_vocab=config.vocab_size if draft_vocab is None else draft_vocab,
        block_size=block_size,
        mask_token_id=mask_token_id,
        from_anchor=dspark,
        own_head=draft_vocab is not None,
        **(heads if dspark else {}),
    )
    weights = {"total_variation": 1.0, "confidence": 1.0} if dspark else {}
    recipe = block_recipe(params, made, **{**weights, **options})

    def start(key: Array) -> PyTree:
        weights = recipe.init(key, params)
        weights["norm"] = _softened(params)
        return weights

    fit = _fit(fitted_blocks, params, made, options) if mixed else None
    return Plan(recipe, start, fit)


def _draft_model(
    params: Params,
    *,
    layers: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    **options: Any,
) -> Plan:
    config = params.model.config
    layers = (0, config.num_layers - 1) if layers is None else layers
    made = _layers(
        config,
        len(layers),
        intermediate_size=intermediate_size,
        tie_embeddings=config.tie_embeddings,
    )
    recipe = distilled_recipe(params, made, layers=layers, **options)
    return Plan(recipe, lambda key: recipe.init(key, params))


def _early_exit(
    params: Params,
    *,
    num_layers: int | None = None,
    exits: tuple[int, ...] | None = None,
    **options: Any,
) -> Plan:
    config = params.model.config
    count = max(1, config.num_layers // 4) if num_layers is None else num_layers
    if not isinstance(count, int) or not 1 <= count < config.num_layers:
        raise ValueError(f"num_layers must be from 1 to {config.num_layers - 1}, got {count!r}")
    made, _ = first_layers(config, params.target, count)
    exits = tuple(sorted({max(1, count // 2), count})) if exits is None else tuple(exits)
    recipe = early_exit_recipe(params, made, exits=exits, **options)
    return Plan(recipe, lambda key: recipe.init(key, params))


def _fit(fitted: Callable[..., PyTree], params: Params, made: Any, options: Mapping[str, Any]):
    """The closed-form start; of the recipe's options, how much prompts count is one of its own."""
    weight = {k: v for k, v in options.items() if k == "prompt_weight"}
    return functools.partial(fitted, params, made, **weight)


def _softened(params: Params) -> PyTree:
    """The target's last norm, scaled down."""
    return jax.tree.map(lambda x: _HEAD_SCALE * x.astype(jnp.float32), params.target["norm"])


PLANNERS: Mapping[str, Planner] = {
    "eagle": Planner(_eagle),
    "eagle3": Planner(_eagle3, own_vocabulary=True),
    "mtp": Planner(_mtp),
    "medusa": Planner(_medusa),
    "dflash": Planner(functools.partial(_block, False), own_vocabulary=True, mask=True),
    "dspark": Planner(functools.partial(_block, True), own_vocabulary=True, mask=True),
    "draft_model": Planner(_draft_model),
    "early_exit": Planner(_early_exit),
}
