"""Tokenizers: the recorded ids, chat templates, growing text, and files that are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from specjax.checkpoints import gguf_tokenizer
from specjax.checkpoints import tokenizer as tokenizing
from specjax.checkpoints.tokenizer import Detokenizer

TEXTS = (
    "Grüße, 你好 🙂👩‍👩‍👧 e\u0301 🇩🇪!",
    "  two  spaces\n\n\ttabs\r\n 1234567 3.14",
    "a \ufffd b",
    "",
)


@pytest.fixture(scope="module")
def cases(shared):
    return json.loads((shared / "data" / "smollm2_greedy_reference.json").read_text())["cases"]


def metadata(pre="gpt-2", extra_tokens=(), merges=(), **keys):
    """A vocabulary of all bytes, the merges' results, and more tokens at the end."""
    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    kinds = [1] * len(tokens) + [kind for _, kind in extra_tokens]
    tokens += [token for token, _ in extra_tokens]
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(merges),
    } | named


def test_recorded_ids(smollm2, cases):
    for case in cases:
        assert smollm2.tokenizer.encode(case["text"]) == case["prompt_ids"]
        text = smollm2.tokenizer.decode(case["greedy_ids"], skip_special_tokens=False)
        assert text == case["output"]


def test_recorded_chat(smollm2, cases):
    for case in cases:
        user = case["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": user}]
        assert smollm2.tokenizer.apply_chat_template(messages) == case["text"]
        assert smollm2.tokenizer.encode_chat(messages) == case["prompt_ids"]
        closed = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert closed == case["text"].removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_special_tokens_in_decode(smollm2):
    ids = smollm2.tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smollm2.tokenizer.decode(ids) == "hi"
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_content_decides_equality(smollm2):
    first = gguf_tokenizer.tokenizer_from_gguf(metadata())
    second = gguf_tokenizer.tokenizer_from_gguf(metadata())
    other = gguf_tokenizer.tokenizer_from_gguf(metadata(eos_token_id=3))
    assert first == second
    assert hash(first) == hash(second)
    assert first != other
    assert len({first, second, other, smollm2.tokenizer}) == 3


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_join_to_the_whole(smollm2, text, size):
    ids = smollm2.tokenizer.encode(text)
    detokenizer = Detokenizer(smollm2.tokenizer)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_waits_for_its_last_byte():
    tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata())
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.flush() == ""


def test_pieces_of_any_bytes_join_to_the_whole(smollm2):
    rng = np.random.default_rng(0)
    single = gguf_tokenizer.tokenizer_from_gguf(metadata(extra_tokens=[("<|end|>", 3)]))
    for tokenizer in (single, smollm2.tokenizer):
        for skip in (True, False):
            for _ in range(60):
                ids = rng.integers(0, tokenizer.vocab_size, 40)
                detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
                text = "".join(detokenizer.push(ids[i : i + 1]) for i in range(40))
                text += detokenizer.flush()
                assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_cut_character_comes_with_flush():
    tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata())
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a🙂")[:-1]
    assert detokenizer.push(ids) == "a"
    assert "a" + detokenizer.flush() == tokenizer.decode(ids)
    assert detokenizer.push(tokenizer.encode("b")) == "b"


# --- the bytes of each token -------------------------------------------------------------------


def byte_level():
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    )
    backend.decoder = decoders.ByteLevel()
    # A space and an emoji are not in the byte-level alphabet, a small e with an accent is.
    backend.add_tokens(["a b", "é", "x🙂", "Ġz", "<tool>"])
    backend.add_special_tokens(["<s>"])
    return backend


