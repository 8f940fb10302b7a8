"""Other people's verification, run on their inputs with their uniform numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept
from specjax.accept.tree import topology
from specjax.sampling import Sampling, distribution
from specjax.types import Proposal


def load(shared, name):
    return np.load(shared / "parity" / f"verify-{name}" / "expected.npz")


def proposal_of(tokens, parents, probs=None):
    yes = jnp.ones(tokens.shape, bool)
    return Proposal(
        tokens=jnp.asarray(tokens),
        parents=jnp.asarray(parents),
        probs=probs,
        valid=yes,
        candidate=yes,
    )


def test_speculative_sampling(shared):
    """transformers and DeepSpec."""
    data = load(shared, "spec-sampling")
    p = jax.nn.softmax(data["target_logits"], axis=-1)
    q = jax.nn.softmax(data["draft_logits"], axis=-1)
    rows, depth = data["draft_tokens"].shape
    proposal = proposal_of(data["draft_tokens"], np.arange(depth, dtype=np.int32), q)
    law = accept.dense_law(p)
    keep = accept.chain_keep(proposal, law, depth)
    np.testing.assert_allclose(keep, data["accept_prob"], atol=1e-5)
    accepted = np.cumprod(data["uniforms"] < np.asarray(keep), axis=1).sum(1)
    np.testing.assert_array_equal(accepted, data["n_accepted_hf"])
    np.testing.assert_array_equal(accepted, data["n_accepted_deepspec"])
    following = accept.chain_following(proposal, law, jnp.asarray(accepted, jnp.int32), depth)
    for name in ("hf", "deepspec"):
        np.testing.assert_allclose(following, data[f"next_token_dist_{name}"], atol=1e-5)
    after_root = accept.chain_following(proposal, law, jnp.zeros(rows, jnp.int32), depth)
    np.testing.assert_allclose(after_root[1:], data["residual_feifeibear"], atol=1e-5)


@pytest.mark.parametrize("k", range(6))
def test_medusa_typical_acceptance(shared, k):
    """Each candidate is a chain below a root after which all of their first tokens are plausible.

    Medusa's candidates begin with the token of the root, whose law they do not judge.
    """
    data = load(shared, "medusa-typical")
    temperature, epsilon, delta = data["params"][k].tolist()
    rows, paths, size = data["candidates"].shape
    vocab = data["logits"].shape[-1]
    probs = distribution(jnp.asarray(data["logits"]), Sampling(temperature=temperature))
    flat = probs.reshape(rows, paths * size, vocab)
    flat = jnp.concatenate([jnp.full((rows, 1, vocab), 1 / vocab), flat], axis=1)
    parents = np.arange(paths * size, dtype=np.int32)
    parents[::size] = 0
    proposal = proposal_of(data["candidates"].reshape(rows, -1), parents)
    shape = topology(proposal, size)
    keep, p = accept.typical_keep(proposal, accept.dense_law(flat), shape, epsilon, delta)
    node = np.asarray(accept.typical_best(shape, keep, p))
    np.testing.assert_array_equal((node - 1) // size, data[f"p{k}_best"])
    np.testing.assert_array_equal((node - 1) % size, data[f"p{k}_accept"])


@pytest.mark.parametrize("name", ["greedy", "t1", "t0p7"])
def test_eagle_tree(shared, name):
    """EAGLE's walk over the distinct children, one uniform number a tried child."""
    data = load(shared, "eagle-tree")
    temperature = {"greedy": 0.0, "t1": 1.0, "t0p7": 0.7}[name]
    p = distribution(jnp.asarray(data["node_logits"]), Sampling(temperature=temperature))
    proposal = proposal_of(data["tree_tokens"][:, 1:], data["parents"][:, 1:])
    rows, size = data["parents"].shape
    shape = topology(proposal, size - 1)
    tried = []

    def toss(node, keep):
        """Every row that still walks tries one child a step: uniform numbers come in order."""
        tried.append(np.asarray(node))
        return jnp.asarray(data["uniforms"][:, len(tried) - 1]) < keep

    with jax.disable_jit():  # so that `toss` can count
        walk = accept.walk_down(proposal, accept.dense_law(p), shape, toss, accept.one_by_one())
    depth = np.asarray(shape.depth)[np.arange(rows), walk.node]
    np.testing.assert_array_equal(depth, data[f"{name}_accept_len"])
    for row in range(rows):
        path = data[f"{name}_path_nodes"][row]
        assert path[path >= 0][-1] == walk.node[row]
    if name == "greedy":
        bonus = np.asarray(walk.law).argmax(-1)
        np.testing.assert_array_equal(bonus, data["greedy_bonus_token"])
    else:
        np.testing.assert_allclose(walk.law, data[f"{name}_next_dist"], atol=1e-5)
        used = (np.stack(tried) > 0).sum(0)  # a row that has ended tries the root
        np.testing.assert_array_equal(used, data[f"{name}_uniforms_used"])
