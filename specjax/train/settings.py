"""Settings beside what was made with them: a run goes on only with the same ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["agree"]


def agree(path: Path, settings: Mapping[str, Any], what: str) -> None:
    """Writes settings, or compares them with those that are there.

    Args:
      path: a JSON file; its folder is made if missing.
      settings: what JSON can hold; tuples count as lists.
      what: what the folder holds, for the message.

    Raises:
      ValueError: the file holds others. It names each that differs.
    """
    settings = json.loads(json.dumps(settings, default=str))
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        changed = sorted(k for k in settings | found if settings.get(k) != found.get(k))
        if changed:
            short = lambda value: f"{value!r:.60}"
            differences = (
                f"{k} was {short(found.get(k))}, is {short(settings.get(k))}" for k in changed
            )
            raise ValueError(
                f"the folder {str(path.parent)!r} holds {what} of other settings: "
                f"{'; '.join(differences)}. Choose another folder, or the same settings to go on"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    os.replace(part, path)
