"""Loading holds a checkpoint once: what is read becomes the weight, or is freed before the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from specjax.models import llama, naming

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
LARGE = CONFIG | {"num_hidden_layers": 15}  # 1 GB in float32
# What jax itself takes is taken off.
SCRIPT = """
import resource, sys
import jax
import specjax

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.numpy.zeros(3).block_until_ready()
from specjax import checkpoints, loading
before = peak()
if sys.argv[1] == "load":
    jax.block_until_ready(specjax.load(sys.argv[2], dtype="float32").target)
else:
    checkpoints.convert(sys.argv[2], sys.argv[2] + "-copy")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
@pytest.mark.parametrize(
    ("what", "config", "share"),
    [
        ("load", CONFIG, 1.3),
        pytest.param("load", LARGE, 1.3, marks=pytest.mark.slow),
        pytest.param("convert", LARGE, 0.3, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_little_more_than_what_is_kept(tmp_path, what, config, share):
    """Loading keeps the weights once; converting never holds more than a few tensors."""
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    found = naming.sources(llama.config_from_hf(config), llama.FAMILY.hf).values()
    tensors = {s.names[0]: np.zeros(s.shape, np.float32) for s in found}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    assert size > 4e8
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, folder],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    assert int(run.stdout.split()[-1]) < share * size
