"""Routed experts: the choice, the sum, and the sum over devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, sharding
from specjax.models import feed_forward
from specjax.models.config import ExpertsConfig
from specjax.models.decoder import decoder_model, random_weights
from specjax.types import Params
from tests import tiny
from tests.tiny import emitted

BASE = ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_size=16)


def _by_hand(scores, bias, config):
    """Experts and weights of one token, in plain Python."""
    if config.scoring == "sigmoid":
        weights = 1 / (1 + np.exp(-scores))
    else:
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
    choice = weights + bias
    size = len(scores) // config.groups
    worth = [sum(sorted(choice[g * size :][:size])[-2:]) for g in range(config.groups)]
    kept = sorted(range(config.groups), key=lambda g: -worth[g])[: config.groups_kept]
    open_ = [i for i in range(len(scores)) if i // size in kept]
    chosen = sorted(open_, key=lambda i: -choice[i])[: config.experts_per_token]
    picked = weights[chosen]
    if config.normalise:
        picked = picked / picked.sum()
    return dict(zip(chosen, picked * config.scale, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": False},
        {"scoring": "sigmoid", "groups": 4, "groups_kept": 2, "scale": 2.5},
        {"scoring": "sigmoid", "experts_per_token": 4, "groups": 2, "groups_kept": 1},
    ],
)
def test_the_choice(changes):
    config = dataclasses.replace(BASE, **changes)
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((16, 8)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32) * (config.scoring == "sigmoid")
    chosen, weights = feed_forward.route(jnp.asarray(scores), jnp.asarray(bias), config)
    for row in range(16):
        found = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        expected = _by_hand(scores[row], bias, config)
        assert found.keys() == expected.keys()
        for expert, weight in expected.items():
            assert found[expert] == pytest.approx(weight, abs=1e-6)


def test_a_group_that_is_not_kept_stays_closed_below_zero():
    config = dataclasses.replace(BASE, scoring="sigmoid", groups=4, groups_kept=1)
    bias = jnp.asarray([-2.0, -2.0, -3.0, -3.0, -1.0, -9.0, -0.9, -0.8])
    chosen, weights = feed_forward.route(jnp.zeros((1, 8)), bias, config)
    assert sorted(chosen[0].tolist()) == [6, 7]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_forms_of_the_sum():
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (5, 12))
    gate, up = (jax.random.normal(k, (8, 16, 12)) for k in keys[1:3])
    down = jax.random.normal(keys[3], (8, 12, 16))
    chosen, weights = feed_forward.route(jax.random.normal(keys[4], (5, 8)), None, BASE)
    expected = np.zeros((5, 12))
    for row in range(5):
        for i, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            inner = np.asarray(jax.nn.silu(gate[i] @ x[row]) * (up[i] @ x[row]))
            expected[row] += weight * np.asarray(down[i] @ inner)
    for form in (feed_forward.one_by_one, feed_forward.grouped):
        out = jax.jit(functools.partial(form, activation="silu"))(
            x, chosen, weights, gate, up, down
        )
        np.testing.assert_allclose(out, expected, atol=1e-4)


def test_over_devices():
    """Greedy text with experts, weights split over 8 devices, equals that of one."""
    config = dataclasses.replace(
        tiny.CONFIG,
        vocab_size=64,
        experts=dataclasses.replace(BASE, shared_size=24),
        expert_layers=(False, True),
    )
    params = Params(
        target=random_weights(config, jax.random.key(1)),
        model=decoder_model(config),
        drafter=drafters.ngram(4),
    )
    prompts = [[1, 2, 3, 1, 2], [9, 8]]
    plain = params.replace(drafter=drafters.plain())
    alone = specjax.decode(plain, prompts, max_new_tokens=16)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    placed = sharding.place(params.model, params.target, sharding.auto(mesh))
    experts = placed["layers"][1]["mlp"]["gate"]
    assert experts.sharding.shard_shape(experts.shape) == (8, 4, 32)
    out = specjax.decode(params, prompts, max_new_tokens=16, mesh=mesh)
    for row in range(2):
        assert emitted(out, row) == emitted(alone, row)
