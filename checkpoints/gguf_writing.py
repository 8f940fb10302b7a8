"""Writing a GGUF file of the Llama, Qwen2 or Qwen3 architecture, one tensor in memory at a time.

The metadata are read back as our own reader reads them before the first tensor is written, so a
configuration that the architecture cannot express is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from specjax.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from specjax.checkpoints.reading import Checkpoint
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models import families
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.naming import sources
from specjax.models.rope import inverse_frequencies

__all__ = ["KINDS", "write_gguf"]

_Kind = gguf.GGMLQuantizationType
KINDS = {
    "float32": _Kind.F32,
    "bfloat16": _Kind.BF16,
    "float16": _Kind.F16,
    "q8_0": _Kind.Q8_0,
}
_FILE_TYPES = {_Kind.F32: 0, _Kind.F16: 1, _Kind.Q8_0: 7, _Kind.BF16: 32}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_ENDS = ("eos", "eot", "eom")


class _Tensor(NamedTuple):
    """A tensor that is read when its turn has come."""

    shape: tuple[int, ...]
    kind: _Kind
    read: Callable[[], np.ndarray]


def write_gguf(
    path: Path, checkpoint: Checkpoint, dtype: str | None, types: Mapping[str, np.dtype]
) -> None:
    """Writes a file.

    Args:
      path: the file, which is not there yet.
      checkpoint: what to write.
      dtype: a name of `KINDS`, for all tensors of two dimensions; the others are float32. Rows that
        are no whole blocks of q8_0 become float16. None keeps the types.
      types: parameter path -> the type that `checkpoint.weights` reads.

    Raises:
      ValueError: the format cannot hold this configuration or this tokenizer.
    """
    config = checkpoint.config
    architecture = _architecture(config)
    family = families.by_gguf_architecture(architecture)
    tensors: dict[str, _Tensor] = {}
    refusal = (
        f"{checkpoint.path}: has settings that a GGUF file of the architecture {architecture} "
        "cannot hold. Use --to safetensors or --to orbax."
    )
    try:
        wanted = sources(config, family.gguf)
    except KeyError as error:  # a parameter that the architecture does not have
        raise ValueError(refusal) from error
    for key, source in wanted.items():
        stored = types[key].name if dtype is None else dtype
        read, (name,) = checkpoint.weights[key], source.names
        if source.turn is not None:
            read = _interleaved(read, config.num_heads if ".q." in key else config.num_kv_heads)
        tensors[name] = _Tensor(source.shape, _kind(stored, source.shape), read)
    if config.rope is not None and config.rope.kind == "llama3":
        factors = _factors(config.rope, config.head_dim)
        tensors["rope_freqs.weight"] = _Tensor(factors.shape, _Kind.F32, lambda: factors)
    metadata = _metadata(config, architecture) | _ids(checkpoint)
    if checkpoint.tokenizer is not None:
        metadata |= _tokenizer(checkpoint.tokenizer, config.vocab_size)
    try:
        found = family.config_from_gguf(metadata, {name: t.read for name, t in tensors.items()})
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: cannot be written as GGUF: {error}") from error
    if found != config:
        raise ValueError(refusal)
    largest = max(tensors.values(), key=lambda tensor: int(np.prod(tensor.shape)))
    metadata["general.file_type"] = _FILE_TYPES[largest.kind]
    metadata["general.name"] = checkpoint.name
    metadata["general.quantization_version"] = 2
    _write(path, architecture, metadata, tensors)


def _write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, _Tensor]
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in metadata.items():
            writer.add_key_value(key, value, _value_type(value))
        for name, tensor in tensors.items():
            raw = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
            bytes_ = int(np.prod(raw))
            writer.add_tensor_info(name, raw, np.dtype(np.uint8), bytes_, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors.values():
            array = np.ascontiguousarray(tensor.read(), np.float32)
            writer.write_tensor_data(gguf.quantize(array, tensor.kind))
    finally:
        writer.close()


def _architecture(config: DecoderConfig) -> str:
    """The one that has such biases and norms; whether the rest fits shows when it is read back."""
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.attention_bias and not config.output_bias else "llama"


def _kind(name: str, shape: tuple[int, ...]) -> _Kind:
    kind = KINDS[name]
    if len(shape) < 2:
        return _Kind.F32
    whole = shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if whole else _Kind.F16


def _interleaved(read: Callable[[], np.ndarray], heads: int) -> Callable[[], np.ndarray]:
    """llama.cpp turns neighbours where we turn halves: 0 1 2 3 4 5 becomes 0 3 1 4 2 5."""

    def turned() -> np.ndarray:
        array = read()
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)

    return turned


def _factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """What llama3 scaling divides each frequency by."""
    plain, _ = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
    scaled, _ = inverse_frequencies(rope, head_dim)
    return (np.asarray(plain) / np.asarray(scaled)).astype(np.float32)


def _metadata(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    own: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.rope is not None:
        own["rope.freq_base"] = config.rope.theta
        if config.rope.kind in ("linear", "yarn"):
            own["rope.scaling.type"] = config.rope.kind
            own["rope.scaling.factor"] = config.rope.factor
        if config.rope.kind == "yarn":
            own["rope.scaling.original_context_length"] = config.rope.original_max_position
    return {f"{architecture}.{key}": value for key, value in own.items()}


def _ids(checkpoint: Checkpoint) -> dict[str, Any]:
    if len(checkpoint.eos_ids) > len(_ENDS):
        raise ValueError(
            f"{checkpoint.path}: has {len(checkpoint.eos_ids)} end tokens; a GGUF file holds at "
            f"most {len(_ENDS)}. Remove those that the model does not use."
        )
    ids = dict(zip(_ENDS, checkpoint.eos_ids, strict=False)) | {"padding": checkpoint.pad_id}
    return {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}


def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The tables of a byte-level BPE tokenizer."""
    content = json.loads(tokenizer.backend.to_str())
    pre = _pre_tokenizer(content)
    words = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for word, i in content["model"]["vocab"].items():
        words[i], kinds[i] = word, _NORMAL
    for token in content["added_tokens"]:
        words[token["id"]] = token["content"]
        kinds[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    merges = content["model"]["merges"]
    if not merges:
        raise ValueError(
            "the tokenizer has no merges, and a GGUF file cannot hold an empty list. Use --to "
            "safetensors or --to orbax."
        )
    before, after = _ends(tokenizer)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in merges],
        "tokenizer.ggml.add_bos_token": bool(before),
        "tokenizer.ggml.add_eos_token": bool(after),
    }
    bos = before[0] if before else tokenizer.ids.bos
    if bos is not None:
        metadata["tokenizer.ggml.bos_token_id"] = bos
    unknown = dict(tokenizer.named_tokens).get("unk_token")
    if unknown in words:
        metadata["tokenizer.ggml.unknown_token_id"] = words.index(unknown)
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way in which a text is cut."""
    kind = content["model"]["type"], (content["decoder"] or {}).get("type")
    if kind == ("BPE", "ByteLevel"):
        for name, make in PRE_TOKENIZERS.items():
            written = json.loads(make().__getstate__())
            normalizer = {"type": "NFC"} if name == "qwen2" else None
            if (written, normalizer) == (content["pre_tokenizer"], content["normalizer"]):
                return name
    raise ValueError(
        "the tokenizer is not one of the kinds that can be written in a GGUF file; supported: "
        f"byte-level BPE that cuts texts as {', '.join(PRE_TOKENIZERS)}. Use --to safetensors or "
        "--to orbax."
    )


def _ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that every text gets in front and behind."""
    inner, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    at = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    before, after = whole[:at], whole[at + len(inner) :]
    eos = tokenizer.ids.eos[:1]
    if len(before) > 1 or after not in ([], list(eos)):
        raise ValueError(
            f"the tokenizer puts {before} and {after} around every text; a GGUF file holds one "
            "token in front and the first end token behind. Use --to safetensors or --to orbax."
        )
    return before, after


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY
    if isinstance(value, str):
        return gguf.GGUFValueType.STRING
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    return gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
