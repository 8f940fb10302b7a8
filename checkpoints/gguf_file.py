"""Reading a GGUF file: its metadata, and its tensors one at a time as float32.

The header is parsed here, with every length checked against the file, because a damaged header
must give an error that names the file. The block formats are decoded by the gguf package.
"""

from __future__ import annotations

import functools
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from specjax.checkpoints.tensors import StoredTensor, read_bytes

__all__ = ["GgufFile", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_AGAIN = "The file is damaged or incomplete: download it again."
_STRING, _ARRAY = 8, 9
# Metadata value type -> struct code.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32 = 6
_MAX_DIMENSIONS = 4  # of a tensor, by the format


class GgufFile(NamedTuple):
    """What the header of a GGUF file says."""

    path: Path
    metadata: dict[str, Any]  # plain Python values
    tensors: dict[str, StoredTensor]  # shapes in row-major order: [out, in]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file; no weight is read yet.

    Args:
      path: the file.

    Returns:
      Its metadata and tensors. A tensor decodes to float32 when it is read.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a GGUF file of a known version, it is damaged or incomplete, or a
        tensor has a storage type that cannot be decoded.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; wanted a GGUF file.")
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path}: has {size} bytes, too few for a GGUF file. {_AGAIN}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data, size).read()


class _Header:
    """A cursor over the header. Each step checks that what it reads lies inside the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self.data, self.size, self.at = path, data, size, 0

    def read(self) -> GgufFile:
        magic = self.take(4)
        if magic != _MAGIC:
            raise ValueError(
                f"{self.path}: starts with {magic!r}, not {_MAGIC!r}; it is not a GGUF file. Give "
                "a GGUF file or a Hugging Face checkpoint folder."
            )
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(
                f"{self.path}: is GGUF version {version} (or big-endian); supported: little-endian "
                f"{_VERSIONS}. Convert it with a current llama.cpp."
            )
        tensor_count, key_count = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string()
            if key in metadata:
                raise ValueError(f"{self.path}: the key {key} comes twice. {_AGAIN}")
            metadata[key] = self.value(self.scalar("I"), key)
        if metadata.get("split.count", 1) not in (0, 1):
            raise ValueError(
                f"{self.path}: is one of {metadata['split.count']} parts (split.count); only whole "
                "files are supported. Join the parts with llama-gguf-split --merge."
            )
        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: general.alignment is {alignment!r}; wanted a power of two. {_AGAIN}"
            )
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ValueError(f"{self.path}: the tensor {name} comes twice. {_AGAIN}")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return GgufFile(self.path, metadata, tensors)

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise ValueError(
                f"{self.path}: the header wants {count} bytes at byte {self.at} but the file ends "
                f"at byte {self.size}. {_AGAIN}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}: the header has a text that is not UTF-8 before byte {self.at}. "
                f"{_AGAIN}"
            ) from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                width = struct.calcsize("<" + _SCALARS[item])
                # Sizes first: a damaged count must not become a format string of that length.
                raw = self.take(count * width)
                values = struct.unpack(f"<{count}{_SCALARS[item]}", raw)
                return [_shortest(value) if item == _FLOAT32 else value for value in values]
            if item != _STRING:
                raise ValueError(
                    f"{self.path}: the key {key} is an array of the value type {item}; supported: "
                    f"texts and numbers. {_AGAIN}"
                )
            # A text takes at least eight bytes of file, so a damaged count ends in an error.
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: the key {key} has the unknown value type {kind}. {_AGAIN}"
            )
        value = self.scalar(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT32 else value

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self.string(), self.scalar("I")
        if rank > _MAX_DIMENSIONS:
            raise ValueError(
                f"{self.path}: the tensor {name} has {rank} dimensions; a GGUF tensor has at most "
                f"{_MAX_DIMENSIONS}. {_AGAIN}"
            )
        # The file lists the contiguous dimension first.
        shape = tuple(self.scalar("Q") for _ in range(rank))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, shape: tuple[int, ...], code: int, begin: int) -> StoredTensor:
        if code not in {kind.value for kind in gguf.GGMLQuantizationType}:
            raise ValueError(
                f"{self.path}: the tensor {name} has the unknown storage type {code}. Update the "
                "gguf package, or take a file in F16, BF16, Q8_0 or Q4_K."
            )
        kind = gguf.GGMLQuantizationType(code)
        if not _decodable(kind):
            raise ValueError(
                f"{self.path}: the tensor {name} has the storage type {kind.name}, which cannot "
                "be decoded. Take a file in F16, BF16, Q8_0 or Q4_K."
            )
        block, width = gguf.GGML_QUANT_SIZES[kind]
        row = shape[-1] if shape else 1
        if row % block:
            raise ValueError(
                f"{self.path}: the tensor {name} has rows of {row}, no multiple of the "
                f"{kind.name} block of {block}. {_AGAIN}"
            )
        count = 1
        for dimension in shape:  # Python integers: a damaged shape cannot overflow
            count *= dimension
        length = count // block * width
        if begin + length > self.size:
            raise ValueError(
                f"{self.path}: the tensor {name} lies at bytes {begin} to {begin + length} but the "
                f"file ends at byte {self.size}. {_AGAIN}"
            )
        read = functools.partial(_decode, self.path, begin, length, kind, shape)
        return StoredTensor(name, shape, kind.name, self.path, read)


def _decode(
    path: Path, begin: int, length: int, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]
) -> np.ndarray:
    raw = read_bytes(path, begin, length)
    rows = raw.reshape(*shape[:-1], -1) if length else raw
    return np.asarray(gguf.dequantize(rows, kind), np.float32).reshape(shape)


@functools.cache
def _decodable(kind: gguf.GGMLQuantizationType) -> bool:
    """Asks the gguf package by decoding one block of zeros."""
    _, width = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, width), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5 rather than 9.99999974e-06, so that a
    configuration read from GGUF equals the one that it was converted from."""
    return float(str(np.float32(value)))
