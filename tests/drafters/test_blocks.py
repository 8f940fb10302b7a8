"""What DFlash and DSpark have in common: the law of the text, rows, rejected drafts, programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, decoding, drafters
from specjax.models.block_decoder import block_network
from specjax.models.decoder import decoder_model, random_weights
from specjax.models.dspark import MARKOV_KINDS
from specjax.seen import Seen
from specjax.types import Block, Cache, Context, Outcome, Params, Prefill, Scores
from tests import tiny
from tests.drafters import block_folders as folders
from tests.drafters import block_tiny

ALL = ["dflash", "windowed", "dspark", "dspark-rnn"]
SPEEDS = tuple(1.0 / (4000 + size) for size in range(1, 17000))  # half of a step is overhead
FOLDERS = ["dflash", "spec-dflash", "dspark-gated", "dspark-rnn", "spec-dspark"]


def from_folder(shared, name: str) -> Params:
    loaded = folders.load(shared / "parity" / name)
    make = drafters.dflash if "dflash" in name else drafters.dspark
    made = make(loaded.network, mapped=loaded.found.d2t is not None)
    return loaded.params.replace(drafter=made)


@pytest.mark.parametrize("name", FOLDERS)
def test_rows_do_not_depend_on_each_other(shared, name):
    """Prompts of 1, 5, 17 and 25 tokens together, among others, and without drafts."""
    params = from_folder(shared, name)
    text = np.load(shared / "parity" / "spec-dspark" / "expected.npz")["input_ids"][0].tolist()
    prompts = [text[:1], text[:5], text[:17], text[:25]]
    options = {"max_new_tokens": 16, "eos_ids": []}
    out = specjax.decode(params, prompts, **options)
    plain = specjax.decode(params.replace(drafter=drafters.plain(), draft=None), prompts, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert int(out.stats.accepted.sum()) > 0 or name == "spec-dspark"  # its weights are random
    # Nothing is known of the target before its first pass.
    rounds, proposed = (np.asarray(x)[0] for x in (out.stats.rounds, out.stats.proposed[:, 0]))
    assert proposed == rounds - 1

    others = [prompts[3], [9] * 17, prompts[0], prompts[1]]
    again = specjax.decode(params, others, **options)
    for row, other in ((3, 0), (0, 2), (1, 3)):
        np.testing.assert_array_equal(again.tokens[other], out.tokens[row])
        np.testing.assert_array_equal(again.stats.histogram[other], out.stats.histogram[row])


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_that_of_plain_decoding(name):
    """With penalties, which see the drafts before a slot; in a batch with sampled rows."""
    params = block_tiny.params(name)
    prompts = [[1, 2, 3], [7], list(range(30)), [5, 5, 5, 5, 5, 5]]
    options = {
        "max_new_tokens": 20,
        "sampling": specjax.Sampling(
            temperature=[0.0, 0.0, 0.0, 0.9], frequency_penalty=0.4, repetition_penalty=1.2
        ),
        "key": jax.random.key(3),
    }
    ours = specjax.decode(params, prompts, **options)
    plain = specjax.decode(params.replace(drafter=drafters.plain(), draft=None), prompts, **options)
    np.testing.assert_array_equal(ours.tokens[:3], plain.tokens[:3])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dflash", {}),
        ("windowed", {"num_speculative_tokens": 2}),
        ("dspark", {"num_speculative_tokens": 3}),
        ("dspark", {"confidence_threshold": 0.5}),
        ("dspark", {"steps_per_second": SPEEDS, "num_speculative_tokens": 3}),
        ("dspark-rnn", {"confidence_threshold": 0.3, "confidence_temperatures": (2.0,) * 4}),
    ],
)
def test_law_of_sampled_text(name, options):
    """Three tokens after a prompt, 4000 times, against their exact law."""
    vocab, rows, new = 4, 4000, 3
    config = dataclasses.replace(tiny.CONFIG, vocab_size=vocab)
    params = block_tiny.params(name, config, **options)
    prompt = [1, 0, 2, 2, 1]
    out = specjax.decode(
        params,
        [prompt] * rows,
        max_new_tokens=new,
        sampling=specjax.Sampling(temperature=1.3),
        key=jax.random.key(0),
        eos_ids=[],
    )
    texts = np.stack(np.meshgrid(*[range(vocab)] * new, indexing="ij"), -1).reshape(-1, new)
    exact = law_of(params, prompt, texts, 1.3)
    code = np.asarray(out.tokens) @ vocab ** np.arange(new)[::-1]
    counts = np.bincount(code, minlength=vocab**new)
    chi = np.sum((counts - rows * exact) ** 2 / (rows * exact))
    assert chi < 63 + 4 * np.sqrt(2 * 63)
    proposed = int(out.stats.proposed.sum())
    assert 0 < int(out.stats.accepted.sum()) < proposed
    if options.keys() - {"num_speculative_tokens"}:  # some drafts were cut
        assert proposed < int(np.minimum(out.stats.rounds, 2).sum()) * params.drafter.depth


def law_of(params: Params, prompt: list[int], texts: np.ndarray, temperature: float) -> np.ndarray:
    """The probability of each text after a prompt."""
    tokens = jnp.asarray([[*prompt, *text] for text in texts.tolist()])
    model, steps = params.model, tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(steps), tokens.shape)
    causal = jnp.tril(jnp.ones((1, steps, steps), bool))
    empty = model.init_cache(params.target, len(texts), 1)
    out = model.forward(params.target, tokens, positions, empty, causal)
    logp = jax.nn.log_softmax(model.unembed(params.target, out.hidden) / temperature)
    each = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return np.exp(np.asarray(each[:, len(prompt) - 1 :], np.float64).sum(axis=1))


@pytest.mark.parametrize("name", ALL)
def test_a_rejected_draft_leaves_no_trace(name):
    """After a round whose drafts all fell, the state is that of a prompt of one token more."""
    params = block_tiny.params(name)
    drafter, model = params.drafter, params.model
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 24)), jnp.int32)
    lengths = jnp.array([17, 2])
    _, features = cache.prefill(
        model,
        params.target,
        model.init_cache(params.target, 2, 24),
        tokens,
        lengths,
        chunk=8,
        features=drafter.features,
    )

    def state(lengths):
        known = jnp.arange(24)[None, :, None] < lengths[:, None, None] - 1
        prompt = Prefill(
            tokens=tokens,
            lengths=lengths,
            features=tuple(jnp.where(known, x, 0) for x in features),
            slots=40,
            chunk=8,
        )
        return drafter.init(params, prompt)

    def node_states(x):
        root = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
        return jnp.pad(root, ((0, 0), (0, drafter.nodes), (0, 0)), constant_values=jnp.nan)

    nodes = drafter.nodes + 1
    outcome = Outcome(
        tokens=tokens,
        lengths=lengths + 1,
        path=jnp.broadcast_to(jnp.arange(nodes), (2, nodes)),
        accepted=jnp.zeros(2, jnp.int32),
        scores=Scores(
            logits=jnp.zeros((2, nodes, model.vocab_size)),
            hidden=jnp.zeros((2, nodes, 1)),
            features=tuple(map(node_states, features)),
            block=Block(keys=(), values=()),
        ),
    )
    after = jax.jit(lambda held: drafter.update(params, held, outcome))(state(lengths))
    wanted = jax.jit(state)(lengths + 1)
    np.testing.assert_array_equal(after.lengths, wanted.lengths)
    for ours, theirs in zip(after.keys + after.values, wanted.keys + wanted.values, strict=True):
        kept = jnp.arange(ours.shape[2])[None, None, :, None] < lengths[:, None, None, None]
        np.testing.assert_allclose(
            jnp.where(kept, ours, 0), jnp.where(kept, theirs, 0), atol=1e-5, rtol=1e-5
        )
        assert np.isfinite(ours).all()


def test_a_window_over_a_long_context():
    """A ring of slots gives what all slots would give."""
    config = block_tiny.WINDOWED
    network = block_network(config)
    weights = block_tiny.params("windowed").draft
    ring = network.init_cache(weights, 1, 400)
    assert [x.shape[2] for x in ring.keys] == [400, 256]
    flat = jnp.zeros_like(ring.keys[0])
    whole = Cache(keys=(flat, flat), values=(flat, flat), lengths=ring.lengths, rings=())
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(2, 1, 300, config.target_size)), jnp.float32)

    @jax.jit
    def extend(held, part):
        block = network.project(weights, network.fuse(weights, tuple(part)), held)
        return cache.append(held, block, held.lengths + part.shape[2])

    embedded = jnp.asarray(rng.normal(size=(1, 5, config.decoder.hidden_size)), jnp.float32)
    hidden = []
    for held in (ring, whole):
        for start in range(0, 300, 20):
            held = extend(held, features[:, :, start : start + 20])
        hidden.append(network.forward(weights, embedded, held))
    np.testing.assert_allclose(*hidden, atol=1e-5, rtol=1e-5)
    # The window is as long as it says: of the last 6 tokens before the block all matter.
    near = dataclasses.replace(held, keys=(flat, held.keys[1].at[:, :, 294].add(1.0)))
    far = dataclasses.replace(held, keys=(flat, held.keys[1].at[:, :, 293].add(1.0)))
    base = dataclasses.replace(held, keys=(flat, held.keys[1]))
    base, near, far = (network.forward(weights, embedded, x) for x in (base, near, far))
    assert float(jnp.abs(near - base).max()) > 1e-4
    np.testing.assert_array_equal(far, base)


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_nan_in_the_network_ends_the_draft(kind):
    config = dataclasses.replace(block_tiny.network_config("dspark"), markov_kind=kind)
    params = block_tiny.params("dspark")
    weights = block_tiny.random_block(config, jax.random.key(1))
    table = weights["markov"]["w1"]["weight"]
    weights["markov"]["w1"]["weight"] = table.at[::2].set(jnp.nan)  # after tokens of even ids
    broken = params.replace(draft=weights, drafter=drafters.dspark(block_network(config)))
    prompts = [[1, 2, 3], [4, 9, 1, 2]]
    options = {"max_new_tokens": 12, "eos_ids": []}
    plain = specjax.decode(params.replace(drafter=drafters.plain(), draft=None), prompts, **options)
    ours = specjax.decode(broken, prompts, **options)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    assert int(ours.stats.proposed.sum()) < int(ours.stats.rounds.sum()) * 5


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_penalties_see_the_drafts_before_a_slot(name):
    """A penalty that forbids repetition: no token is drafted twice."""
    params = block_tiny.params(name)
    params = params.replace(model=params.model._replace(unembed=unembed_one))
    tokens = jnp.array([[3, 1, 2, 3]])

    @jax.jit
    def drafted(penalty):
        held = params.drafter.init(params, prompt_of(params, tokens))
        context = Context(
            tokens=tokens,
            lengths=jnp.array([4]),
            sampling=specjax.Sampling(
                frequency_penalty=penalty, presence_penalty=0.0, repetition_penalty=1.0
            ),
            active=jnp.ones(1, bool),
            seen=Seen(counts=jnp.zeros((1, 61), jnp.int32).at[0, tokens[0]].add(1)),
        )
        keys = jax.random.split(jax.random.key(0), 1)
        return params.drafter.draft(params, keys, held, context)[0].tokens[0]

    free, penalised = drafted(0.0).tolist(), drafted(1e4).tolist()
    assert len(set(free)) < len(free)
    assert len(set(penalised)) == len(penalised)
    assert not set(penalised) & {1, 2, 3}


def unembed_one(weights, hidden):
    """Logits that fall with the token's id, whatever was read."""
    return jnp.broadcast_to(-20.0 * jnp.arange(61.0), (*hidden.shape[:-1], 61))


