"""The rules that knowingly change the law: by how much, and that they do what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept
from specjax.sampling import row_keys
from specjax.types import Proposal


def proposal_of(tokens, parents, probs=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    yes = jnp.ones(tokens.shape, bool)
    return Proposal(
        tokens=tokens,
        parents=jnp.asarray(parents, jnp.int32),
        probs=probs,
        valid=yes,
        candidate=yes,
    )


@functools.partial(jax.jit, static_argnames=("rule", "depth"))
def judged(rule, key, proposal, probs, depth):
    batch = proposal.tokens.shape[0]
    positions = jnp.zeros(batch, jnp.int32)
    return rule.judge(row_keys(key, batch), proposal, accept.dense_law(probs), positions, depth)


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.25])
def test_lenience(lenience):
    """The law of one token against the formula, and never above p / l."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(6, 0.5), size=(2, 50)).astype(np.float64)
    rows = np.repeat(np.arange(50), 6)
    tokens = np.tile(np.arange(6), 50)[:, None]
    with jax.enable_x64(True):
        proposal = proposal_of(tokens, [0], jnp.asarray(q[rows][:, None]))
        law = accept.dense_law(jnp.asarray(np.stack([p[rows], p[rows]], axis=1)))
        keep = np.asarray(accept.chain_keep(proposal, law, 1, lenience)).reshape(50, 6)
        zero = jnp.zeros(300, jnp.int32)
        after = np.asarray(accept.chain_following(proposal, law, zero, 1, lenience))[::6]
    np.testing.assert_allclose(keep, np.minimum(1, p / (lenience * q)), atol=1e-12)
    left = np.maximum(p - lenience * q, 0)
    np.testing.assert_allclose(after, left / left.sum(-1, keepdims=True), atol=1e-12)
    out = q * keep + (1 - (q * keep).sum(-1, keepdims=True)) * after
    assert (out <= p / lenience + 1e-12).all()
    assert (np.abs(out - p).max() < 1e-12) == (lenience == 1)


def test_full_lenience_is_speculative_sampling():
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.dirichlet(np.ones(6), size=(64, 3)), jnp.float32)
    p = jnp.asarray(rng.dirichlet(np.ones(6), size=(64, 4)), jnp.float32)
    proposal = proposal_of(rng.integers(0, 6, size=(64, 3)), [0, 1, 2], q)
    exact = judged(accept.speculative_sampling(), jax.random.key(0), proposal, p, 3)
    lenient = judged(accept.lenient_sampling(1.0), jax.random.key(0), proposal, p, 3)
    jax.tree.map(np.testing.assert_array_equal, exact, lenient)


def test_synthetic_rates():
    """Depths stand at the given rates whatever the tokens; beyond them nothing does."""
    rows, rates = 20000, (0.9, 0.5)
    p = jnp.broadcast_to(jnp.array([0.0, 0.25, 0.75]), (rows, 4, 3))
    proposal = proposal_of(np.zeros((rows, 3)), [0, 1, 2])  # tokens that p never gives
    verdict = judged(accept.synthetic_acceptance(rates), jax.random.key(2), proposal, p, 3)
    accepted = np.asarray(verdict.accepted)
    assert accepted.max() == 2
    assert abs(np.mean(accepted >= 1) - 0.9) < 0.01
    assert abs(np.mean(accepted[accepted >= 1] == 2) - 0.5) < 0.015
    following = np.take_along_axis(np.asarray(verdict.tokens), accepted[:, None], axis=1)
    assert abs(np.mean(following == 2) - 0.75) < 0.015
    assert not (following == 0).any()


def test_typical_acceptance_on_a_worked_tree():
    """Two paths of two nodes stand; the likelier one is taken. A third is deeper but broken."""
    #          0
    #        / | \         tokens 0 1 2; then 3 below each; then 4 below the last
    p = np.full((1, 8, 5), 0.01, np.float32)
    p[0, 0] = [0.3, 0.36, 0.3, 0.02, 0.02]  # H = 1.27: threshold min(0.09, 0.3 * 0.28) = 0.084
    p[0, 1] = [0.01, 0.01, 0.01, 0.96, 0.01]
    p[0, 2] = [0.3, 0.01, 0.01, 0.5, 0.18]
    p[0, 3] = [0.5, 0.2, 0.2, 0.05, 0.05]  # 3 is not plausible here, so nothing below it stands
    p[0, 6] = [0.01, 0.01, 0.01, 0.01, 0.96]
    p[0, 4], p[0, 5] = [0.6, 0.4, 0, 0, 0], [0, 1, 0, 0, 0]
    proposal = proposal_of([[0, 1, 2, 3, 3, 3, 4]], [0, 0, 0, 1, 2, 3, 6])
    key = jax.random.key(0)
    verdict = judged(accept.typical_acceptance(), key, proposal, jnp.asarray(p), 3)
    assert np.asarray(verdict.path)[0, :3].tolist() == [0, 1, 4]  # 0.3 * 0.96 > 0.36 * 0.5
    assert np.asarray(verdict.tokens)[0, :3].tolist() == [0, 3, 0]
    # With a threshold of nothing everything of any probability stands.
    free = accept.typical_acceptance(epsilon=0.0)
    assert int(judged(free, key, proposal, jnp.asarray(p), 3).accepted[0]) == 3


def test_typical_next_token():
    rows = 4000
    p = jnp.broadcast_to(jnp.array([0.4, 0.6]), (rows, 2, 2))
    proposal = proposal_of(np.ones((rows, 1)), [0])
    key = jax.random.key(3)
    greedy = judged(accept.typical_acceptance(), key, proposal, p, 1)
    assert np.asarray(greedy.tokens).tolist() == [[1, 1]] * rows
    drawn = judged(accept.typical_acceptance(next_token="sample"), key, proposal, p, 1)
    assert (np.asarray(drawn.accepted) == 1).all()
    assert abs(np.asarray(drawn.tokens)[:, 1].mean() - 0.6) < 0.03
