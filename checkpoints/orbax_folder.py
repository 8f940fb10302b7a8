"""specjax's own checkpoint folder: weights by Orbax, and beside them what they are the weights of.

folder/
  specjax.json   configuration, special ids; shape, type and checksum of every tensor
  weights/       the arrays by parameter path, as Orbax writes them: shard by shard
  tokenizer.json, tokenizer_config.json, ...   if there is a tokenizer
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checkpoints.safetensors_folder import read_json
from specjax.checkpoints.tensors import StoredTensor
from specjax.models.config import DecoderConfig
from specjax.models.config_json import config_from_json, config_to_json
from specjax.models.naming import Source, parameters

__all__ = [
    "Header",
    "OrbaxFolder",
    "is_orbax_folder",
    "orbax_sources",
    "read_orbax",
    "restore",
    "start_arrays",
    "verify",
    "write_header",
]

_HEADER, _WEIGHTS, _FORMAT = "specjax.json", "weights", 1
_CACHE = 16_000_000  # bytes, of indices
_AGAIN = "The folder is damaged or incomplete: save or convert the checkpoint again."


class Header(NamedTuple):
    """What specjax.json says beside the table of tensors."""

    name: str
    model_type: str | None  # the family in Hugging Face's word; None: not known
    config: DecoderConfig
    eos_ids: tuple[int, ...]
    pad_id: int


class _Entry(NamedTuple):
    """One tensor in the table of specjax.json."""

    shape: tuple[int, ...]
    dtype: str
    exact: bool  # keeps this type whatever type is asked for
    crc32: str  # of the bytes in row-major order


class OrbaxFolder(NamedTuple):
    """A folder whose table agrees with Orbax's own list of arrays."""

    header: Header
    tensors: dict[str, StoredTensor]  # parameter path -> tensor, checked whenever it is read
    exact: frozenset[str]  # parameters that keep their stored type


def is_orbax_folder(path: Path) -> bool:
    """Whether a folder was written by `specjax.save` or `specjax convert --to orbax`."""
    return (path / _HEADER).is_file()


