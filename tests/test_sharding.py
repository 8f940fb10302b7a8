"""Eight virtual devices give what one gives."""

import jax
import numpy as np
import pytest

import specjax
from specjax import Sampling, sharding
from tests import tiny

PROMPTS = [[5], [1, 2, 3, 4, 5], list(range(10, 27)), [7, 7]]


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_decode_on_a_mesh(shape, drafter):
    params = tiny.params(drafter)
    options = {
        "max_new_tokens": 20,
        "sampling": Sampling(temperature=np.array([0.0, 1.0, 0.0, 0.7])),
        "key": jax.random.key(1),
    }
    one = specjax.decode(params, PROMPTS, **options)
    many = specjax.decode(params, PROMPTS, mesh=jax.make_mesh(shape, ("data", "model")), **options)
    jax.tree.map(np.testing.assert_array_equal, many, one)


def test_passes_of_several_sizes_on_a_mesh():
    params = tiny.params("ngram")
    params = params.replace(drafter=specjax.drafters.sized(params.drafter, (0, 2)))
    options = {"max_new_tokens": 20, "eos_ids": []}
    one = specjax.decode(params, PROMPTS, **options)
    many = specjax.decode(params, PROMPTS, mesh=jax.make_mesh((4, 2), ("data", "model")), **options)
    jax.tree.map(np.testing.assert_array_equal, many, one)


def test_load_onto_a_mesh(shared):
    folder = shared / "parity" / "hf-llama-untied"
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    drafter = {"method": "draft_model", "draft_layers": 1}
    sharded = specjax.load(folder, drafter, mesh=mesh)
    layer = sharded.target["layers"][0]
    assert layer["mlp"]["gate"]["weight"].sharding.shard_shape((80, 64)) == (40, 64)
    assert layer["attn"]["o"]["weight"].sharding.shard_shape((64, 64)) == (64, 32)
    assert sharded.target["embed"]["weight"].sharding.shard_shape((160, 64)) == (80, 64)
    alone = specjax.load(folder, drafter)
    a, b = (
        specjax.decode(p, [[1, 2, 3], [4, 5]], max_new_tokens=20, eos_ids=[])
        for p in (sharded, alone)
    )
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_rules():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert sharding.spec(("vocab", "embed"), (10, 4), mesh) == jax.P("model", None)
    assert sharding.spec(("vocab", "embed"), (9, 4), mesh) == jax.P(None, None)
    # Three heads of four are not cut in the middle, although twelve divides by two.
    assert sharding.spec((("heads", 4), "embed"), (12, 4), mesh) == jax.P(None, None)
    assert sharding.spec((("heads", 4), "embed"), (16, 4), mesh) == jax.P("model", None)
    assert sharding.spec(("batch", "embed"), (8, 4), mesh) == jax.P("data", None)
    only_data = jax.make_mesh((8,), ("data",))
    assert sharding.spec(("vocab", "embed"), (16, 4), only_data) == jax.P(None, None)
    with pytest.raises(KeyError, match="colour"):
        sharding.spec(("colour",), (4,), mesh)
