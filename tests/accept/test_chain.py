"""The law of the output, by enumeration of every draft and every coin, and through the driver."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import accept, drafters, tree
from specjax.sampling import Sampling, distribution, row_keys
from specjax.types import Params, Proposal
from tests import tiny

WORKED_Q, WORKED_P = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.4, 0.2])


def test_worked_case():
    """q = [.6, .3, .1], p = [.4, .4, .2]."""
    keep = accept.keep_probability(jnp.asarray(WORKED_P), jnp.asarray(WORKED_Q))
    np.testing.assert_allclose(keep, [2 / 3, 1, 1], atol=1e-6)
    assert np.sum(WORKED_Q * np.asarray(keep)) == pytest.approx(0.8, abs=1e-6)
    left = accept.residual(jnp.asarray(WORKED_P), jnp.asarray(WORKED_Q))
    np.testing.assert_allclose(left, [0, 0.5, 0.5], atol=1e-6)
    out = WORKED_Q * np.asarray(keep) + (1 - 0.8) * np.asarray(left)
    np.testing.assert_allclose(out, WORKED_P, atol=1e-6)


def test_residual_edge_cases_give_no_nan():
    p = jnp.array([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(accept.residual(p, p), p)  # no mass left: p itself
    np.testing.assert_allclose(accept.residual(p, jnp.zeros_like(p)), p)
    keep = accept.keep_probability(jnp.array([0.0, 0.5, 0.5]), jnp.array([0.0, 0.0, 0.5]))
    np.testing.assert_allclose(keep, [0.0, 1.0, 1.0])


def _laws(kind: str, vocab: int, rng) -> np.ndarray:
    """A Markov law `[V, V]`, or an adversarial one."""
    if kind == "one_hot":
        return np.eye(vocab)[rng.permutation(vocab)]
    law = rng.dirichlet(np.full(vocab, 0.7), size=vocab)
    if kind == "sparse":
        law[:, 0] = 0
        law /= law.sum(-1, keepdims=True)
    return law


@functools.partial(jax.jit, static_argnames="depth")
def _chain_laws_jit(proposal, probs, depth):
    law = accept.dense_law(probs)
    counts = [jnp.full(probs.shape[0], a, jnp.int32) for a in range(depth + 1)]
    following = [accept.chain_following(proposal, law, count, depth) for count in counts]
    return accept.chain_keep(proposal, law, depth), jnp.stack(following)


def _chain_laws(proposal, probs, depth):
    """Keep probabilities `[B, K]`, and the law after 0..K accepted drafts `[K + 1, B, V]`."""
    keep, following = _chain_laws_jit(proposal, probs, depth)
    return np.asarray(keep, float), np.asarray(following, float)


def _round_law(target, draft, root, depth, drafted):
    """Every block that one round can emit from `root`, with its probability.

    All V^K drafts are rows of one batch; the JAX functions give keep probabilities and the law of
    the following token, and the coins are summed over rather than tossed.
    """
    vocab = target.shape[0]
    chains = np.array(list(itertools.product(range(vocab), repeat=depth)), np.int32)
    chains = chains.reshape(vocab**depth, depth)
    before = np.concatenate([np.full((len(chains), 1), root), chains[:, :-1]], axis=1)[:, :depth]
    if drafted == "one_hot":  # a deterministic drafter: the most likely chain of `draft`
        rows = draft.argmax(-1)
        weight = np.all(chains == rows[before], axis=1).astype(float)
        probs = None
    else:
        weight = np.prod(draft[before, chains], axis=1)
        probs = jnp.asarray(draft[before], jnp.float32)
    proposal = Proposal(
        tokens=jnp.asarray(chains),
        parents=jnp.asarray(tree.chain(depth)),
        probs=probs,
        valid=jnp.ones(chains.shape, bool),
        candidate=jnp.ones(chains.shape, bool),
    )
    nodes = np.concatenate([np.full((len(chains), 1), root), chains], axis=1)
    keep, following = _chain_laws(proposal, jnp.asarray(target[nodes], jnp.float32), depth)
    out: dict[tuple, float] = {}
    for accepted in range(depth + 1):
        stay = weight * np.prod(keep[:, :accepted], axis=1)
        if accepted < depth:
            stay = stay * (1 - keep[:, accepted])
        after = following[accepted]
        for i, chain in enumerate(chains):
            for token in range(vocab):
                mass = stay[i] * after[i, token]
                if mass > 0:
                    block = (*chain[:accepted].tolist(), token)
                    out[block] = out.get(block, 0.0) + mass
    return out


def _output_law(target, draft, depth, length, drafted):
    """The law of the first `length` tokens after root 0, over as many rounds as it takes."""
    vocab = target.shape[0]
    rounds = [_round_law(target, draft, root, depth, drafted) for root in range(vocab)]
    done = np.zeros((vocab,) * length)
    open_texts = {(0,): 1.0}
    while open_texts:
        text, mass = open_texts.popitem()
        if len(text) > length:
            done[text[1 : length + 1]] += mass
            continue
        for block, p in rounds[text[-1]].items():
            longer = text + block
            open_texts[longer] = open_texts.get(longer, 0.0) + mass * p
    return done


def _markov_law(target, length):
    law = target[0]
    for _ in range(length - 1):
        law = law[..., None] * target
    return law


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ("random", "random"),
        ("random", "sparse"),
        ("sparse", "random"),
        ("one_hot", "random"),
        ("random", "one_hot"),
        ("one_hot", "one_hot"),
        ("random", "same"),
    ],
)
@pytest.mark.parametrize("drafted", ["sampled", "one_hot"])
def test_law_by_enumeration(vocab, depth, p, q, drafted):
    rng = np.random.default_rng(vocab * 100 + depth)
    target = _laws(p, vocab, rng)
    draft = target if q == "same" else _laws(q, vocab, rng)
    law = _output_law(target, draft, depth, 3, drafted)
    np.testing.assert_allclose(law, _markov_law(target, 3), atol=1e-5)


def test_acceptance_is_the_overlap():
    rng = np.random.default_rng(7)
    target, draft = _laws("random", 4, rng), _laws("random", 4, rng)
    blocks = _round_law(target, draft, 0, 1, "sampled")
    accepted = sum(p for block, p in blocks.items() if len(block) == 2)
    assert accepted == pytest.approx(np.minimum(target[0], draft[0]).sum(), abs=1e-6)


@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "plain"])
def test_law_through_the_driver(drafter):
    """Chi-square of the first three tokens of 2 x 8192 rows against the exact law."""
    vocab, rows = 4, 8192
    rng = np.random.default_rng(3)
    target, draft = _laws("random", vocab, rng), _laws("random", vocab, rng)
    model = tiny.markov_model(vocab)
    made = {
        "draft_model": drafters.draft_model(model, 3),
        "ngram": drafters.ngram(3, prompt_lookup_min=1, prompt_lookup_max=2),
        "plain": drafters.plain(),
    }[drafter]
    params = Params(
        target=jnp.log(target).astype(jnp.float32),
        draft=jnp.log(draft).astype(jnp.float32),
        model=model,
        drafter=made,
    )
    counts = np.zeros((vocab,) * 3)
    for seed in (1, 2):
        out = specjax.decode(
            params,
            np.tile([[0, 1, 2, 3, 1, 0]], (rows, 1)),
            max_new_tokens=3,
            sampling=Sampling(temperature=1.0),
            key=jax.random.key(seed),
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    expected = _markov_law(target, 3) * counts.sum()
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert chi_square < 110  # 63 degrees of freedom: p = 0.0002


def test_public_step_keeps_a_rare_draft_rarely():
    """A drafted token of probability 0.01, from a certain draft, stands one time in a hundred."""
    rows = 20000
    p = jnp.broadcast_to(jnp.array([0.01, 0.99]), (rows, 2, 2))
    proposal = Proposal(
        tokens=jnp.zeros((rows, 1), jnp.int32),
        parents=jnp.zeros(1, jnp.int32),
        probs=None,
        valid=jnp.ones((rows, 1), bool),
        candidate=jnp.ones((rows, 1), bool),
    )
    verdict = specjax.accept_and_resample(jax.random.key(0), proposal, p)
    rate = float(jnp.mean(verdict.accepted))
    assert abs(rate - 0.01) < 3 * (0.01 * 0.99 / rows) ** 0.5
    assert set(np.asarray(verdict.tokens[:, 0])[np.asarray(verdict.accepted) == 0]) == {1}


def test_riders_and_invalid_nodes_are_never_accepted():
    p = jnp.broadcast_to(jnp.array([0.0, 1.0]), (4, 4, 2))
    yes, no = jnp.ones((4, 3), bool), jnp.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]]) > 0
    base = {"tokens": jnp.ones((4, 3), jnp.int32), "probs": None}
    keys = row_keys(jax.random.key(0), 4)
    for masks in ({"valid": no, "candidate": yes}, {"valid": yes, "candidate": no}):
        proposal = Proposal(**base, **masks, parents=jnp.arange(3, dtype=jnp.int32))
        verdict = specjax.accept_and_resample(keys, proposal, p)
        np.testing.assert_array_equal(verdict.accepted, [0, 1, 2, 3])
    off_chain = Proposal(
        **base,
        valid=yes,
        candidate=yes,
        parents=jnp.array([[0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 1, 2]]),
    )
    verdict = specjax.accept_and_resample(keys, off_chain, p)
    np.testing.assert_array_equal(verdict.accepted, [1, 2, 3, 3])


def test_logits_law_equals_the_dense_law():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 9)) * 3
    controls = Sampling(temperature=jnp.array([0.0, 0.5, 1.5]))
    lazy, dense = (
        accept.logits_law(logits, controls),
        accept.dense_law(distribution(logits, controls)),
    )
    nodes = jnp.array([[0, 1, 2], [3, 3, 0], [1, 0, 2]])
    tokens = jnp.array([[5, 8, 0], [1, 2, 3], [4, 4, 4]])
    np.testing.assert_allclose(lazy.at(nodes, tokens), dense.at(nodes, tokens), atol=1e-6)
    node = jnp.array([0, 2, 3])
    np.testing.assert_allclose(lazy.row(node), dense.row(node), atol=1e-6)
