"""Loading holds a checkpoint once: what is read becomes the weight, or is freed before the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np

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
LOAD = """
import resource, sys
import jax
import specjax

jax.numpy.zeros(3).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = specjax.load(sys.argv[1], dtype="float32")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024)
"""


def test_the_peak_is_little_more_than_the_file(tmp_path):
    from safetensors.numpy import save_file

    found = naming.sources(llama.config_from_hf(CONFIG), llama.FAMILY.hf).values()
    tensors = {s.names[0]: np.zeros(s.shape, np.float32) for s in found}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 4e8
    run = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "model.safetensors").unlink()
    assert int(run.stdout) < 1.3 * size
