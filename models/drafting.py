"""What a published format of drafters says: how to recognise it, and where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

from specjax.models.config import DecoderConfig
from specjax.models.naming import Source

__all__ = ["DraftFormat", "Found"]


class Found(NamedTuple):
    """A drafter's checkpoint, understood by its headers."""

    config: Hashable  # of the network
    sources: Mapping[str, Source]  # parameter path -> tensors
    ignored: Callable[[str], bool] = lambda name: False  # tensors that may be there
    d2t: str | None = None  # tensor of offsets [DV], if the drafter has a vocabulary of its own
    options: Mapping[str, Any] = {}  # what the checkpoint says of drafting, as options of the method


class DraftFormat(NamedTuple):
    """One way in which drafters are published."""

    name: str  # for messages
    method: str  # as `specjax.load` knows it
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]  # config.json, tensor names
    # config.json, shapes of its tensors, the target
    read: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], DecoderConfig], Found]
