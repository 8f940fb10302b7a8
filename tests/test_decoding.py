"""The driver: rows, ends, limits, statistics, one compiled program."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, Status, decoding, drafters
from specjax.models import decoder
from specjax.models.decoder import decoder_model, first_layers, random_weights
from tests import tiny
from tests.tiny import emitted

PROMPTS = [[5], [1, 2, 3, 4, 5], list(range(10, 27)), [(7 * i) % 61 for i in range(300)]]


@functools.cache
def _greedy(prompt: tuple[int, ...], tokens: int = 32) -> list[int]:
    """Plain greedy decoding, by a full pass over the text for every token."""
    params, text = tiny.params(), list(prompt)
    model = params.model
    size = len(prompt) + tokens

    @jax.jit
    def best(ids, length):
        held = model.init_cache(params.target, 1, 1)
        causal = jnp.tril(jnp.ones((1, size, size), bool))
        positions = jnp.arange(size)[None, :]
        hidden = model.forward(params.target, ids, positions, held, causal).hidden
        last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
        return jnp.argmax(model.unembed(params.target, last)[0, 0])

    for _ in range(tokens):
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(text)] = text
        text.append(int(best(ids, len(text))))
    return text[len(prompt) :]


@pytest.mark.parametrize("drafter", ["plain", "ngram", "draft_model"])
def test_greedy_equals_a_full_pass_a_token(drafter):
    out = specjax.decode(tiny.params(drafter), PROMPTS[1], max_new_tokens=32)
    assert emitted(out) == _greedy(tuple(PROMPTS[1]))


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_rows_are_independent(drafter):
    """Alone, in a batch of 4 and of 8, in other slots; greedy and sampled rows mixed."""
    params = tiny.params(drafter)
    keys = jax.random.split(jax.random.key(11), 8)
    temperature = np.array([0.0, 1.0, 0.7, 0.0, 1.3, 0.0, 1.0, 0.5])
    rows = PROMPTS + PROMPTS[::-1]

    def run(order):
        out = specjax.decode(
            params,
            [rows[i] for i in order],
            max_new_tokens=24,
            sampling=Sampling(temperature=temperature[order]),
            key=keys[np.array(order)],
        )
        return {i: emitted(out, slot) for slot, i in enumerate(order)}

    batch = run([0, 1, 2, 3, 4, 5, 6, 7])
    assert run([7, 6, 5, 4, 3, 2, 1, 0]) == batch
    assert run([3, 4]) == {i: batch[i] for i in (3, 4)}
    for i in (1, 3):
        alone = specjax.decode(
            params,
            rows[i],
            max_new_tokens=24,
            sampling=Sampling(temperature=temperature[i]),
            key=keys[i],
        )
        assert emitted(alone) == batch[i]


def test_one_key_for_a_batch():
    """Row 0 has the key itself, the others their own; rows with one prompt differ."""
    params, hot = tiny.params("ngram"), Sampling(temperature=1.0)
    key = jax.random.key(4)
    batch = specjax.decode(params, [[1, 2]] * 4, max_new_tokens=24, sampling=hot, key=key)
    alone = specjax.decode(params, [1, 2], max_new_tokens=24, sampling=hot, key=key)
    assert emitted(batch) == emitted(alone)
    assert len({tuple(emitted(batch, i)) for i in range(4)}) == 4


def test_unseeded_calls_differ():
    params, hot = tiny.params(), Sampling(temperature=1.5)
    texts = {
        tuple(emitted(specjax.decode(params, [1], max_new_tokens=16, sampling=hot)))
        for _ in range(4)
    }
    assert len(texts) == 4


@pytest.mark.parametrize("limit", range(1, 11))
def test_max_new_tokens_is_exact(limit):
    text = _greedy((3, 1, 4), 32)
    oracle = tiny.oracle((3, 1, 4, *text), 4)
    out = specjax.decode(tiny.params().replace(drafter=oracle), [3, 1, 4], max_new_tokens=limit)
    assert out.tokens.shape == (1, limit)
    assert emitted(out) == text[:limit]
    assert int(out.lengths[0]) == limit
    assert out.status[0] == Status.LENGTH


@pytest.mark.parametrize("offset", range(8))
def test_eos_at_every_offset_of_a_block(offset):
    prompt, depth = (3, 1, 4), 5
    text = _greedy(prompt, 32)
    eos = text[offset]
    end = text.index(eos) + 1
    params = tiny.params().replace(drafter=tiny.oracle(prompt + tuple(text), depth))
    out = specjax.decode(params, list(prompt), max_new_tokens=20, eos_ids=eos)
    assert emitted(out) == text[:end]
    assert out.status[0] == Status.EOS
    assert np.asarray(out.tokens)[0, end:].tolist() == [params.pad_id] * (20 - end)
    # What lies beyond the end is not counted.
    rounds = -(-end // (depth + 1))
    assert int(out.stats.rounds[0]) == rounds
    bonus = sum(1 for r in range(rounds) if (r + 1) * (depth + 1) <= end)
    assert int(out.stats.accepted.sum()) == end - bonus

    ignoring = Sampling(ignore_eos=True)
    out = specjax.decode(params, list(prompt), max_new_tokens=20, eos_ids=eos, sampling=ignoring)
    assert emitted(out) == text[:20]
    assert out.status[0] == Status.LENGTH


def test_an_end_beyond_the_limit_is_not_seen():
    prompt = (3, 1, 4)
    text = _greedy(prompt, 32)
    eos = text[4]
    assert text.index(eos) == 4
    params = tiny.params().replace(drafter=tiny.oracle(prompt + tuple(text), 5))
    within = specjax.decode(params, list(prompt), max_new_tokens=5, eos_ids=[eos, 59])
    assert (int(within.lengths[0]), int(within.status[0])) == (5, Status.EOS)
    beyond = specjax.decode(params, list(prompt), max_new_tokens=4, eos_ids=eos)
    assert (int(beyond.lengths[0]), int(beyond.status[0])) == (4, Status.LENGTH)


@pytest.mark.parametrize("depth", [1, 4, 6])
def test_oracle_and_adversary(depth):
    """A perfect drafter gives K + 1 tokens a round, a perverse one exactly 1; same text."""
    prompt = (3, 1, 4)
    text = _greedy(prompt, 32)
    size = 4 * (depth + 1)
    for shift, tau in ((0, depth + 1), (1, 1)):
        params = tiny.params().replace(drafter=tiny.oracle(prompt + tuple(text), depth, shift))
        out = specjax.decode(params, list(prompt), max_new_tokens=size)
        assert emitted(out) == text[:size]
        assert int(out.stats.rounds[0]) * tau == size
        histogram = np.zeros(depth + 1)
        histogram[tau - 1] = size // tau
        np.testing.assert_array_equal(out.stats.histogram[0], histogram)


def test_max_len_ends_a_row():
    out = specjax.decode(
        tiny.params("ngram"), [PROMPTS[1], PROMPTS[2]], max_new_tokens=20, max_len=19
    )
    np.testing.assert_array_equal(out.lengths, [14, 2])
    np.testing.assert_array_equal(out.status, [Status.CACHE_FULL, Status.CACHE_FULL])
    whole = specjax.decode(tiny.params(), [PROMPTS[1], PROMPTS[2]], max_new_tokens=20)
    assert emitted(out, 0) == emitted(whole, 0)[:14]
    full = specjax.decode(tiny.params(), PROMPTS[2], max_new_tokens=20, max_len=17)
    assert (int(full.lengths[0]), int(full.status[0])) == (0, Status.CACHE_FULL)


def test_nonfinite_logits_end_their_row_only():
    params = tiny.params("ngram")
    prompts = [PROMPTS[1], [1, 2, 33]]
    clean = specjax.decode(params, prompts[0], max_new_tokens=8)
    assert 33 not in emitted(clean)
    target = dict(params.target)
    target["embed"] = {"weight": params.target["embed"]["weight"].at[33].set(jnp.nan)}
    out = specjax.decode(params.replace(target=target), prompts, max_new_tokens=8)
    assert emitted(out, 0) == emitted(clean)
    np.testing.assert_array_equal(out.status, [Status.LENGTH, Status.NONFINITE])
    np.testing.assert_array_equal(out.lengths, [8, 0])


def test_nan_of_padding_and_of_rejected_drafts_stays_where_it_is():
    """Neither a prompt's padding nor a draft that fails ends a row that plain decoding runs."""
    params, prompt = tiny.params(), [1, 2, 3]
    text = emitted(specjax.decode(params, prompt, max_new_tokens=8))
    table = params.target["embed"]["weight"].at[jnp.array([0, 50])].set(jnp.nan)
    assert not {0, 50} & set(text)
    broken = params.replace(target=params.target | {"embed": {"weight": table}})
    wrong = broken.replace(drafter=tiny.oracle((*prompt, *[50] * 9), 4))
    for made in (broken, wrong):
        out = specjax.decode(made, prompt, max_new_tokens=8)
        assert (emitted(out), int(out.status[0])) == (text, Status.LENGTH)