def prompt_of(params: Params, tokens) -> Prefill:
    """A prompt of random states."""
    tokens = jnp.asarray(tokens, jnp.int32)
    shape = (*tokens.shape, tiny.CONFIG.hidden_size)
    features = tuple(
        jax.random.normal(jax.random.key(i), shape) for i in range(len(params.drafter.features))
    )
    return Prefill(
        tokens=tokens,
        lengths=jnp.full(tokens.shape[0], tokens.shape[1]),
        features=features,
        slots=32,
        chunk=tokens.shape[1],
    )


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_second_call_does_not_trace_again(name):
    params, traces = block_tiny.params(name), []
    drafter = params.drafter

    def counted(*args):
        traces.append(None)
        return drafter.draft(*args)

    params = params.replace(drafter=drafter._replace(draft=counted))
    specjax.decode(params, [[1, 2, 3], [4]], max_new_tokens=12)
    first = len(traces)
    for call in range(3):
        specjax.decode(
            params,
            [[5] * (call + 1), [6, 7]],
            max_new_tokens=9 + call,
            sampling=specjax.Sampling(temperature=[0.0, 0.5 * call]),
            key=jax.random.key(call),
        )
    assert len(traces) == first


@pytest.mark.parametrize(("batch", "dtype"), [(1, "bfloat16"), (4, "float32")])
def test_the_loop_copies_no_cache(batch, dtype):
    """Neither the target's nor the network's, which have the same shape here."""
    config = dataclasses.replace(tiny.CONFIG, num_layers=8)
    block = dataclasses.replace(
        block_tiny.BLOCK, decoder=dataclasses.replace(block_tiny.BLOCK.decoder, num_layers=6)
    )
    params = block_tiny.params("dflash").replace(
        target=random_weights(config, jax.random.key(0), dtype),
        model=decoder_model(config),
        draft=block_tiny.random_block(block, jax.random.key(1), dtype),
        drafter=drafters.dflash(block_network(block)),
    )
    job = decoding._job(params, [[1, 2, 3]] * batch, max_new_tokens=12)
    lowered = decoding._decode_program.lower(job.params, job.request, job.prompt, plan=job.plan)
    text = lowered.compile().as_text()
    shape = (batch, config.num_kv_heads, job.plan.slots, config.head_dim)
    dims = ",".join(map(str, shape))
    assert f"f32[{dims}]" in text
    loops = [c for c in re.split(r"\n(?=\S)", text) if not c.startswith("ENTRY")]
    pattern = rf"= \w+\[{dims}\]\S* (?:copy|copy-start|convert)\(.*"
    assert not [line for c in loops for line in re.findall(pattern, c)]


