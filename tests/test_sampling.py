"""Logits to distribution, and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.sampling import Purpose, Sampling


def test_mixed_rows():
    logits = jnp.array([[-1.0, 3.0, 2.0]] * 4)
    probs = sampling.distribution(logits, Sampling(temperature=jnp.array([0.0, 1.0, 0.5, 1e-8])))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs[0], [0, 1, 0])
    np.testing.assert_allclose(probs[1], jax.nn.softmax(logits[1]), atol=1e-6)
    np.testing.assert_allclose(probs[2], jax.nn.softmax(2 * logits[2]), atol=1e-6)
    np.testing.assert_allclose(probs[3], [0, 1, 0])


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-3, 1.0, 100.0])
def test_banned_tokens_and_ties_give_no_nan(temperature):
    logits = jnp.array([[1e4, 1e4, -jnp.inf], [-jnp.inf, -5.0, -jnp.inf]])
    probs = sampling.distribution(logits, Sampling(temperature=temperature))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(probs[1], [0, 1, 0])
    expected = [1, 0, 0] if temperature == 0 else [0.5, 0.5, 0]  # greedy takes the first
    np.testing.assert_allclose(probs[0], expected, atol=1e-6)


def test_probability_of_one_token():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 7))
    controls = Sampling(temperature=jnp.array([0.0, 0.7, 2.0]))
    tokens = jax.random.randint(jax.random.key(1), (3, 5), 0, 7)
    whole = sampling.distribution(logits, controls)
    expected = jnp.take_along_axis(whole, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        sampling.probability_of(logits, tokens, controls), expected, atol=1e-6
    )


def test_draw_stays_in_the_support():
    probs = jnp.tile(jnp.array([[0.0, 0.2, 0.0, 0.8]]), (4096, 1))
    tokens = np.asarray(sampling.draw(jax.random.split(jax.random.key(0), 4096), probs))
    assert set(tokens) == {1, 3}
    assert abs((tokens == 1).mean() - 0.2) < 0.03
    certain = sampling.draw(jax.random.split(jax.random.key(0), 2), jnp.eye(3)[:2])
    np.testing.assert_array_equal(certain, [0, 1])


def test_keys_depend_on_row_position_and_purpose_only():
    keys = sampling.row_keys(jax.random.key(3), 4)
    np.testing.assert_array_equal(
        jax.random.key_data(keys[0]), jax.random.key_data(jax.random.key(3))
    )
    grid = sampling.at_positions(keys, Purpose.DRAFT, jnp.tile(jnp.arange(5), (4, 1)))
    one = sampling.at_positions(keys[2:3], Purpose.DRAFT, jnp.array([3]))
    np.testing.assert_array_equal(jax.random.key_data(grid[2, 3]), jax.random.key_data(one[0]))
    every = [
        tuple(np.asarray(jax.random.key_data(k)).ravel())
        for purpose in Purpose
        for k in sampling.at_positions(keys, purpose, jnp.tile(jnp.arange(5), (4, 1))).reshape(-1)
    ]
    assert len(set(every)) == len(every) == 3 * 4 * 5


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "hot", [1.0, 2.0, 3.0]])
def test_bad_temperature(bad):
    with pytest.raises(ValueError, match=r"sampling\.temperature"):
        sampling.check_sampling(Sampling(temperature=bad), 2)
