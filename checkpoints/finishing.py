"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["refuse_existing", "unfinished"]


def refuse_existing(path: Path) -> None:
    """Nothing is overwritten.

    Raises:
      FileExistsError: there is a file, or a folder that is not empty.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise FileExistsError(
            f"{path}: exists already and is not overwritten. Remove it, or give another path."
        )


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Another place to write to; at the end it is renamed to `path`.

    A process that is killed leaves a folder whose name ends in ".unfinished", beside `path`.

    Args:
      path: what is to be written. It may exist as an empty folder.

    Yields:
      A path of the same name, where nothing is yet: the caller makes a file or a folder there.

    Raises:
      FileExistsError: there is something at `path`.
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".unfinished", dir=path.parent))
    try:
        yield made / path.name
        refuse_existing(path)  # it may have come meanwhile
        (made / path.name).rename(path)
    finally:
        shutil.rmtree(made, ignore_errors=True)
