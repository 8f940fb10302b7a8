"""GPT-2: learned positions, layer norms, and one tensor for queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig
from specjax.models.family import Family
from specjax.models.naming import Finder, Layout, Parameter, hf_ignored, named

__all__ = ["GPT2"]

_KEYS = frozenset(
    """
    activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer
    n_positions reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx
    scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj
    """.split()
)


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    given = reading.present(config)
    reading.expect(given, scale_attn_by_inverse_layer_idx=False)
    hidden, heads = (reading.positive_int(given, key) for key in ("n_embd", "n_head"))
    return reading.decoder_from_hf(
        config,
        keys=_KEYS,
        defaults={"tie_word_embeddings": True},
        hidden_size=hidden,
        intermediate_size=reading.positive_int({"n_inner": 4 * hidden} | given, "n_inner"),
        num_layers=reading.positive_int(given, "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=reading.head_size({}, "n_head", hidden, heads),
        max_position=reading.positive_int({"n_positions": 1024} | given, "n_positions"),
        norm="layer",
        norm_eps=reading.positive_float({"layer_norm_epsilon": 1e-5} | given, "layer_norm_epsilon"),
        attention_bias=True,
        output_bias=True,
        query_scale=None if reading.flag(given, "scale_attn_weights", True) else 1.0,
        rope=None,
        learned_positions=True,
        activation=reading.activation(given, "activation_function", "gelu_new"),
        gated=False,
        mlp_bias=True,
    )


def _transposed(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """Weights are stored [in, out]."""
    return array.T


def _linear(name: str) -> Finder:
    return named(name, _transposed, lambda parameter: parameter.shape[::-1])


def _third(part: int) -> Finder:
    """Queries, keys and values side by side."""

    def turn(parameter: Parameter, array: np.ndarray) -> np.ndarray:
        return np.split(array, 3, axis=-1)[part].T

    def stored(parameter: Parameter) -> tuple[int, ...]:
        return (*parameter.shape[:0:-1], 3 * parameter.shape[0])

    return named("attn.c_attn", turn, stored)


def _with_prefix(name: str) -> str:
    """Some files leave out the name of the model inside of the model with a head."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _ignored(name: str, config: DecoderConfig) -> bool:
    """Older files hold the causal mask."""
    return hf_ignored(name, config) or name.endswith((".attn.bias", ".attn.masked_bias"))


GPT2 = Family(
    model_type="gpt2",
    config_from_hf=_from_hf,
    hf=Layout(
        "transformer.h.{}.",
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            **{f"attn.{name}": _third(part) for part, name in enumerate("qkv")},
            "attn.o": _linear("attn.c_proj"),
            "mlp.up": _linear("mlp.c_fc"),
            "mlp.down": _linear("mlp.c_proj"),
        },
        ignored=_ignored,
        rename=_with_prefix,
    ),
)
