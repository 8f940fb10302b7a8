"""specjax's own folders: saved and loaded, on meshes, in the background, and damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import checkpoints
from specjax.checkpoints import orbax_folder
from specjax.models.quantized import quantize_weight


def equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def params(write_folder) -> specjax.Params:
    return specjax.load(write_folder(config={"eos_token_id": [2, 5], "pad_token_id": 3}))


@pytest.fixture
def saved(params, tmp_path):
    return specjax.save(params, tmp_path / "saved").result()


@pytest.fixture
def header(saved):
    """Changes specjax.json."""

    def change(**changes):
        file = saved / "specjax.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(params, tmp_path, dtype):
    params = params.replace(target=jax.tree.map(lambda x: x.astype(dtype), params.target))
    saved = specjax.save(params, tmp_path / "saved").result()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder-1.5", "saved"]
    loaded = specjax.load(saved, "ngram", dtype=dtype)
    equal(loaded.target, params.target)
    assert loaded.model is params.model
    assert (loaded.name, loaded.eos_ids, loaded.pad_id) == ("folder-1.5", (2, 5), 3)
    assert checkpoints.verify(saved) == len(jax.tree.leaves(params.target))


@pytest.mark.parametrize("name", ["hf-gemma3-text", "hf-gpt2", "hf-qwen3-moe", "mtp-deepseek-v3"])
def test_all_families(shared, tmp_path, name):
    params = specjax.load(shared / "parity" / name, dtype="float32")
    loaded = specjax.load(specjax.save(params, tmp_path / "saved").result(), dtype="float32")
    equal(loaded.target, params.target)
    assert loaded.model is params.model


def test_what_must_stay_exact_does(shared, tmp_path):
    params = specjax.load(shared / "parity" / "mtp-deepseek-v3", dtype="float32")
    saved = specjax.save(params, tmp_path / "saved").result()
    checkpoint = checkpoints.read(saved, jnp.bfloat16)
    types = {key.split(".")[-1]: read().dtype for key, read in checkpoint.weights.items()}
    assert types["choice_bias"] == np.float32
    assert types["weight"] == jnp.bfloat16


def test_the_tokenizer_comes_along(shared, tmp_path, smollm2):
    params = specjax.load(shared / "parity" / "hf-llama-untied")
    bos = smollm2.tokenizer.bos_id
    tokenizer = dataclasses.replace(smollm2.tokenizer, prefix=(bos,))
    ends = params.replace(tokenizer=tokenizer, eos_ids=(7,), pad_id=9)
    config = params.model.config
    saved = specjax.save(ends, tmp_path / "saved").result()
    with pytest.raises(ValueError, match=rf"49152 tokens but the model has {config.vocab_size}"):
        specjax.load(saved)
    found = checkpoints.tokenizer.tokenizer_from_folder(saved)
    messages = [{"role": "user", "content": "Hi"}]
    assert found.encode("Hello 12") == tokenizer.encode("Hello 12")
    assert found.encode("Hello 12")[0] == bos
    assert found.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert found.named_tokens == tokenizer.named_tokens
    assert (found.ids.bos, found.ids.eos, found.ids.pad) == (bos, (7,), 9)


def test_sharded_arrays_go_from_one_mesh_to_another(params, tmp_path):
    four = jax.make_mesh((2, 4), ("data", "model"))
    eight = jax.make_mesh((1, 8), ("data", "model"))
    folder = tmp_path / "folder-1.5"
    spread = specjax.load(folder, mesh=four)
    saved = specjax.save(spread, tmp_path / "saved").result()
    for mesh in (four, eight):
        loaded, wanted = specjax.load(saved, mesh=mesh), specjax.load(folder, mesh=mesh)
        equal(loaded.target, wanted.target)
        for a, b in zip(
            jax.tree.leaves(loaded.target), jax.tree.leaves(wanted.target), strict=True
        ):
            assert a.sharding == b.sharding
    half = specjax.load(saved, mesh=eight, dtype="bfloat16")
    equal(half.target, specjax.load(folder, mesh=eight, dtype="bfloat16").target)
    equal(specjax.load(saved).target, params.target)


def test_each_device_reads_its_own_part(saved, monkeypatch):
    mesh = jax.make_mesh((1, 4), ("data", "model"), devices=jax.devices()[:4])
    where = jax.sharding.NamedSharding(mesh, jax.P("model"))
    sizes, read = [], orbax_folder._part

    def part(stored, index):
        sizes.append(read(stored, index).shape)
        return read(stored, index)

    monkeypatch.setattr(orbax_folder, "_part", part)
    orbax_folder.restore(saved, "embed.weight", where)
    assert sizes == [(5, 32)] * 4
    orbax_folder.restore(saved, "embed.weight", jax.sharding.NamedSharding(mesh, jax.P()))
    assert sizes[4:] == [(20, 32)]


def test_in_the_background(params, tmp_path):
    copies = params.replace(target=jax.tree.map(jnp.copy, params.target))
    future = specjax.save(copies, tmp_path / "saved", asynchronous=True)
    for leaf in jax.tree.leaves(copies.target):
        leaf.delete()  # as if it had been donated to a training step
    assert future.result(timeout=60) == tmp_path / "saved"
    equal(specjax.load(tmp_path / "saved").target, params.target)


def test_what_fails_in_the_background_is_raised_and_leaves_nothing(params, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(orbax_folder, "write_header", fail)
    future = specjax.save(params, tmp_path / "saved", asynchronous=True)
    with pytest.raises(OSError, match="no space"):
        future.result(timeout=60)
    assert [file.name for file in tmp_path.iterdir()] == ["folder-1.5"]


def test_nothing_is_overwritten(params, saved, tmp_path):
    with pytest.raises(FileExistsError, match=r"saved: exists already.*give another path"):
        specjax.save(params, saved)
    (tmp_path / "empty").mkdir()
    assert specjax.save(params, tmp_path / "empty").done()


def test_weights_that_cannot_be_saved(params, tmp_path):
    weights = params.target
    head = quantize_weight(("head", "weight"), weights["head"]["weight"], 8)
    bad = [
        ({**weights, "head": {"weight": head}}, r"head\.weight as QuantizedTensor.*`quantize`"),
        ({**weights, "head": {"weight": jnp.ones((3, 2))}}, r"head\.weight of shape \(3, 2\)"),
        ({**weights, "more": {"weight": jnp.ones(2)}}, r"has more\.weight"),
        ({key: weights[key] for key in weights if key != "norm"}, r"lacks norm\.scale"),
    ]
    for target, message in bad:
        with pytest.raises(ValueError, match=message):
            specjax.save(params.replace(target=target), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- damage ----------------------------------------------------------------------------------


def test_a_missing_renamed_extra_or_misshapen_tensor(saved, header):
    table = json.loads((saved / "specjax.json").read_text())["tensors"]
    head = table["head.weight"]
    cases = [
        ({**table, "other": head}, r"weights: the tensor other is missing, but specjax\.json"),
        (
            {key: table[key] for key in table if key != "head.weight"},
            r"weights: the tensor head\.weight is not expected",
        ),
        (
            {**table, "head.weight": head | {"shape": [32, 20]}},
            r"weights: the tensor head\.weight has the shape \(20, 32\).* wants \(32, 20\)",
        ),
        (
            {**table, "head.weight": head | {"dtype": "bfloat16"}},
            r"head\.weight .* the type float32; specjax\.json wants .* bfloat16",
        ),
    ]
    for tensors, message in cases:
        header(tensors=tensors)
        with pytest.raises(ValueError, match=message):
            specjax.load(saved)


def test_a_configuration_of_other_weights(saved, header):
    config = json.loads((saved / "specjax.json").read_text())["config"]
    header(config=config | {"intermediate_size": 48})
    with pytest.raises(ValueError, match=r"mlp\.down\.weight has the shape \(32, 64\).*\(32, 48\)"):
        specjax.load(saved)
    header(config=config | {"num_layers": 3})
    with pytest.raises(ValueError, match=r"layers\.2\.\S+ is missing"):
        specjax.load(saved)
    header(config=config | {"tie_embeddings": True})
    with pytest.raises(ValueError, match=r"head\.weight is not expected"):
        specjax.load(saved)
    header(config=config | {"new_switch": 1})
    with pytest.raises(ValueError, match=r"specjax\.json: .*new_switch.*not known"):
        specjax.load(saved)


def test_a_header_that_is_wrong(saved, header):
    header(format=2)
    with pytest.raises(ValueError, match=r"specjax\.json: has the format 2; supported: 1"):
        specjax.load(saved)
    header(format=1, tensors=[])
    with pytest.raises(ValueError, match=r"specjax\.json: does not hold what it should"):
        specjax.load(saved)
    (saved / "specjax.json").write_text("{")
    with pytest.raises(ValueError, match=r"specjax\.json: does not hold JSON"):
        specjax.load(saved)


def test_weights_that_changed_after_they_were_saved(saved, header):
    table = json.loads((saved / "specjax.json").read_text())["tensors"]
    header(tensors=table | {"norm.scale": table["norm.scale"] | {"crc32": "00000000"}})
    message = r"weights: the tensor norm\.scale has the checksum \w+; specjax\.json wants 00000000"
    with pytest.raises(ValueError, match=message):
        checkpoints.verify(saved)
    with pytest.raises(ValueError, match=message):
        specjax.load(saved)


def test_truncated_or_missing_weights(saved, tmp_path):
    files = [f for f in (saved / "weights").rglob("d/*") if f.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[: len(whole) // 2])
    mesh = jax.make_mesh((1, 4), ("data", "model"), devices=jax.devices()[:4])
    for where in (None, mesh):
        with pytest.raises(ValueError, match=r"saved.weights: the tensor \S+ cannot be read"):
            specjax.load(saved, mesh=where)
    largest.write_bytes(whole)
    (saved / "weights" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"saved.weights: cannot be read"):
        specjax.load(saved)
    shutil.rmtree(saved / "weights")
    with pytest.raises(ValueError, match=r"saved.weights: is missing; wanted 21 tensors"):
        specjax.load(saved)


def test_verify_of_another_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no specjax\.json; wanted a folder that specjax\.save"
    ):
        checkpoints.verify(tmp_path)
