"""Losses against hand values and against the gradients of their definitions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import losses

# p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), as logits with an offset that must not matter.
P = jnp.log(jnp.array([[0.5, 0.25, 0.25]])) + 3.0
Q = jnp.log(jnp.array([[0.25, 0.25, 0.5]])) - 1.0
LN2 = np.log(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (losses.cross_entropy(Q, jnp.array([0])), 2 * LN2),
        (losses.cross_entropy(Q, jnp.array([2])), LN2),
        (losses.soft_cross_entropy(P, Q), (0.5 * 2 + 0.25 * 2 + 0.25) * LN2),
        (losses.kl(P, Q), 0.25 * LN2),
        (losses.reverse_kl(P, Q), 0.25 * LN2),
        (losses.total_variation(P, Q), 0.25),
        (losses.acceptance(P, Q), 0.75),
        (losses.binary_cross_entropy(jnp.array([0.0]), jnp.array([0.3])), LN2),
        (losses.smooth_l1(jnp.array([[0.0, 3.0]]), jnp.array([[0.5, 1.0]])), (0.125 + 1.5) / 2),
    ],
)
def test_hand_values(value, expected):
    np.testing.assert_allclose(value, [expected], rtol=1e-6)


def test_kl_is_not_symmetric():
    sharp = jnp.log(jnp.array([[0.9, 0.05, 0.05]]))
    assert abs(float(losses.kl(sharp, Q)[0] - losses.reverse_kl(sharp, Q)[0])) > 0.1
    p, q = np.array([0.9, 0.05, 0.05]), np.array([0.25, 0.25, 0.5])
    np.testing.assert_allclose(losses.kl(sharp, Q)[0], np.sum(p * np.log(p / q)), rtol=1e-5)
    np.testing.assert_allclose(losses.reverse_kl(sharp, Q)[0], np.sum(q * np.log(q / p)), rtol=1e-5)


def test_acceptance_is_what_total_variation_leaves():
    target, draft = jax.random.normal(jax.random.key(0), (2, 5, 11)) * 2
    left = 1 - losses.total_variation(target, draft)
    np.testing.assert_allclose(losses.acceptance(target, draft), left, atol=1e-6)


def test_a_banned_token_costs_nothing_where_the_target_bans_it_too():
    banned = jnp.array([[1.0, -jnp.inf, 0.0]])
    for loss in (losses.kl, losses.reverse_kl, losses.soft_cross_entropy):
        assert np.isfinite(loss(banned, banned)).all()


def definitions(p, q):
    """Each loss, written as sums of probabilities."""
    return {
        "kl": np.sum(p * np.log(p / q), -1),
        "soft_cross_entropy": -np.sum(p * np.log(q), -1),
        "reverse_kl": np.sum(q * np.log(q / p), -1),
        "total_variation": np.sum(np.abs(p - q), -1) / 2,
    }


@pytest.mark.parametrize("name", ["kl", "soft_cross_entropy", "reverse_kl", "total_variation"])
def test_value_and_gradient_of_the_definition(name):
    target, draft = np.random.default_rng(1).normal(size=(2, 4, 6))
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    p, loss = softmax(target), getattr(losses, name)
    np.testing.assert_allclose(
        loss(jnp.asarray(target), jnp.asarray(draft)),
        definitions(p, softmax(draft))[name],
        rtol=1e-5,
    )
    found = jax.grad(lambda d: loss(jnp.asarray(target), d).sum())(jnp.asarray(draft))
    step = 1e-6
    for place in np.ndindex(draft.shape):
        up, down = draft.copy(), draft.copy()
        up[place] += step
        down[place] -= step
        slope = definitions(p, softmax(up))[name] - definitions(p, softmax(down))[name]
        np.testing.assert_allclose(found[place], slope.sum() / (2 * step), atol=2e-4)


def test_tvd_plus_plus_without_normalising_is_the_gradient_of_total_variation():
    """The policy gradient: E_q[-r grad log q] with r = 1 where p > q."""
    target, draft = jax.random.normal(jax.random.key(2), (2, 3, 7))
    p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
    reward = (p > q).astype(jnp.float32)

    def policy(d):
        return -jnp.sum(q * reward * jax.nn.log_softmax(d))

    expected = jax.grad(lambda d: losses.total_variation(target, d).sum())(draft)
    np.testing.assert_allclose(jax.grad(policy)(draft), expected, atol=1e-6)


def test_tvd_plus_plus_normalises_rewards_over_all_places():
    target, draft = jax.random.normal(jax.random.key(3), (2, 3, 7))
    weights = jnp.array([1.0, 2.0, 0.0])
    p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
    reward = np.asarray(p > q, np.float64)
    mass = np.asarray(q * weights[:, None] / weights.sum())
    mean = (mass * reward).sum()
    std = np.sqrt((mass * (reward - mean) ** 2).sum())
    advantage = (reward - mean) / std
    # d/dl_y of -sum_x q A log q at fixed q A: -(q A)_y + q_y sum_x (q A)_x.
    qa = np.asarray(q) * advantage
    expected = -qa + np.asarray(q) * qa.sum(-1, keepdims=True)
    found = jax.grad(lambda d: losses.tvd_plus_plus(target, d, weights).sum())(draft)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_decay_and_weighted_mean():
    values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(losses.decayed(values, 0.5), [2.5, 4.0])
    mean = losses.weighted_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1.0, 3.0, 0.0]))
    np.testing.assert_allclose(mean, 2.5)
    assert float(losses.weighted_mean(jnp.ones(2), jnp.zeros(2))) == 0.0


def test_confidence_is_best_at_the_chance_itself():
    chance = jnp.array(0.3)
    slope = jax.grad(losses.binary_cross_entropy)(jnp.log(0.3 / 0.7), chance)
    assert abs(float(slope)) < 1e-6
    chex.assert_scalar_positive(float(losses.binary_cross_entropy(jnp.array(100.0), chance)))
