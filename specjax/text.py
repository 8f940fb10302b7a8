"""Text in, text out: chat template and tokenizer around `decode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.decoding import decode, stream_tokens
from specjax.types import DecodeResult, Params

__all__ = ["encode_prompt", "generate", "stream"]

Prompt = str | Sequence[Mapping[str, Any]]


def encode_prompt(params: Params, prompt: Prompt, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt.

    Args:
      prompt: a text, or a conversation as messages with "role" and "content".
      chat: whether a text is a user's message, to be put into the checkpoint's chat template (if
        it has one), or is to be continued as it is.

    Raises:
      ValueError: the checkpoint has no tokenizer, or the prompt is neither text nor messages.
    """
    tokenizer = params.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"the checkpoint {params.name!r} has no tokenizer; put tokenizer.json into its folder, "
            "or pass token ids to specjax.decode"
        )
    if isinstance(prompt, str):
        if not (chat and tokenizer.chat_template):
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt)
    if not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError(f"prompt must be a text or a list of messages, got {prompt!r}")
    return tokenizer.encode_chat(messages)


def generate(
    params: Params, prompt: Prompt | Sequence[Prompt], *, chat: bool = True, **options: Any
) -> str | list[str]:
    """Answers a prompt, or each of a list of prompts in one batch.

    Args:
      params: from `specjax.load`.
      prompt: a text or a conversation (messages with "role" and "content"); or a list of those.
      chat: as for `encode_prompt`.
      **options: as for `specjax.decode`.

    Returns:
      The text of the new tokens, special tokens left out; a list for a list of prompts.

    Raises:
      ValueError: a bad argument, before anything is compiled.
    """
    many = (
        not isinstance(prompt, str)
        and len(prompt) > 0
        and not all(isinstance(part, Mapping) for part in prompt)
    )
    prompts = list(prompt) if many else [prompt]
    ids = [encode_prompt(params, one, chat=chat) for one in prompts]
    result = decode(params, ids, **options)
    texts = [
        params.tokenizer.decode(row[:length].tolist())
        for row, length in zip(np.asarray(result.tokens), result.lengths.tolist(), strict=True)
    ]
    return texts if many else texts[0]


def stream(
    params: Params,
    prompt: Prompt,
    *,
    chat: bool = True,
    rounds: int = 1,
    **options: Any,
) -> Iterator[str]:
    """Yields the text of an answer as it is committed; joined, it is what `generate` returns.

    Args:
      rounds: rounds of drafting and verifying between two pieces.
      **options: as for `specjax.decode`.

    Yields:
      Pieces that end with a complete character; none is empty.
    """
    ids = encode_prompt(params, prompt, chat=chat)
    yield from pieces(params, stream_tokens(params, ids, rounds=rounds, **options))


def pieces(params: Params, results: Iterator[DecodeResult]) -> Iterator[str]:
    """The new text of row 0 in each of a series of growing results."""
    detokenizer = params.tokenizer.detokenizer()
    seen = 0
    for result in results:
        length = int(result.lengths[0])
        piece = detokenizer.push(np.asarray(result.tokens[0])[seen:length].tolist())
        seen = length
        if piece:
            yield piece
    rest = detokenizer.flush()
    if rest:
        yield rest
