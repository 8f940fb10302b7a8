"""Writing a tokenizer and the special ids as the files of a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import processors

from specjax.checkpoints.tokenizer import SpecialIds, Tokenizer

__all__ = ["write_ids", "write_tokenizer"]


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the chat template within.

    Args:
      folder: an existing folder.
      tokenizer: what to write. Tokens that it puts around every text become a part of
        tokenizer.json, so other libraries put them there, too.
    """
    (folder / "tokenizer.json").write_text(_with_ends(tokenizer).to_str(pretty=True), "utf-8")
    settings = {
        **dict(tokenizer.named_tokens),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, "utf-8")


def write_ids(folder: Path, ids: SpecialIds) -> None:
    """Writes generation_config.json.

    Args:
      folder: an existing folder.
      ids: what it declares.
    """
    declared = {
        "bos_token_id": ids.bos,
        "eos_token_id": list(ids.eos) or None,
        "pad_token_id": ids.pad,
    }
    (folder / "generation_config.json").write_text(json.dumps(declared, indent=2), "utf-8")


def _with_ends(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if not tokenizer.prefix and not tokenizer.suffix:
        return backend
    names = {i: backend.id_to_token(i) for i in (*tokenizer.prefix, *tokenizer.suffix)}
    before, after = ([names[i] for i in ids] for ids in (tokenizer.prefix, tokenizer.suffix))
    ends = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(name, i) for i, name in names.items()],
    )
    own = backend.post_processor
    backend.post_processor = ends if own is None else processors.Sequence([own, ends])
    return backend