@pytest.mark.parametrize("drafter", ["oracle", "plain"])
def test_a_law_that_is_none_counts_only_if_it_is_needed(drafter):
    """NaN behind the end of a row is not seen; before it, what was sound is emitted."""
    text = (1, 10, 11, 12, 13, 14, 15)
    weights = tiny.script(text)
    weights[12] = np.nan  # no law after 12
    params = tiny.scripted(text).replace(target=jnp.asarray(weights))
    if drafter == "plain":
        params = params.replace(drafter=drafters.plain())
    for options, status in (
        ({"eos_ids": [12]}, Status.EOS),
        ({"stop": [12]}, Status.STOP),
        ({"max_new_tokens": 3}, Status.LENGTH),
        ({"max_len": 4}, Status.CACHE_FULL),
        ({}, Status.NONFINITE),
    ):
        out = specjax.decode(params, [1], **{"max_new_tokens": 6, "eos_ids": []} | options)
        assert (emitted(out), int(out.status[0])) == ([10, 11, 12], status)


def test_keys_of_any_generator():
    """Rows are independent whatever generator makes the keys, also one that is not under vmap."""
    params, hot = tiny.params("ngram"), Sampling(temperature=1.0)
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    options = {"max_new_tokens": 8, "sampling": hot}
    batch = specjax.decode(params, [[1, 2]] * 3, key=keys, **options)
    for row in range(3):
        alone = specjax.decode(params, [1, 2], key=keys[row], **options)
        assert emitted(alone) == emitted(batch, row)
    assert len({tuple(emitted(batch, row)) for row in range(3)}) == 3


