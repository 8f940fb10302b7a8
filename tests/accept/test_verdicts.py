"""What holds of every rule's verdict: greedy rows, masks, NaN, independence of rows, no drafts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import accept
from specjax.sampling import row_keys
from specjax.types import Proposal, check_verdict

ROWS, NODES, DEPTH, VOCAB = 64, 6, 4, 5
CHAIN_RULES = (
    accept.speculative_sampling(),
    accept.block_verification(),
    accept.lenient_sampling(0.5),
)
TREE_RULES = (
    accept.recursive_rejection(),
    accept.recursive_rejection(without_replacement=True),
    accept.spectr(),
    accept.traversal_verification(),
    accept.traversal_verification(without_replacement=True),
    accept.typical_acceptance(),
    accept.typical_acceptance(next_token="sample"),
)
SYNTHETIC = accept.synthetic_acceptance((1.0, 0.5))
RULES = (*CHAIN_RULES, *TREE_RULES)
each_rule = pytest.mark.parametrize(
    "rule", RULES, ids=[f"{i}-{r.name}" for i, r in enumerate(RULES)]
)


@functools.partial(jax.jit, static_argnames=("rule", "depth"))
def judged(rule, keys, proposal, probs, depth=DEPTH):
    positions = jnp.arange(probs.shape[0], dtype=jnp.int32)
    return rule.judge(keys, proposal, accept.dense_law(probs), positions, depth)


def keys(rows=ROWS):
    return row_keys(jax.random.key(5), rows)


def drafted(seed, chain, with_probs=True):
    """Random trees or chains, a different one in each row, and a random p."""
    rng = np.random.default_rng(seed)
    parents = np.broadcast_to(np.arange(NODES), (ROWS, NODES))
    if not chain:
        parents = rng.integers(0, np.arange(1, NODES + 1), size=(ROWS, NODES))
    probs = rng.dirichlet(np.ones(VOCAB), size=(ROWS, NODES)) if with_probs else None
    proposal = Proposal(
        tokens=jnp.asarray(rng.integers(0, VOCAB, size=(ROWS, NODES)), jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
        valid=jnp.ones((ROWS, NODES), bool),
        candidate=jnp.ones((ROWS, NODES), bool),
    )
    p = rng.dirichlet(np.full(VOCAB, 0.5), size=(ROWS, NODES + 1))
    return proposal, np.asarray(p, np.float32)


def greedy(p):
    return np.eye(VOCAB, dtype=np.float32)[p.argmax(-1)]


def same(a, b):
    """Equal verdicts, as far as they have a meaning."""
    for x, y in ((a.accepted, b.accepted), (a.finite, b.finite)):
        np.testing.assert_array_equal(x, y)
    meant = np.arange(a.tokens.shape[1])[None, :] <= np.asarray(a.accepted)[:, None]
    for x, y in ((a.tokens, b.tokens), (a.path, b.path)):
        np.testing.assert_array_equal(np.where(meant, x, -1), np.where(meant, y, -1))


def best_texts(proposal, p, may):
    """What greedy decoding keeps of each tree: the longest path of the target's choices."""
    out = []
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.parents)
    for b in range(ROWS):
        texts, nodes = {0: ()}, {(): [0]}
        for j in range(1, NODES + 1):
            up = parents[b, j - 1]
            good = up in texts and may[b, j - 1] and tokens[b, j - 1] == p[b, up].argmax()
            if good and len(texts[up]) < DEPTH:
                texts[j] = (*texts[up], int(tokens[b, j - 1]))
                nodes.setdefault(texts[j], []).append(j)
        longest = max(texts.values(), key=len)
        out.append((longest, nodes[longest]))
    return out


def alike(p, proposal):
    """The same p after every node that stands for the same text, as a target has it."""
    p = p.copy()
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.parents)
    for b in range(ROWS):
        texts, first = {0: ()}, {(): 0}
        for j in range(1, NODES + 1):
            texts[j] = (*texts[parents[b, j - 1]], int(tokens[b, j - 1]))
            p[b, j] = p[b, first.setdefault(texts[j], j)]
    return p


@each_rule
def test_greedy_rows_accept_the_targets_choices(rule):
    for with_probs in (True, False):
        proposal, p = drafted(1, rule.chain, with_probs)
        p = greedy(alike(p, proposal))
        verdict = judged(rule, keys(), proposal, jnp.asarray(p))
        assert np.asarray(verdict.finite).all()
        best = best_texts(proposal, p, np.ones((ROWS, NODES), bool))
        for b, (text, nodes) in enumerate(best):
            count = int(verdict.accepted[b])
            expected = [*text, int(p[b, nodes[0]].argmax())]
            assert np.asarray(verdict.tokens)[b, : count + 1].tolist() == expected
            assert int(verdict.path[b, count]) in nodes
            path = np.asarray(verdict.path)[b, : count + 1]
            assert path[0] == 0
            parents = np.asarray(proposal.parents)[b]
            assert all(parents[j - 1] == i for i, j in itertools.pairwise(path))
        assert max(len(text) for text, _ in best) >= 2


