"""What every drafter must hold, as one table."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, types
from specjax.analysis import summary
from specjax.models.block_decoder import BlockConfig, block_network, random_block
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, first_layers, random_weights
from specjax.models.eagle import EagleConfig, eagle_network, random_eagle
from specjax.models.medusa import MedusaConfig, medusa_heads
from specjax.models.medusa import random_weights as random_medusa
from specjax.models.mtp import MtpConfig, mtp_network, random_mtp
from specjax.sampling import distribution
from specjax.types import Params
from tests import tiny
from tests.tiny import emitted

SMALL = DecoderConfig(
    vocab_size=7,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=2048,
    qk_norm=True,
)
ONE = dataclasses.replace(SMALL, num_layers=1)
PROMPTS = [[3], [1, 2, 3, 4, 5], [5, 1, 1, 2, 6, 0, 4, 2, 2, 3, 1, 5, 5, 0, 6, 2, 1]]


def _key(i: int) -> jax.Array:
    return jax.random.key(100 + i)


def _eagle(**options):
    fused = options.pop("fused", True)
    own = options.pop("own", None)
    config = EagleConfig(
        decoder=ONE,
        mixed=options.pop("mixed", False),
        features=(0, 1, 2) if fused else (2,),
        target_size=SMALL.hidden_size,
        fused=fused,
        draft_vocab=own,
    )
    network, weights = eagle_network(config), random_eagle(config, _key(0))
    if own is None:
        return drafters.eagle(network, **options), weights
    # The head has every other token only.
    ids = drafters.vocabulary_map(np.arange(own), SMALL.vocab_size)
    return drafters.eagle(network, mapped=True, **options), (weights, ids)


def _mtp(steps: int, modules: int):
    config = MtpConfig(decoder=ONE, target_layers=SMALL.num_layers, modules=modules)
    made = drafters.mtp(mtp_network(config), steps, modules=modules)
    return made, random_mtp(config, _key(1))


def _medusa(choices):
    config = MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=SMALL.hidden_size,
        vocab_size=SMALL.vocab_size,
        target_layers=SMALL.num_layers,
    )
    return drafters.medusa(medusa_heads(config), choices), random_medusa(config, _key(2))


def _block(**options):
    config = BlockConfig(
        decoder=ONE,
        features=(1, 2),
        target_size=SMALL.hidden_size,
        draft_vocab=SMALL.vocab_size,
        block_size=4,
        mask_token_id=6,
        **options,
    )
    network, weights = block_network(config), random_block(config, _key(3))
    make = drafters.dspark if config.markov_rank else drafters.dflash
    return make(network), weights


def _draft_model(make=drafters.draft_model, depth=3, **options):
    config, weights = first_layers(SMALL, _target().target, 1)
    return make(decoder_model(config), depth, **options), weights


def _both(make, **options):
    """Prompt lookup and a head."""
    head, weights = _eagle(**options)
    return make(drafters.ngram(3), head), (None, weights)


def _sized(made, sizes):
    drafter, weights = made
    return drafters.sized(drafter, sizes), weights


BRANCHED = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
TABLE = {
    "plain": lambda: (drafters.plain(), None),
    "ngram": lambda: (drafters.ngram(3), None),
    "ngram, sized": lambda: (drafters.sized(drafters.ngram(3), (0, 1)), None),
    "draft_model": _draft_model,
    "draft_tree, paths": lambda: _draft_model(drafters.draft_tree, 2, paths=3),
    "draft_tree, dynamic": lambda: _draft_model(
        drafters.draft_tree, tree=drafters.dynamic_tree(9, 3, 3)
    ),
    "eagle1": lambda: _eagle(fused=False, num_speculative_tokens=3),
    "eagle3": lambda: _eagle(num_speculative_tokens=3),
    "eagle3, own vocabulary": lambda: _eagle(num_speculative_tokens=3, own=4),
    "eagle3, paths": lambda: _eagle(num_speculative_tokens=2, paths=3),
    "eagle3, static tree": lambda: _eagle(tree=BRANCHED),
    "eagle2, dynamic tree": lambda: _eagle(fused=False, tree=drafters.dynamic_tree(9, 3, 3)),
    "eagle3, a tree as sure as it is large": lambda: _sized(
        _eagle(mixed=True, tree=drafters.dynamic_tree(9, 3, 3, 0.1)), (1, 4)
    ),
    "mtp": lambda: _mtp(1, 1),
    "mtp, three steps": lambda: _mtp(3, 2),
    "medusa": lambda: _medusa(BRANCHED),
    "dflash": lambda: _block(),
    "dflash, mixed": lambda: _block(mixed=2),
    "dspark": lambda: _block(markov_kind="gated", markov_rank=4, confidence=True, from_anchor=True),
    "fallback": lambda: _both(drafters.fallback, num_speculative_tokens=4),
    "merged": lambda: _both(drafters.merged, num_speculative_tokens=2),
    "merged, dynamic tree": lambda: _both(
        functools.partial(drafters.merged, nodes=9), tree=drafters.dynamic_tree(8, 3, 3)
    ),
}


@functools.cache
def _target() -> Params:
    # Larger weights: the law is far from uniform, and drafts are both accepted and rejected.
    weights = jax.tree.map(lambda x: 1.5 * x, random_weights(SMALL, _key(9)))
    return Params(
        target=weights,
        model=decoder_model(SMALL),
        drafter=drafters.plain(),
        pad_id=SMALL.vocab_size - 1,
    )


@functools.cache
def _params(name: str) -> Params:
    drafter, draft = TABLE[name]()
    return _target().replace(drafter=drafter, draft=draft)


every_drafter = pytest.mark.parametrize("name", TABLE)
SAMPLED = specjax.Sampling(temperature=0.9, top_k=5)
NEW = 24


def _decode(params: Params, prompts, *, temperature: float = 0.0, keys=None, tokens: int = NEW):
    """Every call has the same shapes, so that a drafter is compiled once for all tests here."""
    return specjax.decode(
        params,
        prompts,
        max_new_tokens=tokens,
        sampling=specjax.Sampling(temperature=temperature, top_k=5),
        key=jax.random.split(_key(4), 3) if keys is None else keys,
        eos_ids=[],
        max_len=64,
    )


@every_drafter
def test_greedy_equals_plain(name):
    plain, out = _decode(_target(), PROMPTS), _decode(_params(name), PROMPTS)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    stats = out.stats
    assert stats.lossless
    np.testing.assert_array_equal(np.sum(stats.histogram, axis=1), stats.rounds)
    depth = np.arange(1, stats.histogram.shape[1] + 1)
    assert np.all(np.asarray(stats.histogram) @ depth >= NEW)
    np.testing.assert_array_equal(np.sum(stats.hits, axis=1), np.sum(stats.accepted, axis=1))


@every_drafter
def test_rows_do_not_depend_on_each_other(name):
    """Sampled, in other slots and beside other rows."""
    keys = jax.random.split(_key(4), 3)
    run = functools.partial(_decode, _params(name), temperature=0.9)
    out = run(PROMPTS, keys=keys)
    turned = run(PROMPTS[::-1], keys=keys[::-1])
    np.testing.assert_array_equal(out.tokens, turned.tokens[::-1])
    others = run([PROMPTS[2], PROMPTS[1], PROMPTS[2]], keys=keys[jnp.array([2, 1, 0])])
    assert emitted(others, 1) == emitted(out, 1)
    assert emitted(others, 0) == emitted(out, 2)


@every_drafter
def test_rejected_drafts_leave_no_trace(name):
    """A run that is taken up from its text, where a round ended, makes the same rounds."""
    run = functools.partial(_decode, _params(name))
    tokens = lambda out: int(
        np.asarray(out.stats.histogram[1]) @ np.arange(1, out.stats.histogram.shape[1] + 1)
    )
    whole = run(PROMPTS)
    for at in range(NEW // 3, NEW):
        part = run(PROMPTS, tokens=at)
        if tokens(part) == at:
            break
    text = PROMPTS[1] + emitted(part, 1)
    rest = run([PROMPTS[0], text, PROMPTS[2]], tokens=NEW - at)
    assert emitted(rest, 1) == emitted(whole, 1)[at:]
    assert int(part.stats.rounds[1] + rest.stats.rounds[1]) == int(whole.stats.rounds[1])


@every_drafter
def test_no_second_trace(name):
    _decode(_params(name), PROMPTS)
    before = specjax.decoding._decode_program._cache_size()
    for temperature in (0.0, 1.3):
        _decode(_params(name), [p[::-1] for p in PROMPTS], temperature=temperature, tokens=17)
    assert specjax.decoding._decode_program._cache_size() == before


@every_drafter
def test_records_of_a_round(name):
    """Shapes hold, and the steps are the same outside of jit."""
    params = _params(name)
    drafter = params.drafter
    batch, chunk = 2, 8
    tokens = jnp.array([[1, 2, 3, 4, 5, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]], jnp.int32)
    lengths = jnp.array([5, 1])
    _, features = specjax.cache.prefill(
        params.model,
        params.target,
        params.model.init_cache(params.target, batch, 32),
        tokens,
        lengths - 1,
        chunk=chunk,
        features=drafter.features,
    )
    prefill = types.Prefill(
        tokens=tokens, lengths=lengths, features=features, slots=32, chunk=chunk
    )
    context = types.Context(
        tokens=jnp.pad(tokens, [(0, 0), (0, 24)]),
        lengths=lengths,
        sampling=specjax.Sampling(),
        active=jnp.ones(batch, bool),
    )
    keys = jax.random.split(_key(6), batch)
    state = jax.jit(drafter.init)(params, prefill)
    proposal, after = jax.jit(drafter.draft)(params, keys, state, context)
    types.check_proposal(proposal, {"B": batch, "N": drafter.nodes, "V": params.model.vocab_size})
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    parents = np.atleast_2d(proposal.parents)
    assert np.all(parents <= np.arange(drafter.nodes)[None])
    assert np.all(parents >= 0)
    if drafter.features:  # a prompt of one token has no states of the target yet
        assert not np.any(proposal.valid[1])
        assert np.any(proposal.valid[0])


# --- the law ---------------------------------------------------------------------------------


@functools.cache
def _law(prompt: tuple[int, ...]) -> np.ndarray:
    """Probabilities `[V, V]` of the next two tokens, by passes over every text."""
    params, vocab = _target(), SMALL.vocab_size
    texts = np.array([[*prompt, i] for i in range(vocab)], np.int32)
    length = texts.shape[1]
    out = params.model.forward(
        params.target,
        jnp.asarray(texts),
        jnp.broadcast_to(jnp.arange(length)[None], texts.shape),
        params.model.init_cache(params.target, vocab, 8),
        jnp.tril(jnp.ones((1, length, length), bool)),
    )
    laws = np.asarray(
        distribution(params.model.unembed(params.target, out.hidden[:, -2:]), SAMPLED),
        np.float64,
    )
    return laws[0, 0][:, None] * laws[:, 1]


# The laws of the other drafters are tested in their own files, or are slow to sample.
_ALWAYS = ["eagle3", "eagle3, paths", "eagle2, dynamic tree", "mtp, three steps"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in _ALWAYS else pytest.mark.slow) for n in TABLE]
)
def test_law_of_two_tokens(name):
    """Chi-square of the first two tokens; the bound is passed once in 10^5 times."""
    prompt, batch = (1, 2, 3, 4), 4096
    expected = _law(prompt)
    counts = np.zeros_like(expected)
    for i in range(3):
        out = specjax.decode(
            _params(name),
            np.tile(np.array(prompt, np.int32), (batch, 1)),
            max_new_tokens=2,
            sampling=SAMPLED,
            key=_key(10 + i),
            eos_ids=[],
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    total = counts.sum()
    assert np.all(counts[expected == 0] == 0)
    likely = expected * total >= 5
    counts = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum()) * total
    keep = expected > 0
    chi = np.sum((counts[keep] - expected[keep]) ** 2 / expected[keep])
    degrees = keep.sum() - 1
    assert chi < degrees + 4.5 * np.sqrt(2 * degrees) + 8, (chi, degrees)


# --- counters --------------------------------------------------------------------------------


def test_summary_of_an_oracle_of_a_tree():
    """All of a path stands in every round; nodes beside it never do."""
    plain = _decode(_target(), PROMPTS[1:2], keys=_key(0))
    text = tuple(PROMPTS[1] + emitted(plain))
    parents, right = (0, 0, 1, 2, 2, 5), (2, 5, 6)  # root - 2 - 5 - 6
    params = _target().replace(drafter=tiny.tree_oracle(text, parents, right))
    out = specjax.decode(params, PROMPTS[1], max_new_tokens=16, eos_ids=[])
    assert emitted(out) == emitted(plain)[:16]
    found = summary(out.stats)
    assert found.tau == 4
    np.testing.assert_array_equal(found.cumulative, [1, 1, 1])
    np.testing.assert_array_equal(found.conditional, [1, 1, 1])
    np.testing.assert_array_equal(found.hits, [0, 1, 0, 0, 1, 1])
