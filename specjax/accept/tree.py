"""Rules for trees, top down: at each node its children are tried in turn, until one stands.

Siblings that were drawn independently may carry the same token. Then they stand for one text, so
once x stands the walk goes on below all of them, in node order:

            r
          / | \\
         x  y  x          the children of x: a, b and c
        / \\     \\
       a   b     c
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance, eligible, keep_probability, residual
from specjax.sampling import Purpose
from specjax.types import Proposal, Verdict

__all__ = [
    "Siblings",
    "Topology",
    "TossFn",
    "Walk",
    "children",
    "draft_law",
    "first_of",
    "k_sequential",
    "kept_with",
    "one_by_one",
    "pick",
    "recursive_rejection",
    "require_bool",
    "spectr",
    "topology",
    "tree_verdict",
    "walk_down",
]

TossFn = Callable[[Array, Array], Array]  # node [B], chance [B] -> [B] bool, True that often


class Topology(NamedTuple):
    """A proposal's tree with the root as node 0."""

    parents: Array  # [B, M] int32; the root's is 0
    tokens: Array  # [B, M] int32; the root's is 0
    mask: Array  # [1 or B, M, M] bool: node i has j on its path
    depth: Array  # [B, M] int32
    texts: Array  # [B, M, K + 1] int32: the tokens on the path to each node, by depth
    eligible: Array  # [B, M] bool: may be tried, as may its ancestors; False for the root


class Walk(NamedTuple):
    """Where a walk ended."""

    node: Array  # [B] int32: the last accepted node, 0 if none
    law: Array  # [B, V]: of the next token
    chance: Array  # [B]: how likely the coins were to fall as they did


class Siblings(NamedTuple):
    """How the children of a node are tried, given p there, the first child's q, and their number.

    A child x is kept with min(1, p(x) / (scale q(x))); `rest` is the law of the next token once
    there is nothing more to try.
    """

    enter: Callable[[Array, Array, Array], tuple[Array, Array]]  # p, q, k -> scale [B], rest
    rejected: Callable[[Array, Array, Array], tuple[Array, Array]]  # p, rest, q -> p, rest


def pick(values: Array, node: Array) -> Array:
    """`values[b, node[b]]`, for `values [B, M]` or `[B, M, V]`."""
    return jax.vmap(lambda row, i: row[i])(values, node)


def topology(proposal: Proposal, depth: int) -> Topology:
    """The tree of a proposal of which paths of up to `depth` nodes may be accepted."""
    batch, nodes = proposal.tokens.shape
    root = jnp.zeros((batch, 1), jnp.int32)
    parents = jnp.broadcast_to(jnp.atleast_2d(proposal.parents), (batch, nodes))
    tokens = jnp.concatenate([root, proposal.tokens], axis=1)
    mask = tree.ancestors(proposal.parents)
    level = jnp.broadcast_to(tree.depths(mask), (batch, nodes + 1)).astype(jnp.int32)
    may = jnp.concatenate([root == 0, eligible(proposal)], axis=1) & (level <= depth)
    may = jnp.all(may[:, None, :] | ~mask, axis=-1)
    at_depth = jax.nn.one_hot(level, min(depth, nodes) + 1, dtype=jnp.int32) * tokens[..., None]
    on_path = jnp.broadcast_to(mask, (batch, *mask.shape[1:])).astype(jnp.int32)
    return Topology(
        parents=jnp.concatenate([root, parents], axis=1),
        tokens=tokens,
        mask=mask,
        depth=level,
        texts=jnp.einsum("bij,bjd->bid", on_path, at_depth),
        eligible=may & (level > 0),
    )


def children(shape: Topology, node: Array) -> Array:
    """The children of `node [B]` and of all nodes that stand for the same text: `[B, M]` bool."""
    same = jnp.all(shape.texts == pick(shape.texts, node)[:, None, :], axis=-1)
    same = same & (shape.depth == pick(shape.depth, node)[:, None])
    same = same & (shape.eligible | (shape.depth == 0))
    return shape.eligible & jnp.take_along_axis(same, shape.parents, axis=1)


