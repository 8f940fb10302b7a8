"""The draft's vocabulary, and the estimate of a softmax on a sample of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.choosing import choose, draft_vocabulary, token_counts


def test_counts():
    counts = token_counts([np.array([1, 1, 3]), np.array([0])], 5)
    np.testing.assert_array_equal(counts, [1, 2, 0, 1, 0])


def test_vocabulary_holds_the_frequent_ones_in_increasing_order():
    counts = np.array([5, 0, 9, 1, 7, 0])
    np.testing.assert_array_equal(draft_vocabulary(counts, 3), [0, 2, 4])
    np.testing.assert_array_equal(draft_vocabulary(counts, 3, always=[5]), [2, 4, 5])
    np.testing.assert_array_equal(draft_vocabulary(counts, 6), np.arange(6))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_vocabularies_that_cannot_be(size):
    with pytest.raises(ValueError, match="the draft's vocabulary must have from 2 to 6 tokens"):
        draft_vocabulary(np.arange(6), size, always=[0, 1])


def test_all_tokens_need_no_estimate():
    found = choose(np.array([3]), np.arange(10), np.array([0]), 10, [0])
    np.testing.assert_array_equal(found.ids, np.arange(10))
    np.testing.assert_array_equal(found.log_weights, np.zeros(10))


def test_the_sum_over_a_sample_is_right_on_average():
    draft_ids = np.arange(0, 400, 2)  # target ids 0, 2, ...: 200 draft tokens
    logits = np.random.default_rng(0).normal(size=200)
    tokens, frequent = np.array([[10, 11], [398, 10]]), np.array([0, 1, 2, 3])
    sums = []
    for seed in range(400):
        found = choose(tokens, draft_ids, frequent, 40, [seed])
        ids = np.asarray(found.ids)
        assert len(set(ids.tolist())) == 40
        # Draft ids of 10 and 398; 11 is no token of the draft.
        assert {5, 199, 0, 1, 2, 3} <= set(ids.tolist())
        sums.append(np.exp(logits[ids] + np.asarray(found.log_weights)).sum())
    whole = np.exp(logits).sum()
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - whole) < 4 * error
    assert error < 0.02 * whole


def test_a_step_draws_its_own_sample():
    first, same, other = (
        choose(np.array([1]), np.arange(100), np.array([0]), 20, seed).ids
        for seed in ([0, 1], [0, 1], [0, 2])
    )
    assert jnp.array_equal(first, same)
    assert not jnp.array_equal(first, other)
