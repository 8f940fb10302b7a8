"""The bytes that each token adds to a text, derived from the tokenizer's decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

__all__ = ["bytes_of_tokens"]

_Piece = str | bytes  # a token on its way through the decoder; bytes are final
_KNOWN = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, then Strip; alone or in sequence"


def bytes_of_tokens(backend: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Decodes each token as it reads inside a text.

    Args:
      backend: the tokenizer.

    Returns:
      The bytes by id; b"" for special tokens and for ids without a token.

    Raises:
      ValueError: the decoder is of a kind that is not understood.

    Example:
      >>> from tokenizers import Tokenizer, decoders, models
      >>> backend = Tokenizer(models.BPE(vocab={"a": 0, "Ġb": 1, "Ã": 2}, merges=[]))
      >>> backend.decoder = decoders.ByteLevel()
      >>> bytes_of_tokens(backend)
      (b'a', b' b', b'\\xc3')
    """
    description = json.loads(backend.to_str())
    steps = _steps(description["decoder"])
    special = {token["content"] for token in description["added_tokens"] if token["special"]}

    def decode(token: str | None) -> bytes:
        if token is None or token in special:
            return b""
        piece: _Piece = token
        for step in steps:
            if isinstance(piece, str):
                piece = step(piece)
        return piece.encode() if isinstance(piece, str) else piece

    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return tuple(decode(backend.id_to_token(i)) for i in range(highest + 1))


def _steps(decoder: Mapping[str, Any] | None) -> list[Callable[[str], _Piece]]:
    """The decoder as functions of one token.

    After Fuse the text is one piece, so what comes then may only act on its start.
    """
    kinds = _flat(decoder)
    joined = next(
        (i for i, d in enumerate(kinds) if d["type"] in ("Fuse", "ByteLevel")), len(kinds)
    )
    for later in kinds[joined + 1 :]:
        if later["type"] != "Fuse" and not (later["type"] == "Strip" and later["stop"] == 0):
            raise _unknown(decoder)
    steps = []
    for kind in kinds[: joined + 1]:
        match kind:
            case {"type": "ByteLevel"}:
                steps.append(_from_byte_level)
            case {"type": "Metaspace", "replacement": str(mark)}:
                steps.append(_replacing(mark, " "))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                steps.append(_replacing(old, new))
            case {"type": "ByteFallback"}:
                steps.append(_from_hexadecimal)
            case {"type": "Fuse"}:
                pass
            case _:
                raise _unknown(decoder)
    return steps


def _flat(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ValueError(
            f"the tokenizer has no decoder; supported: {_KNOWN}. Correct tokenizer.json."
        )
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _flat(part)]
    return [decoder]


def _unknown(decoder: Mapping[str, Any] | None) -> ValueError:
    return ValueError(
        f"the tokenizer's decoder is {json.dumps(decoder)}, by which the bytes of a single token "
        f"are not known; supported: {_KNOWN}. Use token ids instead of texts."
    )


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    # A token with any other character (an added one) stands for its own text.
    known = all(character in _ALPHABET for character in token)
    return bytes(_ALPHABET[character] for character in token) if known else token.encode()


def _from_hexadecimal(token: str) -> _Piece:
    byte = re.fullmatch(r"<0x([0-9a-fA-F]{2})>", token)
    return token if byte is None else bytes([int(byte[1], 16)])


def _replacing(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)
