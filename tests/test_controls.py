"""Sampling controls, log-probabilities, stops and seeds through the driver."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, Status, sampling
from tests import tiny
from tests.tiny import emitted

PROMPTS = [[1, 2, 3, 4, 5], [5], [7, 7, 7, 8, 7, 7], list(range(20, 40))]
EOS, NEW = 36, 16
# One program serves all combinations, each a row; on top of them what is the same for all rows.
COMBINATIONS = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "logit_bias": {4: 0.5, 9: -np.inf}},
    {"frequency_penalty": 0.9, "banned": [16, 47]},
    {"presence_penalty": 1.1, "min_new_tokens": 5},
    {"allowed": list(range(10, 45)), "min_new_tokens": 9},
    {"min_new_tokens": 20},
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "min_new_tokens": 7,
        "banned": [35],
        "logit_bias": {50: 1.0},
    },
    {"min_new_tokens": 3, "ignore_eos": True, "frequency_penalty": 0.5, "top_k": 3, "top_p": 0.5},
]
DEFAULTS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "top_k": 0,
    "top_p": 1.0,
    "ignore_eos": False,
    "logit_bias": {},
    "allowed": None,
    "banned": None,
}


def _rows() -> Sampling:
    columns = {k: [c.get(k, off) for c in COMBINATIONS] for k, off in DEFAULTS.items()}
    return Sampling(
        **{
            k: v if k in ("logit_bias", "allowed", "banned") else np.array(v)
            for k, v in columns.items()
        }
    )


def _prompt(row: int) -> list[int]:
    return PROMPTS[row % len(PROMPTS)]


@functools.cache
def _logits_after():
    """Logits of the tiny model at every position of `[1, 64]` tokens."""
    params = tiny.params()
    size = 64

    @jax.jit
    def run(ids):
        held = params.model.init_cache(params.target, 1, 1)
        causal = jnp.tril(jnp.ones((1, size, size), bool))
        positions = jnp.arange(size)[None, :]
        hidden = params.model.forward(params.target, ids, positions, held, causal).hidden
        return params.model.unembed(params.target, hidden)[0]

    def logits(text: list[int]) -> np.ndarray:
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(text)] = text
        return np.asarray(run(ids))[: len(text)]

    return logits


def _by_hand(prompt: list[int], fields: dict) -> list[int]:
    """Plain greedy decoding: a full pass a token, controls on the logits one by one in numpy."""
    c = DEFAULTS | fields
    text = list(prompt)
    for step in range(NEW):
        logits = _logits_after()(text)[-1].copy()
        for token in set(text):
            factor = c["repetition_penalty"]
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= c["frequency_penalty"] * text.count(token) + c["presence_penalty"]
        for token, bias in c["logit_bias"].items():
            logits[token] += bias
        for token in range(61):
            if token in (c["banned"] or ()) or (c["allowed"] and token not in c["allowed"]):
                logits[token] = -np.inf
        if step < c["min_new_tokens"] and not c["ignore_eos"]:
            logits[EOS] = -np.inf
        text.append(int(np.argmax(logits)))
        if text[-1] == EOS and not c["ignore_eos"]:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("drafter", "depth"),
    [
        ("plain", 4),
        *[(d, k) for d in ("ngram", "draft_model") for k in (1, 4, 6)],
        *[
            pytest.param(d, k, marks=pytest.mark.slow)
            for d in ("ngram", "draft_model")
            for k in (2, 3, 5)
        ],
    ],
)
def test_row_23_greedy_with_controls_equals_plain_decoding_by_hand(drafter, depth):
    out = specjax.decode(
        tiny.params(drafter, depth),
        [_prompt(row) for row in range(len(COMBINATIONS))],
        max_new_tokens=NEW,
        sampling=_rows(),
        eos_ids=[EOS],
    )
    for row, fields in enumerate(COMBINATIONS):
        assert emitted(out, row) == _by_hand(_prompt(row), fields), fields


# A tree of 7 nodes, 3 deep, whose right path is 2, 5, 6.
TREE = ((0, 0, 1, 1, 2, 5, 5), (2, 5, 6))


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal_verification"])
def test_trees_with_controls(rule):
    """A tree drafter that knows each row's text: 4 tokens a round, the text by hand all the same.

    Penalties, length and grammar are those of each node's own path; so are log-probabilities."""
    row = 6
    prompt, fields = _prompt(row), COMBINATIONS[row]
    text = _by_hand(prompt, fields)
    params = tiny.params().replace(drafter=tiny.tree_oracle((*prompt, *text), *TREE))
    options = {"max_new_tokens": 12, "eos_ids": [EOS], "sampling": Sampling(**fields)}
    out = specjax.decode(
        params, prompt, acceptance=rule, logprobs=2, logprobs_of="processed", **options
    )
    assert emitted(out) == text[:12]
    assert int(out.stats.rounds[0]) == 3
    # Any token, but every third one is 5: the grammar's state goes along the accepted path.
    any_, third = dict.fromkeys(range(61)), {5: 0}
    cycle = {0: dict.fromkeys(any_, 1), 1: dict.fromkeys(any_, 2), 2: third}
    for way in cycle.values():
        way.pop(EOS, None)
    grammar = specjax.constraints.token_dfa(cycle, {0}, (EOS,), 61)
    options["constraint"] = grammar
    plain = specjax.decode(tiny.params(), prompt, **options)
    text = emitted(plain)
    assert text[2::3] == [5] * len(text[2::3])
    knowing = tiny.params().replace(drafter=tiny.tree_oracle((*prompt, *text), *TREE))
    out = specjax.decode(knowing, prompt, acceptance=rule, **options)
    assert emitted(out) == text
    assert int(out.stats.rounds[0]) == 3
    assert out.stats.lossless
    assert out.stats.rule == rule