@each_rule
def test_invalid_nodes_and_riders_are_never_accepted_and_never_read(rule):
    proposal, p = drafted(2, rule.chain)
    p = greedy(alike(p, proposal))
    rng = np.random.default_rng(3)
    valid, candidate = rng.random((2, ROWS, NODES)) < 0.85
    may = valid & candidate
    best = best_texts(proposal, p, may)
    masked = dataclasses.replace(
        proposal, valid=jnp.asarray(valid), candidate=jnp.asarray(candidate)
    )
    verdict = judged(rule, keys(), masked, jnp.asarray(p))
    assert np.asarray(verdict.accepted).tolist() == [len(text) for text, _ in best]
    nan = np.array(~may)[..., None]
    masked = dataclasses.replace(masked, probs=jnp.where(nan, jnp.nan, proposal.probs))
    p_nan = np.concatenate([p[:, :1], np.where(nan, np.nan, p[:, 1:])], axis=1)
    same(verdict, judged(rule, keys(), masked, jnp.asarray(p_nan)))


@each_rule
def test_nan_off_the_accepted_path_changes_nothing(rule):
    proposal, p = drafted(4, rule.chain)
    p = greedy(alike(p, proposal))
    verdict = judged(rule, keys(), proposal, jnp.asarray(p))
    used = np.zeros((ROWS, NODES + 1), bool)
    for b, (_, nodes) in enumerate(best_texts(proposal, p, np.ones((ROWS, NODES), bool))):
        for j in [*nodes, *np.asarray(verdict.path[b]).tolist()]:
            while j and not used[b, j]:
                used[b, j], j = True, int(proposal.parents[b, j - 1])
    used[:, 0] = True
    p_nan = jnp.asarray(np.where(used[..., None], p, np.nan))
    same(verdict, judged(rule, keys(), proposal, p_nan))
    q_nan = jnp.where(used[:, 1:, None], proposal.probs, jnp.nan)
    same(verdict, judged(rule, keys(), dataclasses.replace(proposal, probs=q_nan), p_nan))


@each_rule
def test_a_row_does_not_depend_on_the_others(rule):
    proposal, p = drafted(6, rule.chain)
    p = alike(p, proposal)
    verdict = judged(rule, keys(), proposal, jnp.asarray(p))
    assert np.asarray(verdict.finite).all()
    assert (np.asarray(verdict.tokens) >= 0).all()
    assert (np.asarray(verdict.tokens) < VOCAB).all()
    broken = p.copy()
    broken[::2] = np.nan
    other = judged(rule, keys(), proposal, jnp.asarray(broken))
    half = lambda v: jax.tree.map(lambda x: np.asarray(x)[1::2], v)
    same(half(verdict), half(other))
    assert not np.asarray(other.finite)[::2].any()
    assert (np.asarray(other.tokens) >= 0).all()
    assert (np.asarray(other.tokens) < VOCAB).all()


@pytest.mark.parametrize("with_probs", [True, False])
def test_on_a_chain_recursive_rejection_is_speculative_sampling(with_probs):
    proposal, p = drafted(7, True, with_probs)
    tokens = judged(RULES[0], keys(), proposal, jnp.asarray(p))
    assert set(np.asarray(tokens.accepted)) >= {0, 1, 2}
    for rule in TREE_RULES[:2]:
        same(tokens, judged(rule, keys(), proposal, jnp.asarray(p)))


@pytest.mark.parametrize("with_probs", [True, False])
def test_on_a_chain_traversal_is_block_verification(with_probs):
    proposal, p = drafted(8, True, with_probs)
    p[:, :-1] = (p[:, :-1] + np.eye(VOCAB)[proposal.tokens]) / 2  # so that some drafts stand
    rng = np.random.default_rng(9)  # drafts that end early
    valid = np.arange(NODES) < rng.integers(0, NODES + 1, size=(ROWS, 1))
    proposal = dataclasses.replace(proposal, valid=jnp.asarray(valid))
    block = judged(RULES[1], keys(), proposal, jnp.asarray(p))
    assert set(np.asarray(block.accepted)) >= {0, 1, 2}
    for rule in TREE_RULES[3:5]:
        same(block, judged(rule, keys(), proposal, jnp.asarray(p)))


def test_equal_laws_are_always_accepted():
    proposal, p = drafted(10, True)
    p = np.concatenate([np.asarray(proposal.probs), p[:, -1:]], axis=1)
    for rule in (*CHAIN_RULES, *TREE_RULES[:5]):
        assert (np.asarray(judged(rule, keys(), proposal, p).accepted) == DEPTH).all(), rule.name


def test_chain_rules_try_only_the_chain_of_a_tree():
    proposal, p = drafted(11, True)
    parents = np.array(proposal.parents)
    parents[:, 2] = 0  # the third node is no child of the second
    proposal = dataclasses.replace(proposal, parents=jnp.asarray(parents))
    p = np.concatenate([np.asarray(proposal.probs), p[:, -1:]], axis=1)
    for rule in CHAIN_RULES:
        assert (np.asarray(judged(rule, keys(), proposal, p).accepted) == 2).all(), rule.name


