"""Inverse frequencies of every scaling kind, by another implementation; the rotation by its law."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import llama
from specjax.models.config import RopeConfig
from specjax.models.rope import inverse_frequencies, rotate, rotation

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rope.json").read_text())
LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 80,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["params"]["rope_type"])
def test_frequencies_from_a_checkpoints_config(case):
    settings = {
        "rope_parameters": case["params"],
        "max_position_embeddings": case["max_position"],
    }
    config = llama.config_from_hf(LLAMA | settings)
    inv_freq, attention = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(inv_freq, case["inv_freq"], rtol=1e-5)
    assert attention == pytest.approx(case["attention"], rel=1e-6)


def test_products_depend_on_the_distance_only():
    rope = RopeConfig(theta=100.0)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i, j):
        positions = jnp.array([[i], [j]])
        cos, sin = rotation(rope, 8, positions)
        return float(jnp.sum(rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(0, 0) == pytest.approx(float(jnp.sum(q * k)), abs=1e-5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig(kind="dynamic"), "rope kind 'dynamic' is not supported"),
        (RopeConfig(kind="yarn", factor=2.0), "needs original_max_position"),
    ],
)
def test_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(rope, 8)
