"""Reading weights, configurations and tokenizers of checkpoints, and the registry of names."""

from __future__ import annotations

from specjax.checkpoints.reading import Checkpoint, read
from specjax.checkpoints.registry import available, resolve
from specjax.checkpoints.tokenizer import Detokenizer, Tokenizer

__all__ = ["Checkpoint", "Detokenizer", "Tokenizer", "available", "read", "resolve"]