def read_orbax(path: Path) -> OrbaxFolder:
    """Reads specjax.json and the list of arrays; no weight is read yet.

    Args:
      path: the folder.

    Returns:
      The record.

    Raises:
      FileNotFoundError: it is no such folder.
      ValueError: specjax.json is damaged or of another version, the arrays are missing, or their
        names, shapes or types are not those of specjax.json.
    """
    file = path / _HEADER
    if not is_orbax_folder(path):
        raise FileNotFoundError(
            f"{path}: has no {_HEADER}; wanted a folder that specjax.save wrote."
        )
    content = read_json(file)
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{file}: has the format {content.get('format')!r}; supported: {_FORMAT}. Read it with "
            "the version of specjax that wrote it."
        )
    try:
        table = {
            key: _Entry(**entry | {"shape": tuple(entry["shape"])})
            for key, entry in content["tensors"].items()
        }
        header = Header(
            name=str(content["name"]),
            model_type=content["model_type"],
            config=config_from_json(DecoderConfig, content["config"]),
            eos_ids=tuple(int(i) for i in content["eos_ids"]),
            pad_id=int(content["pad_id"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: does not hold what it should ({error!r}). {_AGAIN}") from error
    _compare(path, table)
    tensors = {
        key: StoredTensor(
            key,
            entry.shape,
            entry.dtype,
            path / _WEIGHTS,
            functools.partial(_read_one, path, key, entry),
        )
        for key, entry in table.items()
    }
    return OrbaxFolder(header, tensors, frozenset(k for k, entry in table.items() if entry.exact))


def orbax_sources(folder: OrbaxFolder) -> dict[str, Source]:
    """Where the parameters of the configuration are stored: under their own paths."""
    return {
        key: Source((key,), shape, exact=key in folder.exact)
        for key, shape in parameters(folder.header.config).items()
    }


def restore(path: Path, key: str, where: jax.sharding.Sharding, dtype: Any = None) -> jax.Array:
    """Reads an array straight to its devices, each its own part. Its checksum is not looked at.

    Args:
      path: the folder.
      key: parameter path.
      where: how it is spread.
      dtype: of the array; None keeps the stored type.

    Returns:
      The array.

    Raises:
      ValueError: it cannot be read.
    """
    with _errors_named(path, key):
        stored = _open(path, key)
        wanted = np.dtype(stored.dtype.numpy_dtype if dtype is None else dtype)
        parts: dict[str, np.ndarray] = {}  # what is on several devices is read once

        def part(index: tuple[slice, ...]) -> np.ndarray:
            name = str(index)
            if name not in parts:
                parts[name] = _part(stored, index).astype(wanted, copy=False)
            return parts[name]

        return jax.make_array_from_callback(stored.shape, where, part)


def verify(path: str | Path) -> int:
    """Reads every tensor of a folder that `specjax.save` wrote, and compares it with its checksum.

    Args:
      path: the folder.

    Returns:
      How many tensors there are.

    Raises:
      FileNotFoundError: it is no such folder.
      ValueError: names the first tensor that is damaged.
    """
    tensors = read_orbax(Path(path)).tensors
    for tensor in tensors.values():
        tensor.read()
    return len(tensors)


def start_arrays(folder: Path, arrays: Mapping[str, Any]) -> Any:
    """Begins to write arrays; when it returns they may be changed or deleted.

    Args:
      folder: a folder that is being made.
      arrays: parameter path -> array, of JAX (sharded or not) or NumPy.

    Returns:
      A function that waits until all is written.
    """
    import orbax.checkpoint as ocp

    saver = ocp.StandardCheckpointer()
    try:
        saver.save((folder / _WEIGHTS).resolve(), dict(arrays))
    except BaseException:
        saver.close()
        raise
    return saver.close  # waits first


def write_header(
    folder: Path, header: Header, shapes: Mapping[str, tuple[int, ...]], exact: frozenset[str]
) -> None:
    """Reads the arrays back, one after the other, and writes specjax.json with their checksums.

    Args:
      folder: where the arrays have been written.
      header: what else it says.
      shapes: parameter path -> shape.
      exact: parameters that keep their type.
    """
    table = {}
    for key, shape in shapes.items():
        array = _read_as_stored(folder, key)
        entry = _Entry(shape, array.dtype.name, key in exact, _checksum(array))
        if array.shape != shape:
            raise ValueError(f"{folder}: {key} was written as {array.shape}; wanted {shape}.")
        table[key] = entry._asdict()
    content = {
        "format": _FORMAT,
        **header._replace(config=config_to_json(header.config))._asdict(),
        "tensors": table,
    }
    (folder / _HEADER).write_text(json.dumps(content, indent=1), "utf-8")


def _compare(path: Path, table: Mapping[str, _Entry]) -> None:
    """Holds specjax.json against Orbax's own list."""
    import orbax.checkpoint as ocp

    weights = path / _WEIGHTS
    if not weights.is_dir():
        raise ValueError(f"{weights}: is missing; wanted {len(table)} tensors. {_AGAIN}")
    try:
        with ocp.PyTreeCheckpointer() as reader:
            found = dict(reader.metadata(weights.resolve()).item_metadata.tree)
    except Exception as error:
        # Orbax and what it is built on raise nothing narrower.
        raise ValueError(f"{weights}: cannot be read ({_first_line(error)}). {_AGAIN}") from error
    for key in table:
        if key not in found:
            raise ValueError(
                f"{weights}: the tensor {key} is missing, but {_HEADER} names it. {_AGAIN}"
            )
    for key, array in found.items():
        if key not in table:
            raise ValueError(
                f"{weights}: the tensor {key} is not expected: {_HEADER} does not name it. {_AGAIN}"
            )
        shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
        if shape != table[key].shape or dtype != table[key].dtype:
            raise ValueError(
                f"{weights}: the tensor {key} has the shape {shape} and the type {dtype}; "
                f"{_HEADER} wants {table[key].shape} and {table[key].dtype}. {_AGAIN}"
            )


def _read_one(path: Path, key: str, entry: _Entry) -> np.ndarray:
    array = _read_as_stored(path, key)
    found = _checksum(array)
    if found != entry.crc32:
        raise ValueError(
            f"{path / _WEIGHTS}: the tensor {key} has the checksum {found}; {_HEADER} wants "
            f"{entry.crc32}. {_AGAIN}"
        )
    return array


def _read_as_stored(path: Path, key: str) -> np.ndarray:
    with _errors_named(path, key):
        return _open(path, key).read().result()


def _open(path: Path, key: str) -> Any:
    """One array as Orbax lays it out: Zarr within OCDBT. Orbax itself reads all names each time."""
    import tensorstore

    base = (path / _WEIGHTS).resolve().as_uri() + "/"
    store = {"driver": "ocdbt", "base": base, "path": key + "/"}
    spec = {"driver": "zarr", "kvstore": store}
    return tensorstore.open(spec, read=True, open=True, context=_context()).result()


def _part(stored: Any, index: tuple[slice, ...]) -> np.ndarray:
    return stored[index].read().result()


@functools.cache
def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})


@contextlib.contextmanager
def _errors_named(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path / _WEIGHTS}: the tensor {key} cannot be read ({_first_line(error)}). {_AGAIN}"
        ) from error


def _checksum(array: np.ndarray) -> str:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{zlib.crc32(raw.data):08x}"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
