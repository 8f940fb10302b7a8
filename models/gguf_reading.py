"""Reading the metadata of a GGUF file: what all supported architectures store alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, RopeConfig

__all__ = ["Metadata", "decoder_from_gguf", "own_keys"]

_COMMON = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length
    attention.layer_norm_rms_epsilon attention.value_length block_count context_length
    embedding_length feed_forward_length rope.dimension_count rope.freq_base
    rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.type vocab_size
    """.split()
)
# Files of routed experts name the same architecture; no experts is what a dense file may say.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0}

Metadata = Mapping[str, Any]


def own_keys(metadata: Metadata, architecture: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The keys of an architecture, under their whole names.

    Args:
      metadata: all keys of the file.
      architecture: what they begin with.
      keys: what the family reads beside the common ones, without the architecture.

    Returns:
      Key -> value.

    Raises:
      ValueError: a key that nobody reads.
    """
    own = {key: v for key, v in metadata.items() if key.startswith(f"{architecture}.")}
    for key, value in own.items():
        short = key.removeprefix(f"{architecture}.")
        neutral = short in _NEUTRAL and value == _NEUTRAL[short]
        if short not in _COMMON and short not in keys and not neutral:
            raise ValueError(
                f"the GGUF key {key} (value {value!r}) is not supported: it may change the "
                f"forward pass. Use a file of a plain {architecture} model."
            )
    return own


def decoder_from_gguf(
    metadata: Metadata,
    tensors: Mapping[str, Callable[[], np.ndarray]],
    architecture: str,
    *,
    keys: Collection[str] = (),
    **changes: Any,
) -> DecoderConfig:
    """Reads what all architectures store alike.

    Args:
      metadata: all keys of the file.
      tensors: its tensors by name. Biases and a separate head show by their names.
      architecture: the file's.
      keys: what else the family reads.
      changes: fields of `DecoderConfig` that the family has found out by itself.

    Returns:
      The configuration.

    Raises:
      ValueError: a required key is missing, a value is not supported, sizes do not fit, or a key
        of the architecture is not known.
    """
    own = own_keys(metadata, architecture, keys)

    def key(short: str) -> str:  # errors name the whole key
        return f"{architecture}.{short}"

    hidden = reading.positive_int(own, key("embedding_length"))
    heads = reading.positive_int(own, key("attention.head_count"))
    size = reading.head_size(own, key("attention.key_length"), hidden, heads)
    for other in (key("attention.value_length"), key("rope.dimension_count")):
        if own.get(other, size) != size:
            raise ValueError(
                f"{other} is {own[other]!r} but the head size is {size}; wanted them equal. "
                f"Use a file of a plain {architecture} model."
            )
    words = metadata.get("tokenizer.ggml.tokens")
    if words is not None:
        own.setdefault(key("vocab_size"), len(words))
    fields = {
        "vocab_size": reading.positive_int(own, key("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": reading.positive_int(own, key("feed_forward_length")),
        "num_layers": reading.positive_int(own, key("block_count")),
        "num_heads": heads,
        "num_kv_heads": reading.positive_int(
            {key("attention.head_count_kv"): heads} | own, key("attention.head_count_kv")
        ),
        "head_dim": size,
        "norm_eps": reading.positive_float(own, key("attention.layer_norm_rms_epsilon")),
        "rope": _rope(own, architecture),
        "tie_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "max_position": reading.positive_int(own, key("context_length")),
    }
    return reading.check_config(DecoderConfig(**(fields | changes)))


def _rope(own: Metadata, architecture: str) -> RopeConfig:
    base, scaling = f"{architecture}.rope.freq_base", f"{architecture}.rope.scaling."
    theta = reading.positive_float({base: 10000.0} | own, base)
    # As llama.cpp: a factor alone is linear scaling.
    kind = own.get(scaling + "type", "linear" if scaling + "factor" in own else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{scaling}type is {kind!r}; supported: none, linear, yarn. Use another file."
        )
    if own.get(scaling + "attn_factor", 1.0) != 1.0:
        raise ValueError(
            f"{scaling}attn_factor is {own[scaling + 'attn_factor']!r}; supported: 1. Use another "
            "file."
        )
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = reading.positive_float(own, scaling + "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    original = reading.positive_int(own, scaling + "original_context_length")
    return RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position=original)
