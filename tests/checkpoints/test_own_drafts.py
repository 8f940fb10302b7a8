"""The folder of a drafter that specjax trained: written, read back, refused if it does not fit."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import specjax
from specjax import checkpoints
from specjax.checkpoints import registry, save_draft, set_options
from specjax.models.medusa import MedusaConfig, random_weights
from specjax.train.recipes import PLANNERS
from tests.train import toy

CONFIG = MedusaConfig(
    num_heads=2, num_layers=1, hidden_size=32, vocab_size=48, target_layers=3, own_output=False
)
WEIGHTS = random_weights(CONFIG, jax.random.key(0))


def _saved(folder):
    return save_draft(folder / "medusa", "medusa", CONFIG, WEIGHTS, toy.CONFIG)


def _changed(folder, **changes):
    path = _saved(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path.parent


def test_written_and_read_back(tmp_path):
    found = checkpoints.read_draft(_saved(tmp_path), toy.CONFIG)
    assert (found.method, found.config, found.offsets) == ("medusa", CONFIG, None)
    block = found.weights["heads.1.blocks.0.weight"]()
    expected = WEIGHTS["heads"][1]["blocks"][0]["weight"]
    np.testing.assert_allclose(block.astype(np.float32), expected, rtol=1 / 128)
    assert found.weights["heads.1.blocks.0.bias"]().dtype == np.float32


def test_nothing_is_overwritten(tmp_path):
    _saved(tmp_path)
    with pytest.raises(FileExistsError, match="exists already"):
        _saved(tmp_path)


def test_weights_of_another_network_are_refused(tmp_path):
    wrong = {"heads": {0: WEIGHTS["heads"][0]}}
    with pytest.raises(ValueError, match=r"heads\.1\.blocks\.0\.bias is None, wanted \(32,\)"):
        save_draft(tmp_path / "x", "medusa", CONFIG, wrong, toy.CONFIG)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="'ngram' has no format; known: eagle"):
        save_draft(tmp_path / "x", "ngram", CONFIG, WEIGHTS, toy.CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"hidden_size": 64, "num_layers": 3, "vocab_size": 48}}, "hidden_size is 64"),
        ({"network": {"heads": 2}}, "the key 'heads', which is not known"),
        ({"network": {}}, "network does not hold what it should"),
        ({"options": 3}, "options is 3; wanted an object"),
    ],
)
def test_folders_that_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.read_draft(_changed(tmp_path, **changes), toy.CONFIG)


def _registered(tmp_path, monkeypatch, drafter=None):
    """The toy target as an entry "toy" of the registry, with a place for bundled drafters."""
    path = tmp_path / "target"
    target = path if path.exists() else toy.saved_target(tmp_path)
    about = {"summary": "", "licence": "", "note": "", "hub": "x/toy"}
    entry = registry.Entry(name="toy", drafter=drafter, **about)
    monkeypatch.setattr(registry, "entries", lambda: {"toy": entry})
    monkeypatch.setattr(registry, "_locate", lambda found: target)
    monkeypatch.setattr(registry, "_BUNDLED", tmp_path / "bundled")
    return target


def test_the_default_drafter_is_the_registrys(tmp_path, monkeypatch):
    target = _registered(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"no drafter is known to be the best for .*target"):
        specjax.load("toy", drafter="default")
    save_draft(tmp_path / "bundled/toy/medusa", "medusa", CONFIG, WEIGHTS, toy.CONFIG)
    both = {"method": "fallback", "first": "ngram", "second": "medusa", "verify_sizes": [0, 2]}
    _registered(tmp_path, monkeypatch, both)
    params = specjax.load("toy", drafter="default")
    assert params.drafter.name == "fallback(ngram, medusa)"
    assert params.drafter.sizes == (0, 2)
    assert specjax.load(target, drafter="default").drafter == params.drafter


def test_a_bundled_drafter_is_found_by_its_method_alone(tmp_path, monkeypatch):
    _registered(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="holds none, and none comes with the package"):
        specjax.load("toy", drafter="medusa")
    save_draft(tmp_path / "bundled/toy/medusa", "medusa", CONFIG, WEIGHTS, toy.CONFIG)
    params = specjax.load("toy", drafter="medusa")
    assert params.drafter.name == "medusa"
    folder = tmp_path / "bundled/toy/medusa"
    assert specjax.load("toy", drafter=folder).drafter == params.drafter


def test_a_folder_may_say_how_it_drafts(tmp_path):
    target, folder = toy.saved_target(tmp_path), _saved(tmp_path)
    default = specjax.load(target, drafter=folder).drafter
    set_options(folder, {"choices": [[0], [1], [0, 0]]})
    drafter = specjax.load(target, drafter=folder).drafter
    assert (drafter.nodes, drafter.depth) == (3, 2)
    assert default.nodes > 3
    # What the caller says goes first.
    chain = specjax.load(target, drafter={"method": "medusa", "model": folder, "choices": 1})
    assert chain.drafter.nodes == 1


def test_a_draft_models_folder_may_say_how_far_it_drafts(tmp_path):
    target, loaded = toy.saved_target(tmp_path), toy.toy_target()
    plan = PLANNERS["draft_model"].plan(loaded)
    weights = plan.start(jax.random.key(0))
    plan.recipe.save(tmp_path / "draft", weights, np.arange(toy.CONFIG.vocab_size))
    depth = lambda **more: (
        specjax.load(
            target, drafter={"method": "draft_model", "model": tmp_path / "draft", **more}
        ).drafter.depth
    )
    assert depth() == 4
    set_options(tmp_path / "draft", {"num_speculative_tokens": 2})
    assert (depth(), depth(num_speculative_tokens=3)) == (2, 3)
