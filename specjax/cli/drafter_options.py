"""The drafter as the command line's options describe it, to what `specjax.load` takes."""

from __future__ import annotations

import os
from typing import Any

import typer

from specjax.cli.arguments import is_json, json_object

__all__ = ["drafter_argument"]


def drafter_argument(
    drafter: str | None,
    *,
    plain: bool,
    num_speculative_tokens: int | None,
    draft_layers: int | None,
    model: str = "",
) -> dict[str, Any] | None:
    """Merges the options into one dict, or None for plain decoding.

    Args:
      drafter: a method's name, a checkpoint, or a JSON object; None: "draft_model" where
        `draft_layers` is given, else the best one that the registry knows for the model, else
        "ngram".
      model: what is decoded with.

    Raises:
      typer.BadParameter: options that contradict each other, bad JSON, or an unknown name.
    """
    options = {"num_speculative_tokens": num_speculative_tokens, "draft_layers": draft_layers}
    options = {name: value for name, value in options.items() if value is not None}
    if plain:
        given = [_flag(name) for name in options]
        given = (["--drafter"] if drafter is not None else []) + given
        if given:
            raise typer.BadParameter(
                f"--plain decodes without a drafter, so it cannot go with {', '.join(given)}"
            )
        return None
    if drafter is None:
        drafter = "draft_model" if draft_layers is not None else _best(model, options)
    chosen = _parse(drafter)
    for name, value in options.items():
        if chosen.setdefault(name, value) != value:
            raise typer.BadParameter(
                f"{_flag(name)} is {value}, but --drafter says {chosen[name]}; give one of them"
            )
    method = chosen.get("method")
    if draft_layers is not None and (method != "draft_model" or "model" in chosen):
        raise typer.BadParameter(
            "--draft-layers makes a draft of the target's own first layers; it goes only with "
            f"--drafter draft_model, got {drafter!r}"
        )
    return chosen


def _best(model: str, options: dict[str, Any]) -> str:
    from specjax.checkpoints.registry import entries

    known = model in entries() and entries()[model].drafter is not None
    return "default" if known and not options else "ngram"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(drafter: str) -> dict[str, Any]:
    from specjax.checkpoints.registry import entries
    from specjax.loading import METHODS, method_of

    if is_json(drafter):
        value = json_object("--drafter", drafter)
        method = value.get("method")
        if not isinstance(method, str):
            raise typer.BadParameter(
                f'--drafter needs a "method", one of {", ".join(METHODS)}, got {drafter}'
            )
        return value
    if drafter in METHODS:
        return {"method": drafter}
    if drafter not in entries() and not os.path.exists(os.path.expanduser(drafter)):
        raise typer.BadParameter(
            f"--drafter {drafter!r} is neither a method ({', '.join(METHODS)}), a named "
            f"checkpoint ({', '.join(entries())}) nor an existing path"
        )
    return {"method": method_of(os.path.expanduser(drafter)) or "draft_model", "model": drafter}
