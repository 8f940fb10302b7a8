"""The drafters that come with the package: they load by name, fit, and do what their cards say."""

import json

import numpy as np
import pytest

import specjax
from specjax.checkpoints import registry
from specjax.train.evaluation import Report, evaluate_prompts, read_groups
from tests.conftest import ROOT

NAME = "smollm2-135m"
FOLDERS = {
    "eagle3": "eagle3",
    "medusa": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
    "draft_model": "draft",
}
PROMPT = "Why is the sky blue?"
MEASURED = json.loads((ROOT / "benchmarks/results/bundled.json").read_text())
# What each is in the benchmark's table.
ROWS = {
    "eagle3": "eagle3, chain of 5",
    "medusa": "medusa, tree",
    "dflash": "dflash",
    "dspark": "dspark",
    "draft_model": "draft, chain of 5",
}

pytestmark = pytest.mark.smollm2


@pytest.mark.parametrize("method", FOLDERS)
def test_it_loads_by_its_method_alone(method):
    folder = ROOT / "checkpoints" / "bundled" / NAME / FOLDERS[method]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 14_000_000
    params = specjax.load(NAME, drafter=method)
    assert params.drafter.name == method
    card = (folder / "README.md").read_text()
    for group, tau in _measured(method)["groups"].items():
        line = next(line for line in card.splitlines() if line.startswith(f"| {group} |"))
        assert f"{tau:.2f}" in line
    assert "no other data" in card
    assert set(registry.entries()[NAME].bundled) == set(FOLDERS)


def _measured(method):
    return next(row for row in MEASURED["acceptance"] if row["drafter"] == ROWS[method])


def _text(drafter, tokens):
    params = specjax.load(NAME, drafter=drafter, dtype="float32")
    return specjax.complete(params, PROMPT, max_new_tokens=tokens)


def test_the_default_writes_the_text_of_plain_decoding():
    plain, found = _text(None, 32), _text("default", 32)
    assert found.text == plain.text
    assert np.sum(found.stats.rounds) < 32


@pytest.mark.slow
@pytest.mark.parametrize("method", FOLDERS)
def test_the_text_is_that_of_plain_decoding(method):
    plain, found = _text(None, 64), _text(method, 64)
    assert found.text == plain.text
    assert np.sum(found.stats.rounds) < 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", FOLDERS)
def test_tau_is_that_of_the_card(method, shared):
    row = _measured(method)
    groups = read_groups(shared / "data" / MEASURED["data"], MEASURED["prompts_a_group"])
    groups = {name: groups[name] for name in row["groups"]}  # those that were measured
    params = specjax.load(NAME, row["as"], dtype="float32")
    options = {"max_new_tokens": MEASURED["max_new_tokens"], "rows": MEASURED["prompts_a_group"]}
    report = Report(dict(evaluate_prompts(params, groups, **options)))
    assert report.tau == pytest.approx(row["tau"], rel=0.01)
