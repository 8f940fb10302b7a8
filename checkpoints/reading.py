"""Reading a target checkpoint of any format into one record of lazily read weights."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from specjax.checkpoints import registry
from specjax.checkpoints.gguf_file import read_gguf
from specjax.checkpoints.gguf_tokenizer import special_ids_from_gguf, tokenizer_from_gguf
from specjax.checkpoints.orbax_folder import is_orbax_folder, orbax_sources, read_orbax, restore
from specjax.checkpoints.safetensors_folder import read_folder
from specjax.checkpoints.tensors import StoredTensor, aligned, match
from specjax.checkpoints.tokenizer import (
    SpecialIds,
    Tokenizer,
    special_ids_from_folder,
    tokenizer_from_folder,
)
from specjax.models import families
from specjax.models.config import DecoderConfig
from specjax.models.family import Family
from specjax.models.naming import Layout, Source, sources

__all__ = ["Checkpoint", "Place", "read", "read_source"]


class Place(Protocol):
    """Reads one parameter straight to where it belongs."""

    def __call__(self, key: str, where: jax.sharding.Sharding, /) -> jax.Array: ...


class Checkpoint(NamedTuple):
    """A checkpoint whose names and shapes are verified and whose weights are not read yet."""

    name: str
    path: Path
    family: Family | None  # None: a folder of `specjax.save` whose family is not known
    config: DecoderConfig
    weights: Mapping[str, Callable[[], np.ndarray]]  # parameter path -> reads one array
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]  # empty when the checkpoint declares none
    pad_id: int
    place: Place | None = None  # if the format can read each device's part alone


def read(name_or_path: str | os.PathLike[str], dtype: Any = None) -> Checkpoint:
    """Reads a checkpoint's headers, configuration and tokenizer.

    Names and shapes of all tensors are verified here. Each entry of `weights` reads, decodes and
    casts one tensor when it is called and keeps nothing, so a caller that places one before it
    reads the next never holds a second copy.

    Args:
      name_or_path: a registry name, a Hugging Face checkpoint folder, a GGUF file or a folder that
        `specjax.save` wrote.
      dtype: of the weights. None keeps the stored type of a folder, and is float32 for a GGUF file.

    Returns:
      The record.

    Raises:
      FileNotFoundError: no such name or path, or a file of the checkpoint is missing.
      ValueError: a damaged file, an unsupported architecture or setting, or a tensor that is
        missing, has another shape or is not expected.

    Example:
      >>> checkpoint = read("smollm2-135m")
      >>> checkpoint.weights["norm.scale"]().shape
      (576,)
    """
    path = registry.resolve(name_or_path)
    known = os.fspath(name_or_path) in registry.entries()
    # A folder's name may have a point in it (Llama-3.1-8B), which is no suffix.
    own = path.resolve().name if path.is_dir() else path.stem
    name = os.fspath(name_or_path) if known else own
    wanted = None if dtype is None else np.dtype(dtype)
    if is_orbax_folder(path):
        return _read_orbax(path, wanted)
    return _read_folder(path, name, wanted) if path.is_dir() else _read_gguf(path, name, wanted)


def _read_orbax(path: Path, dtype: np.dtype | None) -> Checkpoint:
    folder = read_orbax(path)
    header = folder.header
    wanted = orbax_sources(folder)
    found = match(wanted, folder.tensors, lambda name: False, path)
    weights = {key: functools.partial(read_source, found[key], wanted[key], dtype) for key in found}
    tokenizer = tokenizer_from_folder(path)
    bos = None if tokenizer is None else tokenizer.ids.bos
    ids = SpecialIds(bos, header.eos_ids, header.pad_id)
    if tokenizer is not None:
        tokenizer = dataclasses.replace(tokenizer, ids=ids)

    def place(key: str, where: jax.sharding.Sharding) -> jax.Array:
        return restore(path, key, where, None if wanted[key].exact else dtype)

    family = None if header.model_type is None else families.by_model_type(header.model_type)
    made = _checkpoint(path, header.name, family, header.config, weights, tokenizer, ids)
    return made._replace(place=place)


def _read_folder(path: Path, name: str, dtype: np.dtype | None) -> Checkpoint:
    folder = read_folder(path)
    try:
        family = families.by_model_type(folder.config.get("model_type"))
        config = family.config_from_hf(folder.config)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    weights = _weights(config, family.hf, folder.tensors, path, dtype)
    tokenizer = tokenizer_from_folder(path)
    ids = special_ids_from_folder(path) if tokenizer is None else tokenizer.ids
    return _checkpoint(path, name, family, config, weights, tokenizer, ids)


def _read_gguf(path: Path, name: str, dtype: np.dtype | None) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise ValueError(
            f"{path}: is a safetensors file, which does not say what model it is. Give the folder "
            "that has its config.json."
        )
    file = read_gguf(path)
    try:
        family = families.by_gguf_architecture(file.metadata.get("general.architecture"))
        readers = {key: tensor.read for key, tensor in file.tensors.items()}
        config = family.config_from_gguf(file.metadata, readers)
        tokenizer = tokenizer_from_gguf(file.metadata)
        ids = special_ids_from_gguf(file.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    weights = _weights(config, family.gguf, file.tensors, path, dtype)
    return _checkpoint(path, name, family, config, weights, tokenizer, ids)


def _checkpoint(
    path: Path,
    name: str,
    family: Family | None,
    config: DecoderConfig,
    weights: Mapping[str, Callable[[], np.ndarray]],
    tokenizer: Tokenizer | None,
    ids: SpecialIds,
) -> Checkpoint:
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens but the model has "
            f"{config.vocab_size}. Take the tokenizer and the weights from the same release."
        )
    outside = [i for i in (*ids.eos, ids.pad) if i >= config.vocab_size]
    if outside:
        raise ValueError(
            f"{path}: declares the end or padding token {outside[0]} but the model has "
            f"{config.vocab_size} tokens. Correct generation_config.json or config.json."
        )
    return Checkpoint(
        name, path, family, config, weights, tokenizer, eos_ids=ids.eos, pad_id=ids.pad
    )


def _weights(
    config: DecoderConfig,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    path: Path,
    dtype: np.dtype | None,
) -> dict[str, Callable[[], np.ndarray]]:
    """Verifies names and shapes, and gives what reads each parameter."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        other = stored.setdefault(layout.rename(name), tensor)
        if other is not tensor:
            raise ValueError(
                f"{tensor.file}: the tensors {other.name} and {name} are two names of one. Remove "
                "one of them."
            )
    wanted = sources(config, layout)
    found = match(wanted, stored, lambda name: layout.ignored(name, config), path)
    return {
        key: functools.partial(read_source, parts, wanted[key], dtype)
        for key, parts in found.items()
    }


def read_source(
    tensors: tuple[StoredTensor, ...], source: Source, dtype: np.dtype | None
) -> np.ndarray:
    """One parameter from its tensors.

    Args:
      dtype: what is wanted; None, or a source that is exact: the stored type.
    """

    def read(tensor: StoredTensor) -> np.ndarray:
        array = tensor.read()
        array = array if source.turn is None else source.turn(array)
        wanted = array.dtype if dtype is None or source.exact else dtype
        return np.asarray(array, wanted, order="C")

    first = read(tensors[0])
    if not source.stacked:
        return first
    # One part after the other, so that never all of them are held twice.
    whole = aligned((len(tensors), *first.shape), first.dtype)
    whole[0] = first
    for i, tensor in enumerate(tensors[1:], 1):
        whole[i] = read(tensor)
    return whole
