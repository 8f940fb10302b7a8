"""Reading a PyTorch checkpoint (a zip with a pickle in it) without PyTorch and without its code.

The pickle says which tensors there are; it is a program, so that only those few things are known to
it that build tensors, and everything else is refused. The tensors' bytes lie uncompressed beside
it and are read when they are wanted.

    archive/data.pkl     {"fc.weight": _rebuild_tensor_v2(storage "0", offset, size, stride, ...)}
    archive/data/0       elements of the storage "0"
    archive/byteorder    "little"; absent in files of older versions

Reference: PyTorch, "Serialization semantics" (docs/source/notes/serialization.rst).
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints.safetensors_folder import DTYPES
from specjax.checkpoints.tensors import StoredTensor, aligned, read_bytes

__all__ = ["read_torch"]

_AGAIN = "The file is damaged or incomplete: download it again."
_CONVERT = "Convert it to safetensors with a PyTorch that you trust it to."
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_LOCAL_HEADER = 30  # bytes of a zip member's header before its name


def read_torch(path: Path) -> dict[str, StoredTensor]:
    """Reads what a PyTorch file says of its tensors; runs nothing that is in it.

    Args:
      path: a file that `torch.save` wrote, with a dictionary of tensors; dictionaries in it are
        flattened, their names joined by dots.

    Returns:
      Tensor name -> tensor, in the words of `safetensors_folder.DTYPES`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, of another format, needs a class that is not allowed, or
        holds something else than tensors.
    """
    members = _members(path)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError(
            f"{path}: is a zip file with {len(pickles)} members */data.pkl; wanted 1. It was not "
            "written by torch.save."
        )
    archive = pickles[0].removesuffix("data.pkl")
    if f"{archive}byteorder" in members:
        order = _content(path, members[f"{archive}byteorder"])
        if order != b"little":
            raise ValueError(f"{path}: has the byte order {order[:16]!r}; wanted b'little'.")
    content = _content(path, members[pickles[0]])
    try:
        _check_memo(content)
        found = _Reader(content, path, archive, members).load()
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # anything can come of bytes that are no pickle
        raise ValueError(
            f"{path}: its pickle cannot be read ({type(error).__name__}: {error}). {_AGAIN}"
        ) from error
    return {
        name: StoredTensor(
            name, tensor.shape, tensor.storage.kind, path, functools.partial(_read, path, tensor)
        )
        for name, tensor in _flat(path, found).items()
    }


# --- the zip file ----------------------------------------------------------------------------


class _Member(NamedTuple):
    """Where the bytes of a file within the file are."""

    begin: int
    size: int


def _members(path: Path) -> dict[str, _Member]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; wanted a PyTorch file.")
    with path.open("rb") as file:
        start = file.read(2)
        if start != b"PK":
            if start[:1] == b"\x80":
                raise ValueError(
                    f"{path}: is a pickle of the format that PyTorch wrote before version 1.6, "
                    f"which is not read. {_CONVERT}"
                )
            raise ValueError(f"{path}: is neither a zip file nor a pickle. {_AGAIN}")
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except Exception as error:  # zipfile lets through what its parts raise
            raise ValueError(f"{path}: is no whole zip file ({error}). {_AGAIN}") from error
        size = path.stat().st_size
        return {info.filename: _member(path, file, size, info) for info in infos}


def _member(path: Path, file: Any, size: int, info: zipfile.ZipInfo) -> _Member:
    """The place of a member, behind its own header, whose length the directory does not say."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(
            f"{path}: its member {info.filename} is compressed or encrypted, which torch.save "
            "does not do. Take the original file."
        )
    file.seek(max(info.header_offset, 0))
    header = file.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = info.header_offset + _LOCAL_HEADER + lengths
    if info.header_offset < 0 or header[:4] != b"PK\3\4" or begin + info.file_size > size:
        raise ValueError(
            f"{path}: its member {info.filename} should have {info.file_size} bytes from byte "
            f"{begin} on; the file has {size}. {_AGAIN}"
        )
    return _Member(begin, info.file_size)


def _content(path: Path, member: _Member) -> bytes:
    return read_bytes(path, member.begin, member.size).tobytes()


# --- the pickle ------------------------------------------------------------------------------

# What a pickle can get hold of are immutable instances, never classes or functions of ours: it may
# set attributes of whatever it holds.


class _RefusedError(Exception):
    """The pickle asks for something that it does not get; the message names the file."""


class _StorageType(NamedTuple):
    kind: str | None  # None: bytes, whose type the tensor says


class _Type(NamedTuple):
    kind: str


class _Storage(NamedTuple):
    member: _Member
    kind: str
    count: int  # elements


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements


