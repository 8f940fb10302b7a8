"""Reading a Hugging Face checkpoint folder: config.json and safetensors, one tensor at a time."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.tensors import StoredTensor, read_bytes

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "SafetensorsFolder",
    "read_folder",
    "read_json",
    "read_safetensors",
]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "The file is damaged or incomplete: download it again."
# bfloat16 is no dtype of NumPy's own; JAX brings it.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsFolder(NamedTuple):
    """What the headers of a checkpoint folder say."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_folder(path: Path) -> SafetensorsFolder:
    """Reads config.json and the headers of all weight files of a folder.

    Args:
      path: the folder.

    Returns:
      Its configuration and tensors.

    Raises:
      FileNotFoundError: config.json, the weights or a shard are missing.
      ValueError: a file is damaged, or the index and the shards disagree.
    """
    config = read_json(path / "config.json")
    if (path / SINGLE).is_file():
        return SafetensorsFolder(path, config, read_safetensors(path / SINGLE))
    if (path / INDEX).is_file():
        return SafetensorsFolder(path, config, _read_shards(path))
    pickles = sorted(file.name for file in path.glob("*.bin"))
    hint = (
        f" It has {pickles[0]}, which is not read because unpickling runs code: convert it to "
        "safetensors."
        if pickles
        else " Download the checkpoint again, with its weights."
    )
    raise FileNotFoundError(f"{path}: has neither {SINGLE} nor {INDEX}.{hint}")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Reads the header of one safetensors file.

    Args:
      path: the file.

    Returns:
      Tensor name -> tensor.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, incomplete, or holds a type that is not supported.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; wanted a safetensors file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path}: has {size} bytes, too few for its header (wanted {length + 8}). {_AGAIN}"
            )
        raw = file.read(length)
    header = _parse(raw, path)
    start = 8 + length
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(path, name, info, start, size)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
      path: the file.

    Returns:
      The object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file. A Hugging Face checkpoint folder has one: download "
            "the checkpoint again, with all its files."
        )
    return _parse(path.read_bytes(), path)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: does not hold JSON where it should ({error}). {_AGAIN}"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; wanted a JSON object. {_AGAIN}")
    return value


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: has no weight_map. {_AGAIN}")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in dict.fromkeys(weight_map.values()):
        # A name with folders in it could lead out of the checkpoint.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: names the shard {shard!r}; wanted a plain file name.")
        if not (folder / shard).is_file():
            raise FileNotFoundError(
                f"{folder / shard}: is missing, but {INDEX} names it. Download the missing shard."
            )
        shards[shard] = read_safetensors(folder / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(
                f"{folder / shard}: has no tensor {name}, but {INDEX} says so. Take the index and "
                "the shards from the same release."
            )
    tensors: dict[str, StoredTensor] = {}
    for shard, content in shards.items():
        for name, tensor in content.items():
            if weight_map.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: has the tensor {name}, which {INDEX} places in "
                    f"{weight_map.get(name)!r}. Take the index and the shards from one release."
                )
            tensors[name] = tensor
    return tensors


def _tensor(path: Path, name: str, info: Any, start: int, size: int) -> StoredTensor:
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= set(info):
        raise ValueError(f"{path}: the header entry of {name} is {info!r}. {_AGAIN}")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if kind not in DTYPES:
        raise ValueError(
            f"{path}: the tensor {name} has the type {kind!r}; supported: {', '.join(DTYPES)}. "
            "Take a checkpoint in one of these."
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{path}: the header entry of {name} is {info!r}. {_AGAIN}")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[kind].itemsize:
        raise ValueError(
            f"{path}: the tensor {name} of shape {shape} and type {kind} has {end - begin} bytes, "
            f"wanted {math.prod(shape) * DTYPES[kind].itemsize}. {_AGAIN}"
        )
    if start + end > size:
        raise ValueError(
            f"{path}: the tensor {name} ends at byte {start + end} but the file ends at byte "
            f"{size}. {_AGAIN}"
        )
    read = functools.partial(_decode, path, start + begin, end - begin, kind, tuple(shape))
    return StoredTensor(name, tuple(shape), kind, path, read)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _decode(path: Path, begin: int, length: int, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return read_bytes(path, begin, length).view(DTYPES[kind]).reshape(shape)
