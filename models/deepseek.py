"""DeepSeek-V3: latent attention, and experts chosen by groups, with one that all tokens visit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, ExpertsConfig, LatentConfig
from specjax.models.family import Family
from specjax.models.naming import (
    HF_DECODER,
    Layout,
    Parameter,
    Source,
    hf_ignored,
    named,
    split_pairs,
    stacked,
)

__all__ = ["DEEPSEEK_V3"]

_KEYS = frozenset(
    """
    attention_bias aux_loss_alpha ep_size first_k_dense_replace kv_lora_rank moe_intermediate_size
    moe_layer_freq
    n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_local_experts
    num_nextn_predict_layers q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim
    rope_interleave routed_scaling_factor scoring_func seq_aux topk_group topk_method v_head_dim
    """.split()
)


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    given = reading.present(config)
    given.setdefault("n_routed_experts", given.get("num_local_experts"))
    reading.expect(
        given,
        moe_layer_freq=1,
        rope_interleave=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_local_experts=given["n_routed_experts"],
    )
    latent = LatentConfig(
        query_rank=_query_rank(config),
        kv_rank=reading.positive_int(given, "kv_lora_rank"),
        nope_dim=reading.positive_int(given, "qk_nope_head_dim"),
        rope_dim=reading.positive_int(given, "qk_rope_head_dim"),
        value_dim=reading.positive_int(given, "v_head_dim"),
    )
    heads = reading.positive_int(given, "num_attention_heads")
    # What the other keys say about the size of heads follows from these.
    reading.expect(
        given,
        num_key_value_heads=heads,
        qk_head_dim=latent.nope_dim + latent.rope_dim,
    )
    layers = reading.positive_int(given, "num_hidden_layers")
    dense = given.get("first_k_dense_replace", 3)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise ValueError(f"first_k_dense_replace is {dense!r}; wanted 0 or more.")
    bias = reading.flag(given, "attention_bias", False)
    made = reading.decoder_from_hf(
        {key: value for key, value in config.items() if not _own_code(key, value)},
        keys=_KEYS,
        defaults={"max_position_embeddings": 4096},
        num_kv_heads=heads,
        head_dim=latent.rope_dim,
        attention_bias=bias,
        output_bias=bias,
        latent=latent,
        experts=_experts(given, config.get("n_shared_experts", 1)) if dense < layers else None,
        expert_layers=tuple(i >= dense for i in range(layers)) if 0 < dense < layers else (),
    )
    return dataclasses.replace(made, query_scale=_query_scale(made, given))


def _query_rank(config: Mapping[str, Any]) -> int | None:
    """null switches the compression of queries off, a missing key does not."""
    config = {"q_lora_rank": 1536} | dict(config)
    if config["q_lora_rank"] is None:
        return None
    return reading.positive_int(config, "q_lora_rank")


def _own_code(key: str, value: Any) -> bool:
    """Published files name the code of this architecture, which is known here."""
    return (
        key == "auto_map"
        and isinstance(value, Mapping)
        and all(re.match(r"(configuration|modeling)_deepseek\.", str(v)) for v in value.values())
    )


def _experts(given: Mapping[str, Any], shared: Any) -> ExpertsConfig:
    inner = reading.positive_int(given, "moe_intermediate_size")
    if shared:
        shared = reading.positive_int({"n_shared_experts": shared}, "n_shared_experts")
    return ExpertsConfig(
        num_experts=reading.positive_int(given, "n_routed_experts"),
        experts_per_token=reading.positive_int(given, "num_experts_per_tok"),
        intermediate_size=inner,
        normalise=reading.flag(given, "norm_topk_prob", True),
        scoring="sigmoid",
        groups=reading.positive_int(given, "n_group"),
        groups_kept=reading.positive_int(given, "topk_group"),
        scale=reading.positive_float(given, "routed_scaling_factor"),
        shared_size=(shared or 0) * inner,
    )


def _query_scale(config: DecoderConfig, given: Mapping[str, Any]) -> float | None:
    """yarn's second scale counts for the whole score, not for the rotated part only."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    weight = reading.optional_float(rope, "mscale_all_dim") if rope.get("mscale_all_dim") else None
    if weight is None or config.rope.kind == "default" or config.rope.factor <= 1:
        return None
    size = config.latent.nope_dim + config.latent.rope_dim
    return size**-0.5 * (0.1 * weight * math.log(config.rope.factor) + 1.0) ** 2


def _query_rows(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """Rotated rows come in pairs of neighbours; ours are halves."""
    config = parameter.config
    return split_pairs(array, config.num_heads, config.latent.nope_dim)


def _shared_key_rows(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    return split_pairs(array, 1, parameter.config.latent.kv_rank)


def _query(parameter: Parameter) -> Source:
    compressed = parameter.config.latent.query_rank is not None
    name = "self_attn.q_b_proj" if compressed else "self_attn.q_proj"
    return named(name, _query_rows)(parameter)


def _up_shape(parameter: Parameter) -> tuple[int, ...]:
    latent = parameter.config.latent
    rows = parameter.config.num_heads * (latent.nope_dim + latent.value_dim)
    return rows, latent.kv_rank


def _up_part(parameter: Parameter, array: np.ndarray, part: int) -> np.ndarray:
    """The rows of one tensor are, head by head, those of the key and those of the value."""
    latent = parameter.config.latent
    rows = array.reshape(parameter.config.num_heads, -1, latent.kv_rank)
    return np.split(rows, [latent.nope_dim], axis=1)[part].reshape(parameter.shape)


def _ignored(name: str, config: DecoderConfig) -> bool:
    """The modules that predict further tokens are numbered as layers behind the last."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return hf_ignored(name, config) or (layer is not None and int(layer[1]) >= config.num_layers)


_SHARED = ("gate", "up", "down")

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    config_from_hf=_from_hf,
    hf=Layout(
        "model.layers.{}.",
        {
            **HF_DECODER,
            "attn.q_a": "self_attn.q_a_proj",
            "attn.q_norm": "self_attn.q_a_layernorm",
            "attn.q": _query,
            "attn.kv_a": named("self_attn.kv_a_proj_with_mqa", _shared_key_rows),
            "attn.kv_norm": "self_attn.kv_a_layernorm",
            "attn.k": named("self_attn.kv_b_proj", lambda p, a: _up_part(p, a, 0), _up_shape),
            "attn.v": named("self_attn.kv_b_proj", lambda p, a: _up_part(p, a, 1), _up_shape),
            "mlp.router": "mlp.gate",
            **{f"mlp.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in _SHARED},
        },
        {
            "mlp.choice_bias": named("mlp.gate.e_score_correction_bias", exact=True),
            **{f"mlp.{name}": stacked(f"mlp.experts.{{}}.{name}_proj.weight") for name in _SHARED},
        },
        ignored=_ignored,
    ),
)