def draft_law(
    proposal: Proposal, shape: Topology, node: Array, tried: Array | None, like: Array
) -> Array:
    """q of a node, `[B, V]` in the dtype of `like [B, V]`; all 0 where it has no mass left.

    Args:
      node: `[B]` int32; the root has no law, and gets a meaningless one.
      tried: `[B, M]` bool, or None. Where given, the node's siblings among them have been drawn
        before it and not put back: their tokens are removed, the rest is renormalised.
    """
    token = pick(shape.tokens, node)
    if proposal.probs is None:
        q = jax.nn.one_hot(token, like.shape[-1], dtype=like.dtype)
    else:
        q = pick(proposal.probs, jnp.maximum(node - 1, 0)).astype(like.dtype)
    if tried is None:
        return q
    siblings = tried & (shape.parents == pick(shape.parents, node)[:, None])
    gone = jax.vmap(lambda row, x, s: row.at[x].max(s))(
        jnp.zeros(q.shape, bool), shape.tokens, siblings
    )
    q = jnp.where(gone, 0.0, q)
    mass = jnp.sum(q, axis=-1, keepdims=True)
    return q / jnp.where(mass > 0, mass, 1.0)


def kept_with(p: Array, q: Array, token: Array, scale: Array) -> Array:
    """min(1, p(x) / (scale q(x))) where q is a law, else 0; `[B]`, never NaN.

    Args:
      p, q: `[B, V]`.
      token: `[B]` int32, x.
      scale: `[B]`, what q is multiplied by.
    """
    keep = keep_probability(pick(p, token), scale * pick(q, token))
    return jnp.where((keep > 0) & jnp.any(q > 0, axis=-1), keep, 0.0)


def first_of(mask: Array) -> Array:
    """The first True of `[B, M]`, `[B]` int32; 0 where there is none."""
    return jnp.argmax(mask, axis=1).astype(jnp.int32)


class _State(NamedTuple):
    tried: Array  # [B, M] bool
    walk: Walk  # its law is that of the next token if nothing more is tried
    p: Array  # [B, V] what the next child is tried against
    scale: Array  # [B]


def walk_down(
    proposal: Proposal,
    law: TargetLaw,
    shape: Topology,
    toss: TossFn,
    siblings: Siblings,
    without_replacement: bool = False,
) -> Walk:
    """Walks from the root to the last accepted node, one tried child a step, rows in lockstep."""
    batch, nodes = proposal.tokens.shape
    everyone = jnp.arange(nodes + 1, dtype=jnp.int32)[None, :]
    root = jnp.zeros(batch, jnp.int32)

    def enter(node: Array) -> tuple[Array, Array, Array]:
        """p at a node, and what its children need."""
        p = law.row(node)
        below = children(shape, node)
        q = draft_law(proposal, shape, first_of(below), None, p)
        return p, *siblings.enter(p, q, jnp.sum(below, axis=1).astype(p.dtype))

    if nodes == 0:
        p = law.row(root)
        return Walk(node=root, law=p, chance=jnp.ones(batch, p.dtype))
    p, scale, rest = enter(root)
    walk = Walk(node=root, law=rest, chance=jnp.ones(batch, p.dtype))
    tried = jnp.zeros((batch, nodes + 1), bool)
    state = _State(tried=tried, walk=walk, p=p, scale=scale)

    def unfinished(s: _State) -> Array:
        return jnp.any(children(shape, s.walk.node) & ~s.tried)

    def step(s: _State) -> _State:
        waiting = children(shape, s.walk.node) & ~s.tried
        trying = jnp.any(waiting, axis=1)
        child = first_of(waiting)
        token = pick(shape.tokens, child)
        q = draft_law(proposal, shape, child, s.tried if without_replacement else None, s.p)
        keep = kept_with(s.p, q, token, s.scale)
        kept = toss(child, keep) & trying
        failed = (trying & ~kept)[:, None]
        chance = s.walk.chance * jnp.where(trying, jnp.where(kept, keep, 1 - keep), 1.0)

        p, rest = siblings.rejected(s.p, s.walk.law, q)
        p, rest = jnp.where(failed, p, s.p), jnp.where(failed, rest, s.walk.law)
        node = jnp.where(kept, child, s.walk.node)

        def deeper(_) -> tuple[Array, Array, Array]:
            entered = enter(node)
            return jax.tree.map(
                lambda new, old: jnp.where(kept.reshape((-1,) + (1,) * (new.ndim - 1)), new, old),
                entered,
                (p, s.scale, rest),
            )

        p, scale, rest = jax.lax.cond(jnp.any(kept), deeper, lambda _: (p, s.scale, rest), None)
        return _State(
            tried=s.tried | (trying[:, None] & (everyone == child[:, None])),
            walk=Walk(node=node, law=rest, chance=chance),
            p=p,
            scale=scale,
        )

    return jax.lax.while_loop(unfinished, step, state).walk


