"""Reading and writing weights, configurations and tokenizers, and the registry of names."""

from __future__ import annotations

from specjax.checkpoints.draft_reading import DraftCheckpoint, draft_format, read_draft
from specjax.checkpoints.draft_writing import save_draft, set_options
from specjax.checkpoints.orbax_folder import verify
from specjax.checkpoints.reading import Checkpoint, read
from specjax.checkpoints.registry import available, bundled, default_drafter, resolve
from specjax.checkpoints.tokenizer import Detokenizer, Tokenizer
from specjax.checkpoints.writing import convert, save

__all__ = [
    "Checkpoint",
    "Detokenizer",
    "DraftCheckpoint",
    "Tokenizer",
    "available",
    "bundled",
    "convert",
    "default_drafter",
    "draft_format",
    "read",
    "read_draft",
    "resolve",
    "save",
    "save_draft",
    "set_options",
    "verify",
]
