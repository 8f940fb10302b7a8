"""Text to token ids and back, chat templates, and text that grows while it is generated.

`Tokenizer` is immutable and compares by content, so it can be a static part of a jitted pytree.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders

from specjax.checkpoints import chat, vocabulary
from specjax.checkpoints.safetensors_folder import read_json

__all__ = [
    "Detokenizer",
    "SpecialIds",
    "Tokenizer",
    "declared_ids",
    "padding_id",
    "special_ids_from_folder",
    "tokenizer_from_folder",
]

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no complete character


class SpecialIds(NamedTuple):
    """The token ids that a checkpoint declares for its ends."""

    bos: int | None
    eos: tuple[int, ...]  # empty when none is declared
    pad: int  # the declared one, otherwise the first of eos, otherwise 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A byte-pair vocabulary, its special tokens and its chat template."""

    backend: tokenizers.Tokenizer
    ids: SpecialIds
    named_tokens: tuple[tuple[str, str], ...]  # ("bos_token", "<s>"), ...: for chat templates
    chat_template: str | None
    prefix: tuple[int, ...] = ()  # put around every encoded text, beside what backend adds itself
    suffix: tuple[int, ...] = ()
    fingerprint: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        content = json.dumps(
            [
                self.backend.to_str(),
                self.ids,
                self.named_tokens,
                self.chat_template,
                self.prefix,
                self.suffix,
            ]
        )
        object.__setattr__(self, "fingerprint", hashlib.sha256(content.encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]})"

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, None when the checkpoint declares none."""
        return self.ids.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end generation; empty when the checkpoint declares none."""
        return self.ids.eos

    @property
    def pad_id(self) -> int:
        """The token for unused places: declared, otherwise the first end token, otherwise 0."""
        return self.ids.pad

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included. A model's vocabulary may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. Special tokens written in the text become their ids.

        Args:
          text: the text.
          add_special_tokens: whether to add the tokens that the checkpoint puts around a text
            (Llama 3 adds its bos; SmolLM2 adds none). False for text from a chat template, which
            has them already.

        Returns:
          The token ids.
        """
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Encodes a conversation by the chat template.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: whether to end with the opening of the assistant's turn.

        Returns:
          The token ids.

        Raises:
          ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        text = self.apply_chat_template(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Decodes token ids; no spaces are tidied.

        Args:
          ids: [T] token ids. An id without a token (a padded vocabulary has some) gives no text.
          skip_special_tokens: whether to leave special tokens out.

        Returns:
          The text; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: ids is not a flat sequence of non-negative integers.
        """
        return self.backend.decode(_id_list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation by the checkpoint's chat template.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: whether to end with the opening of the assistant's turn.

        Returns:
          The text. It has its special tokens: encode it with add_special_tokens=False.

        Raises:
          ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template; wanted one to render messages. Give the "
                "whole prompt as text or as token ids instead."
            )
        return chat.render(
            self.chat_template, messages, add_generation_prompt, dict(self.named_tokens)
        )

    def token_bytes(self) -> tuple[bytes, ...]:
        """What each token adds to a text, for searching and constraining text token by token.

        The bytes of all tokens joined are the UTF-8 of `decode` of their ids, but for two things.
        Decoders in SentencePiece's manner drop spaces of a text's first token: here tokens read as
        they do inside a text. And where bytes are no UTF-8, byte fallback replaces each byte of the
        whole run of byte tokens.

        Returns:
          The bytes by id, up to the highest id of this tokenizer; b"" for special tokens, which
          `decode` leaves out, and for ids without a token.

        Raises:
          ValueError: the tokenizer's decoder is of a kind that is not understood.

        Example:
          >>> from specjax import checkpoints
          >>> tokenizer = checkpoints.read("smollm2-135m").tokenizer
          >>> [tokenizer.token_bytes()[i] for i in tokenizer.encode("a 🦜<|im_end|>")]
          [b'a', b' \\xf0\\x9f', b'\\xa6', b'\\x9c', b'']
        """
        return _token_bytes(self)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so, None if there is none."""
        i = self.backend.token_to_id(text)
        return i if i is not None and self.backend.decode([i]) == "" else None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Begins a text that will grow token by token."""
        return Detokenizer(self, skip_special_tokens)


