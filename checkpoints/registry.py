"""The registry of names: from a short name to a file on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

__all__ = ["Availability", "Entry", "available", "entries", "resolve"]


class Entry(NamedTuple):
    """One named checkpoint: where its weights come from."""

    name: str
    summary: str
    package: str
    module: str
    file: str
    licence: str
    install: str
    note: str


class Availability(NamedTuple):
    """An entry, and where it lies; None when it is not installed."""

    entry: Entry
    path: Path | None


@functools.cache
def entries() -> dict[str, Entry]:
    """Reads the registry.

    Returns:
      Name -> entry.
    """
    text = resources.files("specjax.checkpoints").joinpath("registry.toml").read_text("utf-8")
    return {name: Entry(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def available() -> list[Availability]:
    """Lists all named checkpoints and where they lie.

    Returns:
      One record an entry, in the order of the registry.
    """
    return [Availability(entry, _locate(entry)) for entry in entries().values()]


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Finds a checkpoint by its registry name or its path.

    Args:
      name_or_path: a name of the registry, which goes first, or an existing file or folder.

    Returns:
      The file or folder.

    Raises:
      FileNotFoundError: the named checkpoint is not installed, or there is no such name and no
        such path.
    """
    name = os.fspath(name_or_path)
    if name in entries():
        entry = entries()[name]
        path = _locate(entry)
        if path is None:
            raise FileNotFoundError(
                f"the checkpoint {name} is not on this machine; get it with: {entry.install}"
            )
        return path
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{name!r} is neither a known checkpoint nor an existing path; known: "
            f"{', '.join(entries())}. Give one of these, a Hugging Face checkpoint folder or a "
            "GGUF file."
        )
    return path


def _locate(entry: Entry) -> Path | None:
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.submodule_search_locations is None:
        return None
    files = [
        file
        for folder in spec.submodule_search_locations
        for file in sorted(Path(folder).glob(entry.file))
    ]
    if len(files) > 1:
        raise ValueError(
            f"the package {entry.package} has {len(files)} files that match {entry.file}; wanted "
            f"one. Reinstall it: {entry.install}"
        )
    return files[0] if files else None
