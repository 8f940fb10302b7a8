"""Reading a drafter's checkpoint, in whatever format it was published."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints.reading import read_source
from specjax.checkpoints.safetensors_folder import INDEX, SINGLE, read_folder, read_json
from specjax.checkpoints.tensors import StoredTensor, match
from specjax.checkpoints.torch_file import read_torch
from specjax.models.config import DecoderConfig
from specjax.models.draft_formats import FORMATS
from specjax.models.drafting import DraftFormat

__all__ = ["DraftCheckpoint", "draft_format", "read_draft"]


class DraftCheckpoint(NamedTuple):
    """A drafter whose names and shapes are verified and whose weights are not read yet."""

    path: Path
    method: str
    format: str
    config: Hashable  # of its network
    weights: Mapping[str, Callable[[], np.ndarray]]  # parameter path -> reads one array
    offsets: np.ndarray | None  # d2t [DV]: target id minus draft id
    options: Mapping[str, Any]  # what the checkpoint says of drafting
    from_target: Mapping[str, str] = {}  # parameter path -> "embed" or "head": the target's rows


class _Folder(NamedTuple):
    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]


def _read_folder(path: Path) -> _Folder:
    """config.json and the headers of the weights, in safetensors or PyTorch's format."""
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        folder = read_folder(path)
        return _Folder(path, folder.config, folder.tensors)
    config = read_json(path / "config.json")
    files = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if not files:
        raise FileNotFoundError(
            f"{path}: has no weights; wanted {SINGLE}, pytorch_model.bin or medusa_lm_head.pt. "
            "Download the drafter again, with its weights."
        )
    if len(files) > 1:
        raise ValueError(
            f"{path}: has {', '.join(file.name for file in files)}; wanted one file of weights. "
            "Remove the others."
        )
    return _Folder(path, config, read_torch(files[0]))


def draft_format(path: Path, method: str | None = None) -> DraftFormat | None:
    """What drafter a folder holds, if it holds one.

    Args:
      path: a folder.
      method: look only for drafters of this method, those that lie within a target's checkpoint
        included; None: for any that has a folder of its own.

    Raises:
      FileNotFoundError, ValueError: the folder has a config.json, but is damaged.
    """
    if not (path / "config.json").is_file():
        return None
    return _recognised(_read_folder(path), method)


def _recognised(folder: _Folder, method: str | None) -> DraftFormat | None:
    for known in FORMATS:
        wanted = not known.within_target if method is None else known.method == method
        if wanted and known.recognises(folder.config, folder.tensors.keys()):
            return known
    return None


def read_draft(
    path: Path, target: DecoderConfig, method: str | None = None, dtype: Any = None
) -> DraftCheckpoint:
    """Reads a drafter's headers and configuration.

    Args:
      path: its folder, or that of the target if the drafter lies within.
      target: what it has to fit.
      method: refuse drafters of another method.
      dtype: of the weights; None keeps the stored type.

    Raises:
      FileNotFoundError: no such folder, or no weights.
      ValueError: no known format, another method, a damaged file, a drafter that does not fit the
        target, or a tensor that is missing, has another shape or is not expected.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder; wanted a drafter's checkpoint.")
    folder = _read_folder(path)
    found = _recognised(folder, method)
    if found is None:
        names = sorted({known.name for known in FORMATS if method in (None, known.method)})
        message = f"{path}: is no drafter of a known format; known: {', '.join(names)}."
        other = None if method is None else _recognised(folder, None)
        if other is not None:
            message += f" It is {other.name}: use the method {other.method!r}."
        raise ValueError(message)
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    try:
        read = found.read(folder.config, shapes, target)
    except ValueError as error:
        raise ValueError(f"{path} ({found.name}): {error}") from error
    parts = match(read.sources, folder.tensors, read.ignored, path)
    wanted = None if dtype is None else np.dtype(dtype)
    weights = {
        key: lambda key=key: read_source(parts[key], read.sources[key], wanted) for key in parts
    }
    offsets = None
    if read.d2t is not None:
        offsets = _offsets(folder.tensors[read.d2t], read.draft_vocab, target.vocab_size)
    return DraftCheckpoint(
        path,
        found.method,
        found.name,
        read.config,
        weights,
        offsets,
        read.options,
        read.from_target,
    )


def _offsets(tensor: StoredTensor, draft_vocab: int | None, vocab_size: int) -> np.ndarray:
    """d2t, which must lead each of the draft's tokens to another one of the target's."""
    where = f"{tensor.file}: the tensor {tensor.name}"
    offsets = tensor.read()
    if offsets.shape != (draft_vocab,) or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"{where} is {offsets.dtype} of shape {offsets.shape}; wanted integers of shape "
            f"({draft_vocab},), one for each token of the draft. Download the drafter again."
        )
    ids = np.arange(offsets.size) + offsets.astype(np.int64)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise ValueError(
            f"{where} leads the draft's token {bad[0]} to {ids[bad[0]]}, but the target has "
            f"{vocab_size} tokens. Take the drafter that belongs to this target."
        )
    if np.unique(ids).size != ids.size:
        raise ValueError(
            f"{where} leads two of the draft's tokens to one of the target's. Download the "
            "drafter again."
        )
    return offsets
