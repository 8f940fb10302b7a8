"""Reading a checkpoint's configuration: required values, RoPE, and refusing what is not known.

A key that changes the maths and is overlooked gives a model that runs and is wrong. So every key
must be one of three: read by the family, known to leave the forward pass as it is, or known to
leave it as it is at one value. Any other key is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from specjax.models.config import DecoderConfig, RopeConfig

__all__ = [
    "activation",
    "check_config",
    "decoder_from_hf",
    "expect",
    "flag",
    "head_size",
    "optional_float",
    "positive_float",
    "positive_int",
    "present",
    "refuse_unknown",
    "rope_from_hf",
    "windows",
]

# What nearly every family has under these names.
_COMMON = frozenset(
    """
    head_dim hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta
    tie_word_embeddings vocab_size
    """.split()
)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Bookkeeping: token ids, training and generation settings, names and versions.
_HARMLESS = frozenset(
    """
    _name_or_path architectures attention_dropout bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_llama_config
    label2id length_penalty max_length medusa_num_heads medusa_num_layers min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise
    sep_token_id suppress_tokens task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_cache
    """.split()
)

# Keys that only say something at another value than this one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "auto_map": (None, {}),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (False,),
    "layer_types": (None,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
    "use_sliding_window": (False,),
}

_SLIDING, _FULL = "sliding_attention", "full_attention"
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


def present(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is set: null is as good as a missing key.

    Example:
      >>> present({"head_dim": None, "hidden_size": 8})
      {'hidden_size': 8}
    """
    return {key: value for key, value in config.items() if value is not None}


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
      default: what a missing key, or null, means for this family.

    Returns:
      Its value.

    Raises:
      ValueError: the value is not a boolean.
    """
    value = default if source.get(key) is None else source[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; wanted true or false. Correct the checkpoint.")
    return value


def optional_float(source: Mapping[str, Any], key: str) -> float | None:
    """Reads a positive, finite number that may be missing or null.

    Args:
      source: a parsed config.json, or GGUF metadata.
      key: the key to read.

    Returns:
      Its value as a float, or None.

    Raises:
      ValueError: the value is not a positive finite number.
    """
    return None if source.get(key) is None else positive_float(source, key)


def activation(source: Mapping[str, Any], key: str, default: str) -> str:
    """Reads the name of an activation function.

    Args:
      source: a parsed config.json.
      key: the key to read.
      default: what a missing key means for this family.

    Returns:
      Its name in `specjax.models.layers.ACTIVATIONS`.

    Raises:
      ValueError: an activation that is not supported.
    """
    value = source.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(
            f"{key} is {value!r}; supported: {', '.join(_ACTIVATIONS)}. Use another checkpoint."
        )
    return _ACTIVATIONS[value]


def expect(source: Mapping[str, Any], **wanted: Any) -> None:
    """Refuses keys with another value than the one that is supported; they may be missing.

    Args:
      source: a parsed config.json.
      wanted: key -> the value.

    Raises:
      ValueError: names the key, its value and what is supported.
    """
    for key, value in wanted.items():
        if source.get(key, value) != value:
            raise ValueError(
                f"{key} is {source[key]!r} in config.json; supported: {value!r}. Use another "
                "checkpoint."
            )


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


def decoder_from_hf(
    config: Mapping[str, Any],
    *,
    keys: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    **changes: Any,
) -> DecoderConfig:
    """Reads what most families store under the same keys.

    Args:
      config: the parsed config.json.
      keys: what else the family reads.
      defaults: what missing keys mean for this family. For null there is no such default.
      changes: fields of `DecoderConfig` that the family has found out by itself.

    Returns:
      The configuration.

    Raises:
      ValueError: a required key is missing, a value is not supported, sizes do not fit, or a key
        is not known.
    """
    refuse_unknown(config, _COMMON | set(keys))
    defaults = {"rope_theta": 10000.0} | dict(defaults or {})
    theta = defaults.pop("rope_theta")
    config = present(defaults | dict(config))
    fields = dict(changes)

    def add(name: str, read: Callable[..., Any], *arguments: Any) -> None:
        if name not in fields:
            fields[name] = read(config, *arguments)

    add("vocab_size", positive_int, "vocab_size")
    add("hidden_size", positive_int, "hidden_size")
    add("intermediate_size", positive_int, "intermediate_size")
    add("num_layers", positive_int, "num_hidden_layers")
    add("num_heads", positive_int, "num_attention_heads")
    config = {
        "num_key_value_heads": fields["num_heads"],
        "max_position_embeddings": 2048,
    } | config
    add("num_kv_heads", positive_int, "num_key_value_heads")
    add("head_dim", head_size, "head_dim", fields["hidden_size"], fields["num_heads"])
    add("norm_eps", positive_float, "rms_norm_eps")
    add("tie_embeddings", flag, "tie_word_embeddings", False)
    add("max_position", positive_int, "max_position_embeddings")
    add("activation", activation, "hidden_act", "silu")
    if "rope" not in fields:
        fields["rope"] = rope_from_hf(config, fields["max_position"], theta=theta)
    return check_config(DecoderConfig(**fields))


def head_size(source: Mapping[str, Any], key: str, hidden: int, heads: int) -> int:
    """Reads the size of a head; if it is missing, all heads together are as wide as the model.

    Args:
      source: a parsed config.json, or GGUF metadata.
      key: the key to read.
      hidden: width of the model.
      heads: query heads.

    Returns:
      The size.

    Raises:
      ValueError: the value is not a positive integer, or the width is no multiple of the heads.
    """
    if source.get(key) is not None:
        return positive_int(source, key)
    if hidden % heads:
        raise ValueError(
            f"{key} is missing and the width {hidden} is no multiple of {heads} heads; wanted "
            f"one of the two. Add {key} to the checkpoint's configuration."
        )
    return hidden // heads


def windows(
    config: Mapping[str, Any],
    window: int | None,
    slides: Callable[[int], bool] = lambda layer: True,
) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types` or else by the family's rule.

    Args:
      config: the parsed config.json.
      window: of the layers that have one; None if the configuration switches windows off.
      slides: the family's rule: whether a layer has a window.

    Returns:
      One entry a layer, or () if no layer has a window.

    Raises:
      ValueError: `layer_types` is not one known type a layer, or asks for a window of no size.
    """
    layers = positive_int(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        types = [_SLIDING if window and slides(i) else _FULL for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or set(types) - {_SLIDING, _FULL}:
        raise ValueError(
            f"layer_types is {types!r}; wanted {layers} of {_FULL!r} and {_SLIDING!r}. Use another "
            "checkpoint."
        )
    if _SLIDING not in types:
        return ()
    if window is None:
        raise ValueError(
            f"layer_types is {types!r} but the configuration sets no window; wanted "
            "sliding_window. Correct config.json."
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def rope_from_hf(
    config: Mapping[str, Any],
    max_position: int,
    *,
    theta: float = 10000.0,
    partial: bool = False,
) -> RopeConfig:
    """Reads rotary embeddings in the dialect of transformers 4 or 5.

    transformers 4 has `rope_theta` and `rope_scaling` (kind under `rope_type` or `type`);
    transformers 5 has all in `rope_parameters`.

    Args:
      config: the parsed config.json.
      max_position: `max_position_embeddings`, what yarn takes for a missing original length.
      theta: what the family means when no key says otherwise.
      partial: whether the family rotates a part of each head, and reads how large it is.

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
    theta = positive_float({"rope_theta": thetas.pop() if thetas else theta}, "rope_theta")

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ValueError(
            f"rope_type is {kind!r}; supported: {', '.join(_ROPE_KEYS)}. Use a checkpoint with "
            "one of these."
        )
    if not partial and rope.get("partial_rotary_factor", 1) not in (None, 1):
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
    experts = config.experts
    if experts is not None and (
        experts.experts_per_token > experts.num_experts
        or experts.num_experts % experts.groups
        or experts.groups_kept > experts.groups
    ):
        raise ValueError(
            f"{experts.num_experts} experts in {experts.groups} groups, of which "
            f"{experts.experts_per_token} in {experts.groups_kept} groups are chosen, is not "
            "possible. Correct the checkpoint's configuration."
        )
    rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if config.rope is not None and rotated % 2:
        raise ValueError(
            f"head_dim is {config.head_dim}, of which {rotated} are rotated; rotary embeddings "
            "want an even number. Correct the checkpoint's configuration."
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
    rope = present(rope)
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
