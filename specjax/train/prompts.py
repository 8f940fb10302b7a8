"""Prompts to train on: the target's own ideas of what a user asks, or the user's files.

A chat model, asked to continue the opening of a user's turn, writes a user's message. So no data
set is needed, and what is trained on is what the target itself would say.

Reference: Xu et al. 2024 (Magpie, arXiv:2406.08464).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.decoding import decode
from specjax.sampling import Sampling
from specjax.text import Prompt, encode_prompt
from specjax.types import Params

__all__ = ["KINDS", "Kind", "Turns", "read_lines", "read_prompts", "self_instruction", "user_turn"]

_MARK = "\u2042content\u2042"


class Kind(NamedTuple):
    """One kind of message: how it begins, how long it grows, how it ends."""

    name: str
    openings: tuple[str, ...]  # the first words; "" lets the model choose
    tokens: int  # most tokens that the model adds
    closings: tuple[str, ...] = ()  # what follows; then the model may not end the message itself


# Beginnings of messages, so that what a small model likes to talk about is not all there is.
KINDS = (
    Kind("free", ("",), 48),
    Kind(
        "question",
        (
            "Who ",
            "What is ",
            "What are ",
            "When did ",
            "When was ",
            "Where is ",
            "Where did ",
            "Which ",
            "How does ",
            "How many ",
            "Why do ",
            "What year ",
            "Who wrote ",
            "Who sings ",
            "Who plays ",
            "What is the name of ",
        ),
        24,
    ),
    Kind(
        "translation",
        tuple(
            f"Translate German to English: {word}"
            for word in (
                "Die ",
                "Der ",
                "Das ",
                "Ein ",
                "Eine ",
                "Wir ",
                "Ich ",
                "Es ",
                "In ",
                "Im ",
                "Nach ",
                "Mit ",
                "Auf ",
                "Für ",
                "Sie ",
                "Er ",
                "Bei ",
                "Am ",
                "Als ",
                "Wenn ",
                "Seit ",
                "Viele ",
                '"',
                "",
            )
        ),
        40,
    ),
    Kind(
        "mathematics",
        (
            "A farmer has ",
            "A shop sells ",
            "There are ",
            "John has ",
            "Mary buys ",
            "Tom is ",
            "A train travels ",
            "If a book costs ",
            "Sarah earns $",
            "Each day, ",
            "A class of ",
            "Solve: ",
            "Find the ",
            "Calculate ",
            "What is the sum of ",
            "Anna bakes ",
        ),
        64,
    ),
    Kind(
        "writing",
        (
            "Write a short story about ",
            "Write an email to ",
            "Write a poem about ",
            "Compose a blog post about ",
            "Describe ",
            "Imagine you are ",
            "Pretend to be ",
            "Draft a letter ",
            "Give me a list of ",
            "Suggest ",
            "Help me ",
            "Rewrite ",
            "Create a ",
            "Explain ",
            "Compare ",
            "Discuss ",
        ),
        40,
    ),
    Kind(
        "reasoning",
        (
            "Write a Python function that ",
            "Implement ",
            "Write a program ",
            "Given the following ",
            "Extract ",
            "Evaluate ",
            "Classify ",
            "Identify ",
            "What would happen if ",
            "Explain how ",
            "Explain the difference between ",
            "What are the main causes of ",
            "How can I ",
            "Provide an overview of ",
            "Outline ",
            "Analyze ",
        ),
        48,
    ),
    Kind(
        "summary",
        tuple(
            f"Summarize: {words}"
            for words in (
                "",
                "The ",
                "A ",
                "In ",
                "On Monday, ",
                "Police ",
                "Scientists ",
                "The president ",
                "By ",
                "(CNN) ",
                "After ",
                "It was ",
                "More than ",
                "Two ",
                "LONDON, ",
                "According to ",
            )
        ),
        224,
        ("",),
    ),
    Kind(
        "passage",
        (
            "",
            "The ",
            "In the ",
            "During ",
            "A ",
            "Some ",
            "History of ",
            "The city of ",
            "Most ",
            "In 19",
            "Many ",
            "One of ",
            "The first ",
            "It is ",
            "Although ",
            "Research ",
        ),
        192,
        (
            "\n\nWhat is this text about?",
            "\n\nWhy is this important?",
            "\n\nWho is mentioned in the text?",
            "\n\nWhen did this happen?",
            "\n\nWhat is the main idea?",
            "\n\nWhat are the effects of this?",
            "\n\nAnswer the question: how does it work?",
            "\n\nList the key facts.",
        ),
    ),
)


class Turns(NamedTuple):
    """What stands around a user's message, as token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]  # ends with the opening of the assistant's turn


