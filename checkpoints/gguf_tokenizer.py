"""The tokenizer of a GGUF file: byte-level BPE or SentencePiece, from tables in its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.checkpoints import sentencepiece
from specjax.checkpoints.tokenizer import SpecialIds, Tokenizer, declared_ids, padding_id

__all__ = ["PRE_TOKENIZERS", "special_ids_from_gguf", "tokenizer_from_gguf"]

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
    eos = tuple(dict.fromkeys(i for value in declared for i in declared_ids(value, "eos_token_id")))
    bos = declared_ids(metadata.get("tokenizer.ggml.bos_token_id"), "bos_token_id")
    pad = declared_ids(metadata.get("tokenizer.ggml.padding_token_id"), "padding_token_id")
    return SpecialIds(bos[0] if bos else None, eos, padding_id(pad, eos))


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
