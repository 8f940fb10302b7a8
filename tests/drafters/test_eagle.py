"""EAGLE heads against the reference's code: states, logits, chains, trees, whole texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, checkpoints, drafters, tree
from specjax.drafters.eagle import reader_of
from specjax.models.eagle import EagleConfig, eagle_network, random_eagle
from specjax.types import Context, Prefill
from tests import tiny
from tests.drafters.reading import TOLERANCE, assert_rounds, case
from tests.tiny import emitted

PUBLISHED = ["eagle1", "eagle3", "spec-eagle3", "spec-eagle31", "deepspec-eagle3"]


def _params(shared, name, **options):
    found = case(shared, name)
    method = "eagle" if name == "eagle1" else "eagle3"
    drafter = {"method": method, "model": str(found.folder), **options}
    return found, specjax.load(found.target, drafter, dtype="float32")


def _state(params, found, chunk=32):
    """The drafter's state after the prompt, with the target's greedy token as the root."""
    ids = np.concatenate([found.expected["input_ids"], found.expected["next_token"][None]], axis=1)
    ids = ids.astype(np.int32)
    length = ids.shape[1]
    model = params.model
    _, kept = cache.prefill(
        model,
        params.target,
        model.init_cache(params.target, 1, 64),
        jnp.asarray(np.pad(ids, [(0, 0), (0, 32 - length)])),
        jnp.array([length - 1]),
        chunk=chunk,
        features=params.drafter.features,
    )
    prefill = Prefill(
        tokens=jnp.asarray(np.pad(ids, [(0, 0), (0, 32 - length)])),
        lengths=jnp.array([length]),
        features=kept,
        slots=64,
        chunk=chunk,
    )
    context = Context(
        tokens=jnp.asarray(np.pad(ids, [(0, 0), (0, 64 - length)])),
        lengths=jnp.array([length]),
        sampling=specjax.Sampling(),
        active=jnp.array([True]),
    )
    return jax.jit(params.drafter.init)(_core(params), prefill), context, kept


def _core(params):
    """What a compiled program depends on."""
    return params.replace(tokenizer=None, name="")


def _draft(params, state, context):
    keys = jax.random.split(jax.random.key(0), 1)
    return jax.jit(params.drafter.draft)(_core(params), keys, state, context)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_states_and_logits(shared, name):
    found, params = _params(shared, name, num_speculative_tokens=4)
    expected = found.expected
    ids = expected["input_ids"]
    length = ids.shape[1]
    _, _, features = _state(params, found)
    given = np.concatenate([np.asarray(x)[:, :length] for x in features], axis=-1)[0]
    np.testing.assert_allclose(given, expected["features"], **TOLERANCE)
    weights, vocabulary = params.draft if isinstance(params.draft, tuple) else (params.draft, None)
    config = checkpoints.read_draft(found.folder, params.model.config).config
    network = eagle_network(config)
    reader = reader_of(network, params, weights, vocabulary)
    hidden = network.fuse(weights, tuple(x[:, :length] for x in features))
    text = np.concatenate([ids[:, 1:], expected["next_token"][None]], axis=1).astype(np.int32)
    out = reader.forward(
        jnp.asarray(text),
        hidden,
        jnp.arange(length)[None],
        network.init_cache(weights, 1, 8),
        jnp.tril(jnp.ones((1, length, length), bool)),
    )
    np.testing.assert_allclose(reader.logits(out.hidden)[0], expected["draft_logits"], **TOLERANCE)
    handed_on = expected["draft_hidden"]  # the reference gives it before the norm
    if config.norm_output:
        handed_on = _normed(handed_on, weights["norm"]["scale"], config.decoder.norm_eps)
    np.testing.assert_allclose(out.features[0][0], handed_on, **TOLERANCE)


def _normed(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * np.asarray(scale)


@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_chain(shared, name):
    found, params = _params(shared, name, num_speculative_tokens=4)
    state, context, _ = _state(params, found)
    proposal = _draft(params, state, context)
    np.testing.assert_array_equal(proposal.tokens[0], found.expected["chain_tokens"])
    assert np.all(proposal.valid)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_dynamic_tree(shared, name):
    total, depth, top_k = map(int, case(shared, name).expected["tree_params"])
    shape = drafters.dynamic_tree(total - 1, depth + 1, top_k)
    found, params = _params(shared, name, tree=shape)
    expected = found.expected
    state, context, _ = _state(params, found)
    proposal = _draft(params, state, context)
    tokens = np.concatenate([expected["next_token"], proposal.tokens[0]])
    np.testing.assert_array_equal(tokens, expected["tree_draft_tokens"])
    mask = tree.ancestors(proposal.parents)
    np.testing.assert_array_equal(mask[0], expected["tree_mask"].astype(bool))
    np.testing.assert_array_equal(tree.depths(mask)[0], expected["tree_position_ids"])


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_text_and_accepted_lengths_with_a_dynamic_tree(shared, name):
    total, depth, top_k = map(int, case(shared, name).expected["tree_params"])
    found, params = _params(shared, name, tree=drafters.dynamic_tree(total - 1, depth + 1, top_k))
    expected = found.expected
    wanted = expected["generated_ids"].tolist()
    # The reference draws its first token from the prompt alone.
    prompt = np.concatenate([expected["input_ids"], expected["next_token"][None]], axis=1)
    out = specjax.decode(params, prompt, max_new_tokens=len(wanted) - 1, eos_ids=[])
    assert [int(expected["next_token"][0]), *emitted(out)] == wanted
    assert_rounds(out, expected["accept_lengths"] + 1)


def test_a_tree_leaves_out_what_is_not_likely(shared):
    """The likely part of a tree, and all of it; its nodes come first."""
    floor, most = 3e-3, 40
    found, params = _params(shared, "eagle3", tree=drafters.dynamic_tree(most, 4, 6))
    state, context, _ = _state(params, found)
    whole = _draft(params, state, context)
    shape = drafters.dynamic_tree(most, 4, 6, floor)
    found, params = _params(shared, "eagle3", tree=shape)
    part = _draft(params, state, context)
    count = int(part.valid.sum())
    assert 3 < count < most
    assert bool(part.valid[0, :count].all())
    texts = lambda x, n: {tuple(path) for path in _texts(x)[:n]}
    assert texts(part, count) < texts(whole, most)
    looser = drafters.dynamic_tree(most, 4, 6, floor / 2)
    _, params = _params(shared, "eagle3", tree=looser)
    more = _draft(params, state, context)
    assert texts(part, count) < texts(more, int(more.valid.sum()))


def _texts(proposal):
    """The tokens from the root to each node."""
    parents, tokens = np.asarray(proposal.parents[0]), np.asarray(proposal.tokens[0])
    paths = [()]
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths[1:]


def test_deepspec_text_and_accepted_lengths(shared):
    found, params = _params(shared, "deepspec-eagle3")
    wanted = found.expected["generated_ids"].tolist()
    prompt = np.concatenate([found.expected["input_ids"], [wanted[:1]]], axis=1)
    out = specjax.decode(params, prompt, max_new_tokens=len(wanted) - 1, eos_ids=[])
    assert emitted(out) == wanted[1:]
    assert params.drafter.depth == 4
    assert_rounds(out, found.expected["acceptance_lengths"])


# --- cost ------------------------------------------------------------------------------------


def _products(jaxpr, shape, times=1):
    """How often a weight of some shape is read: products with it, those of a loop each time."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += times * any(v.aval.shape == shape for v in equation.invars)
        inner = times * equation.params.get("length", 1)
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(value, "jaxpr"):
                count += _products(value.jaxpr, shape, inner)
            elif hasattr(value, "eqns"):
                count += _products(value, shape, inner)
    return count