class _Rebuild(NamedTuple):
    """`torch._utils._rebuild_tensor_v2`, or `_v3`, which says the type."""

    path: Path
    typed: bool

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
        if self.typed and isinstance(storage, _Storage):
            kind = rest[2] if len(rest) > 2 else None
            if not isinstance(kind, _Type):
                raise _RefusedError(f"{self.path}: has a tensor without a type. {_AGAIN}")
            size = storage.count * DTYPES[storage.kind].itemsize
            storage = _Storage(storage.member, kind.kind, size // DTYPES[kind.kind].itemsize)
        plain = _naturals((offset,)) and _naturals(shape) and _naturals(strides)
        if not isinstance(storage, _Storage) or not plain or len(shape) != len(strides):
            raise _RefusedError(f"{self.path}: has a tensor without a proper layout. {_AGAIN}")
        tensor = _Tensor(storage, offset, tuple(shape), tuple(strides))
        if offset + _span(tensor) > storage.count:
            raise _RefusedError(
                f"{self.path}: a tensor of shape {tensor.shape} reads elements up to "
                f"{offset + _span(tensor)} of {storage.count} that are stored. {_AGAIN}"
            )
        return tensor


class _Parameter(NamedTuple):
    """`torch._utils._rebuild_parameter`."""

    path: Path

    def __call__(self, tensor: Any, *rest: Any) -> _Tensor:
        if not isinstance(tensor, _Tensor):
            raise _RefusedError(f"{self.path}: has a parameter that is no tensor. {_AGAIN}")
        return tensor


class _Reader(pickle.Unpickler):
    """An unpickler that knows tensors and nothing else."""

    def __init__(self, content: bytes, path: Path, archive: str, members: Mapping[str, _Member]):
        super().__init__(io.BytesIO(content))
        self._path, self._archive, self._members = path, archive, members
        untyped = _StorageType(None)
        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch", "UntypedStorage"): untyped,
            ("torch.storage", "UntypedStorage"): untyped,
            ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(path, typed=False),
            ("torch._utils", "_rebuild_tensor_v3"): _Rebuild(path, typed=True),
            ("torch._utils", "_rebuild_parameter"): _Parameter(path),
            **{("torch", name): _StorageType(kind) for name, kind in _STORAGES.items()},
            **{("torch", name): _Type(kind) for name, kind in _TYPES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle means by a global name."""
        if (module, name) not in self._known:
            raise _RefusedError(
                f"{self._path}: asks for {module}.{name}, which is refused: only tensors are read, "
                f"and unpickling anything else could run code. {_CONVERT}"
            )
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage: ("storage", its type, its key, the device that it was on, elements)."""
        if not (isinstance(pid, tuple) and len(pid) == 5):
            raise _RefusedError(f"{self._path}: refers to something unknown. {_AGAIN}")
        word, kind, key, _, count = pid
        proper = isinstance(kind, _StorageType) and isinstance(key, str) and _naturals((count,))
        if not proper or word != "storage":
            raise _RefusedError(f"{self._path}: refers to something unknown. {_AGAIN}")
        member = self._members.get(f"{self._archive}data/{key}")
        if member is None:
            raise _RefusedError(f"{self._path}: has no storage {key!r}. {_AGAIN}")
        storage = _Storage(member, kind.kind or "U8", count)
        if count * DTYPES[storage.kind].itemsize > member.size:
            raise _RefusedError(
                f"{self._path}: the storage {key!r} has {member.size} bytes; wanted {count} "
                f"elements of type {storage.kind}. {_AGAIN}"
            )
        return storage


def _check_memo(content: bytes) -> None:
    """Refuses numbers of remembered objects that are not below the pickle's size.

    The unpickler would make room for as many objects, however few there are.
    """
    for code, number, _ in pickletools.genops(content):
        if "PUT" in code.name and number >= len(content):
            raise pickle.UnpicklingError(f"object {number} is remembered")


def _flat(path: Path, found: Any) -> dict[str, _Tensor]:
    """The tensors of a dictionary, and of dictionaries in it."""
    if not isinstance(found, dict):
        raise ValueError(
            f"{path}: holds {_word(found)}; wanted a dictionary of tensors, as of "
            "model.state_dict(). Save that."
        )
    tensors: dict[str, _Tensor] = {}
    for prefix, name, value in _entries(found):
        if not isinstance(name, str):
            raise ValueError(f"{path}: has a key that is {_word(name)}; wanted text.")
        full = prefix + name
        if not isinstance(value, _Tensor):
            raise ValueError(
                f"{path}: holds {_word(value)} under the name {full!r}; wanted tensors only. Save "
                "the model's state_dict() by itself."
            )
        if full in tensors:
            raise ValueError(f"{path}: has two tensors by the name {full!r}.")
        tensors[full] = value
    return tensors


def _entries(found: dict[Any, Any]) -> Any:
    """(prefix, name, value) of each entry; those of a dictionary in place of the dictionary."""
    for name, value in dict.items(found):
        if isinstance(name, str) and isinstance(value, dict):
            yield from ((f"{name}.", *entry) for entry in dict.items(value))
        else:
            yield "", name, value


def _word(value: Any) -> str:
    """What something is, without showing it: it may be endless."""
    return "a tensor" if isinstance(value, _Tensor) else f"something of type {type(value).__name__}"


def _naturals(values: Any) -> bool:
    return isinstance(values, tuple | list) and all(type(x) is int and x >= 0 for x in values)


# --- the tensors -----------------------------------------------------------------------------


def _span(tensor: _Tensor) -> int:
    """How many elements lie from the first to the last one of a tensor."""
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _read(path: Path, tensor: _Tensor) -> np.ndarray:
    storage, shape = tensor.storage, tensor.shape
    dtype = DTYPES[storage.kind]
    begin = storage.member.begin + tensor.offset * dtype.itemsize
    flat = read_bytes(path, begin, _span(tensor) * dtype.itemsize).view(dtype)
    if _contiguous(tensor):
        return flat.reshape(shape)
    # A copy: entries of a view may share memory.
    array = aligned(shape, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    array[...] = np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)
    return array


def _contiguous(tensor: _Tensor) -> bool:
    """Whether the elements lie in order and without gaps."""
    if 0 in tensor.shape:
        return True
    for i, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        if size > 1 and stride != math.prod(tensor.shape[i + 1 :]):
            return False
    return True