def test_equal_arguments_share_a_drafter():
    network = block_network(block_tiny.BLOCK)
    assert block_network(dataclasses.replace(block_tiny.BLOCK)) is network
    assert drafters.dflash(network, 3) is drafters.dflash(network, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n, s: drafters.dflash(n, 5), "from 1 to 4"),
        (lambda n, s: drafters.dflash(n, 0), "num_speculative_tokens"),
        (lambda n, s: drafters.dflash(s), "dspark"),
        (lambda n, s: drafters.dspark(s, 6), "from 1 to 5"),
        (lambda n, s: drafters.dspark(s, True), "num_speculative_tokens"),
        (lambda n, s: drafters.dspark(s, confidence_threshold=1.5), "from 0 to 1"),
        (lambda n, s: drafters.dspark(s, confidence_threshold="high"), "a number"),
        (lambda n, s: drafters.dspark(n, confidence_threshold=0.5), "confidence_threshold needs"),
        (lambda n, s: drafters.dspark(n, steps_per_second=(1.0,)), "steps_per_second needs"),
        (lambda n, s: drafters.dspark(s, steps_per_second=()), "positive numbers"),
        (lambda n, s: drafters.dspark(s, confidence_temperatures=(1.0,) * 4), "at least 5"),
        (lambda n, s: drafters.dspark(s, confidence_temperatures=(0.0,) * 5), "positive numbers"),
    ],
)
def test_bad_arguments(make, message):
    networks = (block_network(block_tiny.network_config(name)) for name in ("dflash", "dspark"))
    with pytest.raises(ValueError, match=message):
        make(*networks)


def test_weights_that_are_missing_or_not_a_pair():
    params = block_tiny.params("dflash")
    decode = functools.partial(specjax.decode, prompt=[[1, 2]], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"params\.draft is None"):
        decode(params.replace(draft=None))
    network = block_network(block_tiny.BLOCK)
    mapped = params.replace(drafter=drafters.dflash(network, mapped=True))
    with pytest.raises(ValueError, match="vocabulary map"):
        decode(mapped)
    ids = drafters.vocabulary_map([0, 1, 2], 61)
    with pytest.raises(ValueError, match="maps 3 draft tokens"):
        decode(mapped.replace(draft=(params.draft, ids)))
    blind = params.model._replace(embed=None)
    with pytest.raises(ValueError, match="embed is None"):
        decode(params.replace(model=blind))
