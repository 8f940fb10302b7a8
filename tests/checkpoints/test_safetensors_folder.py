"""Hugging Face folders: values, shards, and folders with something wrong."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints
from specjax.models import naming

INDEX = "model.safetensors.index.json"


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(write_folder, parameters, shards):
    checkpoint = checkpoints.read(write_folder(shards=shards))
    assert checkpoint.name == "folder-1.5"
    assert checkpoint.tokenizer is None
    assert set(checkpoint.weights) == set(parameters)
    for path, array in parameters.items():
        np.testing.assert_array_equal(checkpoint.weights[path](), array, err_msg=path)


@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float16])
def test_stored_type_is_kept_or_cast(write_folder, parameters, kind):
    def edit(tensors):
        tensors.update({name: array.astype(kind) for name, array in tensors.items()})

    folder = write_folder(edit=edit)
    wanted = parameters["embed.weight"].astype(kind)
    kept = checkpoints.read(folder).weights["embed.weight"]()
    assert kept.dtype == kind
    np.testing.assert_array_equal(kept, wanted)
    cast = checkpoints.read(folder, dtype=np.float32).weights["embed.weight"]()
    assert cast.dtype == np.float32
    np.testing.assert_array_equal(cast, wanted.astype(np.float32))


def test_known_extras_are_left_alone(write_folder):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    folder = write_folder(edit=edit, config={"tie_word_embeddings": True})  # lm_head is stored too
    assert "head.weight" not in checkpoints.read(folder).weights


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"folder-1\.5: .*model\.norm\.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}),
            r"q_proj\.bias is not expected",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((21, 32), np.float32)}),
            r"lm_head\.weight has the shape \(21, 32\).* wants \(20, 32\)",
        ),
        (
            lambda t: t.update({"model.final_norm.weight": t.pop("model.norm.weight")}),
            r"folder-1\.5: the tensor model\.norm\.weight is missing",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((20, 32), np.int8)}),
            r"model\.safetensors: .*lm_head\.weight is stored as I8; wanted floating point",
        ),
    ],
)
def test_tensors_that_do_not_fit(write_folder, edit, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.read(write_folder(edit=edit))


def test_missing_files(write_folder, tmp_path):
    folder = write_folder(shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: is missing"):
        checkpoints.read(folder)
    shard.write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        checkpoints.read(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        checkpoints.read(empty)
    (empty / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="unpickling"):
        checkpoints.read(empty)


def test_index_that_disagrees(write_folder):
    folder = write_folder(shards=2)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second = dict.fromkeys(index.values())
    moved = next(name for name, file in index.items() if file == first)
    edit_json(folder / INDEX, weight_map=index | {moved: second})
    with pytest.raises(ValueError, match=f"{second}: has no tensor {moved}"):
        checkpoints.read(folder)
    edit_json(folder / INDEX, weight_map={k: v for k, v in index.items() if k != moved})
    with pytest.raises(ValueError, match=f"{first}: has the tensor {moved}"):
        checkpoints.read(folder)
    edit_json(folder / INDEX, weight_map=index | {moved: "../" + first})
    with pytest.raises(ValueError, match="plain file name"):
        checkpoints.read(folder)
    edit_json(folder / INDEX, weight_map={})
    with pytest.raises(ValueError, match="no weight_map"):
        checkpoints.read(folder)


def test_config_that_is_wrong(write_folder):
    folder = write_folder()
    edit_json(folder / "config.json", model_type="rwkv")
    with pytest.raises(ValueError, match=r"config\.json: model_type is 'rwkv'.*llama"):
        checkpoints.read(folder)
    edit_json(folder / "config.json", model_type="llama", eos_token_id=[2, 99])
    with pytest.raises(ValueError, match="token 99"):
        checkpoints.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: does not hold JSON"):
        checkpoints.read(folder)


def test_special_ids_without_a_tokenizer(write_folder):
    folder = write_folder(config={"eos_token_id": 2, "pad_token_id": None})
    assert checkpoints.read(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    checkpoint = checkpoints.read(folder)
    assert (checkpoint.eos_ids, checkpoint.pad_id) == ((5, 3), 5)


def test_every_truncation_is_an_error_that_names_the_file(shared, tmp_path):
    source = shared / "parity" / "hf-llama-untied"
    shutil.copy(source / "config.json", tmp_path / "config.json")
    whole = (source / "model.safetensors").read_bytes()
    for length in [0, 4, 8, 100, 1000, 3000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: .*download it again"):
            checkpoints.read(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}, "F8_E5M2"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}, "has 4 bytes, wanted 16"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "header entry of a"),
        ({"dtype": "F32", "shape": [4]}, "header entry of a"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [1000, 1016]}, "the file ends"),
    ],
)
def test_header_entries_that_are_wrong(tmp_path, config, entry, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"a": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        checkpoints.read(tmp_path)


def test_parity_folders(shared):
    folders = [f for kind in ("hf-*", "target-*", "mtp-*") for f in (shared / "parity").glob(kind)]
    assert folders
    for folder in folders:
        checkpoint = checkpoints.read(folder)
        for path, shape in naming.parameters(checkpoint.config).items():
            assert checkpoint.weights[path]().shape == shape


def test_a_bare_safetensors_file_is_no_checkpoint(write_folder):
    with pytest.raises(ValueError, match=r"Give the folder"):
        checkpoints.read(write_folder() / "model.safetensors")
