"""DFlash: the network against its reference, and the drafter."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.dflash import dflash
from tests.drafters import block_folders as folders


@pytest.fixture(scope="module")
def loaded(shared):
    return folders.load(shared / "parity" / "dflash")


def context(loaded, pieces=(24,)):
    held = loaded.network.init_cache(loaded.weights, 1, 40)
    at = 0
    for size in pieces:
        features = loaded.expected["context_features"][at : at + size]
        held = folders.fuse_and_append(loaded, held, features)
        at += size
    return held


def test_block_of_the_reference(loaded):
    expected = loaded.expected
    hidden = folders.block_hidden(loaded, context(loaded), expected["block_ids"][None])
    np.testing.assert_allclose(hidden[0], expected["draft_hidden"], **folders.TOLERANCE)
    logits = folders.logits(loaded, hidden)[0]
    np.testing.assert_allclose(logits, expected["draft_logits"], **folders.TOLERANCE)
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[1:], expected["draft_tokens"])


def test_half_a_block(loaded):
    expected = loaded.expected
    hidden = folders.block_hidden(loaded, context(loaded), expected["block_ids"][None, :4])
    logits = folders.logits(loaded, hidden)[0]
    np.testing.assert_allclose(logits, expected["half_block_logits"], **folders.TOLERANCE)


def test_context_in_two_pieces(loaded):
    ids = loaded.expected["block_ids"][None]
    whole = folders.block_hidden(loaded, context(loaded), ids)
    pieces = folders.block_hidden(loaded, context(loaded, (9, 15)), ids)
    np.testing.assert_allclose(pieces, whole, atol=1e-5, rtol=1e-5)


def test_rounds_of_the_reference(loaded):
    """There the target chooses the first new token while it reads the prompt, before any round."""
    params = loaded.params.replace(drafter=dflash(loaded.network))
    expected = loaded.expected
    first, *rest = expected["generated_ids"].tolist()
    prompt = [[*expected["input_ids"][0].tolist(), first]]
    accepted = expected["acceptance_lengths"].tolist()  # with the token after the drafts
    text, emitted, _ = folders.rounds(params, prompt, sum(accepted))
    assert text[: len(rest)] == rest
    assert emitted == accepted


def test_speculators_format(shared):
    """Blocks behind three places of a text; a layer with a window; a vocabulary of its own."""
    loaded = folders.load(shared / "parity" / "spec-dflash")
    expected, found = loaded.expected, loaded.found
    assert (loaded.format.method, found.options) == ("dflash", {"num_speculative_tokens": 5})
    assert loaded.network.features == tuple(expected["aux_layer_ids"].tolist())
    hidden = folders.anchored(loaded)
    np.testing.assert_allclose(hidden, expected["block_hidden"], **folders.TOLERANCE)
    logits = folders.logits(loaded, hidden)
    np.testing.assert_allclose(logits, expected["base_logits"], **folders.TOLERANCE)
