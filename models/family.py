"""What a model family must say about itself so that its checkpoints can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.models.config import DecoderConfig

__all__ = ["ConfigFromGguf", "ConfigFromHf", "Family", "FromGguf", "Names", "Shapes"]


class ConfigFromHf(Protocol):
    """Reads a parsed `config.json` of Hugging Face, in either of its dialects."""

    def __call__(self, config: Mapping[str, Any], /) -> DecoderConfig: ...


class ConfigFromGguf(Protocol):
    """Reads GGUF metadata. `tensors` gives each stored tensor by name, read when called: some
    families leave a part of their configuration (a tied head, RoPE factors) in the tensors."""

    def __call__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, Callable[[], np.ndarray]], /
    ) -> DecoderConfig: ...


class Names(Protocol):
    """Where each parameter is stored: parameter path -> tensor name."""

    def __call__(self, config: DecoderConfig, /) -> dict[str, str]: ...


class Shapes(Protocol):
    """The shape of each parameter: parameter path -> shape."""

    def __call__(self, config: DecoderConfig, /) -> dict[str, tuple[int, ...]]: ...


class FromGguf(Protocol):
    """Turns a tensor as GGUF stores it into the parameter of that path."""

    def __call__(self, path: str, array: np.ndarray, config: DecoderConfig, /) -> np.ndarray: ...


class Family(NamedTuple):
    """One architecture's maps between checkpoints and parameters."""

    model_type: str  # `model_type` in config.json
    gguf_architecture: str  # `general.architecture` in a GGUF file
    config_from_hf: ConfigFromHf
    config_from_gguf: ConfigFromGguf
    hf_names: Names
    gguf_names: Names
    shapes: Shapes
    from_gguf: FromGguf
    hf_ignored: Callable[[str, DecoderConfig], bool]  # tensors a file may hold that are not read
    gguf_ignored: Callable[[str, DecoderConfig], bool]
