"""`specjax.load` with published drafters: recognised, checked, and refused with a reason."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import checkpoints
from tests.drafters.reading import case
from tests.tiny import emitted

METHODS = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "spec-eagle3": "eagle3",
    "spec-eagle31": "eagle3",
    "deepspec-eagle3": "eagle3",
    "medusa1": "medusa",
    "spec-mtp-qwen3": "mtp",
    "dflash": "dflash",
    "spec-dflash": "dflash",
    "dspark-vanilla": "dspark",
    "dspark-gated": "dspark",
    "dspark-rnn": "dspark",
    "spec-dspark": "dspark",
}


@pytest.mark.parametrize("name", METHODS)
def test_a_folder_is_recognised(shared, name):
    found = case(shared, name)
    params = specjax.load(found.target, found.folder, dtype="float32")
    assert params.drafter.name == METHODS[name]
    assert checkpoints.draft_format(found.target) is None


@pytest.mark.parametrize(
    "tree",
    [
        {"nodes": 12, "depth": 4, "top_k": 4},
        {"nodes": 3, "depth": 3, "top_k": 3},  # as many nodes as levels, but no chain
        {"nodes": 2, "depth": 4, "top_k": 2},  # levels that no node is left for
        "mc_sim_7b_63",
        [[0], [1], [0, 0]],
        3,
    ],
)
def test_trees_as_configuration_files_write_them(shared, tree):
    found = case(shared, "eagle3")
    drafter = {"method": "eagle3", "model": str(found.folder), "tree": tree}
    params = specjax.load(found.target, drafter, dtype="float32")
    out = specjax.decode(params, found.expected["input_ids"], max_new_tokens=8, eos_ids=[])
    assert emitted(out) == found.expected["generated_ids"].tolist()[:8]
    assert out.stats.rule == "recursive_rejection"


def test_modules_within_the_target(shared):
    found = case(shared, "mtp-deepseek-v3")
    assert specjax.load(found.target, "mtp", dtype="float32").drafter.name == "mtp"
    with pytest.raises(ValueError, match=r'needs "model".* holds none'):
        specjax.load(case(shared, "eagle3").target, "mtp")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 5}, '"model" of the drafter'),
        ({"model": ""}, '"model" of the drafter'),
        ({}, 'needs "model"'),
        ({"tree": "nope"}, "tree is 'nope'"),
        ({"tree": 10**6}, "tree is 1000000"),
        ({"tree": []}, "tree is"),
        ({"tree": {"leaves": 3}}, "tree has no option 'leaves'"),
        ({"tree": {"nodes": 0}}, "nodes must be"),
        ({"tree": {"nodes": 99, "depth": 1, "top_k": 4}}, "nodes must be at most 4"),
        ({"tree": {"nodes": 99, "depth": 2, "top_k": 97}}, "draft's vocabulary has"),
        ({"tree": 3, "num_speculative_tokens": 4}, "not both"),
        ({"tree": 3, "paths": 2}, "not both"),
        ({"num_speculative_tokens": [3]}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"choices": 3}, "has no option 'choices'"),
    ],
)
def test_bad_options(shared, options, said):
    found = case(shared, "eagle3")
    given = {"method": "eagle3", **options}
    if "model" not in options and options:
        given["model"] = str(found.folder)
    with pytest.raises(ValueError, match=said):
        specjax.load(found.target, given)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dspark-rnn", {"confidence_temperatures": 3}, "confidence_temperatures must be a list"),
        ("dspark-rnn", {"steps_per_second": 5}, "steps_per_second must be a list"),
        ("dflash", {"num_speculative_tokens": 99}, "num_speculative_tokens"),
        ("dflash", {"method": "eagle3"}, "It is DFlash: use the method 'dflash'"),
    ],
)
def test_bad_options_of_others(shared, name, options, said):
    found = case(shared, name)
    given = {"method": METHODS[name], "model": str(found.folder), **options}
    with pytest.raises(ValueError, match=said):
        specjax.load(found.target, given)


@pytest.mark.parametrize(
    ("drafter", "target", "said"),
    [
        ("eagle3", "target-qwen3-deep", "made for a target|fc.weight reads|layers"),
        ("eagle1", "hf-gemma2", "made for a target"),
        ("deepspec-eagle3", "hf-qwen3", "number of layers|names the layer"),
        ("medusa1", "hf-gemma2", "(?i)hidden|width|vocab"),
        ("dflash", "hf-qwen3", "layers"),
    ],
)
def test_a_drafter_of_another_target(shared, drafter, target, said):
    folder = case(shared, drafter).folder
    theirs = checkpoints.read(shared / "parity" / target).config
    ours = checkpoints.read(case(shared, drafter).target).config
    sizes = lambda c: (c.hidden_size, c.vocab_size, c.num_layers)
    if sizes(theirs) == sizes(ours):
        pytest.skip("both targets have the same sizes")
    with pytest.raises(ValueError, match=said):
        specjax.load(shared / "parity" / target, folder)


def _changed(shared, tmp_path, name, config=lambda config: None, tensors=lambda tensors: None):
    """A copy of a drafter's folder with another configuration or other tensors."""
    found, folder = case(shared, name), tmp_path / "changed"
    shutil.copytree(found.folder, folder)
    read = json.loads((folder / "config.json").read_text())
    config(read)
    (folder / "config.json").write_text(json.dumps(read))
    held = load_file(folder / "model.safetensors")
    tensors(held)
    save_file(held, folder / "model.safetensors")
    return found.target, folder


