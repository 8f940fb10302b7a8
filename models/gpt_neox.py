"""GPT-NeoX: attention and feed-forward side by side, layer norms, heads rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig
from specjax.models.family import Family
from specjax.models.naming import Finder, Layout, Parameter, hf_ignored, named

__all__ = ["GPT_NEOX"]

_KEYS = frozenset(
    """
    attention_bias classifier_dropout hidden_dropout layer_norm_eps partial_rotary_factor
    rotary_emb_base rotary_pct use_parallel_residual
    """.split()
)


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    given = reading.present(config)
    hidden = reading.positive_int(given, "hidden_size")
    heads = reading.positive_int(given, "num_attention_heads")
    size = reading.head_size({}, "num_attention_heads", hidden, heads)
    longest = reading.positive_int(
        {"max_position_embeddings": 2048} | given, "max_position_embeddings"
    )
    ropes = given.get("rope_parameters") or given.get("rope_scaling") or {}
    parts = {
        float(source[key])
        for source in (given, ropes)
        for key in ("partial_rotary_factor", "rotary_pct")
        if source.get(key) is not None
    } or {0.25}
    if len(parts) > 1 or not 0 < min(parts) <= 1:
        raise ValueError(
            f"rotary_pct or partial_rotary_factor is {sorted(parts)}; wanted one number above 0 "
            "and up to 1. Correct config.json."
        )
    rotated = int(size * parts.pop())
    theta = {given[key] for key in ("rope_theta", "rotary_emb_base") if key in given}
    if len(theta) > 1:
        raise ValueError(
            f"rope_theta and rotary_emb_base are {sorted(theta)}; wanted one value. Correct "
            "config.json."
        )
    bias = reading.flag(given, "attention_bias", True)
    rope = reading.rope_from_hf(
        given | ({"rope_theta": theta.pop()} if theta else {}), longest, partial=True
    )
    return reading.decoder_from_hf(
        config,
        keys=_KEYS,
        num_kv_heads=heads,
        head_dim=size,
        norm="layer",
        norm_eps=reading.positive_float({"layer_norm_eps": 1e-5} | given, "layer_norm_eps"),
        parallel=reading.flag(given, "use_parallel_residual", True),
        attention_bias=bias,
        output_bias=bias,
        rope=rope,
        rotary_dim=None if rotated == size else rotated,
        activation=reading.activation(given, "hidden_act", "gelu"),
        gated=False,
        mlp_bias=True,
    )


def _part(part: int) -> Finder:
    """The rows of one tensor are, head by head, those of query, key and value."""

    def turn(parameter: Parameter, array: np.ndarray) -> np.ndarray:
        rows = array.reshape(parameter.config.num_heads, 3, -1, *array.shape[1:])
        return rows[:, part].reshape(parameter.shape)

    def stored(parameter: Parameter) -> tuple[int, ...]:
        return (3 * parameter.shape[0], *parameter.shape[1:])

    return named("attention.query_key_value", turn, stored)


def _ignored(name: str, config: DecoderConfig) -> bool:
    """Older files hold the causal mask."""
    return (
        hf_ignored(name, config)
        or name.endswith((".attention.bias", ".attention.masked_bias"))
        or (config.tie_embeddings and name == "embed_out.weight")
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    config_from_hf=_from_hf,
    hf=Layout(
        "gpt_neox.layers.{}.",
        {
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            "attn_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            **{f"attn.{name}": _part(part) for part, name in enumerate("qkv")},
            "attn.o": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        ignored=_ignored,
    ),
)
