"""What users of speculative decoding hit elsewhere, one test a report, by its number in the list.

Reports on trees of drafts (16) are in tests/accept, on whole models (8, 26) in test_smollm2.py too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, Status, accept, constraints, drafters
from specjax.types import Params
from tests import tiny
from tests.tiny import emitted

TEXT = (1, 10, 11, 12, 20, 21, 22, 5, 6, 7, 8, 9)


def _decode(params, **options):
    return specjax.decode(params, [TEXT[0]], **{"max_new_tokens": 10, "eos_ids": []} | options)


@pytest.mark.parametrize("offset", range(8))
def test_row_01_02_an_end_token_in_mid_block(offset):
    """It ends the row wherever it stands in a block, and not at all with ignore_eos."""
    params = tiny.scripted(TEXT)
    out = _decode(params, eos_ids=TEXT[offset + 1])
    assert emitted(out) == list(TEXT[1 : offset + 2])
    assert out.status[0] == Status.EOS
    out = _decode(params, eos_ids=TEXT[offset + 1], sampling=Sampling(ignore_eos=True))
    assert emitted(out) == list(TEXT[1:11])
    assert out.status[0] == Status.LENGTH


@pytest.mark.parametrize("how", ["eos_ids", "stop"])
def test_row_03_stop_and_limit(how):
    """A stop within the limit is the reason, one beyond it is not seen."""
    params = tiny.scripted(TEXT, depth=6)
    within = _decode(params, max_new_tokens=5, **{how: [12]})
    status = {"eos_ids": Status.EOS, "stop": Status.STOP}[how]
    assert (emitted(within), int(within.status[0])) == ([10, 11, 12], status)
    beyond = _decode(params, max_new_tokens=5, **{how: [22]})
    assert (emitted(beyond), int(beyond.status[0])) == ([10, 11, 12, 20, 21], Status.LENGTH)
    at = _decode(params, max_new_tokens=5, **{how: [21]})
    assert (emitted(at), int(at.status[0])) == ([10, 11, 12, 20, 21], status)


@pytest.mark.parametrize("depth", [1, 4, 12])
@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("qabcdefghijklmnop", "bc", "a"),  # early in a block of 12
        ("qabcdefghijklmnop", "ef", "abcd"),  # across the edge of blocks of 5
        ("qabcdefghijklmnop", "klm", "abcdefghij"),
        ("qabcdefghijklmnop", "zz", "abcdefghijklmno"),  # never
    ],
)
def test_row_04_a_stop_string_anywhere_in_a_block(depth, text, stop, left):
    """Text, ids, log-probabilities and counts are cut at the same token."""
    tokenizer = tiny.tokenizer()
    ids = tuple(tokenizer.encode(text))
    params = tiny.scripted(ids, depth=depth, vocab=61).replace(tokenizer=tokenizer)
    options = {"max_new_tokens": 15, "eos_ids": [], "stop": [stop], "logprobs": 1, "chat": False}
    out = specjax.complete(params, "q", **options)
    assert out.text == left
    found = out.status == Status.STOP
    assert out.tokens == list(ids[1:16])[: len(left) + len(stop) if found else None]
    assert out.logprobs.tokens.shape == (len(out.tokens),)
    assert int(out.stats.accepted.sum() + out.stats.rounds) - len(out.tokens) in (0, 1)
    pieces = list(specjax.stream(params, "q", **options))
    assert "".join(pieces) == left
    assert all(pieces)


def test_row_06_exactly_max_new_tokens():
    params = tiny.scripted(TEXT, depth=4)
    for limit in range(1, 11):
        out = _decode(params, max_new_tokens=limit)
        assert emitted(out) == list(TEXT[1 : limit + 1])


def test_row_07_nothing_beyond_the_end_is_counted():
    out = _decode(tiny.scripted(TEXT), eos_ids=12)
    assert (int(out.lengths[0]), int(out.stats.rounds[0])) == (3, 1)
    np.testing.assert_array_equal(out.stats.accepted[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(out.stats.proposed[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(out.stats.histogram[0], [0, 0, 0, 1, 0, 0])


def test_row_08_one_word_48_times():
    prompt = [17] * 48
    plain = specjax.decode(tiny.params(), prompt, max_new_tokens=32)
    out = specjax.decode(tiny.params("ngram"), prompt, max_new_tokens=32)
    assert emitted(out) == emitted(plain)


def test_row_11_seeds_alone_and_in_batches():
    """A seed gives the same tokens alone, in every slot, and in batches of 2 to 8."""
    params, hot = tiny.params("draft_model"), Sampling(temperature=1.0)
    options = {"max_new_tokens": 12, "sampling": hot}
    alone = emitted(specjax.decode(params, [1, 2, 3], seed=42, **options))
    assert alone == emitted(specjax.decode(params, [1, 2, 3], key=jax.random.key(42), **options))
    for size in (2, 8):
        for slot in (0, size - 1):
            prompts, seeds = [[9]] * size, [None] * size
            prompts[slot], seeds[slot] = [1, 2, 3], 42
            out = specjax.decode(params, prompts, seed=seeds, **options)
            assert emitted(out, slot) == alone
    both = specjax.decode(params, [[1, 2, 3]] * 2, seed=(42, 42), **options)
    assert emitted(both, 0) == emitted(both, 1) == alone


def test_row_13_unseeded_calls_and_rows_differ():
    params, hot = tiny.params("draft_model"), Sampling(temperature=1.5)
    options = {"max_new_tokens": 12, "sampling": hot}
    calls = [specjax.decode(params, [[9]] * 8, seed=[7, *[None] * 7], **options) for _ in range(2)]
    assert emitted(calls[0], 0) == emitted(calls[1], 0)
    texts = {tuple(emitted(out, row)) for out in calls for row in range(1, 8)}
    assert len(texts) == 14
    # First tokens of two calls agree as often as independent draws do.
    law = np.full((1, 4), 0.25)
    params = _markov(np.repeat(law, 4, axis=0), np.repeat(law, 4, axis=0))
    first = [np.asarray(_sampled(params, 4096, 1).tokens)[:, 0] for _ in range(2)]
    agree = np.mean(first[0] == first[1])
    assert abs(agree - 0.25) < 4 * (0.25 * 0.75 / 4096) ** 0.5


def _markov(target: np.ndarray, draft: np.ndarray, depth: int = 3) -> Params:
    model = tiny.markov_model(len(target))
    with np.errstate(divide="ignore"):
        return Params(
            target=jnp.log(jnp.asarray(target, jnp.float32)),
            draft=jnp.log(jnp.asarray(draft, jnp.float32)),
            model=model,
            drafter=drafters.draft_model(model, depth),
        )


def _sampled(params, rows, tokens, seed=None, **fields):
    return specjax.decode(
        params,
        np.zeros((rows, 1), int),
        max_new_tokens=tokens,
        sampling=Sampling(**{"temperature": 1.0} | fields),
        seed=seed,
        eos_ids=[],
    )


def test_row_15_a_rare_draft_is_kept_rarely():
    """The draft is certain of a token of probability 0.01: it stands 1 time in 100."""
    rows = 16384
    target = np.array([[0.01, 0.99], [0.01, 0.99]])
    out = _sampled(_markov(target, np.array([[1.0, 0.0]] * 2)), rows, 4, seed=1)
    rate = float(out.stats.accepted[:, 0].sum() / out.stats.proposed[:, 0].sum())
    proposed = float(out.stats.proposed[:, 0].sum())
    assert abs(rate - 0.01) < 4 * (0.01 * 0.99 / proposed) ** 0.5


def _laws(seed=0, vocab=4):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(vocab, 0.7), size=vocab), rng.dirichlet(
        np.full(vocab, 0.7), size=vocab
    )


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_row_17_the_law_at_each_temperature(drafter):
    """First and second token against the exact law."""
    target, draft = _laws()
    params, rows = _markov(target, draft), 16384
    if drafter == "ngram":
        params = params.replace(drafter=drafters.ngram(3))
    for seed, temperature in enumerate((0.3, 1.0, 1.5)):
        out = _sampled(params, rows, 2, seed=seed, temperature=temperature)
        hot = target ** (1 / temperature)
        hot /= hot.sum(-1, keepdims=True)
        counts = np.zeros((4, 4))
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
        expected = hot[0][:, None] * hot * rows
        enough = expected > 5
        rest = expected[~enough].sum()
        chi_square = ((counts - expected) ** 2 / expected)[enough].sum()
        chi_square += (counts[~enough].sum() - rest) ** 2 / max(rest, 1)
        assert chi_square < 45  # 15 degrees of freedom: p = 0.0001


def test_row_18_acceptance_is_the_overlap():
    """With the draft's own law as q, sum min(p, q) of the first drafts stand, at T = 1 and 2."""
    target, draft = _laws(1)
    for temperature in (1.0, 2.0):
        out = _sampled(_markov(target, draft), 16384, 1, seed=3, temperature=temperature)
        p, q = (x[0] ** (1 / temperature) for x in (target, draft))
        alpha = np.minimum(p / p.sum(), q / q.sum()).sum()
        rate = float(out.stats.accepted[:, 0].mean())
        assert abs(rate - alpha) < 4 * (alpha * (1 - alpha) / 16384) ** 0.5