def sentence_piece(decoder):
    pieces = ["<unk>", "▁", "a", "▁b", "▁▁c", "d▁e", "é", "<0xZZ>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    )
    backend.decoder = decoder
    backend.add_tokens(["▁new"])
    backend.add_special_tokens(["<s>"])
    return backend


def wrap(backend):
    return tokenizing.Tokenizer(
        backend=backend,
        ids=tokenizing.SpecialIds(None, (), 0),
        named_tokens=(),
        chat_template=None,
    )


MARK, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STRIP = decoders.Strip(" ", 1, 0)
SENTENCE_PIECE = (
    decoders.Sequence([MARK, BYTES, FUSE, STRIP]),
    decoders.Sequence([MARK, BYTES, FUSE]),
    decoders.Sequence([BYTES, decoders.Metaspace()]),
    decoders.Sequence([BYTES, decoders.Metaspace(prepend_scheme="never")]),
)


def test_bytes_of_byte_level_tokens_are_the_text(smollm2):
    rng = np.random.default_rng(0)
    for tokenizer in (smollm2.tokenizer, wrap(byte_level())):
        words = tokenizer.token_bytes()
        assert len(words) == tokenizer.vocab_size
        assert tokenizer.token_bytes() is words
        for _ in range(500):
            ids = rng.integers(0, len(words), rng.integers(0, 20))
            assert b"".join(words[i] for i in ids).decode(errors="replace") == tokenizer.decode(ids)


@pytest.mark.parametrize("decoder", SENTENCE_PIECE)
def test_bytes_of_sentence_piece_tokens_are_the_text(decoder):
    tokenizer = wrap(sentence_piece(decoder))
    words = tokenizer.token_bytes()
    rng = np.random.default_rng(0)
    first_byte = tokenizer.backend.token_to_id("<0x00>")
    pieces = [[i] for i in (*range(first_byte), len(words) - 2, len(words) - 1)]
    pieces += [[first_byte + byte for byte in c.encode()] for c in ("é", "🙂", "z", " ")]
    for _ in range(500):
        ids = [i for _ in range(8) for i in pieces[rng.integers(len(pieces))]]
        # Behind other text; at the start of a text, spaces are dropped.
        text = b"".join(words[i] for i in ids).decode()
        assert tokenizer.decode([2, *ids]) == "a" + text
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


def test_bytes_of_ids_without_a_token():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    backend.decoder = decoders.Fuse()
    assert wrap(backend).token_bytes() == (b"a", b"", b"", b"b")


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Replace(tokenizers.Regex("a+"), ""), "Replace"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), FUSE]), "Strip"),
        (decoders.Sequence([FUSE, decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([FUSE, decoders.Replace("ab", "")]), "Replace"),
    ],
)
def test_decoders_that_do_not_say_the_bytes_of_a_token(decoder, name):
    with pytest.raises(ValueError, match=f"decoder is .*{name}"):
        wrap(sentence_piece(decoder)).token_bytes()


def test_no_decoder():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match="no decoder"):
        wrap(backend).token_bytes()


def test_decode_wants_flat_ids(smollm2):
    for ids in (np.zeros((2, 2), np.int32), [-1], [0.5]):
        with pytest.raises(ValueError, match="flat sequence"):
            smollm2.tokenizer.decode(ids)


