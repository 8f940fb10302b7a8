"""What the sampling controls know of the text before a token: occurrences, length, grammar state.

At the root it is the committed text; at a drafted node, the committed text and the node's
ancestors, itself included. A field is None where no control asks for it, and then costs nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.types import Proposal, record

__all__ = ["Seen", "after", "at_nodes", "at_root", "count_tokens", "in_tree"]


@record
class Seen:
    """The text before a token, for each of any number of places in it."""

    counts: Array | None = None  # [B, ..., V] int32: how often each token stands in it
    emitted: Array | None = None  # [B, ...] int32: its new tokens
    held: Array | None = None  # [B, V] bool: tokens held back until min_new_tokens
    constraint: Any = None  # specjax.constraints.Constraint
    states: Any = None  # [B, ...]: of the constraint


def count_tokens(tokens: Array, mask: Array | None, vocab: int) -> Array:
    """How often each token occurs: `[..., C]` to `[..., V]` int32.

    Args:
      tokens: ids; those outside 0..V-1 are ignored.
      mask: `[..., C]` bool, which of them count; None: all.
    """
    *lead, width = tokens.shape
    flat = tokens.reshape(math.prod(lead), width)
    inside = (flat >= 0) & (flat < vocab)
    if mask is not None:
        inside = inside & jnp.broadcast_to(mask, tokens.shape).reshape(flat.shape)
    rows = jnp.arange(flat.shape[0])[:, None]
    counts = jnp.zeros((flat.shape[0], vocab), jnp.int32)
    counts = counts.at[rows, jnp.where(inside, flat, 0)].add(inside.astype(jnp.int32))
    return counts.reshape(*lead, vocab)


def at_root(
    tokens: Array,
    lengths: Array,
    prompt_lengths: Array,
    *,
    vocab: int,
    penalised: bool,
    held: Array | None,
    constraint: Any,
    states: Any,
) -> Seen:
    """What is seen after the committed tokens.

    Args:
      tokens: `[B, S]` int32; meaningless at or beyond `lengths [B]`.
      prompt_lengths: `[B]`.
      vocab: V.
      penalised: whether counts are wanted.
      held: `[B, V]` bool, tokens that wait for min_new_tokens, or None.
      constraint: the grammar, or None; `states` are its states `[B, ...]` after these tokens.
    """
    written = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return Seen(
        counts=count_tokens(tokens, written, vocab) if penalised else None,
        emitted=None if held is None else lengths - prompt_lengths,
        held=held,
        constraint=constraint,
        states=None if constraint is None else states,
    )


def after(seen: Seen | None, tokens: Array) -> Seen | None:
    """What is seen after one more token a row, `[B]` int32; of a `Seen` with one place a row."""
    if seen is None:
        return None
    counts, emitted, states = seen.counts, seen.emitted, seen.states
    if counts is not None:
        counts = counts.at[jnp.arange(tokens.shape[0]), tokens].add(1)
    if emitted is not None:
        emitted = emitted + 1
    if seen.constraint is not None:
        states = seen.constraint.advance(seen.constraint.data, states, tokens)
    return Seen(
        counts=counts,
        emitted=emitted,
        held=seen.held,
        constraint=seen.constraint,
        states=states,
    )


def in_tree(seen: Seen, proposal: Proposal) -> Seen:
    """What is seen after the root and after every drafted node: `[B]` places to `[B, M]`."""
    batch, nodes = proposal.tokens.shape
    mask = tree.ancestors(proposal.parents)  # [1 or B, M, M]
    depth = tree.depths(mask)  # [1 or B, M]
    counts, emitted, states = seen.counts, seen.emitted, seen.states
    if counts is not None:
        path = jnp.broadcast_to(mask[:, :, 1:], (batch, nodes + 1, nodes))
        drafted = jnp.broadcast_to(proposal.tokens[:, None, :], path.shape)
        counts = counts[:, None, :] + count_tokens(drafted, path, counts.shape[-1])
    if emitted is not None:
        emitted = emitted[:, None] + depth
    if seen.constraint is not None:
        states = _states_in_tree(seen, proposal, jnp.broadcast_to(depth, (batch, nodes + 1)))
    return Seen(
        counts=counts,
        emitted=emitted,
        held=seen.held,
        constraint=seen.constraint,
        states=states,
    )


def _states_in_tree(seen: Seen, proposal: Proposal, depth: Array) -> Any:
    """The constraint's states `[B, M, ...]`, a level of the tree at a time."""
    batch, nodes = proposal.tokens.shape
    parents = jnp.broadcast_to(jnp.atleast_2d(proposal.parents), (batch, nodes))
    rows = jnp.arange(batch)[:, None]
    constraint = seen.constraint
    states = jax.tree.map(lambda x: jnp.repeat(x[:, None], nodes + 1, axis=1), seen.states)

    def level(d: Array, states: Any) -> Any:
        moved = constraint.advance(
            constraint.data, jax.tree.map(lambda x: x[rows, parents], states), proposal.tokens
        )

        def put(old: Array, new: Array) -> Array:
            here = (depth[:, 1:] == d).reshape(batch, nodes, *(1,) * (old.ndim - 2))
            return jnp.concatenate([old[:, :1], jnp.where(here, new, old[:, 1:])], axis=1)

        return jax.tree.map(put, states, moved)

    return jax.lax.fori_loop(1, jnp.max(depth) + 1, level, states) if nodes else states


def at_nodes(seen: Seen, nodes: Array) -> Seen:
    """Of `[B, M]` places, those of some nodes: `[B, N]` int32 gives `[B, N]` places, `[B]` one."""
    rows = jnp.arange(nodes.shape[0]).reshape(-1, *(1,) * (nodes.ndim - 1))
    pick = lambda x: None if x is None else x[rows, nodes]
    return Seen(
        counts=pick(seen.counts),
        emitted=pick(seen.emitted),
        held=seen.held,
        constraint=seen.constraint,
        states=jax.tree.map(pick, seen.states),
    )
