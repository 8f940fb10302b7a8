"""Speculative sampling: its two formulas, the public step, and its law through the driver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import accept, drafters
from specjax.sampling import Sampling, distribution, row_keys
from specjax.types import Params, Proposal
from tests import tiny
from tests.accept import laws

WORKED_Q, WORKED_P = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.4, 0.2])


def test_worked_case():
    """q = [.6, .3, .1], p = [.4, .4, .2]."""
    keep = accept.keep_probability(jnp.asarray(WORKED_P), jnp.asarray(WORKED_Q))
    np.testing.assert_allclose(keep, [2 / 3, 1, 1], atol=1e-6)
    assert np.sum(WORKED_Q * np.asarray(keep)) == pytest.approx(0.8, abs=1e-6)
    left = accept.residual(jnp.asarray(WORKED_P), jnp.asarray(WORKED_Q))
    np.testing.assert_allclose(left, [0, 0.5, 0.5], atol=1e-6)
    out = WORKED_Q * np.asarray(keep) + (1 - 0.8) * np.asarray(left)
    np.testing.assert_allclose(out, WORKED_P, atol=1e-6)


def test_residual_edge_cases_give_no_nan():
    p = jnp.array([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(accept.residual(p, p), p)  # no mass left: p itself
    np.testing.assert_allclose(accept.residual(p, jnp.zeros_like(p)), p)
    keep = accept.keep_probability(jnp.array([0.0, 0.5, 0.5]), jnp.array([0.0, 0.0, 0.5]))
    np.testing.assert_allclose(keep, [0.0, 1.0, 1.0])


@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "plain"])
def test_law_through_the_driver(drafter):
    """Chi-square of the first three tokens of 2 x 8192 rows against the exact law."""
    vocab, rows = 4, 8192
    rng = np.random.default_rng(3)
    target, draft = laws.markov("random", vocab, rng), laws.markov("random", vocab, rng)
    model = tiny.markov_model(vocab)
    made = {
        "draft_model": drafters.draft_model(model, 3),
        "ngram": drafters.ngram(3, prompt_lookup_min=1, prompt_lookup_max=2),
        "plain": drafters.plain(),
    }[drafter]
    params = Params(
        target=jnp.log(target).astype(jnp.float32),
        draft=jnp.log(draft).astype(jnp.float32),
        model=model,
        drafter=made,
    )
    counts = np.zeros((vocab,) * 3)
    for seed in (1, 2):
        out = specjax.decode(
            params,
            np.tile([[0, 1, 2, 3, 1, 0]], (rows, 1)),
            max_new_tokens=3,
            sampling=Sampling(temperature=1.0),
            key=jax.random.key(seed),
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    expected = laws.markov_law(target, 3) * counts.sum()
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert chi_square < 110  # 63 degrees of freedom: p = 0.0002


def test_public_step_keeps_a_rare_draft_rarely():
    """A drafted token of probability 0.01, from a certain draft, stands one time in a hundred."""
    rows = 20000
    p = jnp.broadcast_to(jnp.array([0.01, 0.99]), (rows, 2, 2))
    proposal = Proposal(
        tokens=jnp.zeros((rows, 1), jnp.int32),
        parents=jnp.zeros(1, jnp.int32),
        probs=None,
        valid=jnp.ones((rows, 1), bool),
        candidate=jnp.ones((rows, 1), bool),
    )
    verdict = specjax.accept_and_resample(jax.random.key(0), proposal, p)
    rate = float(jnp.mean(verdict.accepted))
    assert abs(rate - 0.01) < 3 * (0.01 * 0.99 / rows) ** 0.5
    assert set(np.asarray(verdict.tokens[:, 0])[np.asarray(verdict.accepted) == 0]) == {1}


def test_riders_and_invalid_nodes_are_never_accepted():
    p = jnp.broadcast_to(jnp.array([0.0, 1.0]), (4, 4, 2))
    yes, no = jnp.ones((4, 3), bool), jnp.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]]) > 0
    base = {"tokens": jnp.ones((4, 3), jnp.int32), "probs": None}
    keys = row_keys(jax.random.key(0), 4)
    for masks in ({"valid": no, "candidate": yes}, {"valid": yes, "candidate": no}):
        proposal = Proposal(**base, **masks, parents=jnp.arange(3, dtype=jnp.int32))
        verdict = specjax.accept_and_resample(keys, proposal, p)
        np.testing.assert_array_equal(verdict.accepted, [0, 1, 2, 3])
    off_chain = Proposal(
        **base,
        valid=yes,
        candidate=yes,
        parents=jnp.array([[0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 1, 2]]),
    )
    verdict = specjax.accept_and_resample(keys, off_chain, p)
    np.testing.assert_array_equal(verdict.accepted, [1, 2, 3, 3])


def test_logits_law_equals_the_dense_law():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 9)) * 3
    controls = Sampling(temperature=jnp.array([0.0, 0.5, 1.5]))
    lazy, dense = (
        accept.logits_law(logits, controls),
        accept.dense_law(distribution(logits, controls)),
    )
    nodes = jnp.array([[0, 1, 2], [3, 3, 0], [1, 0, 2]])
    tokens = jnp.array([[5, 8, 0], [1, 2, 3], [4, 4, 4]])
    np.testing.assert_allclose(lazy.at(nodes, tokens), dense.at(nodes, tokens), atol=1e-6)
    node = jnp.array([0, 2, 3])
    np.testing.assert_allclose(lazy.row(node), dense.row(node), atol=1e-6)
