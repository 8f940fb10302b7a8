"""Verifying passes of several sizes: the smallest that holds the draft is taken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, tree
from specjax.types import Proposal
from specjax.verify import verify_step
from tests import tiny

NODES = 6
PARENTS = jnp.asarray([0, 0, 1, 2, 2, 4], jnp.int32)
ROWS = 2


def _params(sizes):
    base = tiny.params()
    head = drafters.ngram(NODES)._replace(sizes=sizes, features=(1, 2))
    return base.replace(drafter=head)


def _proposal(valid: list[int], rows: bool) -> Proposal:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (ROWS, NODES)), jnp.int32)
    number = jnp.arange(1, NODES + 1)[None, :]
    return Proposal(
        tokens=tokens,
        parents=jnp.broadcast_to(PARENTS, (ROWS, NODES)) if rows else PARENTS,
        probs=jnp.ones((ROWS, NODES, tiny.CONFIG.vocab_size)),
        valid=number <= jnp.asarray(valid)[:, None],
        candidate=jnp.ones((ROWS, NODES), bool),
        confidence=jnp.ones((ROWS, NODES)),
    )


@pytest.fixture(scope="module")
def held():
    """A cache with 9 and 5 tokens."""
    params = tiny.params()
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 60, (ROWS, 16)), jnp.int32)
    model = params.model
    empty = model.init_cache(params.target, ROWS, 32)
    return specjax.cache.prefill(model, params.target, empty, ids, jnp.asarray([9, 5]), chunk=16)[0]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("valid", "size"), [([0, 0], 0), ([0, 2], 2), ([3, 1], 4), ([4, 0], 4), ([5, 6], NODES)]
)
def test_a_pass_scores_what_a_whole_pass_does(held, valid, size, rows):
    root, proposal = jnp.asarray([3, 4], jnp.int32), _proposal(valid, rows)
    whole = verify_step(_params(()), held, root, proposal)
    found = verify_step(_params((0, 2, 4)), held, root, proposal)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(found), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
    for a, b in ((whole.logits, found.logits), (whole.features[1], found.features[1])):
        np.testing.assert_allclose(b[:, : size + 1], a[:, : size + 1], rtol=1e-5, atol=1e-5)
        assert not np.any(b[:, size + 1 :])  # what was not needed was not computed
    for a, b in zip(whole.block.keys, found.block.keys, strict=True):
        np.testing.assert_allclose(b[:, :, : size + 1], a[:, :, : size + 1], rtol=1e-5, atol=1e-5)


def test_first_nodes_are_a_tree():
    short = tree.first_nodes(_proposal([6, 6], True), 3)
    np.testing.assert_array_equal(short.parents, [[0, 0, 1]] * ROWS)
    assert short.probs.shape[1] == short.confidence.shape[1] == 3
    assert tree.first_nodes(dataclasses.replace(short, probs=None), 0).probs is None


def test_rows_that_have_ended_do_not_count():
    """A row with nothing left to do asks for no large pass; the others are as if alone."""
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    params = _params((0,)).replace(drafter=drafters.sized(drafters.ngram(4), [0, 2]))
    alone = specjax.decode(params, [prompt], max_new_tokens=12, eos_ids=[])
    both = specjax.decode(params, [prompt, prompt[:5]], max_new_tokens=12, eos_ids=[])
    np.testing.assert_array_equal(both.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(both.stats.histogram[0], alone.stats.histogram[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (3, "must be a list of integers"),
        ([0, 1.5], "must be a list of integers"),
        ([2, 1], "must ascend"),
        ([-1], "must ascend"),
        ([5], "below the 5 nodes"),
        ([1, 1], "must ascend"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        drafters.sized(drafters.ngram(5), sizes)


def test_sizes_that_do_not_ascend_are_never_used(held):
    with pytest.raises(AssertionError):
        verify_step(_params((4, 2)), held, jnp.asarray([3, 4], jnp.int32), _proposal([1, 1], True))


def test_an_option_of_every_method():
    params = specjax.load("smollm2-135m", {"method": "ngram", "verify_sizes": [0, 2]})
    assert params.drafter.sizes == (0, 2)
    assert params.drafter == drafters.sized(drafters.ngram(), [0, 2])
    part = {"method": "ngram", "verify_sizes": [0]}
    both = {"method": "merged", "first": part, "second": "ngram"}
    with pytest.raises(ValueError, match=r"first is ngram with verify_sizes \[0\], which belong"):
        specjax.load("smollm2-135m", both)
    with pytest.raises(ValueError, match="must ascend"):
        specjax.load("smollm2-135m", {"method": "ngram", "verify_sizes": [9]})
