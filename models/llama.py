"""The Llama family, and how its GGUF files differ from its Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.family import Family
from specjax.models.gguf_reading import decoder_from_gguf
from specjax.models.naming import (
    GGUF_DECODER,
    HF_DECODER,
    Layout,
    Parameter,
    hf_ignored,
    named,
    split_pairs,
)

__all__ = ["FAMILY", "config_from_gguf", "config_from_hf"]

# GGUF files keep only the factors of llama3 scaling. These are the settings of every Llama 3.1 to
# 3.3 release; `_rope_from_factors` checks the stored factors against them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Llama config.json, in the dialect of transformers 4 or 5.

    Args:
      config: the parsed file.

    Returns:
      The configuration.

    Raises:
      ValueError: a required key is missing, a value is not supported, sizes do not fit, or a key
        is not known.
    """
    bias = reading.flag(config, "attention_bias", False)
    return reading.decoder_from_hf(
        config,
        keys={"attention_bias", "mlp_bias"},
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=reading.flag(config, "mlp_bias", False),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Callable[[], np.ndarray]]
) -> DecoderConfig:
    """Reads the metadata of a Llama GGUF file; dense Mistral files are of this kind, too.

    Args:
      metadata: all keys of the file.
      tensors: its tensors by name, read when called. The factors of llama3 scaling are read from
        `rope_freqs.weight`.

    Returns:
      The configuration.

    Raises:
      ValueError: a required key is missing, a value is not supported, sizes do not fit, or a
        `llama.` key is not known.
    """
    config = decoder_from_gguf(metadata, tensors, "llama")
    if "rope_freqs.weight" not in tensors:
        return config
    if config.rope.kind != "default":
        raise ValueError(
            "the file has both rope_freqs.weight and llama.rope.scaling.type "
            f"{config.rope.kind!r}; wanted one of them. Use another file."
        )
    factors = tensors["rope_freqs.weight"]()
    rope = _rope_from_factors(config.rope.theta, factors, config.head_dim)
    return dataclasses.replace(config, rope=rope)


def _rope_from_factors(theta: float, factors: np.ndarray, head_dim: int) -> RopeConfig:
    """Recognises llama3 scaling by what it divides each frequency by."""
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(np.max(factors, initial=1.0)),
        original_max_position=_LLAMA3_ORIGINAL,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ramp = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    ramp = np.clip(ramp, 0.0, 1.0)
    wanted = 1.0 / ((1.0 - ramp) / rope.factor + ramp)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-3):
        raise ValueError(
            "rope_freqs.weight holds factors that are not Llama 3 scaling of a context of "
            f"{_LLAMA3_ORIGINAL} (frequency factors {_LLAMA3_LOW:g} and {_LLAMA3_HIGH:g}), which "
            "is the only kind supported in a GGUF file. Use the Hugging Face checkpoint."
        )
    return rope


def _query_rows(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """llama.cpp turns neighbours, so its converter has interleaved the halves of every head."""
    return split_pairs(array, parameter.config.num_heads)


def _key_rows(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    return split_pairs(array, parameter.config.num_kv_heads)


FAMILY = Family(
    model_type="llama",
    config_from_hf=config_from_hf,
    hf=Layout("model.layers.{}.", HF_DECODER, ignored=hf_ignored),
    gguf_architecture="llama",
    config_from_gguf=config_from_gguf,
    gguf=Layout(
        "blk.{}.",
        {
            **GGUF_DECODER,
            "attn.q": named("attn_q", _query_rows),
            "attn.k": named("attn_k", _key_rows),
        },
        # The factors of llama3 scaling were read with the configuration.
        ignored=lambda name, config: config.rope.kind == "llama3" and name == "rope_freqs.weight",
    ),
)
