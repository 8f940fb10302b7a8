"""Text in, text out: chat template and tokenizer around `decode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decoding import decode, stream_tokens
from specjax.stopping import held_back
from specjax.types import DecodeResult, Logprobs, Params, Stats, Status

__all__ = [
    "Completion",
    "Prompt",
    "complete",
    "encode_prompt",
    "generate",
    "pieces",
    "stop_strings",
    "stream",
]

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


class Completion(NamedTuple):
    """What a prompt was answered with. All fields end with the same token."""

    text: str  # special tokens left out; what precedes a stop string, if one ended it
    tokens: list[int]  # new token ids, the one that ended it included
    status: Status
    stats: Stats  # of this row: rounds [], histogram [K + 1], proposed [K], accepted [K]
    logprobs: Logprobs | None  # T = len(tokens), without a batch axis
    prompt_tokens: list[int]
    prompt_logprobs: Logprobs | None  # T = len(prompt_tokens)


def complete(
    params: Params, prompt: Prompt | Sequence[Prompt], *, chat: bool = True, **options: Any
) -> Completion | list[Completion]:
    """Answers a prompt, or each of a list of prompts in one batch, with all that is known of it.

    Args:
      params: from `specjax.load`.
      prompt: a text or a conversation (messages with "role" and "content"); or a list of those.
      chat: as for `encode_prompt`.
      **options: as for `specjax.decode`.

    Returns:
      Text, tokens, how it ended, statistics and log-probabilities; a list for a list of prompts.

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
    result = jax.tree.map(np.asarray, decode(params, ids, **options))
    strings = stop_strings(options.get("stop"))
    rows = [_completion(params, result, i, row, strings) for i, row in enumerate(ids)]
    return rows if many else rows[0]


def _completion(
    params: Params, result: DecodeResult, i: int, prompt: list[int], strings: Sequence[str]
) -> Completion:
    """Row i of a result."""
    length = int(result.lengths[i])
    tokens = result.tokens[i, :length].tolist()
    status = Status(int(result.status[i]))
    return Completion(
        text=_ended_text(params, params.tokenizer.decode(tokens), tokens, status, strings),
        tokens=tokens,
        status=status,
        stats=jax.tree.map(lambda x: x[i], result.stats),
        logprobs=jax.tree.map(lambda x: x[i, :length], result.logprobs),
        prompt_tokens=prompt,
        prompt_logprobs=jax.tree.map(lambda x: x[i, : len(prompt)], result.prompt_logprobs),
    )


def generate(
    params: Params, prompt: Prompt | Sequence[Prompt], *, chat: bool = True, **options: Any
) -> str | list[str]:
    """Answers a prompt, or each of a list of prompts in one batch: the text of `complete`.

    Args:
      params: from `specjax.load`.
      prompt: a text or a conversation (messages with "role" and "content"); or a list of those.
      chat: as for `encode_prompt`.
      **options: as for `specjax.decode`.

    Returns:
      The text of the new tokens, special tokens left out, up to a stop string if one ended it; a
      list for a list of prompts.

    Raises:
      ValueError: a bad argument, before anything is compiled.
    """
    answer = complete(params, prompt, chat=chat, **options)
    return [one.text for one in answer] if isinstance(answer, list) else answer.text


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
      Pieces that end with a complete character; none is empty. What may become a stop string is
      held back until it is one or is not.
    """
    ids = encode_prompt(params, prompt, chat=chat)
    results = stream_tokens(params, ids, rounds=rounds, **options)
    yield from pieces(params, results, stop_strings(options.get("stop")))


def pieces(
    params: Params, results: Iterator[DecodeResult], strings: Sequence[str] = ()
) -> Iterator[str]:
    """The new text of row 0 in each of a series of growing results.

    Args:
      strings: the stop strings among what ends the row.
    """
    detokenizer = params.tokenizer.detokenizer()
    tokens: list[int] = []
    text, sent, status = "", 0, Status.RUNNING
    for result in results:
        length, status = int(result.lengths[0]), Status(int(result.status[0]))
        new = np.asarray(result.tokens[0])[len(tokens) : length].tolist()
        tokens += new
        text += detokenizer.push(new)
        if status == Status.RUNNING:
            safe = len(text) - held_back(text, strings)
            if safe > sent:
                yield text[sent:safe]
                sent = safe
    text = _ended_text(params, text + detokenizer.flush(), tokens, status, strings)
    if len(text) > sent:
        yield text[sent:]


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings among what `specjax.decode` takes as `stop`."""
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, (Sequence, np.ndarray)):
        return ()
    return tuple(str(part) for part in stop if isinstance(part, str))


def _ended_text(
    params: Params, text: str, tokens: Sequence[int], status: Status, strings: Sequence[str]
) -> str:
    """The text before the stop string that the last token completed, if that ended the row."""
    if status != Status.STOP or not strings:
        return text
    before = params.tokenizer.decode(tokens[:-1]).rstrip("\ufffd")
    # Strings that were complete before (and did not count, by min_new_tokens) are part of the text.
    starts = [text.find(s, max(0, len(before) + 1 - len(s))) for s in strings]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