# What each kind leaves in one piece shows by a merge that would join it.
@pytest.mark.parametrize(
    ("pre", "joined", "apart"),
    [
        ("gpt-2", ["1 2", "12 3", "a b"], ["a 1", "a !", "1 !"]),
        ("smollm", ["a b"], ["1 2", "a 1"]),
        ("llama-bpe", ["1 2", "12 3", "! a", "! \u010a"], ["a 1", "a !"]),
        ("qwen2", ["! a", "! \u010a"], ["1 2", "a 1"]),
        ("default", ["1 2", "12 3", "a b"], ["! a", "a 1", "! \u010a"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(pre, joined, apart):
    # U+010A is how the byte-level alphabet writes a newline.
    add = {"add_bos_token": False}
    for merge in joined:
        needed = ["1 2", merge] if merge.startswith("12") else [merge]
        tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata(pre, merges=needed, **add))
        text = merge.replace(" ", "").replace("\u010a", "\n")
        assert len(tokenizer.encode(text)) == 1, merge
    for merge in apart:
        tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata(pre, merges=[merge], **add))
        text = merge.replace(" ", "").replace("\u010a", "\n")
        assert len(tokenizer.encode(text)) == 2, merge


def test_llama3_cuts_digits_by_three():
    merges = ["1 2", "12 3", "123 4"]
    tokenizer = gguf_tokenizer.tokenizer_from_gguf(
        metadata("llama-bpe", merges=merges, add_bos_token=False)
    )
    assert len(tokenizer.encode("1234")) == 2


def test_bos_is_added_when_the_checkpoint_says_so():
    end = [("<|begin|>", 3)]
    bos = 256
    quiet = gguf_tokenizer.tokenizer_from_gguf(metadata(extra_tokens=end, bos_token_id=bos))
    told = gguf_tokenizer.tokenizer_from_gguf(
        metadata(extra_tokens=end, bos_token_id=bos, add_bos_token=True)
    )
    llama3 = gguf_tokenizer.tokenizer_from_gguf(
        metadata("llama-bpe", extra_tokens=end, bos_token_id=bos)
    )
    assert quiet.encode("a") == told.encode("a")[1:] == told.encode("a", add_special_tokens=False)
    assert told.encode("a")[0] == llama3.encode("a")[0] == bos
    with pytest.raises(ValueError, match="bos_token_id is missing"):
        gguf_tokenizer.tokenizer_from_gguf(metadata("llama-bpe"))


def test_kinds_of_tokens():
    extra = [("<|ctl|>", 3), ("<tool>", 4), ("[PAD]", 5)]
    tokenizer = gguf_tokenizer.tokenizer_from_gguf(
        metadata(extra_tokens=extra, eos_token_id=256, eot_token_id=257)
    )
    ids = tokenizer.encode("<|ctl|>a<tool>[PAD]")
    assert ids[0] == 256
    assert ids[2] == 257
    assert 258 not in ids
    assert tokenizer.decode(ids) == "a<tool>[PAD]"
    assert tokenizer.eos_ids == (256, 257)
    assert tokenizer.pad_id == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'.*smollm"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, r"tokenizer\.ggml\.tokens has 2"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "'a zz'"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_gguf_tables_that_are_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer.tokenizer_from_gguf(metadata() | changes)


@pytest.fixture
def folder(smollm2, tmp_path):
    """SmolLM2's tokenizer as a Hugging Face folder has it."""
    smollm2.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    named = dict(smollm2.tokenizer.named_tokens)
    named["bos_token"] = {"content": named["bos_token"]}
    named["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": smollm2.tokenizer.chat_template},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    return tmp_path


def test_folder_and_gguf_agree(smollm2, folder, cases):
    tokenizer = tokenizing.tokenizer_from_folder(folder)
    assert tokenizer == smollm2.tokenizer
    assert tokenizer.encode(cases[0]["text"]) == cases[0]["prompt_ids"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 2)


def test_folder_files_and_their_order(folder):
    (folder / "config.json").write_text('{"eos_token_id": 7, "pad_token_id": -1}')
    assert tokenizing.tokenizer_from_folder(folder).eos_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert tokenizing.tokenizer_from_folder(folder).eos_ids == (2, 0)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = tokenizing.tokenizer_from_folder(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<|im_start|>x"


def test_folder_files_that_are_wrong(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag"}]}')
    with pytest.raises(ValueError, match="rag"):
        tokenizing.tokenizer_from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizers library"):
        tokenizing.tokenizer_from_folder(folder)
    (folder / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: does not hold JSON"):
        tokenizing.tokenizer_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    assert tokenizing.tokenizer_from_folder(folder) is None
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tokenizer\.model but no tokenizer\.json"):
        tokenizing.tokenizer_from_folder(folder)
