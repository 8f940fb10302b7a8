"""Prompt lookup against a search written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.ngram import lookup


def _search(text, count, shortest, longest):
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[end - n : end] == text[len(text) - n :]:
                tail = text[end:]
                return [tail[i % len(tail)] for i in range(count)]
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 3), (3, 5)])
def test_against_a_search(shortest, longest):
    rng = np.random.default_rng(shortest * 10 + longest)
    lengths = rng.integers(1, 40, size=64)
    tokens = rng.integers(0, 4, size=(64, 48))  # what lies beyond a length must not matter
    run = jax.jit(lookup, static_argnums=(2, 3, 4))
    drafts, found = run(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), 5, shortest, longest
    )
    for b in range(64):
        expected = _search(tokens[b, : lengths[b]].tolist(), 5, shortest, longest)
        assert bool(found[b]) == (expected is not None)
        if expected is not None:
            assert drafts[b].tolist() == expected


def test_one_repeated_word():
    drafts, found = lookup(jnp.full((1, 60), 7), jnp.array([48]), 6, 1, 3)
    assert found[0]
    assert drafts[0].tolist() == [7] * 6