@functools.cache
def _with_logprobs(of: str):
    fields = {"temperature": np.array([0.0, 0.8, 1.0, 1.2]), "top_k": 20, "top_p": 0.95}
    fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "logit_bias": {3: 1.0}}
    out = specjax.decode(
        tiny.params("draft_model"),
        PROMPTS,
        max_new_tokens=NEW,
        sampling=Sampling(**fields),
        seed=3,
        eos_ids=[],
        logprobs=3,
        logprobs_of=of,
        prompt_logprobs=2,
    )
    return fields, out


@pytest.mark.parametrize("of", ["raw", "processed"])
def test_row_10_logprobs_equal_a_teacher_forced_pass(of):
    """Report 10: of every token and of the three most likely ones, to 1e-5."""
    fields, out = _with_logprobs(of)
    for row, prompt in enumerate(PROMPTS):
        text = prompt + emitted(out, row)
        logits = _logits_after()(text)
        for i in range(NEW):
            at = logits[len(prompt) + i - 1]
            if of == "raw":
                expected = np.asarray(jax.nn.log_softmax(at))
            else:
                one = fields | {"temperature": fields["temperature"][row]}
                seen = np.array(text[: len(prompt) + i])
                with np.errstate(divide="ignore"):
                    law = sampling.distribution(at, Sampling(**one), seen)
                    expected = np.log(np.asarray(law))
            token = emitted(out, row)[i]
            assert float(out.logprobs.tokens[row, i]) == pytest.approx(expected[token], abs=1e-5)
            top = np.sort(expected)[::-1][:3]
            np.testing.assert_allclose(out.logprobs.top[row, i], top, atol=1e-5)
            ids = np.asarray(out.logprobs.top_ids[row, i])
            np.testing.assert_allclose(expected[ids], top, atol=1e-5)


def test_prompt_logprobs():
    _, out = _with_logprobs("raw")
    assert out.prompt_logprobs.tokens.shape == (4, 20)
    for row, prompt in enumerate(PROMPTS):
        expected = np.asarray(jax.nn.log_softmax(_logits_after()(prompt), axis=-1))
        found = np.asarray(out.prompt_logprobs.tokens[row])
        assert found[0] == 0
        assert (found[len(prompt) :] == 0).all()
        for i in range(1, len(prompt)):
            assert found[i] == pytest.approx(expected[i - 1, prompt[i]], abs=1e-5)
            top = np.sort(expected[i - 1])[::-1][:2]
            np.testing.assert_allclose(out.prompt_logprobs.top[row, i], top, atol=1e-5)


