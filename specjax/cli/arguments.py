"""Options that are a JSON object or something shorter, to what the library takes."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

__all__ = ["acceptance_argument", "is_json", "json_object", "schema_argument"]


def is_json(text: str) -> bool:
    """Whether an option holds a JSON object, and not a name or a path."""
    return text.lstrip().startswith("{")


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The object in an option's text.

    Raises:
      typer.BadParameter: bad JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{flag} is not valid JSON: {error}") from error


def acceptance_argument(acceptance: str | None, *, plain: bool) -> str | dict[str, Any] | None:
    """What `specjax.accept.names.rule` takes; None leaves it to the drafter's shape.

    Raises:
      typer.BadParameter: bad JSON, or a rule where there is no drafter.
    """
    if acceptance is None:
        return None
    if plain:
        raise typer.BadParameter(
            "--acceptance says which guesses stand; with --plain there are none"
        )
    return json_object("--acceptance", acceptance) if is_json(acceptance) else acceptance


def schema_argument(json_schema: str | None, *, regex: str | None) -> str | None:
    """The JSON text of a schema that is given as a text or as a file.

    Raises:
      typer.BadParameter: bad JSON, no such file, or a regular expression beside it.
    """
    if json_schema is None:
        return None
    if regex is not None:
        raise typer.BadParameter("--regex and --json-schema cannot go together; give one of them")
    if is_json(json_schema):
        json_object("--json-schema", json_schema)
        return json_schema
    path = os.path.expanduser(json_schema)
    if not os.path.isfile(path):
        raise typer.BadParameter(
            f"--json-schema {json_schema!r} is neither a file nor a JSON text that starts with {{"
        )
    with open(path, encoding="utf-8") as file:
        return file.read()