def test_fresh_entropy_inside_jit_is_refused():
    params, hot = tiny.params("ngram"), Sampling(temperature=1.0)
    for options in ({}, {"seed": [None]}):
        with pytest.raises(ValueError, match="key is needed"):
            jax.eval_shape(lambda o=options: specjax.decode(params, [1], sampling=hot, **o))
    jax.eval_shape(lambda: specjax.decode(params, [1], sampling=hot, seed=[3]))
    # Greedy rows need none, whatever else is traced.
    greedy = lambda ids: specjax.decode(params, [1], sampling=Sampling(banned=ids))
    jax.eval_shape(greedy, jnp.array([1, 2]))


def test_a_draft_without_a_law_is_not_tried():
    """NaN in the draft's weights: nothing is accepted, and sampled rows keep the target's law.

    With nothing drafted, a row draws what plain decoding draws with the same key."""
    params, key = tiny.params("draft_model"), jax.random.key(5)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params.draft)
    options = {"max_new_tokens": 12, "sampling": Sampling(temperature=[0.0, 1.0]), "key": key}
    out = specjax.decode(params.replace(draft=broken), [[1, 2], [3]], **options)
    plain = specjax.decode(tiny.params(), [[1, 2], [3]], **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert int(out.stats.proposed.sum()) == 0


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_statistics_add_up(drafter):
    out = specjax.decode(tiny.params(drafter), PROMPTS, max_new_tokens=24)
    stats = out.stats
    np.testing.assert_array_equal(stats.histogram.sum(-1), stats.rounds)
    depth = stats.proposed.shape[1]
    np.testing.assert_array_equal(
        (stats.histogram * np.arange(depth + 1)[None]).sum(-1), stats.accepted.sum(-1)
    )
    assert (np.asarray(stats.accepted) <= np.asarray(stats.proposed)).all()
    assert (np.diff(np.asarray(stats.accepted), axis=1) <= 0).all()
    # Each round emits what it accepted and one more, but for a last one that was cut short.
    extra = np.asarray(stats.accepted.sum(-1) + stats.rounds - out.lengths)
    assert ((extra == 0) | (extra == 1)).all()


def test_stream_gives_the_tokens_of_decode():
    params, hot = tiny.params("draft_model"), Sampling(temperature=np.array([0.0, 1.0]))
    options = {"max_new_tokens": 24, "sampling": hot, "key": jax.random.key(9)}
    whole = specjax.decode(params, PROMPTS[1:3], **options)
    for rounds in (1, 3):
        steps = list(specjax.stream_tokens(params, PROMPTS[1:3], rounds=rounds, **options))
        jax.tree.map(np.testing.assert_array_equal, steps[-1], whole)
        for step in steps:
            for row in range(2):
                got = emitted(step, row)
                assert got == emitted(whole, row)[: len(got)]


def test_decode_inside_jit():
    params = tiny.params("ngram")
    prompt = jnp.array([PROMPTS[1], [9, 8, 7, 6, 5]])
    hot = Sampling(temperature=1.0)
    run = jax.jit(functools.partial(specjax.decode, max_new_tokens=16))
    inside = run(params, prompt, sampling=hot, key=jax.random.key(2))
    outside = specjax.decode(params, prompt, max_new_tokens=16, sampling=hot, key=jax.random.key(2))
    np.testing.assert_array_equal(inside.tokens, outside.tokens)
    with pytest.raises(ValueError, match="key is needed"):
        run(params, prompt, sampling=hot)
    ragged = run(params, prompt, prompt_lengths=jnp.array([5, 2]))
    plain = specjax.decode(params, [PROMPTS[1], [9, 8]], max_new_tokens=16)
    np.testing.assert_array_equal(ragged.tokens, plain.tokens)


def test_concrete_prompts_inside_jit():
    """Whatever is traced, the result has the caller's rows and width."""
    params, prompts = tiny.params("ngram"), [[1, 2], [3], [4]]
    hot, keys = Sampling(temperature=1.0), jax.random.split(jax.random.key(0), 3)
    options = {"max_new_tokens": 6, "sampling": hot}
    outside = specjax.decode(params, prompts, key=keys, **options)
    by_keys = jax.jit(lambda k: specjax.decode(params, prompts, key=k, **options))(keys)
    jax.tree.map(np.testing.assert_array_equal, by_keys, outside)
    assert by_keys.tokens.shape == (3, 6)
    shape = jax.eval_shape(lambda p: specjax.decode(p, prompts, key=keys, **options), params)
    assert shape.tokens.shape == (3, 6)
    with pytest.raises(ValueError, match="key is needed"):
        jax.eval_shape(lambda p: specjax.decode(p, prompts, **options), params)
    with pytest.raises(ValueError, match="integer token ids"):
        jax.eval_shape(lambda x: specjax.decode(params, x), jnp.array([1.5, 2.0]))


@dataclasses.dataclass
class _Counter:
    traces: int = 0


def _counting(drafter: specjax.Drafter, counter: _Counter) -> specjax.Drafter:
    def draft(*args):
        counter.traces += 1
        return drafter.draft(*args)

    return drafter._replace(draft=draft)


def test_a_second_call_does_not_trace_again():
    """Other lengths in the bucket, tokens, temperature, key, eos, limits."""
    params, counter = tiny.params("ngram"), _Counter()
    params = params.replace(drafter=_counting(params.drafter, counter))
    specjax.decode(params, [[1, 2, 3], [4]], max_new_tokens=12)
    first = counter.traces
    for call in range(4):
        specjax.decode(
            params.replace(name=f"other {call}", eos_ids=(call,)),
            [[5] * (call + 1), [6, 7]],
            max_new_tokens=9 + call,
            sampling=Sampling(temperature=[0.0, 0.5 * call], ignore_eos=bool(call % 2)),
            key=jax.random.key(call),
            eos_ids=[call, call + 1][: call % 2 + 1],
        )
    assert counter.traces == first


def test_equal_configurations_share_a_drafter():
    assert drafters.ngram(4) is drafters.ngram(4)
    assert drafters.draft_model(tiny.params().model, 3) is drafters.draft_model(
        tiny.params().model, 3
    )


@functools.cache
def _deep(drafter: str) -> specjax.Params:
    """Eight layers: with few, the compiler happens to copy nothing."""
    config = dataclasses.replace(tiny.CONFIG, num_layers=8)
    weights = random_weights(config, jax.random.key(0))
    held = "plain" if drafter == "sized" else drafter
    params = tiny.params(held).replace(target=weights, model=decoder_model(config))
    if drafter == "draft_model":
        draft_config, draft = first_layers(config, weights, 6)
        made = drafters.draft_model(decoder_model(draft_config), 4)
        params = params.replace(drafter=made, draft=draft)
    if drafter == "sized":
        params = params.replace(drafter=drafters.sized(drafters.ngram(4), [0, 2]))
    return params


def _cache_copies(params: specjax.Params, batch: int) -> tuple[list[str], str]:
    """Copies of a cache layer outside the entry computation, and the program."""
    job = decoding._job(params, [[1, 2, 3]] * batch, max_new_tokens=12)
    lowered = decoding._decode_program.lower(job.params, job.request, job.prompt, plan=job.plan)
    text = lowered.compile().as_text()
    shape = (batch, tiny.CONFIG.num_kv_heads, job.plan.slots, tiny.CONFIG.head_dim)
    dims = ",".join(map(str, shape))
    assert f"f32[{dims}]" in text  # the cache is there under this shape
    computations = re.split(r"\n(?=\S)", text)
    loops = [c for c in computations if not c.startswith("ENTRY")]
    pattern = rf"= \w+\[{dims}\]\S* (?:copy|copy-start|convert)\(.*"
    return [line for c in loops for line in re.findall(pattern, c)], text


@pytest.mark.parametrize(
    ("drafter", "batch", "dtype"),
    [
        ("ngram", 1, "bfloat16"),
        ("ngram", 4, "float32"),
        ("draft_model", 1, "float32"),
        ("sized", 1, "bfloat16"),
    ],
)
def test_the_loop_copies_no_cache_and_calls_no_host(drafter, batch, dtype):
    params = _deep(drafter)
    target, draft = jax.tree.map(lambda x: x.astype(dtype), (params.target, params.draft))
    copies, text = _cache_copies(params.replace(target=target, draft=draft), batch)
    assert not copies
    for host in ("callback", "infeed", "outfeed"):
        assert host not in text


def test_copies_would_be_seen(monkeypatch):
    """Without the tie between a pass and its block, the program does copy, and this finds it."""
    monkeypatch.setattr("specjax.models.decoder.known_after", lambda hidden, block: block)
    decoder._decoder_model.cache_clear()
    try:
        copies, _ = _cache_copies(_deep.__wrapped__("plain"), 1)
    finally:
        decoder._decoder_model.cache_clear()
    assert copies