def test_logprobs_are_zero_beyond_the_end_and_the_same_when_streamed():
    params, options = tiny.params("ngram"), {"max_new_tokens": NEW, "logprobs": 1}
    text = emitted(specjax.decode(params, PROMPTS[0], **options))
    options["eos_ids"] = text[5:6]
    end = text.index(text[5]) + 1
    out = specjax.decode(params, PROMPTS[0], **options)
    assert int(out.lengths[0]) == end
    assert (np.asarray(out.logprobs.tokens[0, end:]) == 0).all()
    assert (np.asarray(out.logprobs.tokens[0, :end]) < 0).all()
    *_, last = specjax.stream_tokens(params, PROMPTS[0], **options)
    jax.tree.map(np.testing.assert_array_equal, last, out)


def test_stop_sequences_across_rounds():
    """Wherever a sequence of three stands, in blocks of any size; never one that began earlier."""
    text = (1, 10, 11, 12, 20, 21, 22, 5, 6, 7, 8, 9)
    for depth in (1, 2, 5):
        params = tiny.scripted(text, depth=depth)
        for start in range(1, 8):
            sequence = list(text[start : start + 3])
            out = specjax.decode(
                params, [1], max_new_tokens=10, eos_ids=[], stop=[[30, 31], sequence, [21, 23]]
            )
            assert emitted(out) == list(text[1 : start + 3])
            assert out.status[0] == Status.STOP
        # The prompt is not part of the text that is searched.
        out = specjax.decode(
            params, [1], max_new_tokens=10, eos_ids=[], stop=[[1, 10, 11], [31, 30], [0, 9, 8]]
        )
        assert emitted(out) == list(text[1:11])


def test_min_new_tokens_and_stops():
    """Single stop tokens are held back; longer ones do not count before."""
    text = (1, 10, 11, 12, 10, 11, 12, 10, 11, 12)  # greedy: 10 11 12 10 11 12 ...
    params = tiny.scripted(text)
    options = {"max_new_tokens": 9, "eos_ids": []}
    for least, length in ((0, 2), (2, 2), (3, 5), (6, 8)):
        controls = Sampling(min_new_tokens=least)
        out = specjax.decode(params, [1], stop=[[10, 11]], sampling=controls, **options)
        assert (int(out.lengths[0]), int(out.status[0])) == (length, Status.STOP)
    out = specjax.decode(params, [1], stop=11, sampling=Sampling(min_new_tokens=3), **options)
    assert 11 not in emitted(out)[:3]
    # An end token and a stop at once: the end token is the reason, unless it is ignored.
    both = {"max_new_tokens": 9, "eos_ids": [11], "stop": [11, 12]}
    assert specjax.decode(params, [1], **both).status[0] == Status.EOS
    ignoring = specjax.decode(params, [1], sampling=Sampling(ignore_eos=True), **both)
    assert (int(ignoring.lengths[0]), int(ignoring.status[0])) == (2, Status.STOP)


def test_a_grammar_that_is_complete_goes_before_min_new_tokens():
    params = tiny.scripted((1, 2, 3))
    grammar = specjax.constraints.token_dfa({0: {5: 1}}, {1}, (7,), 32)
    out = specjax.decode(
        params,
        [1],
        max_new_tokens=8,
        eos_ids=[7],
        constraint=grammar,
        sampling=Sampling(min_new_tokens=6),
    )
    assert (emitted(out), int(out.status[0])) == ([5, 7], Status.EOS)


def test_a_grammar_that_bans_leave_nothing():
    """The grammar has the last word: the row ends as it should."""
    params = tiny.scripted((1, 2, 3))
    grammar = specjax.constraints.token_dfa({0: {5: 1}}, {1}, (7,), 32)
    options = {"max_new_tokens": 8, "eos_ids": [7], "constraint": grammar}
    for fields in ({"allowed": [5, 6]}, {"banned": [7]}):
        out = specjax.decode(params, [1], sampling=Sampling(**fields), **options)
        assert (emitted(out), int(out.status[0])) == ([5, 7], Status.EOS)
    with pytest.raises(ValueError, match="constraint is for a vocabulary of 32 tokens"):
        specjax.decode(tiny.params(), [1], **options)


