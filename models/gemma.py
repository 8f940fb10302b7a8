"""Gemma 2 and 3: (1 + w) norms on both sides of each block, scaled embeddings, local layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.family import Family
from specjax.models.gguf_reading import decoder_from_gguf, own_keys
from specjax.models.naming import GGUF_DECODER, HF_DECODER, Layout, Parameter, hf_ignored, named

__all__ = ["GEMMA2", "GEMMA3", "GEMMA3_TEXT"]

_Tensors = Mapping[str, Callable[[], np.ndarray]]
_KEYS = frozenset(
    """
    attention_bias attn_logit_softcapping final_logit_softcapping hidden_activation layer_types
    query_pre_attn_scalar sliding_window
    """.split()
)
# What a missing key means; Gemma 3's files with pictures leave out what is as in the class.
_GEMMA2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


def _common(hidden: int) -> dict[str, Any]:
    return {
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": hidden**0.5,
        "activation": "gelu_tanh",
    }


def _from_hf(
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    keys: frozenset[str],
    slides: Callable[[int], bool],
    **changes: Any,
) -> DecoderConfig:
    full = dict(defaults) | config  # null switches a soft cap or the windows off
    bias = reading.flag(full, "attention_bias", False)
    window = full["sliding_window"]
    return reading.decoder_from_hf(
        config,
        keys=keys,
        defaults=defaults,
        attention_bias=bias,
        output_bias=bias,
        attention_softcap=reading.optional_float(full, "attn_logit_softcapping"),
        logit_softcap=reading.optional_float(full, "final_logit_softcapping"),
        query_scale=reading.positive_float(full, "query_pre_attn_scalar") ** -0.5,
        windows=reading.windows(
            full,
            None if window is None else reading.positive_int(full, "sliding_window"),
            slides,
        ),
        **_common(reading.positive_int(full, "hidden_size"))
        | {"activation": reading.activation(full, "hidden_activation", "gelu_pytorch_tanh")}
        | changes,
    )


def _gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    return _from_hf(config, _GEMMA2, _KEYS, lambda layer: layer % 2 == 0)


def _gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    given = reading.present(config)
    full = reading.present(_GEMMA3 | dict(config))
    pattern = _pattern(full)
    longest = reading.positive_int(full, "max_position_embeddings")
    theta, local = _GEMMA3["rope_theta"], {"rope_theta": full.get("rope_local_base_freq", 10000.0)}
    ropes = full.get("rope_parameters")
    if isinstance(ropes, Mapping) and "full_attention" in ropes:  # transformers 5
        wide = {"rope_parameters": ropes["full_attention"]}
        local = {"rope_parameters": ropes.get("sliding_attention", local)}
        unknown = sorted(set(ropes) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"rope_parameters has the key {unknown[0]!r}, which is not known.")
    else:
        wide = {key: value for key, value in given.items() if key.startswith("rope_")}
    return _from_hf(
        config,
        _GEMMA3,
        _KEYS | {"_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"},
        lambda layer: (layer + 1) % pattern != 0,
        qk_norm=True,
        rope=reading.rope_from_hf(wide, longest, theta=theta),
        local_rope=reading.rope_from_hf(local, longest),
    )


def _pattern(config: Mapping[str, Any]) -> int:
    """Every so many layers one sees everything."""
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if key in config:
            return reading.positive_int(config, key)
    return 6


def _gemma3_with_pictures(config: Mapping[str, Any]) -> DecoderConfig:
    """The language model of a checkpoint that can also see; the rest is left alone."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {text!r}; wanted an object. Correct config.json.")
    reading.refuse_unknown(
        config,
        {"text_config", "vision_config", "mm_tokens_per_image", "tie_word_embeddings"}
        | {f"{kind}_token_{word}" for kind in ("boi", "eoi", "image") for word in ("id", "index")},
    )
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return _gemma3(outer | dict(text))


def _gguf(
    architecture: str, period: int, largest: int, metadata: Mapping[str, Any], tensors: _Tensors
) -> DecoderConfig:
    """What llama.cpp knows by itself: the pattern of local layers, and how queries are scaled.

    Args:
      period: every so many layers one sees everything, unless the file says otherwise.
      largest: layers of the release whose queries are scaled by the width a head, not by its size.
    """
    short = {
        "window": "attention.sliding_window",
        "pattern": "attention.sliding_window_pattern",
        "scores": "attn_logit_softcapping",
        "logits": "final_logit_softcapping",
    }
    if architecture == "gemma3":
        short["local"] = "rope.freq_base_swa"
    keys = {name: f"{architecture}.{key}" for name, key in short.items()}
    own = own_keys(metadata, architecture, short.values())
    caps = {keys["scores"]: 50.0, keys["logits"]: 30.0} if architecture == "gemma2" else {}
    hidden = reading.positive_int(own, f"{architecture}.embedding_length")
    config = decoder_from_gguf(
        metadata,
        tensors,
        architecture,
        keys=short.values(),
        attention_softcap=reading.optional_float(caps | own, keys["scores"]),
        logit_softcap=reading.optional_float(caps | own, keys["logits"]),
        qk_norm=architecture == "gemma3",
        **_common(hidden),
    )
    period = reading.positive_int({keys["pattern"]: period} | own, keys["pattern"])
    window = reading.positive_int(own, keys["window"])
    local = [(i + 1) % period != 0 for i in range(config.num_layers)]
    width = hidden // config.num_heads if config.num_layers == largest else config.head_dim
    local_rope = None
    if "local" in keys:
        theta = reading.positive_float({keys["local"]: 10000.0} | own, keys["local"])
        local_rope = RopeConfig(theta=theta)
    return dataclasses.replace(
        config,
        windows=tuple(window if i else None for i in local) if any(local) else (),
        query_scale=float(width) ** -0.5,
        local_rope=local_rope,
    )


def _gemma2_from_gguf(metadata: Mapping[str, Any], tensors: _Tensors) -> DecoderConfig:
    return _gguf("gemma2", 2, 46, metadata, tensors)


def _gemma3_from_gguf(metadata: Mapping[str, Any], tensors: _Tensors) -> DecoderConfig:
    return _gguf("gemma3", 6, 62, metadata, tensors)


def _without_one(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """llama.cpp stores 1 + w, which is what it multiplies by."""
    return array - 1


def _language_only(name: str) -> str:
    """The names of a checkpoint that can also see, as the language model alone has them."""
    name = name.removeprefix("language_model.")
    return name.replace("model.language_model.", "model.", 1)


def _not_language(name: str, config: DecoderConfig) -> bool:
    parts = ("vision_tower.", "multi_modal_projector.")
    return hf_ignored(name, config) or name.removeprefix("model.").startswith(parts)


_NORMS = ("norm", "attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "attn.q_norm",
          "attn.k_norm")  # fmt: skip
_HF = Layout(
    "model.layers.{}.",
    {
        **HF_DECODER,
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    ignored=hf_ignored,
)
_GGUF = Layout(
    "blk.{}.",
    {**GGUF_DECODER, **{key: named(GGUF_DECODER[key], _without_one) for key in _NORMS}},
)

GEMMA2 = Family("gemma2", _gemma2, _HF, "gemma2", _gemma2_from_gguf, _GGUF)
GEMMA3_TEXT = Family("gemma3_text", _gemma3, _HF, "gemma3", _gemma3_from_gguf, _GGUF)
GEMMA3 = Family(
    "gemma3",
    _gemma3_with_pictures,
    _HF._replace(rename=_language_only, ignored=_not_language),
)