def tree_verdict(
    key: Array,
    proposal: Proposal,
    law: TargetLaw,
    shape: Topology,
    positions: Array,
    depth: int,
    node: Array,
    token_of: Callable[[Array], Array],
) -> Verdict:
    """The verdict that the path to `node [B]` stands.

    Args:
      token_of: gives the next token `[B]`, from keys `[B]`.
    """
    batch = node.shape[0]
    accepted = pick(shape.depth, node)
    path = tree.path_to(shape.mask, node, depth + 1)
    token = token_of(sampling.at_positions(key, Purpose.RESAMPLE, positions + accepted))
    drafts = jnp.take_along_axis(shape.tokens, path[:, 1:], axis=1)
    padded = jnp.concatenate([drafts, token[:, None]], axis=1)
    step = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]
    asked = pick(jnp.broadcast_to(shape.mask, (batch, *shape.mask.shape[1:])), node)
    return Verdict(
        accepted=accepted,
        path=path,
        tokens=jnp.where(step == accepted[:, None], token[:, None], padded),
        finite=law.finite(asked),
    )


def _coins(key: Array, shape: Topology, positions: Array) -> TossFn:
    """One coin a node: by the position of its token, and its rank among the nodes of that depth.

    The first node of a depth has the coin of a chain.
    """
    nodes = shape.depth.shape[1]
    before = jnp.tril(jnp.ones((nodes, nodes), bool), -1)[None]
    same = shape.depth[:, :, None] == shape.depth[:, None, :]
    rank = jnp.sum(same & before, axis=-1, dtype=jnp.int32)  # [B, M]

    def folded(key: Array, rank: Array) -> Array:
        return jax.lax.select(rank == 0, key, jax.random.fold_in(key, rank))

    def toss(node: Array, chance: Array) -> Array:
        at = positions + pick(shape.depth, node) - 1
        keys = jax.vmap(folded)(sampling.at_positions(key, Purpose.ACCEPT, at), pick(rank, node))
        return jax.vmap(jax.random.uniform)(keys) < chance

    return toss


def _judge_down(
    key: Array,
    proposal: Proposal,
    law: TargetLaw,
    positions: Array,
    depth: int,
    *,
    siblings: Siblings,
    without_replacement: bool = False,
) -> Verdict:
    shape = topology(proposal, depth)
    toss = _coins(key, shape, positions)
    walk = walk_down(proposal, law, shape, toss, siblings, without_replacement)
    token_of = lambda keys: sampling.draw(keys, walk.law)
    return tree_verdict(key, proposal, law, shape, positions, depth, walk.node, token_of)


def one_by_one() -> Siblings:
    """Each child against what those before it left: p <- norm(max(p - q, 0)) at each failure."""

    def enter(p: Array, q: Array, k: Array) -> tuple[Array, Array]:
        return jnp.ones_like(k), p

    def rejected(p: Array, rest: Array, q: Array) -> tuple[Array, Array]:
        left = residual(p, q)
        return left, left

    return Siblings(enter=enter, rejected=rejected)


def k_sequential() -> Siblings:
    """k children of one law q, each against p itself, with q scaled up by rho."""

    def enter(p: Array, q: Array, k: Array) -> tuple[Array, Array]:
        rho = draft_scale(p, q, k)
        beta = overlap(p, q, rho)
        # What the k tries take from p, over beta: (1 - (1 - beta)^k) / beta, k at beta = 0.
        share = jnp.where(beta > 0, _any_of(beta, k) / jnp.where(beta > 0, beta, 1.0), k)
        taken = share[:, None] * jnp.minimum(q, p / rho[:, None])
        return rho, jnp.where(k[:, None] > 0, residual(p, taken), p)

    def rejected(p: Array, rest: Array, q: Array) -> tuple[Array, Array]:
        return p, rest

    return Siblings(enter=enter, rejected=rejected)


