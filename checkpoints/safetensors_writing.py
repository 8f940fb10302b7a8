"""Writing safetensors files, one tensor in memory at a time, in parts with an index if large."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.checkpoints.safetensors_folder import DTYPES, INDEX, SINGLE

__all__ = ["Outgoing", "write_shards"]

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


class Outgoing(NamedTuple):
    """A tensor that is read when its turn has come."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(folder: Path, tensors: Sequence[Outgoing], shard_bytes: int) -> None:
    """Writes the weights of a Hugging Face folder.

    Args:
      folder: an existing folder.
      tensors: in the order in which they are read and written.
      shard_bytes: how large a file may become; a tensor is never divided.
    """
    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.size for t in shards[-1]) + tensor.size > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        _write(folder / SINGLE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    total = sum(tensor.size for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _write(path: Path, tensors: Sequence[Outgoing]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors:
            array = tensor.read()
            if array.shape != tensor.shape or array.dtype != tensor.dtype:
                raise ValueError(
                    f"{path}: the tensor {tensor.name} came as {array.shape} {array.dtype}; wanted "
                    f"{tensor.shape} {tensor.dtype}. The source changed while it was read: convert "
                    "it again."
                )
            np.ascontiguousarray(array).tofile(file)
