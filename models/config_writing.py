"""Writing a configuration as a config.json of Hugging Face.

What is written is read back by the family and must give the configuration that it was made from,
so a setting that a family cannot express is an error and never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from specjax.models import families
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.family import Family

__all__ = ["config_to_hf"]


def config_to_hf(config: DecoderConfig, model_type: str | None = None) -> dict[str, Any]:
    """The config.json of a model, without token ids and types.

    Args:
      config: the configuration.
      model_type: the family that it was read by, which goes first; None if it is not known.

    Returns:
      The JSON object.

    Raises:
      ValueError: none of the families that can be written expresses this configuration.

    Example:
      >>> config = DecoderConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_layers=1,
      ...                        num_heads=2, num_kv_heads=1, head_dim=4)
      >>> config_to_hf(config)["model_type"]
      'llama'
    """
    for name in dict.fromkeys((model_type, *_WRITERS)):
        if name in _WRITERS:
            written = _written(config, name)
            if _reads_as(written, families.by_model_type(name), config):
                return written
    read_by = "" if model_type is None else f", which was read as {model_type},"
    raise ValueError(
        f"this configuration{read_by} cannot be written as a config.json; supported: "
        f"{', '.join(_WRITERS)}. Keep it in an Orbax folder."
    )


def _reads_as(written: dict[str, Any], family: Family, config: DecoderConfig) -> bool:
    try:
        return family.config_from_hf(written) == config
    except ValueError:
        return False


def _written(config: DecoderConfig, model_type: str) -> dict[str, Any]:
    architecture, extend = _WRITERS[model_type]
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS.get(config.activation, config.activation),
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.rope is not None:
        common["rope_theta"] = config.rope.theta
        common["rope_scaling"] = _rope_scaling(config.rope)
    return common | extend(config)


_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            scaling["truncate"] = False
    return scaling


def _only(values: Iterable[int | None]) -> int | None:
    """The one window that layers have; the check by reading finds whether there are two."""
    return next((value for value in values if value is not None), None)


def _layer_types(config: DecoderConfig) -> list[str]:
    kinds = {False: "full_attention", True: "sliding_attention"}
    return [kinds[config.window(i) is not None] for i in range(config.num_layers)]


def _llama(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _mistral(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": _only(config.windows)}


def _mixtral(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return _mistral(config) | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
    }


def _qwen2(config: DecoderConfig) -> dict[str, Any]:
    slides = _only(config.windows) is not None
    written: dict[str, Any] = {
        "sliding_window": _only(config.windows),
        "use_sliding_window": slides,
    }
    if slides:
        written["layer_types"] = _layer_types(config)
    return written


def _qwen3(config: DecoderConfig) -> dict[str, Any]:
    return _qwen2(config) | {"attention_bias": config.attention_bias}


def _qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return _qwen3(config) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise,
        "mlp_only_layers": [i for i in range(config.num_layers) if not config.has_experts(i)],
    }


def _gemma2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_activation": _ACTIVATIONS.get(config.activation, config.activation),
        "attention_bias": config.attention_bias,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "query_pre_attn_scalar": _square(config.query_scale),
        "sliding_window": _only(config.windows),
        "layer_types": _layer_types(config),
    }


def _gemma3(config: DecoderConfig) -> dict[str, Any]:
    local = config.local_rope or RopeConfig()
    return _gemma2(config) | {"rope_local_base_freq": local.theta}


def _square(scale: float | None) -> float | int | None:
    """The number whose root divides the scores: an integer, unless that is another scale."""
    if scale is None:
        return None
    number = scale**-2
    return round(number) if round(number) ** -0.5 == scale else number


_WRITERS: dict[str, tuple[str, Callable[[DecoderConfig], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "mistral": ("MistralForCausalLM", _mistral),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
}
