"""Reading a checkpoint's configuration: required values, RoPE, and refusing what is not known.

A key that changes the maths and is overlooked gives a model that runs and is wrong. So every key
must be one of three: read by the family, known to leave the forward pass as it is, or known to
leave it as it is at one value. Any other key is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from specjax.models.config import DecoderConfig, RopeConfig

__all__ = [
    "check_config",
    "flag",
    "positive_float",
    "positive_int",
    "refuse_unknown",
    "rope_from_hf",
]

# Bookkeeping: token ids, training and generation settings, names and versions.
_HARMLESS = frozenset(
    """
    _name_or_path architectures attention_dropout bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_llama_config
    label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_cache
    """.split()
)

# Keys that only say something at another value than this one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (None,),
    "auto_map": (None, {}),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (False,),
    "layer_types": (None,),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "use_sliding_window": (False,),
}

_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def positive_int(source: Mapping[str, Any], key: str) -> int:
    """Reads a required positive integer.

    Args:
      source: a parsed config.json, or GGUF metadata.
      key: the key to read.

    Returns:
      Its value.

    Raises:
      ValueError: the key is missing, or its value is not a positive integer.
    """
    value = _required(source, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}; wanted a positive integer. Correct the checkpoint.")
    return value


def positive_float(source: Mapping[str, Any], key: str) -> float:
    """Reads a required positive, finite number.

    Args:
      source: a parsed config.json, or GGUF metadata.
      key: the key to read.

    Returns:
      Its value as a float.

    Raises:
      ValueError: the key is missing, or its value is not a positive finite number.
    """
    value = _required(source, key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key} is {value!r}; wanted a positive number. Correct the checkpoint.")
    return float(value)


def flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    """Reads an optional boolean.

    Args:
      source: a parsed config.json, or GGUF metadata.
      key: the key to read.
      default: what a missing key means for this family.

    Returns:
      Its value.

    Raises:
      ValueError: the value is not a boolean.
    """
    value = source.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; wanted true or false. Correct the checkpoint.")
    return value


def refuse_unknown(config: Mapping[str, Any], understood: Collection[str]) -> None:
    """Refuses keys of a config.json that nobody reads and that may change the forward pass.

    Args:
      config: the parsed config.json.
      understood: the keys that the family reads.

    Raises:
      ValueError: names the key, its value and what to do.
    """
    for key, value in config.items():
        if key in understood or key in _HARMLESS:
            continue
        if key in _NEUTRAL:
            if value in _NEUTRAL[key]:
                continue
            raise ValueError(
                f"{key} is {value!r} in config.json, which changes the forward pass and is not "
                f"supported; supported: {_NEUTRAL[key][-1]!r}. Use a checkpoint without it."
            )
        raise ValueError(
            f"config.json has the key {key!r} (value {value!r}), which specjax does not know. If "
            "it does not change the forward pass, remove it from config.json; if it does, this "
            "checkpoint is not supported."
        )


def rope_from_hf(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Reads rotary embeddings in the dialect of transformers 4 or 5.

    transformers 4 has `rope_theta` and `rope_scaling` (kind under `rope_type` or `type`);
    transformers 5 has all in `rope_parameters`.

    Args:
      config: the parsed config.json.
      max_position: `max_position_embeddings`, what yarn takes for a missing original length.

    Returns:
      The record.

    Raises:
      ValueError: unknown kind, unknown or missing key, or two dialects that disagree.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and _plain(scaling) != _plain(parameters):
        raise ValueError(
            f"rope_scaling is {scaling!r} but rope_parameters is {parameters!r}; wanted one of "
            "them, or equal ones. Remove the wrong one from config.json."
        )
    rope = parameters or scaling or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_scaling or rope_parameters is {rope!r}; wanted an object or null.")
    thetas = {source["rope_theta"] for source in (config, rope) if "rope_theta" in source}
    if len(thetas) > 1:
        raise ValueError(
            f"rope_theta has two values, {sorted(thetas)}; wanted one. Remove the wrong one from "
            "config.json."
        )
    # 10000 is what the class means when no key says otherwise: Llama 1 and 2 have no rope_theta.
    theta = positive_float({"rope_theta": thetas.pop() if thetas else 10000.0}, "rope_theta")

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ValueError(
            f"rope_type is {kind!r}; supported: {', '.join(_ROPE_KEYS)}. Use a checkpoint with "
            "one of these."
        )
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor is {rope['partial_rotary_factor']!r}; supported: 1. Use a "
            "checkpoint that rotates the whole head."
        )
    unknown = sorted(set(rope) - _ROPE_COMMON - _ROPE_KEYS[kind])
    if unknown:
        raise ValueError(
            f"RoPE of type {kind!r} has the key {unknown[0]!r} (value {rope[unknown[0]]!r}), "
            f"which specjax does not know; known: {', '.join(sorted(_ROPE_KEYS[kind])) or 'none'}."
            " Remove it from config.json if it does not change the forward pass."
        )
    return _ROPE_READERS[kind](theta, rope, max_position)


def check_config(config: DecoderConfig) -> DecoderConfig:
    """Checks what single values cannot show: that the sizes fit each other.

    Args:
      config: the record as read.

    Returns:
      The same record.

    Raises:
      ValueError: names the sizes that do not fit.
    """
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads is {config.num_heads} and num_kv_heads is {config.num_kv_heads}; wanted "
            "a multiple of num_kv_heads. Correct the checkpoint's configuration."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim is {config.head_dim}; rotary embeddings want an even number. Correct the "
            "checkpoint's configuration."
        )
    return config


def _required(source: Mapping[str, Any], key: str) -> Any:
    if source.get(key) is None:
        raise ValueError(
            f"{key} is missing from the checkpoint's configuration; it is required. Take the "
            "complete checkpoint, or add the key."
        )
    return source[key]


def _plain(rope: Any) -> Any:
    """A rope object with the kind under one key and without theta, to compare two dialects."""
    if not isinstance(rope, Mapping):
        return rope
    rest = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta")}
    return rest | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _default(theta: float, rope: Mapping[str, Any], max_position: int) -> RopeConfig:
    del rope, max_position
    return RopeConfig(theta=theta)


def _linear(theta: float, rope: Mapping[str, Any], max_position: int) -> RopeConfig:
    del max_position
    return RopeConfig(theta=theta, kind="linear", factor=positive_float(rope, "factor"))


def _llama3(theta: float, rope: Mapping[str, Any], max_position: int) -> RopeConfig:
    del max_position
    low = positive_float(rope, "low_freq_factor")
    high = positive_float(rope, "high_freq_factor")
    if high <= low:
        raise ValueError(
            f"high_freq_factor is {high} and low_freq_factor is {low}; wanted high > low. "
            "Correct config.json."
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=positive_float(rope, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=positive_int(rope, "original_max_position_embeddings"),
    )


def _yarn(theta: float, rope: Mapping[str, Any], max_position: int) -> RopeConfig:
    rope = {key: value for key, value in rope.items() if value is not None}
    original = (
        positive_int(rope, "original_max_position_embeddings")
        if "original_max_position_embeddings" in rope
        else max_position
    )
    factor = positive_float(rope, "factor")
    attention = positive_float(rope, "attention_factor") if "attention_factor" in rope else None
    # As transformers: the two scales count only together, and only without attention_factor.
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        log = math.log(factor) if factor > 1 else 0.0
        over = 0.1 * positive_float(rope, "mscale") * log + 1.0
        under = 0.1 * positive_float(rope, "mscale_all_dim") * log + 1.0
        attention = over / under
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=positive_float({"beta_fast": 32.0} | rope, "beta_fast"),
        beta_slow=positive_float({"beta_slow": 1.0} | rope, "beta_slow"),
        attention_factor=attention,
        truncate=flag(rope, "truncate", True),
    )


_ROPE_READERS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
