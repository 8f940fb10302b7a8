"""Mistral: Llama with a sliding window; Mixtral: with routed experts, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, ExpertsConfig
from specjax.models.family import Family
from specjax.models.naming import HF_DECODER, Layout, hf_ignored, stacked

__all__ = ["MISTRAL", "MIXTRAL"]

# What a missing key means.
_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def _windows(config: Mapping[str, Any], default: int | None) -> tuple[int | None, ...]:
    config = {"sliding_window": default} | config
    window = config["sliding_window"]
    return reading.windows(
        config, None if window is None else reading.positive_int(config, "sliding_window")
    )


def _mistral(config: Mapping[str, Any]) -> DecoderConfig:
    return reading.decoder_from_hf(
        config,
        keys={"sliding_window"},
        defaults=_DEFAULTS,
        windows=_windows(config, 4096),  # null switches it off, a missing key does not
    )


def _mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2} | config
    return reading.decoder_from_hf(
        config,
        keys={"num_experts_per_tok", "num_local_experts", "sliding_window"},
        defaults=_DEFAULTS | {"rope_theta": 1e6},
        windows=_windows(config, None),
        experts=ExpertsConfig(
            num_experts=reading.positive_int(experts, "num_local_experts"),
            experts_per_token=reading.positive_int(experts, "num_experts_per_tok"),
            intermediate_size=reading.positive_int(config, "intermediate_size"),
        ),
    )


MISTRAL = Family(
    model_type="mistral",
    config_from_hf=_mistral,
    hf=Layout("model.layers.{}.", HF_DECODER, ignored=hf_ignored),
)
MIXTRAL = Family(
    model_type="mixtral",
    config_from_hf=_mixtral,
    hf=Layout(
        "model.layers.{}.",
        {**HF_DECODER, "mlp.router": "block_sparse_moe.gate"},
        {
            "mlp.gate": stacked("block_sparse_moe.experts.{}.w1.weight"),
            "mlp.up": stacked("block_sparse_moe.experts.{}.w3.weight"),
            "mlp.down": stacked("block_sparse_moe.experts.{}.w2.weight"),
        },
        ignored=hf_ignored,
    ),
)
