"""Qwen2: biases of q, k and v. Qwen3: norms of queries and keys; Qwen3-MoE: routed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, ExpertsConfig
from specjax.models.family import Family
from specjax.models.gguf_reading import decoder_from_gguf
from specjax.models.naming import GGUF_DECODER, HF_DECODER, Layout, hf_ignored, stacked

__all__ = ["QWEN2", "QWEN3", "QWEN3_MOE"]

_WINDOW_KEYS = frozenset({"layer_types", "max_window_layers", "sliding_window"})
_EXPERT_KEYS = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts
    """.split()
)
# What a missing key means.
_QWEN2 = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN3 = _QWEN2 | {"head_dim": 128}
_QWEN3_MOE = _QWEN2 | {"num_key_value_heads": 4}
_Tensors = Mapping[str, Callable[[], np.ndarray]]


def _windows(config: Mapping[str, Any], first: int) -> dict[str, Any]:
    """`sliding_window` means nothing unless it is switched on; then the first layers have none."""
    window, first = None, config.get("max_window_layers", first)
    if reading.flag(config, "use_sliding_window", False):
        config = {"sliding_window": 4096} | config
        if config["sliding_window"] is not None:
            window = reading.positive_int(config, "sliding_window")
        if isinstance(first, bool) or not isinstance(first, int):
            raise ValueError(f"max_window_layers is {first!r}; wanted an integer.")
    slides = lambda layer: layer >= first
    return {
        "keys": _WINDOW_KEYS | {"use_sliding_window"},
        "windows": reading.windows(config, window, slides),
    }


def _qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    return reading.decoder_from_hf(
        config, defaults=_QWEN2, **_windows(config, 28), attention_bias=True
    )


def _qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    return _with_norms(config, _windows(config, 28), defaults=_QWEN3)


def _with_norms(
    config: Mapping[str, Any], windows: dict[str, Any], **changes: Any
) -> DecoderConfig:
    bias = reading.flag(config, "attention_bias", False)
    keys = windows.pop("keys") | {"attention_bias"} | changes.pop("keys", set())
    return reading.decoder_from_hf(
        config,
        keys=keys,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        **windows,
        **changes,
    )


def _qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    named = reading.present(config)
    named.setdefault("num_experts", named.get("num_local_experts"))  # transformers 5's word
    if named.get("num_local_experts", named["num_experts"]) != named["num_experts"]:
        raise ValueError(
            f"num_experts is {named['num_experts']!r} but num_local_experts is "
            f"{named['num_local_experts']!r}; wanted one of them. Correct config.json."
        )
    step = reading.positive_int({"decoder_sparse_step": 1} | named, "decoder_sparse_step")
    dense = named.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers is {dense!r}; wanted a list. Correct config.json.")
    layers = range(reading.positive_int(named, "num_hidden_layers"))
    routed = tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    experts = ExpertsConfig(
        num_experts=reading.positive_int(named, "num_experts"),
        experts_per_token=reading.positive_int(named, "num_experts_per_tok"),
        intermediate_size=reading.positive_int(named, "moe_intermediate_size"),
        normalise=reading.flag(named, "norm_topk_prob", False),
    )
    # Here a window is that of all layers, whatever max_window_layers says.
    windows = _windows({k: v for k, v in config.items() if k != "max_window_layers"}, 0)
    return _with_norms(
        config,
        windows,
        defaults=_QWEN3_MOE,
        keys=_EXPERT_KEYS,
        experts=experts if any(routed) else None,
        expert_layers=() if all(routed) or not any(routed) else routed,
    )


def _qwen2_from_gguf(metadata: Mapping[str, Any], tensors: _Tensors) -> DecoderConfig:
    return decoder_from_gguf(metadata, tensors, "qwen2", attention_bias=True)


def _qwen3_from_gguf(metadata: Mapping[str, Any], tensors: _Tensors) -> DecoderConfig:
    return decoder_from_gguf(metadata, tensors, "qwen3", qk_norm=True)


_HF = Layout("model.layers.{}.", HF_DECODER, ignored=hf_ignored)
_GGUF = Layout("blk.{}.", GGUF_DECODER)

QWEN2 = Family("qwen2", _qwen2, _HF, "qwen2", _qwen2_from_gguf, _GGUF)
QWEN3 = Family("qwen3", _qwen3, _HF, "qwen3", _qwen3_from_gguf, _GGUF)
QWEN3_MOE = Family(
    "qwen3_moe",
    _qwen3_moe,
    _HF._replace(
        modules={**HF_DECODER, "mlp.router": "mlp.gate"},
        leaves={
            "mlp.gate": stacked("mlp.experts.{}.gate_proj.weight"),
            "mlp.up": stacked("mlp.experts.{}.up_proj.weight"),
            "mlp.down": stacked("mlp.experts.{}.down_proj.weight"),
        },
    ),
)