def user_turn(params: Params, earlier: Sequence[Mapping[str, Any]] = ()) -> Turns:
    """The chat template's tokens before and after the content of a user's turn.

    Args:
      params: from `specjax.load`.
      earlier: messages that come before, e.g. a system message.

    Raises:
      ValueError: the checkpoint has no tokenizer or no chat template, or the template changes what
        it is given.
    """
    tokenizer = params.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            f"the checkpoint {params.name!r} has no chat template, so it cannot make prompts of "
            "its own; give a file of prompts as `data`"
        )
    text = tokenizer.apply_chat_template([*earlier, {"role": "user", "content": _MARK}])
    if text.count(_MARK) != 1:
        raise ValueError(
            f"the chat template of {params.name!r} does not hold a user's message as it is; give "
            "a file of prompts as `data`"
        )
    encode = lambda part: tuple(tokenizer.encode(part, add_special_tokens=False))
    before, after = map(encode, text.split(_MARK))
    return Turns(before, after)


def self_instruction(
    params: Params, kind: Kind, rows: int, *, seed: int, temperature: float = 1.0
) -> list[list[int]]:
    """Prompts that the target writes itself: one batch of whole user turns.

    Args:
      params: from `specjax.load`; drafted or plain, the law is the same.
      kind: which openings and how long.
      rows: how many.
      seed: of the openings and of the sampling; the same seed gives the same prompts.
      temperature: of the sampling; 1 is the model's own spread.

    Returns:
      Token ids of each prompt, the opening of the assistant's turn included. Fewer than `rows`
      where the model wrote nothing.
    """
    turns = user_turn(params)
    draw = np.random.default_rng([seed, 1])
    encode = lambda text: params.tokenizer.encode(text, add_special_tokens=False)
    # A space that ends an opening belongs to the word that the model adds.
    openings = [encode(text.removesuffix(" ")) for text in draw.choice(kind.openings, size=rows)]
    result = decode(
        params,
        [[*turns.before, *opening] for opening in openings],
        max_new_tokens=kind.tokens,
        sampling=Sampling(temperature=temperature),
        seed=seed,
        eos_ids=() if kind.closings else None,
    )
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    ends = set(params.eos_ids)
    prompts = []
    for row, opening in enumerate(openings):
        new = tokens[row, : lengths[row]].tolist()
        new = new[: next((i for i, token in enumerate(new) if token in ends), len(new))]
        if kind.closings:
            new += encode(str(draw.choice(kind.closings)))
        if new:
            prompts.append([*turns.before, *opening, *new, *turns.after])
    return prompts


def read_prompts(params: Params, path: str | os.PathLike[str]) -> list[list[int]]:
    """Prompts of a file, by the checkpoint's chat template.

    Each line is a JSON text; or an object with "messages" (or "conversations" with "from" and
    "value") of which each user's turn with what precedes it is a prompt; or with "turns" (the
    user's side only: its first); or with "prompt" or "text". A `.txt` file is a prompt a line.

    Raises:
      ValueError: the file is missing or empty, or a line has another form; it names the line.
    """
    return [encode_prompt(params, prompt) for found, _ in read_lines(path) for prompt in found]


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[list[Prompt], str]]:
    """The prompts of each line of a file, as `read_prompts` takes it, and the line's category.

    Yields:
      Texts or messages; what the line's object has as "category", else "all".

    Raises:
      ValueError: the file is missing or empty, or a line has another form; it names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data {str(path)!r} is no file; wanted .jsonl or .txt with prompts")
    lines = [
        (number, line)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise ValueError(f"data {path.name!r} has no prompts")
    for number, line in lines:
        where, value = f"data {path.name!r}, line {number}", line
        if path.suffix != ".txt":
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
        category = value.get("category", "all") if isinstance(value, dict) else "all"
        yield _line_prompts(value, where), str(category)


def _line_prompts(value: Any, where: str) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        if "conversations" in value:
            roles = {"human": "user", "gpt": "assistant"}
            messages = [
                {"role": roles.get(m.get("from"), m.get("from")), "content": m.get("value")}
                for m in _list_of_objects(value["conversations"], "conversations", where)
            ]
            return _user_turns(messages, where)
        if "messages" in value:
            return _user_turns(_list_of_objects(value["messages"], "messages", where), where)
        for name in ("prompt", "text"):
            if isinstance(value.get(name), str):
                return [value[name]]
        turns = value.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return [turns[0]]
    raise ValueError(
        f"{where} is neither a text nor an object with messages, conversations, turns, prompt or "
        f"text: {value!r:.80}"
    )


def _list_of_objects(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise ValueError(f"{where}: {name} must be a list of objects, got {value!r:.80}")
    return value


def _user_turns(messages: list[dict[str, Any]], where: str) -> list[list[dict[str, str]]]:
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: the content of a message must be a text, got {message!r}")
    ends = [i + 1 for i, message in enumerate(messages) if message.get("role") == "user"]
    if not ends:
        raise ValueError(f"{where} has no message of a user")
    return [messages[:end] for end in ends]
