"""What a model family must say about itself so that its checkpoints can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.models.config import DecoderConfig
from specjax.models.naming import Layout

__all__ = ["ConfigFromGguf", "ConfigFromHf", "Family"]


class ConfigFromHf(Protocol):
    """Reads a parsed `config.json` of Hugging Face, in either of its dialects."""

    def __call__(self, config: Mapping[str, Any], /) -> DecoderConfig: ...


class ConfigFromGguf(Protocol):
    """Reads GGUF metadata. `tensors` gives each stored tensor by name, read when called: some
    families leave a part of their configuration (a tied head, RoPE factors) in the tensors."""

    def __call__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, Callable[[], np.ndarray]], /
    ) -> DecoderConfig: ...


class Family(NamedTuple):
    """One architecture's maps between checkpoints and parameters."""

    model_type: str  # `model_type` in config.json
    config_from_hf: ConfigFromHf
    hf: Layout
    gguf_architecture: str | None = None  # `general.architecture` in a GGUF file; None: not read
    config_from_gguf: ConfigFromGguf | None = None
    gguf: Layout | None = None
