"""Speculative decoding in pure JAX: the same law of the output, fewer passes over the weights."""

from specjax.accept import accept_and_resample
from specjax.decoding import decode, stream_tokens
from specjax.draft import draft_step
from specjax.loading import load
from specjax.sampling import Sampling
from specjax.text import generate, stream
from specjax.types import (
    DecodeResult,
    Drafter,
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
    "DecodeResult",
    "Drafter",
    "Model",
    "Params",
    "Proposal",
    "Sampling",
    "Scores",
    "Stats",
    "Status",
    "Verdict",
    "accept_and_resample",
    "decode",
    "draft_step",
    "generate",
    "load",
    "stream",
    "stream_tokens",
    "verify_step",
]
