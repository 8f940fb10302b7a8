"""EAGLE heads against the reference's code: states, logits, chains, trees, whole texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, checkpoints, drafters, tree
from specjax.drafters.eagle import reader_of
from specjax.models.eagle import eagle_network
from specjax.types import Context, Prefill
from tests.drafters.reading import TOLERANCE, assert_rounds, case
from tests.tiny import emitted

PUBLISHED = ["eagle1", "eagle3", "spec-eagle3", "spec-eagle31", "deepspec-eagle3"]


def _params(shared, name, **options):
    found = case(shared, name)
    method = "eagle" if name == "eagle1" else "eagle3"
    drafter = {"method": method, "model": str(found.folder), **options}
    return found, specjax.load(found.target, drafter, dtype="float32")


def _state(params, found):
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
        chunk=32,
        features=params.drafter.features,
    )
    prefill = Prefill(
        tokens=jnp.asarray(np.pad(ids, [(0, 0), (0, 32 - length)])),
        lengths=jnp.array([length]),
        features=kept,
        slots=64,
        chunk=32,
    )
    context = Context(
        tokens=jnp.asarray(np.pad(ids, [(0, 0), (0, 64 - length)])),
        lengths=jnp.array([length]),
        sampling=specjax.Sampling(),
        active=jnp.array([True]),
    )
    return params.drafter.init(params, prefill), context, kept


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
    proposal, _ = params.drafter.draft(
        params, jax.random.split(jax.random.key(0), 1), state, context
    )
    np.testing.assert_array_equal(proposal.tokens[0], found.expected["chain_tokens"])
    assert np.all(proposal.valid)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_dynamic_tree(shared, name):
    total, depth, top_k = map(int, case(shared, name).expected["tree_params"])
    shape = drafters.dynamic_tree(total - 1, depth + 1, top_k)
    found, params = _params(shared, name, tree=shape)
    expected = found.expected
    state, context, _ = _state(params, found)
    proposal, _ = params.drafter.draft(
        params, jax.random.split(jax.random.key(0), 1), state, context
    )
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


def test_deepspec_text_and_accepted_lengths(shared):
    found, params = _params(shared, "deepspec-eagle3")
    wanted = found.expected["generated_ids"].tolist()
    prompt = np.concatenate([found.expected["input_ids"], [wanted[:1]]], axis=1)
    out = specjax.decode(params, prompt, max_new_tokens=len(wanted) - 1, eos_ids=[])
    assert emitted(out) == wanted[1:]
    assert params.drafter.depth == 4
    assert_rounds(out, found.expected["acceptance_lengths"])
