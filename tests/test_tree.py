"""Topology: masks, depths, paths, and verification of a real tree in one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, tree
from specjax.types import Block, Proposal
from tests import tiny

SEED = np.array([0, 0, 1, 1])  # [r, a, b, c, d]: c and d under a


def test_seed_case():
    mask = tree.ancestors(SEED)
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))
    np.testing.assert_array_equal(tree.depths(mask)[0], [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(tree.path_to(mask, jnp.array([4]), 3), [[0, 1, 4]])
    np.testing.assert_array_equal(tree.path_to(mask, jnp.array([2]), 3), [[0, 2, 2]])


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 7, 8, 16])
def test_chain_is_causal(nodes):
    mask = tree.ancestors(tree.chain(nodes))
    np.testing.assert_array_equal(mask[0], np.tril(np.ones((nodes + 1, nodes + 1), bool)))


def test_random_trees_against_walking_up():
    rng = np.random.default_rng(0)
    parents = np.stack([[rng.integers(0, j + 1) for j in range(11)] for _ in range(5)])
    mask = np.asarray(tree.ancestors(parents))
    for b, row in enumerate(parents):
        for i in range(12):
            seen, node = {i}, i
            while node:
                node = row[node - 1]
                seen.add(node)
            assert set(np.flatnonzero(mask[b, i])) == seen


def test_compact_gathers_the_path():
    kv = (jnp.arange(2 * 1 * 5 * 2, dtype=jnp.float32).reshape(2, 1, 5, 2),)
    block = tree.compact(Block(keys=kv, values=kv), jnp.array([[0, 1, 4], [0, 2, 2]]))
    np.testing.assert_array_equal(block.keys[0][0, 0], kv[0][0, 0, jnp.array([0, 1, 4])])
    np.testing.assert_array_equal(block.values[0][1, 0], kv[0][1, 0, jnp.array([0, 2, 2])])


def test_verified_tree_equals_each_path_alone():
    """Logits of every node are those of its path as plain text, and the compacted cache goes on
    as if the path had been decoded token by token."""
    params = tiny.params()
    prompt = jnp.array([[7, 3, 9, 4]], jnp.int32)
    tokens = np.array([[11, 12, 13, 14]], np.int32)

    def read(ids):
        held = params.model.init_cache(params.target, 1, 32)
        held, _ = cache.prefill(
            params.model, params.target, held, ids, jnp.array([ids.shape[1]]), chunk=ids.shape[1]
        )
        return held

    def last_logits(ids):
        held = read(ids[:, :-1])
        chain = specjax.verify_step(params, held, ids[:, -1], _proposal(np.zeros((1, 0)), []))
        return chain.logits[0, 0]

    held = read(prompt[:, :-1])
    scores = specjax.verify_step(params, held, prompt[:, -1], _proposal(tokens, SEED))
    mask = tree.ancestors(SEED)
    for node in range(5):
        path = np.flatnonzero(np.asarray(mask[0, node]))[1:]
        ids = jnp.concatenate([prompt, jnp.asarray(tokens[:, path - 1])], axis=1)
        np.testing.assert_allclose(scores.logits[0, node], last_logits(ids), atol=1e-5)

    kept = tree.compact(scores.block, tree.path_to(mask, jnp.array([4]), 3))
    held = cache.append(held, kept, held.lengths + 3)  # r a d
    after = specjax.verify_step(params, held, jnp.array([20]), _proposal(np.zeros((1, 0)), []))
    whole = jnp.array([[7, 3, 9, 4, 11, 14, 20]], jnp.int32)
    np.testing.assert_allclose(after.logits[0, 0], last_logits(whole), atol=1e-5)


def _proposal(tokens, parents) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    yes = jnp.ones(tokens.shape, bool)
    return Proposal(
        tokens=tokens,
        parents=jnp.asarray(parents, jnp.int32),
        probs=None,
        valid=yes,
        candidate=yes,
    )


def test_parents_per_row():
    parents = np.array([[0, 0, 1, 1], [0, 1, 2, 3]])
    mask = jax.jit(tree.ancestors)(parents)
    np.testing.assert_array_equal(mask[0], tree.ancestors(parents[0])[0])
    np.testing.assert_array_equal(mask[1], tree.ancestors(parents[1])[0])