@pytest.mark.parametrize("tree", [None, (12, 5, 3)])
def test_what_a_draft_reads(tree):
    """K steps read the draft's layer K times and the head's own rows K times, and nothing of the
    target but the embedding; a round reads each weight of the target once."""
    target = tiny.CONFIG
    decoder = dataclasses.replace(target, num_layers=1, intermediate_size=40)
    config = EagleConfig(
        decoder=decoder, features=(0, 1, 2), target_size=target.hidden_size, draft_vocab=23
    )
    options = {} if tree is None else {"tree": drafters.dynamic_tree(*tree)}
    drafter = drafters.eagle(eagle_network(config), 5, mapped=True, **options)
    ids = drafters.vocabulary_map(np.arange(23), target.vocab_size)
    params = tiny.params().replace(
        drafter=drafter, draft=(random_eagle(config, jax.random.key(0)), ids)
    )
    prefill = Prefill(
        tokens=jnp.zeros((1, 8), jnp.int32),
        lengths=jnp.array([5]),
        features=(jnp.zeros((1, 8, target.hidden_size)),) * 3,
        slots=32,
        chunk=8,
    )
    context = Context(
        tokens=jnp.zeros((1, 32), jnp.int32),
        lengths=jnp.array([5]),
        sampling=specjax.Sampling(),
        active=jnp.array([True]),
    )
    keys = jax.random.split(jax.random.key(0), 1)

    def run(params, prefill, context):
        state = drafter.init(params, prefill)
        jaxpr = jax.make_jaxpr(drafter.draft)(params, keys, state, context)
        return jaxpr.jaxpr

    jaxpr = run(params, prefill, context)
    width, inner = target.hidden_size, 40
    assert _products(jaxpr, (inner, width)) == 2 * 5  # gate and up
    assert _products(jaxpr, (23, width)) == 5
    assert _products(jaxpr, (target.vocab_size, width)) == 0
    assert _products(jaxpr, (target.intermediate_size, width)) == 0

    proposal = jax.eval_shape(drafter.draft, params, keys, drafter.init(params, prefill), context)[
        0
    ]
    held = params.model.init_cache(params.target, 1, 32)
    verify = jax.make_jaxpr(specjax.verify_step)(params, held, jnp.array([1]), proposal).jaxpr
    assert _products(verify, (target.intermediate_size, width)) == 2 * target.num_layers
    assert _products(verify, (target.vocab_size, width)) == 1


# --- what users hit elsewhere ----------------------------------------------------------------


def test_row_28_a_draft_with_its_own_head_and_vocabulary(shared):
    """The target's head has other rows: what is proposed are the draft's tokens, moved by d2t."""
    found, params = _params(shared, "eagle3", num_speculative_tokens=4)
    weights, ids = params.draft
    assert weights["head"]["weight"].shape[0] == ids.d2t.size < params.model.vocab_size
    state, context, _ = _state(params, found)
    proposal = _draft(params, state, context)
    own = found.expected["chain_draft_ids"]
    np.testing.assert_array_equal(proposal.tokens[0], own + np.asarray(ids.d2t)[own])


@pytest.mark.parametrize("chunk", [8, 32])
def test_row_32_prompts_longer_than_a_chunk(shared, chunk):
    """The target's states, and the first draft, do not depend on how the prompt was cut."""
    found, params = _params(shared, "eagle3", num_speculative_tokens=4)
    state, context, features = _state(params, found, chunk)
    expected = found.expected["features"]
    given = np.concatenate([np.asarray(x)[:, :24] for x in features], axis=-1)[0]
    np.testing.assert_allclose(given, expected, **TOLERANCE)
    proposal = _draft(params, state, context)
    np.testing.assert_array_equal(proposal.tokens[0], found.expected["chain_tokens"])
