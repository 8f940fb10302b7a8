"""Reading and writing weights, configurations and tokenizers, and the registry of names."""

from __future__ import annotations

from specjax.checkpoints.orbax_folder import verify
from specjax.checkpoints.reading import Checkpoint, read
from specjax.checkpoints.registry import available, resolve
from specjax.checkpoints.tokenizer import Detokenizer, Tokenizer
from specjax.checkpoints.writing import convert, save

__all__ = [
    "Checkpoint",
    "Detokenizer",
    "Tokenizer",
    "available",
    "convert",
    "read",
    "resolve",
    "save",
    "verify",
]
