"""DSpark: the heads against their reference, and the drafter."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.dspark import dspark
from tests.drafters import block_folders as folders

KINDS = ["dspark-vanilla", "dspark-gated", "dspark-rnn"]


@pytest.fixture(scope="module", params=KINDS)
def loaded(shared, request):
    return folders.load(shared / "parity" / request.param)


def corrected(loaded, hidden, base, before):
    """Logits and confidence logits of a block's slots with given tokens before them."""
    network = loaded.network
    state = jnp.zeros((hidden.shape[0], network.markov_rank))
    logits, confidence = [], []
    for k in range(hidden.shape[1]):
        bias, state = network.correct(loaded.weights, state, before[:, k], hidden[:, k])
        logits.append(base[:, k] + bias)
        confidence.append(network.confidence(loaded.weights, hidden[:, k], before[:, k]))
    return jnp.stack(logits, axis=1), jnp.stack(confidence, axis=1)


def test_block_of_the_reference(loaded):
    expected, network = loaded.expected, loaded.network
    held = network.init_cache(loaded.weights, 1, 40)
    held = folders.fuse_and_append(loaded, held, expected["context_features"])
    hidden = folders.block_hidden(loaded, held, expected["block_ids"][None])
    np.testing.assert_allclose(hidden[0], expected["draft_hidden"], **folders.TOLERANCE)
    base = folders.logits(loaded, hidden)
    np.testing.assert_allclose(base[0], expected["base_logits"], **folders.TOLERANCE)

    before = np.concatenate([expected["next_token"], expected["draft_tokens"][:-1]])
    logits, confidence = corrected(loaded, hidden, base, jnp.asarray(before)[None])
    np.testing.assert_allclose(logits[0], expected["corrected_logits"], **folders.TOLERANCE)
    np.testing.assert_allclose(confidence[0], expected["confidence_logits"], **folders.TOLERANCE)
    np.testing.assert_array_equal(jnp.argmax(logits[0], -1), expected["draft_tokens"])

    before = jnp.asarray(expected["teacher_prev_tokens"])[None]
    logits, _ = corrected(loaded, hidden, base, before)
    np.testing.assert_allclose(logits[0], expected["teacher_corrected_logits"], **folders.TOLERANCE)


def test_confidence_and_lengths_by_threshold(loaded):
    """The first round after the prompt and the token that the target chose."""
    expected = loaded.expected
    prompt = np.concatenate([expected["input_ids"], expected["next_token"][None]], axis=1)
    wanted = expected["proposal_lengths_by_threshold"].tolist()
    for threshold, length in zip(expected["thresholds"], wanted, strict=True):
        drafter = dspark(loaded.network, confidence_threshold=round(float(threshold), 3))
        params = loaded.params.replace(drafter=drafter)
        proposal = folders.first_proposal(params, prompt, expected["context_features"][None])
        np.testing.assert_array_equal(proposal.tokens[0], expected["draft_tokens"])
        np.testing.assert_allclose(
            proposal.confidence[0], expected["confidence"], **folders.TOLERANCE
        )
        assert proposal.valid[0].tolist() == [k < length for k in range(drafter.depth)]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_rounds_of_the_reference(loaded, threshold):
    drafter = dspark(loaded.network, confidence_threshold=threshold)
    params = loaded.params.replace(drafter=drafter)
    name = "t05" if threshold else "t0"
    emits, drafts, ids = (
        loaded.expected[f"{name}_{part}"].tolist()
        for part in ("acceptance_lengths", "proposal_lengths", "generated_ids")
    )
    first, *rest = ids
    prompt = [[*loaded.expected["input_ids"][0].tolist(), first]]
    text, emitted, drafted = folders.rounds(params, prompt, sum(emits))
    assert text[: len(rest)] == rest
    assert emitted == emits
    assert drafted == drafts


def test_speculators_format(shared):
    """Slots of three blocks behind places in a text, with given tokens before them."""
    loaded = folders.load(shared / "parity" / "spec-dspark")
    expected, found = loaded.expected, loaded.found
    assert (loaded.format.method, found.options) == ("dspark", {"num_speculative_tokens": 6})
    assert loaded.network.features == tuple(expected["aux_layer_ids"].tolist())
    hidden = folders.anchored(loaded)
    np.testing.assert_allclose(hidden, expected["block_hidden"], **folders.TOLERANCE)
    base = folders.logits(loaded, hidden)
    np.testing.assert_allclose(base, expected["base_logits"], **folders.TOLERANCE)
    logits, confidence = corrected(loaded, hidden, base, jnp.asarray(expected["prev_tokens"]))
    np.testing.assert_allclose(logits - base, expected["markov_bias"], **folders.TOLERANCE)
    np.testing.assert_allclose(logits, expected["corrected_logits"], **folders.TOLERANCE)
    np.testing.assert_allclose(confidence, expected["confidence_logits"], **folders.TOLERANCE)


def test_a_vocabulary_of_its_own(shared):
    """Drafts are the target's ids: the best logit, through the checkpoint's offsets."""
    loaded = folders.load(shared / "parity" / "spec-dspark")
    expected, network = loaded.expected, loaded.network
    params = loaded.params.replace(drafter=dspark(network, mapped=True))
    _, ids = params.draft
    anchor = int(expected["anchors"][1])
    prompt = expected["input_ids"][:, : anchor + 1]
    proposal = folders.first_proposal(params, prompt, expected["features"][None, :anchor])

    hidden = folders.anchored(loaded)[1:2]
    base, token = folders.logits(loaded, hidden), jnp.asarray(prompt[:, -1])
    state = jnp.zeros((1, network.markov_rank))
    wanted = []
    for k in range(network.block_size):
        bias, state = network.correct(loaded.weights, state, token, hidden[:, k])
        best = jnp.argmax(base[:, k] + bias, axis=-1)
        token = best + ids.d2t[best]
        wanted.append(int(token[0]))
    assert proposal.tokens[0].tolist() == wanted
    known = jnp.arange(network.vocab_size) + ids.d2t
    assert set(wanted) <= set(known.tolist())
