"""SentencePiece vocabularies of GGUF files against the joining of neighbours as it is defined."""

import itertools
import random

import pytest

from specjax.checkpoints import gguf_tokenizer
from specjax.checkpoints.sentencepiece import SPACE

WORDS = "the cat sat on a mat then at that hat other another".split()


def _pieces() -> tuple[list[str], list[float], list[int]]:
    """Specials, bytes, letters, and many substrings of a few words with scores of their own."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    parts = {
        w[i:j]
        for word in WORDS
        for w in (SPACE + word,)
        for i in range(len(w))
        for j in range(i + 1, len(w) + 1)
    }
    chosen = sorted(parts, key=lambda part: (len(part), part))
    chosen = [p for p in chosen if len(p) == 1 or random.Random(p).random() < 0.7]
    pieces += chosen
    kinds += [1] * len(chosen)
    order = random.Random(0).sample(range(len(chosen)), len(chosen))
    scores = [0.0] * 259 + [-float(x) for x in order]
    return [*pieces, "<turn>"], [*scores, 0.0], [*kinds, 4]


def _metadata(**changes):
    pieces, scores, kinds = _pieces()
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return base | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}


def _by_definition(text: str) -> list[int]:
    """Joins the neighbours whose union has the best score until there are none."""
    pieces, scores, _ = _pieces()
    ids = {piece: i for i, piece in enumerate(pieces)}
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (scores[ids[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


@pytest.mark.parametrize("space_prefix", [True, False])
def test_encoding_and_decoding(space_prefix):
    made = gguf_tokenizer.tokenizer_from_gguf(_metadata(add_space_prefix=space_prefix))
    rng = random.Random(1)
    for _ in range(50):
        text = " ".join(rng.choice([*WORDS, "thecat", "é🦜", "x"]) for _ in range(6))
        ids = made.encode(text, add_special_tokens=False)
        assert ids == _by_definition((" " if space_prefix else "") + text)
        assert made.decode(ids) == text
    words = made.token_bytes()
    ids = made.encode("the é", add_special_tokens=False)
    assert b"".join(words[i] for i in ids).decode() == (" " if space_prefix else "") + "the é"


def test_special_tokens():
    made = gguf_tokenizer.tokenizer_from_gguf(_metadata())
    ids = made.encode("the cat<turn>")
    assert (ids[0], ids[-1]) == (1, len(_pieces()[0]) - 1)  # bos unless the file says otherwise
    bare = gguf_tokenizer.tokenizer_from_gguf(_metadata(add_bos_token=False))
    assert bare.encode("the cat<turn>") == ids[1:]
    assert made.eos_ids == (2,)


def test_bad_tables():
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores has 1"):
        gguf_tokenizer.tokenizer_from_gguf(_metadata(scores=[0.0]))
    pieces, scores, kinds = _pieces()
    with pytest.raises(ValueError, match="neither an unknown token nor a token for each byte"):
        gguf_tokenizer.tokenizer_from_gguf(
            _metadata(tokens=pieces[5:], scores=scores[5:], token_type=kinds[5:])
        )
    with pytest.raises(ValueError, match=r"'llama' .SentencePiece."):
        gguf_tokenizer.tokenizer_from_gguf(_metadata(model="t5"))