def test_row_20_greedy_rows_beside_sampled_ones():
    """Temperature 0, 1e-8 and 1e-3 take the best token, whatever the other rows do."""
    params = tiny.params("ngram")
    plain = emitted(specjax.decode(params, [1, 2, 3], max_new_tokens=12))
    temperature = np.array([0.0, 1.0, 1e-8, 1e-6])
    out = specjax.decode(
        params,
        [[1, 2, 3]] * 4,
        max_new_tokens=12,
        sampling=Sampling(temperature=temperature),
        seed=5,
        logprobs=0,
    )
    for row in (0, 2, 3):
        assert emitted(out, row) == plain
    assert np.isfinite(out.logprobs.tokens).all()
    assert (np.asarray(out.status) == Status.LENGTH).all()


@pytest.mark.parametrize("drafter", ["plain", "draft_model"])
def test_row_21_temperature_before_top_p(drafter):
    """T = 0.5 and top_p = 0.8 of logits [2, 1.5, 1, 0.5] is [.731, .269, 0, 0]."""
    logits = jnp.array([[2.0, 1.5, 1.0, 0.5]] * 4)
    exact = specjax.sampling.distribution(logits[0], Sampling(temperature=0.5, top_p=0.8))
    np.testing.assert_allclose(exact, [0.7310586, 0.2689414, 0, 0], atol=1e-6)
    model, rows = tiny.markov_model(4), 8192
    params = Params(target=logits, draft=logits[:, ::-1], model=model, drafter=drafters.plain())
    if drafter == "draft_model":
        params = params.replace(drafter=drafters.draft_model(model, 3))
    out = _sampled(params, rows, 3, seed=2, temperature=0.5, top_p=0.8)
    rate = np.bincount(np.asarray(out.tokens).ravel(), minlength=4) / (3 * rows)
    assert (rate[2:] == 0).all()
    assert abs(rate[0] - 0.7310586) < 4 * (0.731 * 0.269 / (3 * rows)) ** 0.5


