"""The registry of names: from a short name to a file on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Availability",
    "Entry",
    "available",
    "bundled",
    "default_drafter",
    "entries",
    "resolve",
]

_BUNDLED = Path(__file__).parent / "bundled"  # NAME/METHOD: drafters that come with the package
_FOLDERS = {"draft_model": "draft"}  # methods whose folder has another name


class Entry(NamedTuple):
    """One named checkpoint: where its weights come from. It has a `package` or is on the hub."""

    name: str
    summary: str
    licence: str
    note: str
    drafters: tuple[str, ...] = ()  # published for it, ids of the Hugging Face hub
    package: str = ""
    module: str = ""
    file: str = ""
    install: str = ""
    hub: str = ""  # id of the Hugging Face hub
    drafter: Mapping[str, Any] | None = None  # the best measured one, as `specjax.load` takes it

    @property
    def bundled(self) -> tuple[str, ...]:
        """Methods whose drafter for it comes with the package."""
        names = {folder: method for method, folder in _FOLDERS.items()}
        found = sorted(path.parent.name for path in (_BUNDLED / self.name).glob("*/config.json"))
        return tuple(names.get(folder, folder) for folder in found)

    @property
    def how_to_get(self) -> str:
        """What to type."""
        return self.install or f"hf download {self.hub} --local-dir DIR, then load DIR"


class Availability(NamedTuple):
    """An entry, and where it lies; None when it is not on this machine."""

    entry: Entry
    path: Path | None


@functools.cache
def entries() -> dict[str, Entry]:
    """Reads the registry.

    Returns:
      Name -> entry.
    """
    text = resources.files("specjax.checkpoints").joinpath("registry.toml").read_text("utf-8")
    return {
        name: Entry(name=name, **fields | {"drafters": tuple(fields.get("drafters", ()))})
        for name, fields in tomllib.loads(text).items()
    }


def available() -> list[Availability]:
    """Lists all named checkpoints and where they lie.

    Returns:
      One record an entry, in the order of the registry.
    """
    return [Availability(entry, _locate(entry)) for entry in entries().values()]


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Finds a checkpoint by its registry name or its path.

    Args:
      name_or_path: a name of the registry, which goes first if its checkpoint is on this machine,
        or an existing file or folder.

    Returns:
      The file or folder.

    Raises:
      FileNotFoundError: the named checkpoint is not on this machine, or there is no such name and
        no such path.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name in entries():
        entry = entries()[name]
        found = _locate(entry)
        if found is not None:
            return found
        if not path.exists():
            raise FileNotFoundError(
                f"the checkpoint {name} is not on this machine; get it with: {entry.how_to_get}"
            )
    if not path.exists():
        raise FileNotFoundError(
            f"{name!r} is neither a known checkpoint nor an existing path; known: "
            f"{', '.join(entries())}. Give one of these, a Hugging Face checkpoint folder or a "
            "GGUF file."
        )
    return path


def bundled(target: Path, method: str) -> Path | None:
    """The drafter of a method that comes with the package, for the checkpoint at `target`."""
    for entry in entries().values():
        folder = _BUNDLED / entry.name / _FOLDERS.get(method, method)
        if (folder / "config.json").is_file() and _locate(entry) == target:
            return folder
    return None


def default_drafter(target: Path) -> Mapping[str, Any] | None:
    """The drafter that measured best with the checkpoint at `target`, if one is known."""
    for entry in entries().values():
        if entry.drafter is not None and _locate(entry) == target:
            return entry.drafter
    return None


def _locate(entry: Entry) -> Path | None:
    return _in_hub_cache(entry.hub) if entry.hub else _in_package(entry)


def _in_hub_cache(name: str) -> Path | None:
    """Where `hf download` without a folder has put a repository."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    if not (folder / "refs" / "main").is_file():
        return None
    snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    return snapshot if (snapshot / "config.json").is_file() else None


def _in_package(entry: Entry) -> Path | None:
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
