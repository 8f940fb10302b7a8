"""A tensor that lies in a file: what its header says, and how to read it when it is wanted.

Readers of all formats hand out `StoredTensor`; `match` pairs them with a model's parameters and
complains about everything that does not fit before the first byte of a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.models.naming import Source

__all__ = ["StoredTensor", "aligned", "match", "read_bytes"]


class StoredTensor(NamedTuple):
    """One tensor of a file; `read` reads and decodes it anew at each call."""

    name: str
    shape: tuple[int, ...]
    kind: str  # the format's own word for the storage type: "BF16", "Q4_1", ...
    file: Path
    read: Callable[[], np.ndarray]


_ALIGNMENT = 64
_NOT_WEIGHTS = frozenset("BOOL I8 I16 I32 I64 U8 U16 U32 U64".split())


def match(
    sources: Mapping[str, Source],
    stored: Mapping[str, StoredTensor],
    ignored: Callable[[str], bool],
    origin: Path,
) -> dict[str, tuple[StoredTensor, ...]]:
    """Pairs parameters with stored tensors; reads headers only.

    Args:
      sources: parameter path -> which tensors it is made of, and their shapes.
      stored: tensor name -> tensor.
      ignored: whether a tensor that no parameter asks for may be there.
      origin: the file or folder, for messages.

    Returns:
      Parameter path -> its tensors, in the order of `sources`.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not expected.
    """
    wanted = {name: source.shape for source in sources.values() for name in source.names}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(
            f"{origin}: the tensor {missing[0]} is missing{_and_more(missing)}; wanted "
            f"{len(wanted)} tensors. The checkpoint is incomplete or of another architecture: "
            "download it again, or correct its configuration."
        )
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.kind in _NOT_WEIGHTS:
            raise ValueError(
                f"{tensor.file}: the tensor {tensor.name} is stored as {tensor.kind}; wanted "
                "floating point. A quantised checkpoint of this kind is not supported: use the "
                "original weights or a GGUF file."
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.file}: the tensor {tensor.name} has the shape {tensor.shape}; its "
                f"configuration wants {shape}. Correct the configuration, or take the file "
                "that belongs to it."
            )
    extra = [name for name in stored if name not in wanted and not ignored(name)]
    if extra:
        tensor = stored[extra[0]]
        raise ValueError(
            f"{tensor.file}: the tensor {tensor.name} is not expected"
            f"{_and_more(extra)}: this architecture and configuration would not use it. Correct "
            "the configuration, or take a checkpoint of a supported architecture."
        )
    return {path: tuple(stored[name] for name in source.names) for path, source in sources.items()}


def read_bytes(file: Path, offset: int, count: int) -> np.ndarray:
    """Reads a range of a file into fresh memory, not a map, so that the file may change later.

    Args:
      file: the file.
      offset: where the range starts, in bytes.
      count: its length, in bytes.

    Returns:
      [count] uint8.

    Raises:
      ValueError: the file ends before the range does.
    """
    data = aligned((count,), np.uint8)
    with file.open("rb") as opened:
        opened.seek(offset)
        read = opened.readinto(data)
    if read != count:
        raise ValueError(
            f"{file}: ends at byte {offset + read}, wanted {offset + count}. The file changed "
            "while it was read: load it again."
        )
    return data


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Fresh memory that XLA's CPU backend takes over as it is, where it would copy any other.

    Args:
      shape: of the array.
      dtype: of the array.

    Returns:
      An array with any values.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(count + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + count].view(dtype).reshape(shape)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