@pytest.mark.parametrize("name", ["spec-eagle3", "spec-dflash", "spec-dspark", "spec-mtp-qwen3"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, []),
        (None, 5),
        ("proposal_methods", [5]),
        ("proposal_methods", {"a": 1}),
        ("proposal_methods", [{"speculative_tokens": "4"}]),
    ],
)
def test_damaged_configurations(shared, tmp_path, name, key, value):
    def change(config):
        if key is None:
            config["speculators_config"] = value
        else:
            config["speculators_config"][key] = value

    target, folder = _changed(shared, tmp_path, name, change)
    with pytest.raises(ValueError, match=r"speculators_config|proposal_methods|speculative_tokens"):
        specjax.load(target, folder)


@pytest.mark.parametrize("name", ["spec-eagle3", "spec-dspark"])
@pytest.mark.parametrize(
    "change",
    [
        lambda d2t: d2t[:-1],
        lambda d2t: d2t[:0],
        lambda d2t: d2t.astype(np.float32),
        lambda d2t: np.where(np.arange(d2t.size) == 3, 500, d2t),
        lambda d2t: np.where(np.arange(d2t.size) == 3, -9, d2t),
        lambda d2t: np.where(np.arange(d2t.size) == 3, d2t[2] - 1, d2t),
    ],
)
def test_damaged_vocabularies(shared, tmp_path, name, change):
    def tensors(held):
        held["d2t"] = change(held["d2t"])

    target, folder = _changed(shared, tmp_path, name, tensors=tensors)
    with pytest.raises(ValueError, match=r"model\.safetensors: the tensor d2t"):
        specjax.load(target, folder)


@pytest.mark.parametrize("name", ["spec-eagle3", "dflash", "dspark-gated", "spec-mtp-qwen3"])
@pytest.mark.parametrize("kind", ["missing", "extra", "shape"])
def test_damaged_tensors(shared, tmp_path, name, kind):
    def tensors(held):
        first = sorted(n for n in held if n.endswith("mlp.up_proj.weight"))[0]
        if kind == "missing":
            del held[first]
        elif kind == "extra":
            held["layers.9.weight"] = np.zeros((2, 2), np.float32)
        else:
            held[first] = np.ascontiguousarray(held[first][:-1])

    target, folder = _changed(shared, tmp_path, name, tensors=tensors)
    said = "layers.9.weight" if kind == "extra" else "up_proj"
    with pytest.raises(ValueError, match=said):
        specjax.load(target, folder)
