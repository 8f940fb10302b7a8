"""Traversal verification: block verification for trees, from the leaves up.

The walk goes down first. A child c of v is worth alpha_c = min(1, alpha_v p_v(x_c) / q_c(x_c)),
the root 1. A node without untried children has a coin with chance alpha: if it passes, the path to
it stands and the next token follows its p. Otherwise the node is given up, and its parent v keeps
what the node has not taken,

    S = sum_x max(alpha_v p_v(x) - q_c(x), 0)
    p_v <- norm(max(alpha_v p_v - q_c, 0))          alpha_v <- S / (S + 1 - alpha_v)

before its next child is tried. So a subtree of weight alpha ends somewhere in itself with
probability alpha, with the law p; by induction from the leaves the root's weight, 1, is exact.
That holds whatever a node's children, so siblings that carry the same token share theirs.

            r 1.0          order: a c d a' b r, where a' is a with what c and d have left
           / \\
          a   b
         / \\
        c   d
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.accept.block import round_coins, weighted_chance, weighted_residual
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance
from specjax.accept.tree import (
    Topology,
    TossFn,
    Walk,
    children,
    draft_law,
    first_of,
    kept_with,
    pick,
    require_bool,
    topology,
    tree_verdict,
)
from specjax.types import Proposal, Verdict

__all__ = ["traversal_verification", "walk_up"]


class _State(NamedTuple):
    level: Array  # [B] int32: depth of the node that the walk is at
    path: Array  # [B, K + 1] int32: the nodes that the walk came by
    p: Array  # [B, K + 1, V]: p at each node of the current path, less what was given up
    alpha: Array  # [B, K + 1]
    tried: Array  # [B, M] bool
    chance: Array  # [B]: how likely the coins were to fall as they did
    done: Array  # [B] bool


def walk_up(
    proposal: Proposal,
    law: TargetLaw,
    shape: Topology,
    depth: int,
    toss: TossFn,
    without_replacement: bool = False,
) -> Walk:
    """Walks until a node stands, one step down or up at a time, rows in lockstep."""
    batch, nodes = proposal.tokens.shape
    rows = jnp.arange(batch)
    everyone = jnp.arange(nodes + 1, dtype=jnp.int32)[None, :]
    root = jnp.zeros(batch, jnp.int32)

    def law_at(node: Array) -> Array:
        p = law.row(node)
        return jnp.where(jnp.isfinite(p), p, 0.0)

    top = law_at(root)
    one = jnp.ones(batch, top.dtype)
    if nodes == 0 or depth == 0:
        return Walk(node=root, law=top, chance=one)

    def step(s: _State) -> _State:
        node = pick(s.path, s.level)
        p, alpha = pick(s.p, s.level), pick(s.alpha, s.level)
        # Below a node that is worth nothing, nothing stands.
        waiting = children(shape, node) & ~s.tried & (alpha > 0)[:, None]
        down = jnp.any(waiting, axis=1) & ~s.done
        child = first_of(waiting)
        subject = jnp.where(down, child, node)
        q = draft_law(proposal, shape, subject, s.tried if without_replacement else None, p)

        # Down: what the child is worth.
        worth = kept_with(alpha[:, None] * p, q, pick(shape.tokens, child), one)

        # Up: the node stands, or its parent keeps what is left.
        keep = jnp.where(node == 0, 1.0, alpha)
        kept = (toss(node, keep) | (node == 0)) & ~down & ~s.done
        back = ~down & ~kept & ~s.done
        above = jnp.maximum(s.level - 1, 0)
        p_above, alpha_above = pick(s.p, above), pick(s.alpha, above)
        left = jnp.sum(jnp.maximum(alpha_above[:, None] * p_above - q, 0.0), axis=-1)

        to = jnp.where(down, s.level + 1, jnp.where(back, above, s.level))
        below_p = jax.lax.cond(jnp.any(down), lambda: law_at(child), lambda: p)
        new_p = jnp.where(back[:, None], weighted_residual(p_above, q, alpha_above[:, None]), p)
        new_p = jnp.where(down[:, None], below_p, new_p)
        new_alpha = jnp.where(back, weighted_chance(left, alpha_above), alpha)
        new_alpha = jnp.where(down, worth, new_alpha)
        chance = jnp.where(kept, keep, jnp.where(back, 1 - keep, 1.0))
        arrived = jnp.where(down, child, pick(s.path, to))
        return _State(
            level=to,
            path=s.path.at[rows, to].set(arrived),
            p=s.p.at[rows, to].set(new_p),
            alpha=s.alpha.at[rows, to].set(new_alpha),
            tried=s.tried | (back[:, None] & (everyone == node[:, None])),
            chance=s.chance * chance,
            done=s.done | kept,
        )

    p = jnp.zeros((batch, depth + 1, top.shape[-1]), top.dtype).at[:, 0].set(top)
    state = _State(
        level=root,
        path=jnp.zeros((batch, depth + 1), jnp.int32),
        p=p,
        alpha=jnp.ones((batch, depth + 1), top.dtype),
        tried=jnp.zeros((batch, nodes + 1), bool),
        chance=one,
        done=jnp.zeros(batch, bool),
    )
    state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), step, state)
    node, last = pick(state.path, state.level), pick(state.p, state.level)
    return Walk(node=node, law=last, chance=state.chance)


def _judge_up(
    key: Array,
    proposal: Proposal,
    law: TargetLaw,
    positions: Array,
    depth: int,
    *,
    without_replacement: bool,
) -> Verdict:
    shape = topology(proposal, depth)

    def toss(node: Array, chance: Array) -> Array:
        return round_coins(key, positions, node[:, None])[:, 0] < chance

    walk = walk_up(proposal, law, shape, depth, toss, without_replacement)
    token_of = lambda keys: sampling.draw(keys, walk.law)
    return tree_verdict(key, proposal, law, shape, positions, depth, walk.node, token_of)


def traversal_verification(without_replacement: bool = False) -> Acceptance:
    """Judges a tree from its leaves up, so that a rejected node does not end its descendants.

    The equations stand at the head of this file. On a chain this is `block_verification`.

    Lossless where each child was drawn from its own `probs` given the siblings before it, as for
    `recursive_rejection`, and drafts are drawn afresh each round: the verdict also depends on
    nodes below the accepted one, so their random numbers must not come again in the next round.

    Args:
      without_replacement: as for `recursive_rejection`.

    Raises:
      ValueError: `without_replacement` is no bool.

    Reference: Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding"
    (arXiv:2505.12398), Algorithm 1.
    """
    return _traversal(require_bool("without_replacement", without_replacement))


@functools.cache
def _traversal(without_replacement: bool) -> Acceptance:
    judge = functools.partial(_judge_up, without_replacement=without_replacement)
    return Acceptance(judge=judge, name="traversal_verification", lossless=True, chain=False)
