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
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.checkpoints import chat, sentencepiece, vocabulary
from specjax.checkpoints.safetensors_folder import read_json

__all__ = [
    "PRE_TOKENIZERS",
    "Detokenizer",
    "SpecialIds",
    "Tokenizer",
    "special_ids_from_folder",
    "special_ids_from_gguf",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no complete character

# How text is cut before byte-pair merging, by `tokenizer.ggml.pre`.
_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT = _LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's own rule for files that name no pre-tokenizer; the four cuts go one after another.
_DEFAULT_CUTS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


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


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: the keys of the file.

    Returns:
      The tokenizer; None when the file describes none.

    Raises:
      ValueError: the tokenizer is neither byte-level BPE nor SentencePiece's, its pre-tokenizer is
        not known, or its tables do not fit each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model == "none":
        return None
    if model not in _GGUF_MODELS:
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece). Use the Hugging Face checkpoint of this model, which has "
            "tokenizer.json."
        )
    tokens, kinds = _table(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type")
    kinds = [_NORMAL] * len(tokens) if kinds is None else kinds
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(set(tokens))} of them "
            f"different, and tokenizer.ggml.token_type has {len(kinds)}; wanted three equal "
            "numbers. The file is damaged: download it again."
        )
    backend, has_bos = _GGUF_MODELS[model](metadata, tokens, kinds)
    added = [(tokens[i], kind) for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, k in added if k == _CONTROL]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, k in added
            if k == _USER_DEFINED
        ]
    )
    ids = special_ids_from_gguf(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {
        name: tokens[i]
        for name, key in names.items()
        if (i := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and i < len(tokens)
    }
    return Tokenizer(
        backend=backend,
        ids=ids,
        named_tokens=tuple(sorted(named.items())),
        chat_template=metadata.get("tokenizer.chat_template"),
        prefix=_around(metadata, "bos", ids.bos, default=has_bos),
        suffix=_around(metadata, "eos", metadata.get("tokenizer.ggml.eos_token_id"), default=False),
    )


def _byte_level_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE; and whether texts begin with bos unless the file says otherwise."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(PRE_TOKENIZERS)}. Use the "
            "Hugging Face checkpoint of this model, which has tokenizer.json."
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    llama3 = pre in _LLAMA3_NAMES
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(_table(metadata, "merges"), vocab), ignore_merges=llama3
        )
    )
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    # llama.cpp adds bos for Llama 3 files, and for no other kind of byte-level BPE.
    return backend, llama3


def _sentencepiece_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece; and whether texts begin with bos unless the file says otherwise."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = len(scores) if isinstance(scores, list) else "no"
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries and tokenizer.ggml.scores has "
            f"{found}; wanted equal numbers. The file is damaged: download it again."
        )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece.backend(tokens, scores, kinds, space_prefix=prefix), True


_GGUF_MODELS = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}


def special_ids_from_gguf(metadata: Mapping[str, Any]) -> SpecialIds:
    """Reads the special ids of a GGUF file: ends of text, of turn and of message all end.

    Args:
      metadata: the keys of the file.

    Returns:
      The ids.

    Raises:
      ValueError: an id is not a non-negative integer.
    """
    keys = ("eos", "eot", "eom")
    declared = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    eos = tuple(dict.fromkeys(i for value in declared for i in _ids(value, "eos_token_id")))
    bos = _ids(metadata.get("tokenizer.ggml.bos_token_id"), "bos_token_id")
    pad = _ids(metadata.get("tokenizer.ggml.padding_token_id"), "padding_token_id")
    return SpecialIds(bos[0] if bos else None, eos, _pad(pad, eos))


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _cut(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, _byte_level(use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _cut(_LLAMA3_CUT)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _cut(_QWEN2_CUT)


def _default() -> pre_tokenizers.PreTokenizer:
    return _cut(*_DEFAULT_CUTS)


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = {
    "default": _default,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    **dict.fromkeys(_LLAMA3_NAMES, _llama3),
}


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
            if ids := _ids(source.get(f"{name}_token_id"), f"{name}_token_id"):
                return ids
        token = names.get(f"{name}_token")
        found = backend.token_to_id(token) if backend is not None and token is not None else None
        return () if found is None else (found,)

    bos, eos = declared("bos"), declared("eos")
    return SpecialIds(bos[0] if bos else None, eos, _pad(declared("pad"), eos))


def _ids(value: Any, key: str) -> tuple[int, ...]:
    """One id, several, or none: null and -1 both say that there is none."""
    values = value if isinstance(value, list) else [value]
    ids = tuple(i for i in values if i is not None and i != -1)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{key} is {value!r}; wanted token ids. Correct the checkpoint.")
    return ids


def _pad(declared: tuple[int, ...], eos: tuple[int, ...]) -> int:
    return (*declared, *eos, 0)[0]


def _around(
    metadata: Mapping[str, Any], name: str, token: int | None, default: bool
) -> tuple[int, ...]:
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return ()
    if token is None:
        raise ValueError(
            f"every text gets a {name} token (tokenizer.ggml.add_{name}_token) but "
            f"tokenizer.ggml.{name}_token_id is missing. Use a complete file."
        )
    return (token,)


def _table(metadata: Mapping[str, Any], name: str) -> list[str]:
    table = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(table, list) or not all(isinstance(entry, str) for entry in table):
        raise ValueError(
            f"tokenizer.ggml.{name} is {type(table).__name__}; wanted a list of texts. The file is "
            "damaged or incomplete: download it again."
        )
    return table


def _merges(merges: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(
                f"tokenizer.ggml.merges has {merge!r}, whose parts and result are not all in "
                "tokenizer.ggml.tokens. The file is damaged: download it again."
            )
        pairs.append((left, right))
    return pairs


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
