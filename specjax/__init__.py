"""Speculative decoding in pure JAX: the same law of the output, fewer passes over the weights."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.accept import accept_and_resample
    from specjax.checkpoints import save
    from specjax.decoding import decode, stream_tokens
    from specjax.draft import draft_step
    from specjax.loading import load
    from specjax.sampling import Sampling
    from specjax.text import Completion, complete, generate, stream
    from specjax.types import (
        DecodeResult,
        Drafter,
        Logprobs,
        Model,
        Params,
        Proposal,
        Scores,
        Stats,
        Status,
        Verdict,
    )
    from specjax.verify import verify_step

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "DecodeResult",
    "Drafter",
    "Logprobs",
    "Model",
    "Params",
    "Proposal",
    "Sampling",
    "Scores",
    "Stats",
    "Status",
    "Verdict",
    "accept_and_resample",
    "complete",
    "decode",
    "draft_step",
    "generate",
    "load",
    "save",
    "stream",
    "stream_tokens",
    "verify_step",
]

# Where each public name lives. Imported when first used, so that `specjax --help` need not wait
# for jax and flax.
_HOMES = {
    "Completion": "text",
    "accept_and_resample": "accept",
    "complete": "text",
    "decode": "decoding",
    "draft_step": "draft",
    "generate": "text",
    "load": "loading",
    "Sampling": "sampling",
    "save": "checkpoints",
    "stream": "text",
    "stream_tokens": "decoding",
    "verify_step": "verify",
}
_MODULES = (
    "accept",
    "cache",
    "checkpoints",
    "constraints",
    "drafters",
    "models",
    "sampling",
    "sharding",
    "text",
    "tree",
    "types",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"specjax.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"specjax.{_HOMES.get(name, 'types')}"), name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