def test_without_drafts_the_next_token_follows_p():
    p = jnp.broadcast_to(jnp.array([0.0, 1.0, 0.0]), (2, 1, 3))
    none = jnp.zeros((2, 0), jnp.int32)
    for rule in (*RULES, SYNTHETIC):
        yes = jnp.ones((2, 0), bool)
        proposal = Proposal(tokens=none, parents=none[0], probs=None, valid=yes, candidate=yes)
        verdict = judged(rule, keys(2), proposal, p, depth=0)
        check_verdict(verdict, {"B": 2, "P": 1})
        assert np.asarray(verdict.tokens).tolist() == [[1], [1]]
        assert np.asarray(verdict.accepted).tolist() == [0, 0]


def test_nodes_beyond_the_depth_are_not_accepted():
    proposal, p = drafted(12, True)
    p = np.concatenate([np.asarray(proposal.probs), p[:, -1:]], axis=1)
    for rule in (RULES[0], RULES[1], TREE_RULES[0], TREE_RULES[3], TREE_RULES[5]):
        verdict = judged(rule, keys(), proposal, p, depth=0)
        check_verdict(verdict, {"B": ROWS, "P": 1})
        assert (np.asarray(verdict.accepted) == 0).all()


def test_duplicates_share_their_children():
    """Both children of the root carry 1; the second one's child is what the target wants."""
    p = np.zeros((1, 4, 3), np.float32)
    p[:, :, 1], p[:, 1:3], p[:, 3] = 1, [0, 0, 1], [1, 0, 0]
    proposal = Proposal(
        tokens=jnp.array([[1, 1, 2]]),
        parents=jnp.array([0, 0, 2]),
        probs=jnp.full((1, 3, 3), 1 / 3),
        valid=jnp.ones((1, 3), bool),
        candidate=jnp.ones((1, 3), bool),
    )
    for rule in (TREE_RULES[0], TREE_RULES[2], TREE_RULES[3], TREE_RULES[5]):
        verdict = specjax.accept_and_resample(
            jax.random.key(0), proposal, jnp.asarray(p), acceptance=rule
        )
        assert np.asarray(verdict.tokens)[0, :3].tolist() == [1, 2, 0]
        assert np.asarray(verdict.path)[0, :3].tolist() == [0, 2, 3]


def test_a_row_whose_law_is_none_says_so():
    proposal, p = drafted(13, True)
    p[:, 0] = np.nan
    for rule in (*RULES, SYNTHETIC):
        verdict = judged(rule, keys(), proposal, jnp.asarray(p))
        assert not np.asarray(verdict.finite).any(), rule.name


def test_records():
    assert accept.recursive_rejection() is accept.recursive_rejection(without_replacement=False)
    assert accept.traversal_verification(True) is accept.traversal_verification(
        without_replacement=True
    )
    assert accept.typical_acceptance() is accept.typical_acceptance(epsilon=0.09, delta=0.3)
    assert accept.synthetic_acceptance([1, 0]) is accept.synthetic_acceptance((1.0, 0.0))
    assert accept.lenient_sampling(1) is accept.lenient_sampling(1.0)
    lossy = {r.name for r in (*RULES, SYNTHETIC) if not r.lossless}
    assert lossy == {"typical_acceptance", "lenient_sampling", "synthetic_acceptance"}
    assert accept.lenient_sampling(1.0).lossless
    trees = {r.name for r in (*RULES, SYNTHETIC) if not r.chain}
    assert trees == {
        "recursive_rejection",
        "spectr",
        "traversal_verification",
        "typical_acceptance",
    }


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: accept.recursive_rejection(1), "without_replacement must be True or False, got 1"),
        (lambda: accept.traversal_verification("yes"), "without_replacement must be"),
        (lambda: accept.lenient_sampling(0), "lenience must be .* got 0"),
        (lambda: accept.lenient_sampling(1.5), "lenience must be .* got 1.5"),
        (lambda: accept.lenient_sampling("1"), "lenience must be"),
        (lambda: accept.typical_acceptance(epsilon=1.0), "epsilon must be .* got 1.0"),
        (lambda: accept.typical_acceptance(delta=-1), "delta must be .* got -1"),
        (lambda: accept.typical_acceptance(delta=float("nan")), "delta must be"),
        (lambda: accept.typical_acceptance(next_token="p"), "next_token must be .* got 'p'"),
        (lambda: accept.synthetic_acceptance(()), "rates must be"),
        (lambda: accept.synthetic_acceptance((0.5, 1.2)), "rates must be .* got"),
        (lambda: accept.synthetic_acceptance(0.5), "rates must be .* got 0.5"),
        (lambda: accept.synthetic_acceptance(["a"]), "rates must be"),
    ],
)
def test_wrong_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()