def test_row_22_penalties_see_every_token_of_a_block():
    """An oracle that knows the penalised text has all drafts accepted, whatever K."""
    prompt, fields = [1, 2, 3], {"frequency_penalty": 0.7, "min_new_tokens": 6}
    options = {"max_new_tokens": 16, "sampling": Sampling(**fields)}
    free = emitted(specjax.decode(tiny.params(), prompt, max_new_tokens=16))
    options["eos_ids"] = free[:1]
    plain = specjax.decode(tiny.params(), prompt, **options)
    text = tuple(prompt + emitted(plain))
    assert emitted(plain) != free[: len(emitted(plain))]
    for depth in (1, 3, 6):
        params = tiny.params().replace(drafter=tiny.oracle(text, depth))
        out = specjax.decode(params, prompt, **options)
        assert emitted(out) == emitted(plain)
        assert int(out.lengths[0]) >= 6
        assert int(out.stats.rounds[0]) == -(-len(emitted(plain)) // (depth + 1))


DIGITS = tuple(range(3, 6))  # tokens 3, 4, 5 are digits, 6 is ";", 7 the end


def _digits(params) -> constraints.Constraint:
    """Digits (at least one), then ";"."""
    to = dict.fromkeys(DIGITS, 1)
    return constraints.token_dfa({0: to, 1: to | {6: 2}}, {2}, (7,), params.model.vocab_size)


@pytest.mark.parametrize("text", [(0, 1, 2, 1, 2), (0, 3, 4, 6, 7), (0, 3, 6, 5, 5, 5)])
def test_row_25_a_grammar_holds_at_every_node(text):
    """The drafter proposes letters, or valid text, or tokens after the end."""
    rng = np.random.default_rng(0)
    model = tiny.markov_model(8)
    weights = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
    params = Params(target=weights, model=model, drafter=drafters.plain())
    grammar = _digits(params)
    drafted = params.replace(drafter=tiny.oracle(text, 4))
    options = {"max_new_tokens": 8, "eos_ids": [7], "constraint": grammar}
    greedy = [emitted(specjax.decode(p, [0], **options)) for p in (params, drafted)]
    assert greedy[0] == greedy[1]

    # The masked law by hand, over texts of at most three tokens.
    def masked(last: int, ids: tuple[int, ...]) -> dict[int, float]:
        p = np.exp(np.asarray(weights)[last, list(ids)])
        return dict(zip(ids, p / p.sum(), strict=True))

    rows = 16384
    hot = {"sampling": Sampling(temperature=1.0), "seed": 4}
    out = specjax.decode(drafted, np.zeros((rows, 1), int), **options, **hot)
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    for row, length, status in zip(tokens, lengths, out.status.tolist(), strict=True):
        line = row[:length].tolist()
        body = line[:-2] if status == Status.EOS else line
        assert status in (Status.EOS, Status.LENGTH)
        assert set(body) - {6} <= set(DIGITS)
        assert status != Status.EOS or line[-2:] == [6, 7]
    first = masked(0, DIGITS)
    for token, p in first.items():
        rate = (tokens[:, 0] == token).mean()
        assert abs(rate - p) < 4 * (p * (1 - p) / rows) ** 0.5
        here = tokens[tokens[:, 0] == token][:, 1]
        for second, p2 in masked(token, (*DIGITS, 6)).items():
            assert abs((here == second).mean() - p2) < 4 * (p2 * (1 - p2) / len(here)) ** 0.5


def test_row_26_short_lookups_with_a_grammar():
    """An n-gram drafter of at least two tokens: the text of masked greedy decoding."""
    params = tiny.params()
    grammar = _digits(params)
    prompt = [3, 4, 1, 3, 4, 2, 3, 4]
    options = {"max_new_tokens": 16, "eos_ids": [7], "constraint": grammar}
    plain = specjax.decode(params, prompt, **options)
    made = drafters.ngram(4, prompt_lookup_min=2, prompt_lookup_max=3)
    out = specjax.decode(params.replace(drafter=made), prompt, **options)
    assert emitted(out) == emitted(plain)
    assert out.stats.proposed.sum() > 0


def test_row_38_placeholders_of_empty_drafts():
    """A draft of -1 that is not valid reaches neither the text nor the caches."""
    oracle = tiny.oracle(TEXT, 4)

    def draft(params, key, state, context):
        proposal, state = oracle.draft(params, key, state, context)
        even = (context.lengths % 2 == 0)[:, None]
        return dataclasses.replace(
            proposal,
            tokens=jnp.where(even, -1, proposal.tokens),
            valid=proposal.valid & ~even,
        ), state

    params = tiny.params()
    plain = emitted(specjax.decode(params, [1], max_new_tokens=10))
    params = params.replace(drafter=oracle._replace(draft=draft))
    out = specjax.decode(params, [1], max_new_tokens=10, logprobs=0)
    assert emitted(out) == plain
    assert np.isfinite(out.logprobs.tokens).all()


def test_row_42_a_residual_without_mass():
    p = jnp.array([0.2, 0.3, 0.5])
    q = p * (1 + 1e-7)
    np.testing.assert_allclose(accept.keep_probability(p, p), 1.0)
    for left in (accept.residual(p, p), accept.residual(p, q), accept.residual(p * 0, p)):
        assert np.isfinite(left).all()
    out = _sampled(_markov(np.tile(p, (3, 1)), np.tile(p, (3, 1))), 4096, 4, seed=1)
    assert int(out.stats.accepted.sum()) == int(out.stats.proposed.sum())


def test_row_44_perplexity_of_the_output():
    """The target finds speculatively sampled text as likely as its own."""
    prompts = [[i % 61] for i in range(64)]
    mean = {}
    for drafter in ("plain", "draft_model"):
        out = specjax.decode(
            tiny.params(drafter),
            prompts,
            max_new_tokens=12,
            sampling=Sampling(temperature=0.9, top_p=0.95),
            seed=8,
            logprobs=0,
        )
        mean[drafter] = (
            np.asarray(out.logprobs.tokens).mean(),
            np.asarray(out.logprobs.tokens).std(),
        )
    difference = abs(mean["plain"][0] - mean["draft_model"][0])
    assert difference < 4 * mean["plain"][1] * (2 / (64 * 12)) ** 0.5
