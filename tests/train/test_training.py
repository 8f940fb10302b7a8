"""The loop: it learns, it resumes exactly, and devices and parts do not change what it computes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.train.recipe import frozen
from specjax.train.recipes import PLANNERS
from specjax.train.training import Training, train
from specjax.train.windows import held_out, open_windows
from tests.train import toy

V = toy.CONFIG.vocab_size
IDS = np.arange(V, dtype=np.int32)
SETTINGS = Training(
    steps=12, rows=8, learning_rate=3e-3, warmup=4, save_every=4, measure_every=0, measure_rows=2
)


# Long enough that a signal comes in time.
LONGER = SETTINGS._replace(steps=120, save_every=10)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return toy.write_toy_texts(tmp_path_factory.mktemp("texts"), shards=8, rows=32)


def _train(
    texts: Path,
    folder: Path,
    settings: Training,
    mesh=None,
    method="eagle3",
    report=lambda line: None,
    **options,
):
    params = toy.toy_target()
    plan = PLANNERS[method].plan(params, **options)
    windows, held = held_out(open_windows(texts, 48, plan.recipe.features), 0.1)
    start = plan.start(jax.random.key(0))
    weights, finished = train(
        plan.recipe,
        frozen(params, IDS),
        start,
        windows,
        held,
        settings,
        folder,
        frequent=np.arange(4),
        mesh=mesh,
        report=report,
    )
    return plan, weights, finished


def _curve(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "rate"} for line in lines]


def test_eight_devices_and_parts_give_the_loss_of_one(texts, tmp_path):
    _train(texts, tmp_path / "one", SETTINGS, steps=2)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    _train(texts, tmp_path / "mesh", SETTINGS, mesh, steps=2)
    _train(texts, tmp_path / "parts", SETTINGS._replace(accumulate=2), steps=2)
    one, mesh, parts = (
        [line["loss"] for line in _curve(tmp_path / name)] for name in ("one", "mesh", "parts")
    )
    assert len(one) == SETTINGS.steps + 1
    np.testing.assert_allclose(mesh, one, atol=1e-4)
    # The mean of two parts' means is the whole's only where both have as many places.
    np.testing.assert_allclose(parts, one, rtol=0.02)


def test_other_settings_are_refused(texts, tmp_path):
    _train(texts, tmp_path, SETTINGS._replace(steps=1), method="medusa", num_heads=2)
    with pytest.raises(ValueError, match=r"holds a run of other settings: steps was 1, is 2\."):
        _train(texts, tmp_path, SETTINGS._replace(steps=2), method="medusa", num_heads=2)
    with pytest.raises(ValueError, match="rows=8 must be a multiple of"):
        _train(texts, tmp_path / "x", SETTINGS._replace(accumulate=3), method="medusa")


def test_bfloat16_products_keep_float32_weights(texts, tmp_path):
    settings = SETTINGS._replace(steps=3, compute_dtype="bfloat16")
    _, weights, _ = _train(texts, tmp_path / "a", settings, method="medusa", num_heads=2)
    assert {str(x.dtype) for x in jax.tree.leaves(weights)} == {"float32"}
    _train(texts, tmp_path / "b", SETTINGS._replace(steps=3), method="medusa", num_heads=2)
    low, full = ([x["loss"] for x in _curve(tmp_path / name)] for name in "ab")
    assert low != full
    np.testing.assert_allclose(low, full, rtol=0.05)


_RUN = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
from pathlib import Path
from tests.train.test_training import LONGER, _train
_train(Path(sys.argv[1]), Path(sys.argv[2]), LONGER, method="medusa", num_heads=2)
"""


def _process(texts: Path, folder: Path) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _RUN, str(texts), str(folder), str(root / ".cache/jax")]
    return subprocess.Popen(command, cwd=root, env=environment)


def _killed_when(process: subprocess.Popen, ready, number: int) -> None:
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        if ready():
            process.send_signal(number)
            break
        time.sleep(0.01)
    process.wait(60)


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert _process(texts, folder).wait(300) == 0
    assert len(_curve(folder)) == LONGER.steps + 1
    return folder


def _stopped(texts: Path, folder: Path, number: int) -> subprocess.Popen:
    """A run that gets a signal soon after one of its checkpoints, whichever."""
    at = 10 * random.SystemRandom().randint(1, 6)
    print("signal", number, "after the checkpoint of step", at)
    process = _process(texts, folder)
    _killed_when(process, (folder / "checkpoints" / str(at)).exists, number)
    return process


def test_a_killed_run_goes_on_along_the_same_curve(texts, whole, tmp_path):
    assert _stopped(texts, tmp_path, signal.SIGKILL).returncode == -signal.SIGKILL
    assert _process(texts, tmp_path).wait(300) == 0
    assert _curve(tmp_path) == _curve(whole)


def test_a_signal_stops_after_the_step_in_progress(texts, whole, tmp_path):
    assert _stopped(texts, tmp_path, signal.SIGTERM).returncode == 0
    stopped = _curve(tmp_path)[-1]
    assert stopped["measured"]
    assert stopped["step"] < LONGER.steps
    assert _process(texts, tmp_path).wait(300) == 0
    steps = lambda folder: [line for line in _curve(folder) if not line["measured"]]
    assert steps(tmp_path) == steps(whole)


def test_a_signal_while_the_held_out_windows_are_measured_loses_no_step(texts, tmp_path):
    """That step has no checkpoint of its own: the next one ends the run with one."""

    def report(line):
        if line.measured and line.step == 2:
            signal.raise_signal(signal.SIGTERM)

    settings = SETTINGS._replace(measure_every=2)
    _, _, finished = _train(texts, tmp_path, settings, method="medusa", report=report, num_heads=2)
    assert not finished
    assert _curve(tmp_path)[-1]["step"] == 3
    assert _curve(tmp_path)[-1]["measured"]
    assert (tmp_path / "checkpoints" / "3").is_dir()


def test_a_recipe_of_two_minutes_reaches_its_tau(texts, tmp_path):
    """An EAGLE-3 head for the toy target: 58,000 tokens, and more than 3 tokens a pass."""
    target = toy.saved_target(tmp_path)
    settings = Training(
        steps=150, rows=8, learning_rate=5e-3, warmup=20, save_every=1000, measure_every=0
    )
    plan, weights, finished = _train(texts, tmp_path / "run", settings, steps=3)
    assert finished
    plan.recipe.save(tmp_path / "drafter", weights, IDS)
    params = specjax.load(target, drafter=tmp_path / "drafter")
    result = specjax.decode(params, toy.prompts(16, seed=99), max_new_tokens=40)
    plain = specjax.decode(toy.toy_target(), toy.prompts(16, seed=99), max_new_tokens=40)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    tau = float(np.sum(result.lengths) / np.sum(result.stats.rounds))
    assert tau > 3