def test_a_special_token_as_a_stop_string():
    tokenizer = tiny.tokenizer()
    tokenizer.backend.add_special_tokens(["<58>"])
    params = tiny.scripted((0, 1, 2, 58, 3, 4), vocab=61).replace(tokenizer=tokenizer)
    for stop in ("<58>", np.array(["<58>"])):
        out = specjax.complete(params, "a", stop=stop, eos_ids=[], max_new_tokens=5, chat=False)
        assert (out.text, out.status, out.tokens) == ("bc", Status.STOP, [1, 2, 58])
    out = specjax.complete(params, "a", stop=np.array(["c"]), eos_ids=[], chat=False)
    assert out.text == "b"


def test_a_grammar_for_each_row():
    params = tiny.scripted((1, 2, 3, 4, 5, 6))
    grammar = specjax.constraints.token_dfa({0: {9: 1}, 1: {3: 1, 4: 0}}, {1}, (7,), 32)
    rows = specjax.constraints.per_row([grammar, None, grammar])
    options = {"max_new_tokens": 5, "eos_ids": [7]}
    out = specjax.decode(params, [[1], [1], [2]], constraint=rows, **options)
    alone = specjax.decode(params, [1], constraint=grammar, **options)
    assert emitted(out, 0) == emitted(alone)
    assert emitted(out, 1) == [2, 3, 4, 5, 6]
    assert emitted(out, 2)[0] == 9
    with pytest.raises(ValueError, match="constraint is for 3 rows"):
        specjax.decode(params, [[1], [1]], constraint=rows, **options)


def test_other_values_do_not_trace_again():
    """Stops, grammars, seeds, penalties and truncation of the same kind share a program."""
    traces = []
    base = tiny.scripted((1, 2, 3, 4))

    def draft(*args):
        traces.append(None)
        return tiny.oracle((1, 2, 3, 4), 5).draft(*args)

    params = base.replace(drafter=base.drafter._replace(draft=draft))
    for call in range(3):
        specjax.decode(
            params,
            [[1]] * 2,
            max_new_tokens=4,
            sampling=Sampling(
                temperature=0.5 * call,
                top_k=call + 1,
                top_p=[0.5, 0.1 * call],
                frequency_penalty=1.0 + call,
                banned=[call],
                min_new_tokens=call + 1,
            ),
            seed=[call, None],
            stop=[[9 + call, 8], 20 + call],
            constraint=specjax.constraints.token_dfa({0: {4 + call: 0}}, {0}, (7,), 32),
            eos_ids=[7],
            logprobs=0,
        )
        if call == 0:
            first = len(traces)
    assert len(traces) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be"),
        ({"seed": 1 << 32}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": "7"}, "seed must be"),
        ({"seed": (1, 2)}, "seed must be"),
        ({"seed": (1, 2.5, 3)}, r"seed\[1\] must be"),
        ({"seed": 1, "key": 2}, "key or seed"),
        ({"stop": [[]]}, "stop"),
        ({"stop": [61]}, "stop"),
        ({"stop": [-1]}, "stop"),
        ({"stop": [1.5]}, "stop"),
        ({"stop": 1.5}, "stop"),
        ({"stop": "text"}, "tokenizer is None"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 62}, "prompt_logprobs"),
        ({"logprobs_of": "model"}, "logprobs_of"),
        ({"constraint": "a+"}, "constraint"),
        ({"sampling": Sampling(banned=[61])}, "banned"),
        ({"sampling": Sampling(allowed=[[1], [2]])}, "allowed"),
        ({"sampling": Sampling(top_k=[1, 2])}, "top_k"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        specjax.decode(tiny.params(), [[1], [2], [3]], max_new_tokens=4, **options)
