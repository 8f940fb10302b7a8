"""Converting: every pair of formats, what stays as it is, what is refused, and a killed process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specjax
from specjax import checkpoints
from specjax.checkpoints import gguf_writing, writing
from specjax.checkpoints.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from specjax.checkpoints.safetensors_folder import read_folder
from specjax.checkpoints.tokenizer import Tokenizer, tokenizer_from_folder
from specjax.checkpoints.tokenizer_writing import write_ids, write_tokenizer
from specjax.checkpoints.writing import FORMATS
from specjax.models import config_writing, families
from specjax.models.config import DecoderConfig
from tests.checkpoints.test_tokenizer import metadata

ROOT = Path(__file__).resolve().parents[2]
INVERTIBLE = """
hf-gemma2 hf-gemma3-text hf-llama-tied-llama3rope hf-llama-untied hf-mistral hf-mixtral hf-qwen2
hf-qwen3 hf-qwen3-moe
""".split()
TURNED = ["hf-gpt-neox", "hf-gpt2", "mtp-deepseek-v3"]


def same_weights(ours: checkpoints.Checkpoint, theirs: checkpoints.Checkpoint) -> None:
    assert set(ours.weights) == set(theirs.weights)
    for key, read in ours.weights.items():
        a, b = read(), theirs.weights[key]()
        assert a.dtype == b.dtype, key
        np.testing.assert_array_equal(a, b, err_msg=key)


def same(ours: checkpoints.Checkpoint, theirs: checkpoints.Checkpoint) -> None:
    assert ours.config == theirs.config
    assert (ours.eos_ids, ours.pad_id) == (theirs.eos_ids, theirs.pad_id)
    same_weights(ours, theirs)


# --- from one format to another --------------------------------------------------------------


@pytest.mark.parametrize("name", INVERTIBLE)
def test_hugging_face_to_orbax_and_back(shared, tmp_path, name):
    source = checkpoints.read(shared / "parity" / name)
    there = checkpoints.convert(source.path, tmp_path / "there", to="orbax")
    back = checkpoints.convert(there, tmp_path / "back")
    same(checkpoints.read(there), source)
    same(checkpoints.read(back), source)
    assert checkpoints.read(back).family == source.family


@pytest.mark.parametrize("name", TURNED)
def test_families_that_orbax_alone_keeps(shared, tmp_path, name):
    source = shared / "parity" / name
    there = checkpoints.convert(source, tmp_path / "there", to="orbax")
    same(checkpoints.read(there), checkpoints.read(source))
    with pytest.raises(ValueError, match=r"cannot be written as a config\.json.*Orbax"):
        checkpoints.convert(there, tmp_path / "back")
    same(checkpoints.read(checkpoints.convert(source, tmp_path / "copy")), checkpoints.read(source))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy", "there"]


@pytest.mark.parametrize("to", FORMATS)
def test_gguf_to_every_format(write_gguf, tmp_path, to):
    source = write_gguf(metadata=[("add_eos_token_id", 2), ("add_eot_token_id", 5)])
    there = checkpoints.convert(source, tmp_path / "there", to=to)
    same(checkpoints.read(there), checkpoints.read(source))


@pytest.mark.parametrize("name", ["hf-llama-untied", "hf-qwen2", "hf-qwen3"])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "q8_0"])
def test_hugging_face_to_gguf(shared, tmp_path, name, dtype):
    source = checkpoints.read(shared / "parity" / name)
    there = checkpoints.read(
        checkpoints.convert(source.path, tmp_path / "there.gguf", to="gguf", dtype=dtype)
    )
    assert there.family == source.family
    assert (there.config, there.eos_ids) == (source.config, source.eos_ids)
    error = {None: 0, "float16": 1e-3, "bfloat16": 8e-3, "q8_0": 1e-2}[dtype]
    for key, read in source.weights.items():
        wanted = read().astype(np.float32)
        matrix = wanted.ndim > 1
        limit = error * np.abs(wanted).max() if matrix else 0
        np.testing.assert_allclose(there.weights[key](), wanted, rtol=0, atol=limit, err_msg=key)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_goes_through_gguf(write_folder, tmp_path, factor):
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = write_folder(config={"rope_scaling": rope, "rope_theta": 500000.0})
    there = checkpoints.convert(folder, tmp_path / "there.gguf", to="gguf")
    same(checkpoints.read(there), checkpoints.read(folder))


@pytest.mark.parametrize("name", ["hf-gemma2", "hf-gpt2", "hf-mistral", "hf-qwen3-moe"])
def test_what_gguf_cannot_hold(shared, tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}: has settings that a GGUF file .* cannot hold"):
        checkpoints.convert(shared / "parity" / name, tmp_path / "there.gguf", to="gguf")
    assert not list(tmp_path.iterdir())


def test_logits_stay_the_same(write_gguf, tmp_path):
    source = write_gguf()
    folder = checkpoints.convert(source, tmp_path / "there")
    tokens = jnp.array([[1, 5, 9, 2, 7, 11, 3]])
    logits = [_logits(specjax.load(path, dtype="float32"), tokens) for path in (source, folder)]
    np.testing.assert_array_equal(*logits)
    assert np.std(logits[0]) > 0.1


def _logits(params: specjax.Params, tokens: jax.Array) -> np.ndarray:
    model, steps = params.model, tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, steps, steps), bool))

    @jax.jit
    def run(weights):
        empty = model.init_cache(weights, 1, 1)
        out = model.forward(weights, tokens, jnp.arange(steps)[None, :], empty, mask)
        return model.unembed(weights, out.hidden)

    return np.asarray(run(params.target))


# --- a Hugging Face folder keeps what it says -------------------------------------------------


def test_a_copy_keeps_files_and_tensors_as_they_are(write_folder, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    source = write_folder(edit=edit, config={"torch_dtype": "float32", "eos_token_id": 3})
    (source / "generation_config.json").write_text('{"eos_token_id":   [3, 4]}')
    (source / "notes.txt").write_text("not needed")
    copy = checkpoints.convert(source, tmp_path / "copy")
    for name in ("config.json", "generation_config.json"):
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = read_folder(copy).tensors, read_folder(source).tensors
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].read(), tensor.read())
    assert sorted(file.name for file in copy.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_another_type(write_folder, tmp_path):
    source = write_folder(config={"torch_dtype": "float32"})
    half = checkpoints.convert(source, tmp_path / "half", dtype="bfloat16")
    same_weights(checkpoints.read(half), checkpoints.read(source, jnp.bfloat16))
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"
    deep = checkpoints.convert(half, tmp_path / "deep", dtype="bfloat16", to="orbax")
    again = checkpoints.convert(deep, tmp_path / "again")
    same(checkpoints.read(again), checkpoints.read(half))
    assert json.loads((again / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_must_stay_exact_does(shared, tmp_path):
    half = checkpoints.convert(shared / "parity" / "mtp-deepseek-v3", tmp_path / "half",
                               dtype="bfloat16")  # fmt: skip
    kinds = {name.split(".")[-1]: t.kind for name, t in read_folder(half).tensors.items()}
    assert kinds["e_score_correction_bias"] == "F32"
    assert kinds["weight"] == "BF16"


def test_shards_and_their_index(write_folder, tmp_path):
    from safetensors.numpy import load_file

    source = write_folder()
    parts = checkpoints.convert(source, tmp_path / "parts", shard_bytes=20_000)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in parts.glob("*.safetensors"))
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    sizes = [load_file(parts / file) for file in files]  # the format's own library reads them
    assert all(sum(a.nbytes for a in part.values()) <= 20_000 for part in sizes)
    assert index["metadata"]["total_size"] == sum(a.nbytes for p in sizes for a in p.values())
    same(checkpoints.read(parts), checkpoints.read(source))
    one = checkpoints.convert(parts, tmp_path / "one")
    assert [file.name for file in one.glob("*.safetensors")] == ["model.safetensors"]
    same(checkpoints.read(one), checkpoints.read(source))


# --- configurations --------------------------------------------------------------------------


@pytest.mark.parametrize("name", INVERTIBLE)
def test_configurations_are_written_as_they_are_read(shared, name):
    config = json.loads((shared / "parity" / name / "config.json").read_text())
    family = families.by_model_type(config["model_type"])
    read = family.config_from_hf(config)
    for model_type in (family.model_type, None, "gpt2"):
        written = config_writing.config_to_hf(read, model_type)
        assert written["model_type"] == family.model_type
        assert family.config_from_hf(json.loads(json.dumps(written))) == read


def test_a_configuration_that_no_family_has():
    config = DecoderConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        parallel=True,
    )
    with pytest.raises(ValueError, match="cannot be written as a config"):
        config_writing.config_to_hf(config)


# --- what is refused -------------------------------------------------------------------------


def test_bad_arguments(write_folder, tmp_path):
    folder = write_folder()
    for options, message in [
        ({"to": "pickle"}, r"to must be one of safetensors, orbax, gguf, got 'pickle'"),
        ({"dtype": "int8"}, r"dtype must be one of float32, bfloat16, float16 for safetensors"),
        ({"dtype": "q8_0", "to": "orbax"}, r"for orbax, got 'q8_0'"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoints.convert(folder, tmp_path / "there", **options)
    with pytest.raises(FileNotFoundError, match="neither a known checkpoint"):
        checkpoints.convert(tmp_path / "nowhere", tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_overwritten(write_folder, tmp_path, to):
    folder = write_folder()
    content = sorted(folder.iterdir())
    (tmp_path / "file").write_text("mine")
    for path in (folder, tmp_path / "file"):
        with pytest.raises(FileExistsError, match=r"exists already and is not overwritten. Remove"):
            checkpoints.convert(folder, path, to=to)
    assert sorted(folder.iterdir()) == content
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    if to != "gguf":
        checkpoints.convert(folder, tmp_path / "empty", to=to)
    assert checkpoints.convert(folder, tmp_path / "new" / "deep", to=to).exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_source_that_breaks_leaves_nothing(write_folder, tmp_path, monkeypatch, to):
    folder = write_folder()
    file, read = folder / "model.safetensors", writing.read

    def read_and_cut(*arguments):
        checkpoint = read(*arguments)
        file.write_bytes(file.read_bytes()[:-8])
        return checkpoint

    monkeypatch.setattr(writing, "read", read_and_cut)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*ends at byte"):
        checkpoints.convert(folder, tmp_path / "there", to=to)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_killed_conversion_leaves_nothing_that_looks_complete(write_folder, tmp_path):
    folder = write_folder()
    script = f"""
        import os, signal
        from specjax import checkpoints
        from specjax.checkpoints import writing

        def read_until_death(*arguments):
            made = read(*arguments)
            die = lambda: os.kill(os.getpid(), signal.SIGKILL)
            return made._replace(weights=made.weights | {{list(made.weights)[-1]: die}})

        read, writing.read = writing.read, read_until_death
        writing._is_hf = lambda path: False  # parameter by parameter
        checkpoints.convert({str(folder)!r}, {str(tmp_path / "there")!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = [path for path in tmp_path.iterdir() if path != folder]
    assert left.name.startswith("there.")
    assert left.name.endswith(".unfinished")
    with pytest.raises((ValueError, FileNotFoundError)):
        checkpoints.read(left)
    checkpoints.convert(folder, tmp_path / "there")


# --- tokenizers ------------------------------------------------------------------------------


TEXTS = ["", "Hello  world\n\n 12345 don't", "naïve 日本語 🦜", "<s>user\nHi<|end|><tool>x"]


def tokenizer(pre: str, **keys) -> Tokenizer:
    extra = [("<s>", 3), ("<|end|>", 3), ("<tool>", 4)]
    ids = {"bos_token_id": 259, "eos_token_id": 260}  # behind all bytes and three merges
    merges = ("H e", "l l", "He ll")
    return tokenizer_from_gguf(metadata(pre, extra, merges, **(ids | keys)))


def agree(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.ids == theirs.ids
    assert dict(ours.named_tokens) == dict(theirs.named_tokens)
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_tokenizers(tmp_path, pre, ends):
    source = tokenizer(pre, **ends)
    source = dataclasses.replace(source, chat_template="{{ messages }}")
    write_tokenizer(tmp_path, source)
    write_ids(tmp_path, source.ids)
    folder = tokenizer_from_folder(tmp_path)
    agree(folder, source)
    for written in (source, folder):
        keys = gguf_writing._tokenizer(written, written.vocab_size)
        keys["tokenizer.ggml.eos_token_id"] = written.ids.eos[0]
        agree(tokenizer_from_gguf(keys), source)


def test_a_vocabulary_that_is_smaller_than_the_model(tmp_path):
    source = tokenizer("gpt-2")
    keys = gguf_writing._tokenizer(source, source.vocab_size + 2)
    assert keys["tokenizer.ggml.tokens"][-2:] == ["[PAD262]", "[PAD263]"]
    assert keys["tokenizer.ggml.token_type"][-2:] == [5, 5]


def test_a_tokenizer_that_gguf_cannot_hold():
    source = tokenizer("gpt-2")
    backend = tokenizers.Tokenizer.from_str(source.backend.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="not one of the kinds that can be written in a GGUF file"):
        gguf_writing._tokenizer(dataclasses.replace(source, backend=backend), 262)
    with pytest.raises(ValueError, match="around every text"):
        gguf_writing._tokenizer(dataclasses.replace(source, prefix=(259, 259)), 262)


# --- SmolLM2 ---------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_converted_and_saved_is_the_same_model(smollm2, tmp_path):
    params = specjax.load("smollm2-135m", dtype="float32")
    folder = checkpoints.convert("smollm2-135m", tmp_path / "folder")
    same(checkpoints.read(folder), smollm2)
    saved = specjax.save(params, tmp_path / "saved").result()
    same(checkpoints.read(saved), smollm2)
    prompt = [smollm2.tokenizer.encode_chat([{"role": "user", "content": "Name a planet."}])]
    outs = []
    for path in ("smollm2-135m", folder, saved):
        loaded = specjax.load(path, dtype="float32")
        assert loaded.tokenizer == params.tokenizer
        loaded = loaded.replace(name=params.name)  # one program for all
        outs.append(specjax.decode(loaded, prompt, max_new_tokens=8, logprobs=0))
    for out in outs[1:]:
        np.testing.assert_array_equal(out.tokens, outs[0].tokens)
        np.testing.assert_array_equal(out.logprobs.tokens, outs[0].logprobs.tokens)
    assert int(outs[0].lengths[0]) > 3


@pytest.mark.smollm2
def test_smollm2_through_gguf(smollm2, tmp_path):
    path = checkpoints.convert("smollm2-135m", tmp_path / "half.gguf", to="gguf", dtype="q8_0")
    there = checkpoints.read(path)
    assert (there.config, there.tokenizer) == (smollm2.config, smollm2.tokenizer)
    for key in ("embed.weight", "layers.0.attn.q.weight", "norm.scale"):
        a, b = smollm2.weights[key](), there.weights[key]()
        np.testing.assert_allclose(b, a, rtol=0, atol=np.abs(a).max() / 100)
