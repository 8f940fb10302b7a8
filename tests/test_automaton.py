"""Automata: merged tables say what unmerged ones do, and their shapes come in buckets."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import automaton


def random_table(rng, states=11, vocab=200, kinds=13):
    """A table with many equal columns: next states and hits, [S, V]."""
    following = rng.integers(-1, states, (states, kinds))
    hits = rng.random((states, kinds)) < 0.3
    kind = rng.integers(0, kinds, vocab)
    return following[:, kind], hits[:, kind]


def test_merged_tables_say_the_same():
    following, hits = random_table(np.random.default_rng(0))
    merged = automaton.build(following, hits=hits)
    states, vocab = following.shape
    assert merged.following.shape == (16, 16)
    assert merged.columns.shape == (vocab,)
    state, token = jnp.meshgrid(jnp.arange(states), jnp.arange(vocab), indexing="ij")
    for run in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(run(automaton.advance)(merged, state, token), following)
        np.testing.assert_array_equal(run(automaton.hit)(merged, state, token), hits)
        np.testing.assert_array_equal(
            run(automaton.allowed)(merged, jnp.arange(states)), following >= 0
        )


def test_what_the_table_refuses_stays_dead():
    following, hits = random_table(np.random.default_rng(1))
    merged = automaton.build(following, hits=hits)
    dead, tokens = jnp.full((3, 2), -1), jnp.arange(6).reshape(3, 2)
    assert (automaton.advance(merged, dead, tokens) == -1).all()
    assert not automaton.hit(merged, dead, tokens).any()
    assert automaton.allowed(merged, dead).shape == (3, 2, 200)
    assert automaton.allowed(merged, dead).all()


def test_without_hits_nothing_is_hit():
    plain = automaton.build(np.zeros((1, 5)))
    assert not automaton.hit(plain, jnp.zeros(5, jnp.int32), jnp.arange(5)).any()


def test_columns_that_no_token_has_are_dropped():
    merged = automaton.build(np.array([[0, 1, -1], [0, 1, 0]]), np.array([2, 0, 2]))
    assert merged.columns.tolist() == [1, 0, 1]
    columns, following, hits = automaton.trimmed(merged)
    assert columns.tolist() == [1, 0, 1]
    assert following.tolist() == [[0, -1]]  # no token leads to state 1
    assert hits is None


def test_an_automaton_of_about_the_same_size_does_not_trace_again():
    advance = jax.jit(chex.assert_max_traces(automaton.advance, 1))
    rng = np.random.default_rng(2)
    for states, kinds in ((9, 9), (16, 12), (12, 15)):
        following, hits = random_table(rng, states, kinds=kinds)
        following[0, 0] = states - 1
        advance(automaton.build(following, hits=hits), jnp.int32(0), jnp.int32(1))


def test_built_while_something_is_traced():
    kept = []

    @jax.jit
    def run(token):
        kept.append(automaton.build(np.array([[0, -1]])))
        return automaton.advance(kept[0], jnp.int32(0), token)

    assert run(jnp.int32(1)) == -1
    assert automaton.advance(kept[0], jnp.int32(0), jnp.int32(0)) == 0


def test_words_are_read_from_every_state():
    rng = np.random.default_rng(3)
    table = np.full((7, 256), -1)
    table[:, 97:101] = rng.integers(-1, 7, (7, 4))
    words = [bytes(rng.integers(97, 101, rng.integers(0, 7)).astype(np.uint8)) for _ in range(300)]
    words.append(b"a\x00a")
    starts = np.array([0, 2, 3, 6])
    columns, ends = automaton.columns_of_words(table, words, starts)
    for word, column in zip(words, columns, strict=True):
        for start, end in zip(starts, ends[:, column], strict=True):
            for byte in word:
                start = table[start, byte] if start >= 0 else -1
            assert start == end
    assert len(np.unique(ends, axis=1).T) == ends.shape[1] == columns.max() + 1


def test_no_words_and_empty_words():
    table = np.zeros((1, 256), np.int64)
    columns, ends = automaton.columns_of_words(table, [b"", b""], np.arange(1))
    assert (columns.tolist(), ends.tolist()) == ([0, 0], [[0]])


def test_a_table_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(automaton, "_LARGEST", 200)
    automaton.build(np.arange(16)[:, None] * np.ones(1))
    with pytest.raises(ValueError, match="32 states and 8 columns"):
        automaton.build(np.arange(17)[:, None] * np.ones(1))
    shift = np.full((20, 256), -1)
    shift[:-1, 97] = np.arange(1, 20)
    with pytest.raises(ValueError, match="20 states and 11 columns"):
        automaton.columns_of_words(shift, [b"a" * n for n in range(20)], np.arange(20))
