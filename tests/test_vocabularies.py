"""Drafts whose vocabulary is smaller, larger or numbered in another way: exact all the same."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, drafters
from specjax.loading import methods, reading
from specjax.models.decoder import decoder_model
from specjax.types import Params
from tests import tiny
from tests.tiny import emitted

V, ROWS = 5, 16384


def _target(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(V, 0.8), size=V)


def _params(draft: np.ndarray, d2t=None) -> Params:
    """A Markov target, and a Markov draft over a vocabulary of its own."""
    made = drafters.draft_model(tiny.markov_model(len(draft)), 3, mapped=d2t is not None)
    weights = jnp.log(jnp.asarray(draft, jnp.float32))
    return Params(
        target=jnp.log(jnp.asarray(_target(), jnp.float32)),
        draft=weights if d2t is None else (weights, drafters.vocabulary_map(d2t, V)),
        model=tiny.markov_model(V),
        drafter=made,
    )


def _smaller() -> Params:
    return _params(np.random.default_rng(1).dirichlet(np.ones(3), size=3))


def _larger() -> Params:
    return _params(np.random.default_rng(2).dirichlet(np.ones(8), size=8))


def _offsets() -> Params:
    """Draft ids 0 1 2 are target ids 0 2 4, as in a head with a reduced vocabulary."""
    return _params(np.random.default_rng(3).dirichlet(np.ones(3), size=3), [0, 1, 2])


def _shuffled() -> Params:
    """Draft ids 0..5 are target ids 3 1 - 0 2 4; one draft token is none of the target's."""
    ids = np.array([3, 1, V, 0, 2, 4])
    return _params(np.random.default_rng(4).dirichlet(np.ones(6), size=6), ids - np.arange(6))


@pytest.mark.parametrize("make", [_smaller, _larger, _offsets, _shuffled])
def test_the_law_is_the_targets(make):
    """First two tokens of 3 x 16384 rows against the exact law, and greedy rows."""
    params, target = make(), _target()
    counts = np.zeros((V, V))
    accepted = 0
    for seed in range(3):
        out = specjax.decode(
            params,
            np.zeros((ROWS, 1), int),
            max_new_tokens=2,
            sampling=Sampling(temperature=1.0),
            seed=seed,
            eos_ids=[],
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
        accepted += int(out.stats.accepted.sum())
    expected = target[0][:, None] * target * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 58  # 24 degrees of freedom: p = 0.0001
    assert accepted > 0
    text = [0]
    for _ in range(6):
        text.append(int(target[text[-1]].argmax()))
    out = specjax.decode(params, [0], max_new_tokens=6, eos_ids=[])
    assert emitted(out) == text[1:]


def test_row_28_proposals_are_the_targets_ids():
    """The target itself as a draft, its tokens renumbered: every draft stands."""
    params = tiny.params()
    order = np.random.default_rng(0).permutation(61)  # draft id i is target id order[i]
    tables = {k: {"weight": params.target[k]["weight"][order]} for k in ("embed", "head")}
    weights = params.target | tables
    ids = drafters.vocabulary_map(order - np.arange(61), 61)
    made = drafters.draft_model(decoder_model(tiny.CONFIG), 4, mapped=True)
    drafted = params.replace(drafter=made, draft=(weights, ids))
    out = specjax.decode(drafted, [1, 2, 3], max_new_tokens=20)
    assert emitted(out) == emitted(specjax.decode(params, [1, 2, 3], max_new_tokens=20))
    assert int(out.stats.rounds[0]) == 4


def test_bad_maps():
    for d2t, message in (
        ([-1], "negative"),
        ([1, 0], "twice to the target's token 1"),
        ([0.5], "integers"),
        ([[0]], "integers"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.vocabulary_map(d2t, 4)


class _Named:
    """As much of a tokenizer as telling tokens apart needs."""

    def __init__(self, words):
        self.words = words
        self.backend = self

    def token_bytes(self):
        return tuple(word.encode() for word in self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def _loaded(words, size, name):
    model = tiny.markov_model(size)
    checkpoint = dataclasses.make_dataclass("Checkpoint", ["tokenizer", "name"])
    tokenizer = None if words is None else _Named(words)
    return reading.Loaded(model, None, None, checkpoint(tokenizer, name))


def test_tokens_are_matched_by_their_text():
    target = _loaded(["a", "b", "c", "d"], 6, "target")
    alike = _loaded(["a", "b", "c"], 4, "alike")
    assert methods._vocabulary_map(alike, target) is None
    other = methods._vocabulary_map(_loaded(["d", "x", "a"], 4, "other"), target)
    np.testing.assert_array_equal(np.arange(4) + other.d2t, [3, 6, 0, 6])
    with pytest.raises(ValueError, match="shares only 1 of its 3 tokens"):
        methods._vocabulary_map(_loaded(["x", "y", "a"], 3, "foreign"), target)
    assert methods._vocabulary_map(_loaded(None, 6, "unknown"), target) is None
    with pytest.raises(ValueError, match="has 3 tokens, the target target has 6"):
        methods._vocabulary_map(_loaded(None, 3, "unknown"), target)
