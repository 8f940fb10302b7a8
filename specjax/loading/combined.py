"""Drafters made of two others, each given as `drafter=` takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from specjax import drafters
from specjax.drafters.combine import require_count
from specjax.loading.reading import Target
from specjax.types import Drafter, PyTree

__all__ = ["methods"]

_Build = Callable[[Target], tuple[Drafter, PyTree]]


def methods(builder: Callable[[Any], _Build]) -> Mapping[str, Callable[..., _Build]]:
    """The methods that combine.

    Args:
      builder: makes what builds a drafter from what `drafter=` takes.
    """
    return {
        "fallback": functools.partial(_fallback, builder),
        "merged": functools.partial(_merged, builder),
    }


def _fallback(
    builder: Callable[[Any], _Build], *, first: Any = None, second: Any = None, least: int = 1
) -> _Build:
    require_count("least", least)
    make = functools.partial(drafters.fallback, least=least)
    return _both(builder, "fallback", first, second, make)


def _merged(
    builder: Callable[[Any], _Build],
    *,
    first: Any = None,
    second: Any = None,
    nodes: int | None = None,
) -> _Build:
    if nodes is not None:
        require_count("nodes", nodes)
    make = functools.partial(drafters.merged, nodes=nodes)
    return _both(builder, "merged", first, second, make)


def _both(
    builder: Callable[[Any], _Build],
    method: str,
    first: Any,
    second: Any,
    make: Callable[[Drafter, Drafter], Drafter],
) -> _Build:
    """Builds the parts, then the drafter of both.

    Raises:
      ValueError: a part that is missing, or plain decoding, or that cannot be.
      FileNotFoundError: a part that is neither a method nor a checkpoint.
    """

    def part(name: str, spec: Any) -> _Build:
        if spec is None:
            raise ValueError(
                f'the drafter {method!r} needs "{name}", a drafter (a name, a checkpoint or a dict '
                'with a "method"), got None; plain decoding cannot be a part'
            )
        try:
            return builder(spec)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f'"{name}" of the drafter {method!r}: {error}') from error

    one, other = part("first", first), part("second", second)

    def build(target: Target) -> tuple[Drafter, PyTree]:
        parts = one(target), other(target)
        made = make(*(drafter for drafter, _ in parts))
        return made, tuple(weights for _, weights in parts)

    return build
