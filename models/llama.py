"""The Llama family: its configuration map, its name maps and how its GGUF files differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models import config_reading as reading
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.family import Family

__all__ = ["FAMILY", "config_from_gguf", "config_from_hf", "gguf_names", "hf_names", "shapes"]

_HF_KEYS = frozenset(
    """
    attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    mlp_bias num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """.split()
)
_GGUF_KEYS = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length
    attention.layer_norm_rms_epsilon attention.value_length block_count context_length
    embedding_length feed_forward_length rope.dimension_count rope.freq_base
    rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.type vocab_size
    """.split()
)
# Mixtral's GGUF files also say "llama"; no experts is what a dense file may say.
_GGUF_NEUTRAL = {"expert_count": 0, "expert_used_count": 0}

# (parameter path, Hugging Face, GGUF) of the modules outside and inside a layer.
_OUTER = (
    ("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    ("norm.scale", "model.norm.weight", "output_norm.weight"),
    ("head.weight", "lm_head.weight", "output.weight"),
)
_NORMS = (
    ("attn_norm.scale", "input_layernorm.weight", "attn_norm.weight"),
    ("mlp_norm.scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
)
_ATTENTION = (
    ("attn.q", "self_attn.q_proj", "attn_q"),
    ("attn.k", "self_attn.k_proj", "attn_k"),
    ("attn.v", "self_attn.v_proj", "attn_v"),
    ("attn.o", "self_attn.o_proj", "attn_output"),
)
_MLP = (
    ("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up", "mlp.up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
)
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
    reading.refuse_unknown(config, _HF_KEYS)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(
            f"hidden_act is {activation!r}; Llama supports 'silu'. Use another checkpoint."
        )
    config = {key: value for key, value in config.items() if value is not None}
    hidden = reading.positive_int(config, "hidden_size")
    heads = reading.positive_int(config, "num_attention_heads")
    max_position = reading.positive_int(
        {"max_position_embeddings": 2048} | config, "max_position_embeddings"
    )
    return reading.check_config(
        DecoderConfig(
            vocab_size=reading.positive_int(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=reading.positive_int(config, "intermediate_size"),
            num_layers=reading.positive_int(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=reading.positive_int(
                {"num_key_value_heads": heads} | config, "num_key_value_heads"
            ),
            head_dim=_head_dim(config, "head_dim", hidden, heads),
            norm_eps=reading.positive_float(config, "rms_norm_eps"),
            rope=reading.rope_from_hf(config, max_position),
            tie_embeddings=reading.flag(config, "tie_word_embeddings", False),
            attention_bias=reading.flag(config, "attention_bias", False),
            mlp_bias=reading.flag(config, "mlp_bias", False),
            max_position=max_position,
        )
    )


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Callable[[], np.ndarray]]
) -> DecoderConfig:
    """Reads the metadata of a Llama GGUF file.

    Args:
      metadata: all keys of the file.
      tensors: its tensors by name, read when called. Biases and a separate head show by their
        names; the factors of llama3 scaling are read from `rope_freqs.weight`.

    Returns:
      The configuration.

    Raises:
      ValueError: a required key is missing, a value is not supported, sizes do not fit, or a
        `llama.` key is not known.
    """
    llama = {
        key.removeprefix("llama."): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    for key, value in llama.items():
        if key not in _GGUF_KEYS and not (key in _GGUF_NEUTRAL and value == _GGUF_NEUTRAL[key]):
            raise ValueError(
                f"the GGUF key llama.{key} (value {value!r}) is not supported: it may change the "
                "forward pass. Use a file of a plain Llama model."
            )
    # From here on errors name the whole key.
    llama = {f"llama.{key}": value for key, value in llama.items()}
    hidden = reading.positive_int(llama, "llama.embedding_length")
    heads = reading.positive_int(llama, "llama.attention.head_count")
    head_dim = _head_dim(llama, "llama.attention.key_length", hidden, heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if llama.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{key} is {llama[key]!r} but the head size is {head_dim}; wanted them equal. "
                "Use a file of a plain Llama model."
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        llama.setdefault("llama.vocab_size", len(tokens))
    return reading.check_config(
        DecoderConfig(
            vocab_size=reading.positive_int(llama, "llama.vocab_size"),
            hidden_size=hidden,
            intermediate_size=reading.positive_int(llama, "llama.feed_forward_length"),
            num_layers=reading.positive_int(llama, "llama.block_count"),
            num_heads=heads,
            num_kv_heads=reading.positive_int(
                {"llama.attention.head_count_kv": heads} | llama, "llama.attention.head_count_kv"
            ),
            head_dim=head_dim,
            norm_eps=reading.positive_float(llama, "llama.attention.layer_norm_rms_epsilon"),
            rope=_rope_from_gguf(llama, tensors, head_dim),
            tie_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            max_position=reading.positive_int(llama, "llama.context_length"),
        )
    )


def hf_names(config: DecoderConfig) -> dict[str, str]:
    """Maps each parameter path to its tensor name in a Hugging Face checkpoint.

    Args:
      config: the model's configuration.

    Returns:
      Parameter path -> tensor name.
    """
    return {path: hf for path, hf, _ in _rows(config)}


def gguf_names(config: DecoderConfig) -> dict[str, str]:
    """Maps each parameter path to its tensor name in a GGUF file.

    Args:
      config: the model's configuration.

    Returns:
      Parameter path -> tensor name.
    """
    return {path: gguf for path, _, gguf in _rows(config)}


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Gives each parameter's shape; a linear weight is [out, in].

    Args:
      config: the model's configuration.

    Returns:
      Parameter path -> shape.
    """
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "attn.q": (query, hidden),
        "attn.k": (key, hidden),
        "attn.v": (key, hidden),
        "attn.o": (hidden, query),
        "mlp.gate": (ffn, hidden),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
    }

    def shape(path: str) -> tuple[int, ...]:
        module, _, kind = re.sub(r"^layers\.\d+\.", "", path).rpartition(".")
        if kind == "scale":
            return (hidden,)
        if module in ("embed", "head"):
            return (vocab, hidden)
        return weights[module] if kind == "weight" else weights[module][:1]

    return {path: shape(path) for path, _, _ in _rows(config)}


def _rows(config: DecoderConfig) -> list[tuple[str, str, str]]:
    rows = [row for row in _OUTER if not (config.tie_embeddings and row[0] == "head.weight")]
    inner = list(_NORMS)
    for modules, bias in ((_ATTENTION, config.attention_bias), (_MLP, config.mlp_bias)):
        for kind in ("weight", "bias") if bias else ("weight",):
            inner += [tuple(f"{name}.{kind}" for name in module) for module in modules]
    for i in range(config.num_layers):
        rows += [(f"layers.{i}.{p}", f"model.layers.{i}.{h}", f"blk.{i}.{g}") for p, h, g in inner]
    return rows


def _head_dim(source: Mapping[str, Any], key: str, hidden: int, heads: int) -> int:
    if key in source:
        return reading.positive_int(source, key)
    if hidden % heads:
        raise ValueError(
            f"{key} is missing and the width {hidden} is no multiple of {heads} heads; wanted "
            f"one of the two. Add {key} to the checkpoint's configuration."
        )
    return hidden // heads


def _rope_from_gguf(
    llama: Mapping[str, Any], tensors: Mapping[str, Callable[[], np.ndarray]], head_dim: int
) -> RopeConfig:
    theta = reading.positive_float(
        {"llama.rope.freq_base": 10000.0} | llama, "llama.rope.freq_base"
    )
    kind = llama.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"llama.rope.scaling.type is {kind!r}; supported: none, linear, yarn. Use another file."
        )
    if llama.get("llama.rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError(
            "llama.rope.scaling.attn_factor is "
            f"{llama['llama.rope.scaling.attn_factor']!r}; supported: 1. Use another file."
        )
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise ValueError(
                f"the file has both rope_freqs.weight and llama.rope.scaling.type {kind!r}; "
                "wanted one of them. Use another file."
            )
        return _rope_from_factors(theta, tensors["rope_freqs.weight"](), head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = reading.positive_float(llama, "llama.rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=reading.positive_int(
            llama, "llama.rope.scaling.original_context_length"
        ),
    )


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


def _from_gguf(path: str, array: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Undoes the order of rows that llama.cpp gives to q and k.

    Its rotary embedding turns neighbours (row 2j with 2j + 1); ours turns halves (row j with
    j + D/2). A head of D = 6 stored as 0 3 1 4 2 5 becomes 0 1 2 3 4 5.
    """
    module = path.split(".")[-2]
    if module not in ("q", "k"):
        return array
    heads = config.num_heads if module == "q" else config.num_kv_heads
    pairs = array.reshape(heads, config.head_dim // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _hf_ignored(name: str, config: DecoderConfig) -> bool:
    """Tied heads may be stored twice; older releases stored the rotary frequencies."""
    return (config.tie_embeddings and name == "lm_head.weight") or name.endswith(
        "rotary_emb.inv_freq"
    )


def _gguf_ignored(name: str, config: DecoderConfig) -> bool:
    """The factors of llama3 scaling were read with the configuration."""
    return config.rope.kind == "llama3" and name == "rope_freqs.weight"


FAMILY = Family(
    model_type="llama",
    gguf_architecture="llama",
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=hf_names,
    gguf_names=gguf_names,
    shapes=shapes,
    from_gguf=_from_gguf,
    hf_ignored=_hf_ignored,
    gguf_ignored=_gguf_ignored,
)
