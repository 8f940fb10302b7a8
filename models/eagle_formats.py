"""How EAGLE heads are published: by SafeAILab (EAGLE-1, EAGLE-3), speculators and DeepSpec."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from specjax.models import config_reading as reading
from specjax.models import families
from specjax.models.config import DecoderConfig
from specjax.models.drafting import (
    DraftFormat,
    Found,
    check_features,
    check_size,
    proposal_tokens,
    renamed,
    target_fields,
)
from specjax.models.eagle import EagleConfig, abstract_eagle
from specjax.models.functional import paths
from specjax.models.naming import HF_DECODER

__all__ = ["FORMATS"]

_Config = Mapping[str, Any]
_Shapes = Mapping[str, tuple[int, ...]]
_SAFEAI_KEYS = frozenset({"bias", "draft_vocab_size", "qkv_bias", "target_hidden_size"})
_DEEPSPEC_KEYS = frozenset(
    """
    draft_num_hidden_layers num_target_layers step_loss_decay target_layer_ids
    target_model_name_or_path ttt_length
    """.split()
)
_SPECULATORS_KEYS = frozenset(
    """
    architectures auto_map draft_vocab_size dtype eagle_aux_hidden_state_layer_ids
    embed_requires_grad fc_norm norm_before_fc norm_before_residual norm_output
    speculators_config speculators_model_type speculators_version target_hidden_size
    tie_word_embeddings torch_dtype transformer_layer_config transformers_version
    """.split()
)


def _layer_names(number: int, prefix: str) -> dict[str, str]:
    inner = {key: name for key, name in HF_DECODER.items() if "." in key}
    names = {f"layers.{number}.{key}": f"{prefix}.{name}" for key, name in inner.items()}
    return names | {
        f"layers.{number}.attn_norm": f"{prefix}.input_layernorm",
        f"layers.{number}.mlp_norm": f"{prefix}.post_attention_layernorm",
    }


def _found(config: EagleConfig, first: str, shapes: _Shapes, **more: Any) -> Found:
    """Under the names that all formats share; `first` is the prefix of the first layer."""
    names = {
        "embed": "embed_tokens",
        "fc": "fc",
        "input_norm": "input_norm",
        "norm": "norm",
        "head": "lm_head",
        **_layer_names(0, first),
        "layers.0.token_norm": f"{first}.input_layernorm",
        "layers.0.state_norm": f"{first}.hidden_norm",
    }
    for i in range(1, config.decoder.num_layers):
        names |= _layer_names(i, f"layers.{i}")
    names |= {f"fc_norm.{i}": f"fc_norm.{i}" for i in range(len(config.features))}
    mapped = config.draft_vocab not in (None, config.decoder.vocab_size)
    if mapped and "d2t" not in shapes:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab} and the target has "
            f"{config.decoder.vocab_size} tokens, but the file has no d2t, which says which are "
            "the same. Download the drafter again."
        )
    return Found(
        config=config,
        sources=renamed(paths(abstract_eagle(config)), names, {}),
        ignored=lambda name: name in ("d2t", "t2d"),
        d2t="d2t" if mapped else None,
        draft_vocab=config.draft_vocab if mapped else None,
        **more,
    )


def _decoder(config: _Config, target: DecoderConfig) -> DecoderConfig:
    """The layers, by the family that the configuration names."""
    made = families.by_model_type(config.get("model_type", "llama")).config_from_hf(config)
    check_size("vocabulary", made.vocab_size, target.vocab_size)
    return made


def _fc_inputs(shapes: _Shapes) -> int:
    shape = shapes.get("fc.weight")
    if shape is None or len(shape) != 2:
        raise ValueError("the tensor fc.weight is missing or no matrix. Download it again.")
    return shape[1]


def _embedding(shapes: _Shapes, decoder: DecoderConfig, target: DecoderConfig) -> bool:
    """Whether the file has an embedding of its own; without one both must be equally wide."""
    if "embed_tokens.weight" in shapes:
        return True
    check_size("width", decoder.hidden_size, target.hidden_size)
    return False


# --- SafeAILab -------------------------------------------------------------------------------


def _safeai(config: _Config, target: DecoderConfig) -> DecoderConfig:
    made = _decoder(target_fields(config, _SAFEAI_KEYS), target)
    bias = reading.flag(config, "qkv_bias", False)
    return dataclasses.replace(made, attention_bias=bias, tie_embeddings=False)


def _eagle1(config: _Config, shapes: _Shapes, target: DecoderConfig) -> Found:
    decoder = _safeai(config, target)
    check_size("width", decoder.hidden_size, target.hidden_size)
    made = EagleConfig(
        decoder=decoder,
        features=(target.num_layers,),
        target_size=target.hidden_size,
        fused=False,
        fc_bias=reading.flag(config, "bias", True),
        own_embedding=_embedding(shapes, decoder, target),
    )
    return _found(made, "layers.0", shapes)


def _eagle3(config: _Config, shapes: _Shapes, target: DecoderConfig) -> Found:
    decoder, n = _safeai(config, target), target.num_layers
    size = config.get("target_hidden_size")
    check_size("width", decoder.hidden_size if size is None else size, target.hidden_size)
    # Equal layers count once, in small targets.
    features = check_features("the rule [2, n // 2, n - 3]", sorted({2, n // 2, n - 3}), n)
    inputs = len(features) * target.hidden_size
    if _fc_inputs(shapes) != inputs:
        raise ValueError(
            f"fc.weight reads {_fc_inputs(shapes)} values, but the target's layers {features} "
            f"give {inputs}. Take the drafter that belongs to this target."
        )
    made = EagleConfig(
        decoder=decoder,
        features=features,
        target_size=target.hidden_size,
        draft_vocab=reading.positive_int(
            {"draft_vocab_size": decoder.vocab_size} | reading.present(config), "draft_vocab_size"
        ),
        own_embedding=_embedding(shapes, decoder, target),
    )
    return _found(made, "midlayer", shapes)


# --- speculators -----------------------------------------------------------------------------


def _speculators(config: _Config, shapes: _Shapes, target: DecoderConfig) -> Found:
    reading.refuse_unknown(config, _SPECULATORS_KEYS)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(f"transformer_layer_config is {layers!r}; wanted an object.")
    decoder, n = _decoder(layers, target), target.num_layers
    size = config.get("target_hidden_size")
    check_size("width", decoder.hidden_size if size is None else size, target.hidden_size)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    made = EagleConfig(
        decoder=dataclasses.replace(decoder, tie_embeddings=False),
        features=check_features(
            "eagle_aux_hidden_state_layer_ids", [2, n // 2, n - 3] if ids is None else ids, n
        ),
        target_size=target.hidden_size,
        draft_vocab=reading.positive_int(
            {"draft_vocab_size": decoder.vocab_size} | reading.present(config), "draft_vocab_size"
        ),
        own_embedding=_embedding(shapes, decoder, target),
        norm_before_residual=reading.flag(config, "norm_before_residual", False),
        norm_before_fc=reading.flag(config, "norm_before_fc", False),
        fc_norm=reading.flag(config, "fc_norm", False),
        norm_output=reading.flag(config, "norm_output", False),
    )
    return _found(made, "layers.0", shapes, options=proposal_tokens(config))


# --- DeepSpec --------------------------------------------------------------------------------


def _deepspec(config: _Config, shapes: _Shapes, target: DecoderConfig) -> Found:
    decoder = _decoder(target_fields(config, _DEEPSPEC_KEYS), target)
    check_size("width", decoder.hidden_size, target.hidden_size)
    layers = reading.positive_int(config, "num_target_layers")
    check_size("number of layers", layers, target.num_layers)
    features = check_features(
        "target_layer_ids", config.get("target_layer_ids"), target.num_layers - 1, 1
    )
    made = EagleConfig(
        decoder=dataclasses.replace(decoder, tie_embeddings=False),
        features=features,
        target_size=target.hidden_size,
        draft_vocab=decoder.vocab_size,
        own_embedding=_embedding(shapes, decoder, target),
    )
    steps = config.get("ttt_length")
    options = {} if steps is None else {"num_speculative_tokens": steps}
    return _found(made, "layers.0", shapes, options=options)


def _architecture(config: _Config, name: str) -> bool:
    given = config.get("architectures")
    return any(name in str(one) for one in (given if isinstance(given, list) else [given]))


def _is_eagle1(config: _Config, names: Collection[str]) -> bool:
    return (
        "fc.weight" in names
        and "layers.0.post_attention_layernorm.weight" in names
        and "layers.0.hidden_norm.weight" not in names
        and "norm.weight" not in names
    )


FORMATS: tuple[DraftFormat, ...] = (
    DraftFormat(
        "speculators EAGLE-3",
        "eagle3",
        lambda config, names: config.get("speculators_model_type") == "eagle3",
        _speculators,
    ),
    DraftFormat(
        "DeepSpec EAGLE-3",
        "eagle3",
        lambda config, names: _architecture(config, "Eagle3Model"),
        _deepspec,
    ),
    DraftFormat(
        "EAGLE-3", "eagle3", lambda config, names: "midlayer.hidden_norm.weight" in names, _eagle3
    ),
    DraftFormat("EAGLE-1", "eagle", _is_eagle1, _eagle1),
)
