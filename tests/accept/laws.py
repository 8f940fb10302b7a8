"""The exact law of a rule's output: every draft and every fall of the coins, summed in float64.

Trees are padded with invalid nodes to one size, and rows are run in chunks of one size, so that a
rule is compiled once for a vocabulary.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept
from specjax.accept.tree import topology
from specjax.types import Proposal

NODES, DEPTH, CHUNK = 7, 3, 2048
PAIRS = (
    ("random", "random"),
    ("random", "sparse"),
    ("sparse", "random"),
    ("one_hot", "random"),
    ("random", "one_hot"),
    ("one_hot", "one_hot"),
    ("random", "same"),
    ("low", "high"),
)
CHAINS = {1: (0,), 2: (0, 1), 3: (0, 1, 2)}
STAR = (0, 0, 0)
BINARY = (0, 0, 1, 1, 2, 2)
UNEVEN = (0, 0, 0, 1, 1, 2, 4)
LEAN = (0, 0, 1, 1)


def k_chains(k: int, depth: int) -> tuple[int, ...]:
    """k chains below the root, level by level."""
    return (0,) * k + tuple(range(1, k * (depth - 1) + 1))


def markov(kind: str, vocab: int, rng) -> np.ndarray:
    """A Markov law `[V, V]`, or an adversarial one."""
    if kind == "one_hot":
        return np.eye(vocab)[rng.permutation(vocab)]
    law = rng.dirichlet(np.full(vocab, 0.7), size=vocab)
    if kind == "sparse":
        law[:, 0] = 0
    if kind == "low":  # together with "high": nothing in common
        law[:, vocab // 2 :] = 0
    if kind == "high":
        law[:, : vocab // 2] = 0
    return law / law.sum(-1, keepdims=True)


def pair(kinds: tuple[str, str], vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """p and q, `[V, V]` each."""
    rng = np.random.default_rng(vocab * 100 + seed)
    target = markov(kinds[0], vocab, rng)
    return target, target if kinds[1] == "same" else markov(kinds[1], vocab, rng)


def markov_law(target: np.ndarray, length: int) -> np.ndarray:
    """The law of `length` tokens after token 0."""
    law = target[0]
    for _ in range(length - 1):
        law = law[..., None] * target
    return law


def drafts(parents: tuple[int, ...], draft: np.ndarray, root: int, drawn: str):
    """Every tree that can be drafted after `root`.

    Args:
      drawn: how siblings are drawn from `draft [V, V]`: "replacement"; "base" and "conditional":
        without replacement, with the common law or each one's own as q; "top_k": the most likely.

    Returns:
      Tokens `[R, N]`, q of each node `[R, N, V]` or None, and the chance of each tree `[R]`.
    """
    vocab = draft.shape[0]
    tokens, weight = np.zeros((1, 0), np.int32), np.ones(1)
    laws: list[np.ndarray] = []
    for node, parent in enumerate(parents, start=1):
        before = tokens[:, parent - 1] if parent else np.full(len(tokens), root)
        base = draft[before]
        own = base.copy()
        siblings = [i for i in range(1, node) if parents[i - 1] == parent]
        if drawn == "top_k":
            choice = np.argsort(-base, axis=-1, kind="stable")[:, len(siblings)]
            own = np.eye(vocab)[choice]
        elif drawn != "replacement":
            for sibling in siblings:
                own[np.arange(len(own)), tokens[:, sibling - 1]] = 0
            mass = own.sum(-1, keepdims=True)
            own = own / np.where(mass > 0, mass, 1)
        # Where siblings have used up the law there is nothing to draw: any token, and no mass.
        chances = np.where(own.sum(-1, keepdims=True) > 0, own, np.eye(vocab)[0])
        row, token = np.nonzero(chances)
        laws = [law[row] for law in laws] + [(base if drawn == "base" else own)[row]]
        weight = weight[row] * chances[row, token]
        tokens = np.concatenate([tokens[row], token[:, None].astype(np.int32)], axis=1)
    probs = None if drawn == "top_k" or not parents else np.stack(laws, axis=1)
    return tokens, probs, weight


def falls(parents: tuple[int, ...], family: str) -> np.ndarray:
    """Ways in which a round can end: `[C, N + 1]` bool, the nodes whose coins pass.

    Top down these are at most one node a depth, down to some depth; bottom up at most one node.
    """
    nodes = len(parents)
    if family == "up":
        return np.eye(nodes + 1, dtype=bool) & (np.arange(nodes + 1) > 0)
    level = [0]
    for parent in parents:
        level.append(level[parent] + 1)
    levels = [[j for j in range(1, nodes + 1) if level[j] == d] for d in range(1, max(level) + 1)]
    out = []
    for deep in range(len(levels) + 1):
        for chosen in itertools.product(*levels[:deep]):
            out.append(np.isin(np.arange(nodes + 1), chosen))
    return np.array(out)


def proposal_of(tokens, parents, probs, valid) -> Proposal:
    """A proposal without riders."""
    return Proposal(
        tokens=tokens, parents=parents, probs=probs, valid=valid, candidate=jnp.ones_like(valid)
    )


@functools.partial(jax.jit, static_argnames=("rule",))
def _walked(tokens, parents, probs, valid, target, coins, rule):
    """Where a tree rule ends when coins fall as `coins [B, M]`, the law there and the chance."""
    proposal = proposal_of(tokens, parents, probs, valid)
    law = accept.dense_law(target)
    shape = topology(proposal, DEPTH)
    toss = lambda node, keep: jnp.take_along_axis(coins, node[:, None], axis=1)[:, 0]
    name, without_replacement = rule
    if name == "traversal_verification":
        walk = accept.walk_up(proposal, law, shape, DEPTH, toss, without_replacement)
    else:
        many = name == "spectr" and probs is not None
        siblings = accept.k_sequential() if many else accept.one_by_one()
        walk = accept.walk_down(proposal, law, shape, toss, siblings, without_replacement)
    return walk.node, walk.law, walk.chance


@functools.partial(jax.jit, static_argnames=("rule",))
def _chained(tokens, parents, probs, valid, target, rule):
    """A chain rule: its coins `[B, K]`, and the laws after 0..K accepted drafts `[B, K + 1, V]`."""
    proposal = proposal_of(tokens, parents, probs, valid)
    law = accept.dense_law(target)
    counts = [jnp.full(tokens.shape[0], a, jnp.int32) for a in range(DEPTH + 1)]
    if rule == "block_verification":
        weights = accept.block_weights(proposal, law, DEPTH)
        keep = accept.block_keep(proposal, law, weights, DEPTH)
        laws = [accept.block_following(proposal, law, weights, a, DEPTH) for a in counts]
    else:
        keep = accept.chain_keep(proposal, law, DEPTH)
        laws = [accept.chain_following(proposal, law, a, DEPTH) for a in counts]
    return keep, jnp.stack(laws, axis=1)


def _in_chunks(function, arrays, **static):
    """Runs rows a chunk at a time, the last one padded with its first row."""
    rows = len(arrays[0])
    parts = []
    for start in range(0, rows, CHUNK):
        index = np.arange(start, start + CHUNK)
        index = np.where(index < rows, index, start)
        part = [None if a is None else jnp.asarray(a[index]) for a in arrays]
        parts.append([np.asarray(x)[: rows - start] for x in function(*part, **static)])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _padded(parents, tokens, probs, target, root):
    """Rows of one size: invalid nodes with laws of NaN fill up to `NODES`."""
    rows, nodes = tokens.shape
    more = NODES - nodes
    all_tokens = np.concatenate([np.full((rows, 1), root, np.int32), tokens], axis=1)
    p = np.concatenate([target[all_tokens], np.full((rows, more, len(target)), np.nan)], axis=1)
    if probs is not None:
        probs = np.concatenate([probs, np.full((rows, more, len(target)), np.nan)], axis=1)
    elif nodes == 0:
        probs = np.full((rows, more, len(target)), np.nan)
    valid = np.broadcast_to(np.arange(NODES) < nodes, (rows, NODES))
    padding = np.full((rows, more), 0, np.int32)
    up = np.broadcast_to(np.array(parents + (0,) * more, np.int32), (rows, NODES))
    return np.concatenate([tokens, padding], axis=1), up, probs, valid, p


def _possible(parents, tokens, coins, vocab) -> np.ndarray:
    """`[R, C]`: whether each node that stands continues the text of the one that stood before."""
    text = [np.zeros(len(tokens), int)]
    for node, parent in enumerate(parents, start=1):
        text.append(text[parent] * vocab + tokens[:, node - 1])
    out = np.ones((len(tokens), len(coins)), bool)
    for c, fall in enumerate(coins):
        stands = np.nonzero(fall)[0]
        for above, node in itertools.pairwise(stands):
            out[:, c] &= text[parents[node - 1]] == text[above]
    return out


def outcomes(rule, parents, target, draft, root, drawn):
    """Ways in which one round from `root` can end.

    Args:
      rule: the name of a rule; with a tree's, whether it is for drafts without replacement.

    Returns:
      Tokens `[R, N]`, the last accepted node `[R]`, the law after it `[R, V]`, the mass `[R]`.
    """
    tokens, probs, weight = drafts(parents, draft, root, drawn)
    arrays = _padded(parents, tokens, probs, target, root)
    name, _ = rule
    rows, nodes = tokens.shape
    if name in ("speculative_sampling", "block_verification"):
        keep, laws = _in_chunks(_chained, arrays, rule=name)
        ends = np.arange(nodes + 1)
        if name == "block_verification":  # the deepest coin that passes
            fails = np.cumprod(1 - keep[:, ::-1], axis=1)[:, ::-1]
            fails = np.concatenate([fails, np.ones((rows, 1))], axis=1)
            passes = np.concatenate([np.ones((rows, 1)), keep], axis=1)
        else:  # all before the first that fails
            passes = np.cumprod(np.concatenate([np.ones((rows, 1)), keep], axis=1), axis=1)
            fails = np.concatenate([1 - keep, np.ones((rows, 1))], axis=1)
        chance = np.concatenate([fails, np.ones((rows, 1))], axis=1)[:, : DEPTH + 1] * passes
        chance = chance[:, : nodes + 1]
        node = np.broadcast_to(ends, chance.shape)
        mass = weight[:, None] * chance
        again = np.repeat(np.arange(rows), nodes + 1)
        return (
            tokens[again],
            node.ravel(),
            laws[:, : nodes + 1].reshape(-1, len(target)),
            mass.ravel(),
        )
    coins = falls(parents, "up" if name == "traversal_verification" else "down")
    again, which = np.nonzero(_possible(parents, tokens, coins, len(target)))
    fall = np.concatenate([coins, np.zeros((len(coins), NODES - nodes), bool)], axis=1)[which]
    arrays = [None if a is None else a[again] for a in arrays]
    node, laws, chance = _in_chunks(_walked, [*arrays, fall], rule=rule)
    level = [0]
    for parent in parents:
        level.append(level[parent] + 1)
    if name == "traversal_verification":
        tossed = np.where(node > 0, fall[np.arange(len(node)), node], ~fall.any(axis=1))
    else:
        tossed = np.array(level)[node] == fall.sum(axis=1)
    # Coins that are never tossed are False, so that no fall is counted twice.
    assert np.isfinite(chance).all()
    return tokens[again], node, laws, np.where(tossed, weight[again] * chance, 0.0)


def round_law(rule, parents, target, draft, root, drawn) -> list[np.ndarray]:
    """The law of the block that one round emits: entry a is `[V] * (a + 1)`, a drafts accepted."""
    vocab = target.shape[0]
    tokens, node, laws, mass = outcomes(rule, parents, target, draft, root, drawn)
    assert np.isfinite(laws[mass > 0]).all()
    blocks = [np.zeros((vocab,) * (a + 1)) for a in range(DEPTH + 1)]
    for end in range(len(parents) + 1):
        path = []
        while end and (not path or path[0]):
            path.insert(0, end if not path else parents[path[0] - 1])
        path = [j for j in path if j]
        here = (node == end) & (mass > 0)
        kept = tuple(tokens[here][:, j - 1] for j in path)
        share = mass[here][:, None] * laws[here]
        if path:
            np.add.at(blocks[len(path)], kept, share)
        else:
            blocks[0] += share.sum(axis=0)
    return blocks


def output_law(rule, parents, target, draft, drawn, length=3) -> np.ndarray:
    """The law of the first `length` tokens after token 0, over as many rounds as it takes."""
    vocab = target.shape[0]
    with jax.enable_x64(True):
        rounds = [round_law(rule, parents, target, draft, r, drawn) for r in range(vocab)]

    @functools.cache
    def after(root: int, left: int) -> np.ndarray:
        total = np.zeros((vocab,) * left)
        for block in rounds[root]:
            size = block.ndim
            if size >= left:
                total += block.sum(axis=tuple(range(left, size)))
                continue
            for last in range(vocab):
                more = after(last, left - size)
                total[(slice(None),) * (size - 1) + (last,)] += np.multiply.outer(
                    block[..., last], more
                )
        return total

    return after(0, length)


def expected_accepted(rule, parents, target, draft, drawn) -> np.ndarray:
    """Drafts that a round accepts on average, for each root `[V]`."""
    with jax.enable_x64(True):
        rounds = [round_law(rule, parents, target, draft, r, drawn) for r in range(target.shape[0])]
    return np.array([sum(a * block.sum() for a, block in enumerate(r)) for r in rounds])