class Detokenizer:
    """Text of a sequence that is still growing.

    Each piece ends with a complete character; the pieces joined are `Tokenizer.decode` of all ids.

    Example:
      >>> from specjax import checkpoints
      >>> tokenizer = checkpoints.read("smollm2-135m").tokenizer
      >>> detokenizer = Detokenizer(tokenizer)
      >>> [detokenizer.push([i]) for i in tokenizer.encode("a 🦜")]
      ['a', ' ', '', '🦜']
      >>> detokenizer.flush()
      ''
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Byte-level text is the tokens' bytes joined, so what lies before a complete character can
        # be forgotten. Other decoders treat the start of the text in their own way: keep it all.
        self._forget = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        self._ids: list[int] = []
        self._sent = 0  # characters of decode(_ids) that were handed out

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """Takes the next ids.

        Args:
          ids: [T] token ids, also none.

        Returns:
          The text that became complete; "" when there is none yet.
        """
        self._ids += _id_list(ids)
        text = self._tokenizer.decode(self._ids, self._skip)
        complete = text.rstrip(_REPLACEMENT)
        # Held back until the next character: a true U+FFFD looks like an incomplete one.
        piece, self._sent = complete[self._sent :], max(self._sent, len(complete))
        if self._forget and complete == text:
            self._ids, self._sent = [], 0
        return piece

    def flush(self) -> str:
        """Ends the sequence.

        Returns:
          What was held back; an incomplete character comes as U+FFFD. Then the detokenizer is as
          new.
        """
        piece = self._tokenizer.decode(self._ids, self._skip)[self._sent :]
        self._ids, self._sent = [], 0
        return piece


def tokenizer_from_folder(path: Path) -> Tokenizer | None:
    """Reads the tokenizer of a Hugging Face checkpoint folder.

    Args:
      path: a folder with tokenizer.json and, beside it, tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja, generation_config.json and config.json.

    Returns:
      The tokenizer; None when the folder has no tokenizer file at all.

    Raises:
      ValueError: a file is damaged, or there is a tokenizer in another format only.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        for other in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"):
            if (path / other).is_file():
                raise ValueError(
                    f"{path}: has {other} but no tokenizer.json, the only format read. Save the "
                    "tokenizer with transformers' fast tokenizer class, or download tokenizer.json."
                )
        return None
    backend = _parse_backend(file)
    names = _named_tokens(path)
    return Tokenizer(
        backend=backend,
        ids=_special_ids(path, names, backend),
        named_tokens=tuple(sorted(names.items())),
        chat_template=_folder_template(path),
    )


def special_ids_from_folder(path: Path) -> SpecialIds:
    """Reads the special ids of a folder that has no tokenizer.

    As transformers does, generation_config.json goes before config.json.

    Args:
      path: the checkpoint folder.

    Returns:
      The ids.

    Raises:
      ValueError: a file is damaged, or an id is not a non-negative integer.
    """
    return _special_ids(path, {}, None)


def _parse_backend(file: Path) -> tokenizers.Tokenizer:
    text = json.dumps(read_json(file))  # names the file when it is no JSON
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        # The library raises nothing narrower; anything else is not ours to explain.
        if type(error) is not Exception:
            raise
        raise ValueError(
            f"{file}: the tokenizers library cannot read it ({error}). Download it again, or "
            "update the tokenizers package."
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _named_tokens(path: Path) -> dict[str, str]:
    """bos_token and its like, each written as a text or as an object with its content."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _optional_json(path / file).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                names[key] = content
    return names


def _folder_template(path: Path) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text("utf-8")
    template = _optional_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ValueError(
                f"{path / 'tokenizer_config.json'}: has the chat templates "
                f"{', '.join(map(str, named))}; wanted one named default. Rename one of them."
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{path / 'tokenizer_config.json'}: chat_template is {type(template).__name__}; wanted "
            "a text or a list of named ones. Download the file again."
        )
    return template


def _special_ids(
    path: Path, names: Mapping[str, str], backend: tokenizers.Tokenizer | None
) -> SpecialIds:
    sources = [_optional_json(path / file) for file in ("generation_config.json", "config.json")]

    def declared(name: str) -> tuple[int, ...]:
        for source in sources:
            if ids := declared_ids(source.get(f"{name}_token_id"), f"{name}_token_id"):
                return ids
        token = names.get(f"{name}_token")
        found = backend.token_to_id(token) if backend is not None and token is not None else None
        return () if found is None else (found,)

    bos, eos = declared("bos"), declared("eos")
    return SpecialIds(bos[0] if bos else None, eos, padding_id(declared("pad"), eos))


def declared_ids(value: Any, key: str) -> tuple[int, ...]:
    """One id, several, or none: null and -1 both say that there is none."""
    values = value if isinstance(value, list) else [value]
    ids = tuple(i for i in values if i is not None and i != -1)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{key} is {value!r}; wanted token ids. Correct the checkpoint.")
    return ids


def padding_id(declared: tuple[int, ...], eos: tuple[int, ...]) -> int:
    """The declared padding token, otherwise the first end token, otherwise 0."""
    return (*declared, *eos, 0)[0]


@functools.lru_cache(maxsize=16)
def _token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    return vocabulary.bytes_of_tokens(tokenizer.backend)


def _id_list(ids: Sequence[int] | np.ndarray) -> list[int]:
    array = np.asarray(ids)
    if array.size == 0:
        return []
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.min() < 0:
        raise ValueError(
            f"ids has shape {array.shape} and type {array.dtype}; wanted a flat sequence of "
            "non-negative integers. Decode one row at a time, cut at its length."
        )
    return array.tolist()
