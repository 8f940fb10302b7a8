"""From a target to a drafter on disk, by the command line, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import specjax
from specjax.cli.app import app
from specjax.decoding import decode_recorded
from specjax.train.evaluation import Report, evaluate_prompts, judged, packed, read_groups
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
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
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
        ('"a"\n{"b": 1}\n', "line 2 is neither a text nor an object"),
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


def _toy_with_draft():
    """Drafts from the target's own law, made softer, so that some of them fall."""
    params = toy.toy_target()
    weak = params.target | {"head": {"weight": 0.7 * params.target["head"]["weight"]}}
    return params.replace(drafter=specjax.drafters.draft_model(params.model, 3), draft=weak)


def test_tau_is_what_decode_counts():
    params = _toy_with_draft()
    groups = {"one": toy.prompts(2), "two": toy.prompts(2, seed=1)}
    report = Report(dict(evaluate_prompts(params, groups, max_new_tokens=20, rows=2)))
    for name, prompts in groups.items():
        done = specjax.decode(params, sorted(prompts, key=len), max_new_tokens=20)
        group = report.groups[name]
        assert group.tokens == int(np.sum(done.lengths))
        assert group.rounds == int(np.sum(done.stats.rounds))
        assert group.accepted == np.sum(done.stats.accepted, axis=0).tolist()
        assert group.tau == group.tokens / group.rounds
    assert report.tau == pytest.approx(np.mean([g.tau for g in report.groups.values()]))


@pytest.mark.smollm2
def test_the_command_eval(tmp_path):
    path = _file(tmp_path, [{"prompt": "Repeat: a b c a b c a b c", "category": "copy"}])
    command = ["eval", str(path), "--drafter", "ngram", "--tokens", "24", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["groups"]["copy"]["prompts"] == 1
    assert found["groups"]["copy"]["tokens"] <= 24
    assert found["tau"] == found["groups"]["copy"]["tau"] > 1


def test_measured_chances_agree_with_what_stood():
    """At temperature 1 the mean of sum min(p, q) is the share of drafts that stand."""
    params = _toy_with_draft()
    params = params.replace(drafter=judged(params.drafter))
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
    params = toy.toy_target().replace(drafter=specjax.drafters.ngram(2))
    groups = {"all": toy.prompts(1)}
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


@pytest.mark.parametrize("own", [True, False])
def test_the_command_trains_and_goes_on(own, tmp_path):
    """Texts, training, the drafter and its tau; then the same command has nothing left to do."""
    target, out = toy.saved_target(tmp_path, chat=True), tmp_path / "mine"
    command = ["train", "--target", str(target), "--drafter", "medusa", "--out", str(out)]
    command += ["--tokens", "9000", "--training", json.dumps(FAST)]
    command += ["--recipe", json.dumps({"num_heads": 2})]
    if own:
        prompts = [f"w{i} w{i + 1} w{2 * i}" for i in range(24)]
        command += ["--data", str(_file(tmp_path, prompts))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "texts, 0.0 GB" in result.stderr
    assert f"drafter='{out}/drafter'" in result.stdout
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["specjax_drafter"] == "medusa"
    curve = (out / "training" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in curve] == [1, 2, 3, 4, 5, 6, 6]
    assert json.loads((out / "evaluation.json").read_text())["tau"] >= 1
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, again.stdout) == (0, result.stdout)
    assert "tau" in again.stderr
    other = CliRunner().invoke(app, [*command, "--epochs", "3"])
    assert other.exit_code == 2
    assert "epochs was 2.0, is 3.0" in other.stderr


def test_training_goes_on_from_a_drafter(tmp_path):
    """A head of one step is the start of one of three; its vocabulary stays its own."""
    target = toy.saved_target(tmp_path, chat=True)
    texts = tmp_path / "texts"
    common = {
        "target": str(target),
        "drafter": "eagle3",
        "texts": texts,
        "data": _file(tmp_path, [f"w{i} w{i + 1} w{2 * i}" for i in range(24)]),
        "tokens": 3000,
        "draft_vocab": 32,
        "window": 32,
        "training": FAST,
        "writing": {"rows": 16, "answer_tokens": 24},
    }
    first = train_drafter(Job(**common, out=tmp_path / "one", options={"steps": 1}))
    job = Job(**common, out=tmp_path / "two", options={"steps": 3}, start=first)
    second = train_drafter(job)
    curves = [
        [json.loads(line) for line in (tmp_path / name / "training/curve.jsonl").open()]
        for name in ("one", "two")
    ]
    assert [len(curve[0]["agreed"]) for curve in curves] == [1, 3]
    assert curves[1][0]["accepted"][0] == pytest.approx(curves[0][-1]["accepted"][0], abs=0.1)
    ids = [
        specjax.load(str(target), drafter={"method": "eagle3", "model": folder}).draft[1].d2t
        for folder in (first, second)
    ]
    np.testing.assert_array_equal(*ids)
    bad = job._replace(out=tmp_path / "three", options={"steps": 1, "intermediate_size": 8})
    with pytest.raises(ValueError, match=r"start .* has other sizes: .*mlp.*; give the options"):
        train_drafter(bad)
    with pytest.raises(ValueError, match="wanted draft_vocab=16"):
        train_drafter(job._replace(out=tmp_path / "four", draft_vocab=16))


def test_a_run_that_stopped_before_its_first_checkpoint_begins_again(tmp_path):
    """From the closed-form start, as if it had never run."""
    target = toy.saved_target(tmp_path, chat=True)
    job = Job(
        target=str(target),
        drafter="medusa",
        out=tmp_path / "whole",
        texts=tmp_path / "texts",
        data=_file(tmp_path, [f"w{i} w{i + 1} w{2 * i}" for i in range(24)]),
        tokens=2000,
        window=32,
        options={"num_heads": 2},
        training=FAST,
        writing={"rows": 16, "answer_tokens": 24},
    )
    train_drafter(job)
    (tmp_path / "cut/training/checkpoints").mkdir(parents=True)
    train_drafter(job._replace(out=tmp_path / "cut"))
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "training/curve.jsonl").open()]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]


def test_prompts_share_few_widths():
    prompts = [[1, 2, 3], [4] * 9]
    tokens, lengths = packed(prompts, 4, 100)
    assert tokens.shape == (2, 16)
    assert lengths.tolist() == [3, 9]
    assert tokens[0].tolist() == [1, 2, 3] + [0] * 13
    assert packed(prompts, 32, 100)[0].shape == (2, 32)
    assert packed(prompts, 4, 12)[0].shape == (2, 12)
    assert packed(prompts, 4, 6)[0].shape == (2, 9)