def overlap(p: Array, q: Array, rho: Array) -> Array:
    """beta(rho) = sum_x min(q(x), p(x) / rho), `[B]`: how often one draw of q is kept."""
    beta = jnp.sum(jnp.minimum(q, p / rho[:, None]), axis=-1)
    return jnp.clip(beta, 0.0, 1.0)


def _any_of(beta: Array, k: Array) -> Array:
    """1 - (1 - beta)^k: how often at least one of k is kept."""
    return -jnp.expm1(k * jnp.log1p(-beta))


def draft_scale(p: Array, q: Array, k: Array) -> Array:
    """The smallest rho in [1, k] with 1 - (1 - beta(rho))^k <= rho beta(rho), from above.

    A smaller rho keeps more, but then the k tries would take more of some token than p holds.

    Args:
      p, q: `[B, V]`.
      k: `[B]`, as floats; 0 counts as 1.
    """
    steps = jnp.finfo(p.dtype).nmant + 4

    def enough(rho: Array) -> Array:
        beta = overlap(p, q, rho)
        return _any_of(beta, k) <= rho * beta

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        good = enough(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    one = jnp.ones_like(k)
    _, high = jax.lax.fori_loop(0, steps, halve, (one, jnp.maximum(k, one)))
    return jnp.where(enough(one), one, high)


def recursive_rejection(without_replacement: bool = False) -> Acceptance:
    """Speculative sampling over the children of a node, each tried against what the last one left.

    Children are tried in node order: x ~ q is kept with min(1, p(x) / q(x)); otherwise
    p <- norm(max(p - q, 0)) and the next one is tried. When all have failed the next token is
    drawn from the p that is left; at a leaf, from p. Without `probs` q is one-hot: a child is kept
    with p(x), and a rejected child's token is taken out of p. On a chain this is
    `speculative_sampling`, to the bit.

    Lossless where each child was drawn from its own `probs` given the siblings before it:
    independently, deterministically, or one after the other without replacement.

    Args:
      without_replacement: siblings were drawn from one law without putting back, and `probs` may
        hold that law for each of them: the tokens of siblings tried before are removed from q,
        and it is renormalised. `probs` that hold the conditional laws are left as they are.

    Raises:
      ValueError: `without_replacement` is no bool.

    Reference: Miao et al. 2023, SpecInfer (arXiv:2305.09781), Algorithm 2; Yang et al. 2024,
    multi-candidate speculative decoding (arXiv:2401.06706); Jeon et al. 2024, RSD
    (arXiv:2402.14160), for drafts without replacement.
    """
    return _recursive_rejection(require_bool("without_replacement", without_replacement))


@functools.cache
def _recursive_rejection(without_replacement: bool) -> Acceptance:
    judge = functools.partial(
        _judge_down, siblings=one_by_one(), without_replacement=without_replacement
    )
    return Acceptance(judge=judge, name="recursive_rejection", lossless=True, chain=False)


def _judge_spectr(
    key: Array, proposal: Proposal, law: TargetLaw, positions: Array, depth: int
) -> Verdict:
    siblings = one_by_one() if proposal.probs is None else k_sequential()
    return _judge_down(key, proposal, law, positions, depth, siblings=siblings)


@functools.cache
def spectr() -> Acceptance:
    """k-SEQ: k independent drafts of one law q, each tried against p itself.

    With beta(rho) = sum_x min(q(x), p(x) / rho), a child x is kept with min(1, p(x) / (rho q(x))).
    When all k have failed the next token follows

        p - min(q, p / rho) (1 - (1 - beta)^k) / beta,    normalised.

    rho is the smallest in [1, k] for which that is nowhere negative. Drafts are k chains below
    the root, duplicates allowed; k is the number of drafts that still carry the accepted text.
    Lossless where all of these were drawn independently from one q. Without `probs` the children
    have no common q, each is certain: they are tried as by `recursive_rejection`, which keeps as
    much of p as they hold, and no rule can keep more.

    Reference: Sun, Suresh, Ro, Beirami, Jain, Yu 2023, SpecTr (arXiv:2310.15141), Algorithm 2.
    """
    return Acceptance(judge=_judge_spectr, name="spectr", lossless=True, chain=False, common=True)


def require_bool(name: str, value: bool) -> bool:
    """The value, if it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value
