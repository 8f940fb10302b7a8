"""SentencePiece's byte-pair vocabularies as GGUF files hold them: pieces with scores, no merges.

Encoding joins, again and again, the two neighbours whose union has the best score. That is
byte-pair merging with the merges in the order of their results' scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

__all__ = ["SPACE", "backend"]

SPACE = "\u2581"  # stands for a space in pieces
_NORMAL, _UNKNOWN, _UNUSED, _BYTE = 1, 2, 5, 6  # tokenizer.ggml.token_type


def backend(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, space_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer of pieces and scores.

    Args:
      pieces: by id.
      scores: of each piece; the best are joined first.
      kinds: of each piece, as `tokenizer.ggml.token_type`.
      space_prefix: whether a space is put before every text, and taken away in decoding.

    Returns:
      A tokenizer without special tokens.

    Raises:
      ValueError: neither an unknown piece nor pieces for all 256 bytes, so that not every text
        can be encoded.

    Example:
      >>> made = backend(["<unk>", "a", "b", "ab"], [0.0, -3.0, -2.0, -1.0], [2, 1, 1, 1],
      ...                space_prefix=False)
      >>> made.encode("abba").tokens
      ['ab', 'b', 'a']
    """
    unknown = [i for i, kind in enumerate(kinds) if kind == _UNKNOWN]
    bytes_ = {pieces[i].lower() for i, kind in enumerate(kinds) if kind == _BYTE}
    whole = {f"<0x{byte:02x}>" for byte in range(256)} <= bytes_
    if not unknown and not whole:
        raise ValueError(
            "tokenizer.ggml.token_type names neither an unknown token nor a token for each byte, "
            "so not every text could be encoded. The file is damaged: download it again."
        )
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(pieces, scores, kinds, vocab),
            unk_token=pieces[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=whole,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if space_prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return made


def _merges(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of pieces whose union is a piece, the best union first."""
    joined = [kind in (_NORMAL, _UNUSED) for kind in kinds]
    found = []
    for i, piece in enumerate(pieces):
        if not joined[i]:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None and joined[left] and joined[right]:
                found.append((-scores[i], i, left, right))
    return [(pieces[left], pieces[right]) for _, _, left, right in sorted(found)]
