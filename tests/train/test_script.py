"""The script that trains every bundled drafter, at a thousandth of its size, on a CPU."""

import json
import os
import subprocess
import sys

import pytest

import specjax
from tests.conftest import ROOT

TOKENS = 20_000_000


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_rehearsal(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable, "XLA_FLAGS": ""}
    done = subprocess.run(
        ["bash", "benchmarks/train_gpu.sh", str(tmp_path), "0.001"],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    report = json.loads(done.stdout)
    assert {row["drafter"] for row in report["drafters"]} == {
        "eagle3",
        "medusa",
        "dflash",
        "dspark",
        "draft_model",
    }
    prompt = "Why is the sky blue?"
    plain = specjax.generate(specjax.load("smollm2-135m"), prompt, max_new_tokens=8)
    for row in report["drafters"]:
        assert row["bytes"] < 14_000_000
        params = specjax.load("smollm2-135m", drafter=tmp_path / row["drafter"])
        assert specjax.generate(params, prompt, max_new_tokens=8) == plain
