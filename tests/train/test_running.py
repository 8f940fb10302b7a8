"""From a target to a drafter on disk, by the command line, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import specjax
from specjax.cli.app import app
from specjax.train.evaluation import Report, evaluate_prompts, judged, read_groups
from specjax.train.running import Job, stated_bytes, train_drafter
from tests.train import toy

FAST = {"rows": 4, "steps": 6, "measure_rows": 1, "save_every": 3, "measure_every": 0}
WRITING = {"rows": 4, "answer_tokens": 12, "temperatures": (0.0,)}


def test_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(
        ValueError, match="'ngram' cannot be trained; those that can: eagle, eagle3"
    ):
        train_drafter(Job(target="smollm2-135m", drafter="ngram", out=tmp_path))


def test_the_size_is_stated_before_anything_is_written(tmp_path, monkeypatch):
    target = toy.saved_target(tmp_path)
    params = specjax.load(target)
    assert stated_bytes(params, 3, 100) == 100 * (4 + 2 * 3 * 32)
    monkeypatch.setattr("shutil.disk_usage", lambda path: (0, 0, 1000))
    job = Job(target=str(target), drafter="eagle3", out=tmp_path / "out", tokens=10**6)
    with pytest.raises(ValueError, match=r"1000000 tokens .* take 0.2 GB, .* has room for 0.0 GB"):
        train_drafter(job)
    assert not (tmp_path / "out" / "training").exists()


def test_a_target_without_a_chat_template_needs_data(tmp_path):
    job = Job(target=str(toy.saved_target(tmp_path)), drafter="eagle3", out=tmp_path, tokens=10)
    with pytest.raises(ValueError, match=r"no chat template, .* give a file of prompts as `data`"):
        train_drafter(job)


def _file(tmp_path, lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_groups_of_a_file(tmp_path):
    path = _file(
        tmp_path,
        [
            {"turns": ["a", "b"], "category": "math"},
            {"turns": ["c"], "category": "coding"},
            {"prompt": "d", "category": "rag"},
            {"text": "e"},
            "f",
        ],
    )
    assert read_groups(path) == {"mt_bench": ["a", "c"], "rag": ["d"], "all": ["e", "f"]}
    assert read_groups(path, 1) == {"mt_bench": ["a"], "rag": ["d"], "all": ["e"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('"a"\n{"b": 1}\n', "line 2 has no text under turns, prompt or text"),
        ("nonsense\n", "line 1 is not JSON"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_groups(tmp_path / "p.jsonl")
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "p.jsonl"), "--drafter", "ngram"])
    assert result.exit_code == 2
    with pytest.raises(ValueError, match=r"'none.jsonl' is no file"):
        read_groups("none.jsonl")


def test_eval_measures_tau_as_decode_counts_it(tmp_path):
    path = _file(tmp_path, [{"prompt": "Repeat: a b c a b c a b c", "category": "copy"}, "Hello"])
    params = specjax.load("smollm2-135m", drafter="ngram")
    groups = read_groups(path)
    report = Report(dict(evaluate_prompts(params, groups, max_new_tokens=24)))
    for name, texts in groups.items():
        done = specjax.complete(params, texts[0], max_new_tokens=24)
        assert report.groups[name].tokens == len(done.tokens)
        assert report.groups[name].rounds == int(done.stats.rounds)
        assert report.groups[name].accepted == np.asarray(done.stats.accepted).tolist()
    taus = [group.tau for group in report.groups.values()]
    assert report.tau == pytest.approx(np.mean(taus))
    result = CliRunner().invoke(
        app, ["eval", str(path), "--drafter", "ngram", "--tokens", "24", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tau"] == pytest.approx(report.tau, abs=1e-3)
    assert found["groups"]["copy"]["tau"] == pytest.approx(report.groups["copy"].tau, abs=1e-3)


def test_measured_chances_agree_with_what_stood():
    """At temperature 1 the mean of sum min(p, q) is the share of drafts that stand."""
    params = toy.toy_target()
    draft = specjax.drafters.draft_model(params.model, 3)
    weak = params.target | {"head": {"weight": 0.7 * params.target["head"]["weight"]}}
    params = params.replace(drafter=judged(draft), draft=weak)
    from specjax.decoding import decode_recorded

    result, state = decode_recorded(
        params,
        toy.prompts(256, seed=3),
        max_new_tokens=48,
        sampling=specjax.Sampling(temperature=1.0),
        seed=1,
    )
    rows = 256
    chance, tried = (np.asarray(x)[:rows].sum(axis=0) for x in (state.chance, state.judged))
    stood = np.asarray(result.stats.accepted).sum(axis=0)
    # Where a row ends within a round, what was cut off counts as judged and not as standing.
    expected, measured = chance.sum() / tried.sum(), stood.sum() / tried.sum()
    assert 0.5 < expected < 0.95
    assert measured == pytest.approx(expected, rel=0.02)


def test_drafts_without_a_law_have_no_chance():
    params = specjax.load("smollm2-135m", drafter="ngram")
    groups = {"all": ["Hello"]}
    with pytest.raises(ValueError, match="chances=True needs a temperature above 0"):
        next(evaluate_prompts(params, groups, chances=True))
    with pytest.raises(ValueError, match="has no law of its own"):
        next(evaluate_prompts(params, groups, chances=True, temperature=1.0, max_new_tokens=4))


@pytest.mark.parametrize(
    ("mesh", "message"), [("rows=2", "wanted data=N"), ("data=99", "needs 99 devices")]
)
def test_bad_meshes(mesh, message):
    import typer

    from specjax.cli.training import mesh_argument

    with pytest.raises(typer.BadParameter, match=message):
        mesh_argument(mesh)


@pytest.mark.smollm2
def test_the_command_trains_and_goes_on(tmp_path):
    """Texts, training and the drafter; then the same command has nothing left to do."""
    out = tmp_path / "mine"
    command = ["train", "--target", "smollm2-135m", "--drafter", "medusa", "--out", str(out)]
    command += ["--tokens", "900", "--training", json.dumps({**FAST, "steps": 2, "rows": 1})]
    prompts = _file(tmp_path, ["Why is the sky blue?", "Name a planet.", "Hello"])
    command += ["--data", str(prompts), "--recipe", json.dumps({"num_heads": 2})]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"drafter='{out}/drafter'" in result.stdout
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["specjax_drafter"] == "medusa"
    curve = (out / "training" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in curve] == [1, 2, 2]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert again.stdout == result.stdout
