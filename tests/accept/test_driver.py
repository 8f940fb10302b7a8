"""Every lossless rule through the real driver: chi-square of the first three tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import accept, drafters
from specjax.sampling import Sampling
from specjax.types import Params
from tests import tiny
from tests.accept import laws
from tests.accept.drafters import markov_tree

ROWS, SEEDS, VOCAB = 16384, 7, 4  # 114,688 texts
CHAIN = laws.CHAINS[3]
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def chi_square(rule, drafter, seeds=SEEDS):
    """Of the law of three tokens after token 0, and the drafts accepted a round."""
    target, draft = laws.pair(("random", "random"), VOCAB)
    params = Params(
        target=jnp.log(jnp.asarray(target, jnp.float32)),
        draft=jnp.log(jnp.asarray(draft, jnp.float32)),
        model=tiny.markov_model(VOCAB),
        drafter=drafter,
    )
    counts, accepted, rounds = np.zeros((VOCAB,) * 3), 0, 0
    for seed in range(seeds):
        out = specjax.decode(
            params,
            np.tile([[0, 1, 2, 3, 1, 0]], (ROWS, 1)),
            max_new_tokens=3,
            sampling=Sampling(temperature=1.0),
            key=jax.random.key(seed),
            acceptance=rule,
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
        accepted += int(np.sum(out.stats.accepted))
        rounds += int(np.sum(out.stats.rounds))
    expected = laws.markov_law(target, 3) * counts.sum()
    return np.sum((counts - expected) ** 2 / expected), accepted / rounds


@pytest.mark.parametrize(
    ("rule", "parents", "drawn", "depth"),
    [
        (accept.block_verification(), CHAIN, "replacement", 3),
        (accept.recursive_rejection(), laws.BINARY, "replacement", 2),
        (accept.spectr(), laws.k_chains(2, 2), "replacement", 2),
        (accept.traversal_verification(True), laws.BINARY, "base", 2),
        slow(accept.speculative_sampling(), CHAIN, "replacement", 3),
        slow(accept.recursive_rejection(), laws.BINARY, "top_k", 2),
        slow(accept.recursive_rejection(True), laws.BINARY, "base", 2),
        slow(accept.spectr(), laws.k_chains(3, 2), "replacement", 2),
        slow(accept.traversal_verification(), laws.BINARY, "replacement", 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_law_through_the_driver(rule, parents, drawn, depth):
    statistic, length = chi_square(rule, markov_tree(parents, drawn, depth))
    assert statistic < 110, (statistic, length)  # 63 degrees of freedom: p = 0.0002
    assert length > 0.3


@pytest.mark.slow
def test_block_verification_with_a_draft_model():
    drafter = drafters.draft_model(tiny.markov_model(VOCAB), 3)
    statistic, _ = chi_square(accept.block_verification(), drafter, seeds=16)
    assert statistic < 110


def test_a_wrong_law_is_noticed():
    drafter = markov_tree(CHAIN, "replacement", 3)
    statistic, _ = chi_square(accept.lenient_sampling(0.7), drafter, seeds=1)
    assert statistic > 150
