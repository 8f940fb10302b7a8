"""Growing a draft, level by level, from the states of its nodes: chains, paths and trees.

A network reads entries: tokens, or pairs of a state and a token. Entries of committed tokens lie in
its cache; those of drafted nodes never do, but are handed from level to level as a `Block`, so that
a rejected draft leaves no trace and there is nothing to roll back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache, sampling
from specjax import seen as seen_lib
from specjax.drafters.choices import StaticTree, named_tree
from specjax.sampling import Purpose
from specjax.types import Block, Cache, Context, Forward, Proposal, PyTree, record

__all__ = [
    "Chooser",
    "DynamicTree",
    "Paths",
    "Pending",
    "Reader",
    "Shape",
    "Start",
    "draft",
    "dynamic_tree",
    "grow",
    "read_pending",
    "shape_of",
    "size_of",
]


class DynamicTree(NamedTuple):
    """EAGLE-2: in each level the `top_k` nodes with the best paths are read on, and have `top_k`
    children each; of all of them the best `nodes` are proposed."""

    nodes: int  # N
    depth: int  # K
    top_k: int
    min_probability: float = 0.0  # of a path; what the network thinks less likely is not proposed


class Paths(NamedTuple):
    """Independent chains from the root; one of them is a chain."""

    depth: int  # K
    count: int


Shape = DynamicTree | StaticTree | Paths


def dynamic_tree(
    nodes: int = 59, depth: int = 6, top_k: int = 10, min_probability: float = 0.0
) -> DynamicTree:
    """The shape of an EAGLE-2 tree. With `top_k=1` it is a chain.

    Args:
      nodes: N, drafted nodes that are verified.
      depth: K, levels.
      top_k: nodes of a level that are read on, and children that each has.
      min_probability: nodes whose path the network gives less are left out, so that a draft is
        as large as it is sure; with the drafter's `sizes`, so is the verifying pass.

    Raises:
      ValueError: a number below 1, fewer candidates than nodes, or no probability.
    """
    for name, value in (("nodes", nodes), ("depth", depth), ("top_k", top_k)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    candidates = top_k + (depth - 1) * top_k**2
    if nodes > candidates:
        raise ValueError(
            f"nodes must be at most {candidates} for depth {depth} and top_k {top_k} (top_k + "
            f"(depth - 1) * top_k^2 candidates), got {nodes}"
        )
    sound = isinstance(min_probability, (int, float)) and not isinstance(min_probability, bool)
    if not (sound and 0 <= min_probability < 1):
        raise ValueError(f"min_probability must be from 0 to below 1, got {min_probability!r}")
    return DynamicTree(nodes, depth, top_k, float(min_probability))


def shape_of(depth: int, tree: Any, paths: int, vocab: int) -> Shape:
    """The shape that a drafter's options mean.

    Args:
      depth: `num_speculative_tokens`, K of a chain or of paths.
      tree: None, a `DynamicTree`, or what `named_tree` takes.
      paths: how many independent chains.
      vocab: DV.

    Raises:
      ValueError: a bad number, both a tree and paths, or a tree that needs more tokens than DV.
    """
    for what, value in (("num_speculative_tokens", depth), ("paths", paths)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")
    if tree is None:
        return Paths(depth, paths)
    if paths > 1:
        raise ValueError(f"give tree or paths, not both; got tree={tree!r}, paths={paths}")
    if isinstance(tree, DynamicTree):
        shape: DynamicTree | StaticTree = dynamic_tree(*tree)
    else:
        try:
            shape = named_tree(tree)
        except ValueError as error:
            raise ValueError(f"tree is {tree!r}: {error}") from error
    most = shape.top_k if isinstance(shape, DynamicTree) else max(shape.ranks) + 1
    if most > vocab:
        raise ValueError(
            f"tree asks for {most} tokens after a node, but the draft's vocabulary has {vocab}"
        )
    return shape


def size_of(shape: Shape) -> tuple[int, int]:
    """K, the longest path that may be proposed, and N of a shape."""
    if isinstance(shape, Paths):
        return shape.depth, shape.depth * shape.count
    if isinstance(shape, DynamicTree):
        return min(shape.depth, shape.nodes), shape.nodes
    return shape.levels, len(shape.parents)


class Reader(NamedTuple):
    """A network over one round's parameters."""

    # tokens [B, T], hidden [B, T, W], positions, cache, mask, earlier -> what PairsFn gives
    forward: Callable[..., Forward]
    logits: Callable[[Array], Array]  # [..., W] -> [..., DV]
    target_ids: Callable[[Array], Array]  # draft ids -> the target's
    target_logits: Callable[[Array], Array]  # [..., DV] -> [..., V]


@record
class Pending:
    """What a network has read, and the states of what it has to read next."""

    cache: Cache
    hidden: Array  # [B, T, W]; only the first ones of a row count


class Start(NamedTuple):
    """Where a draft grows from: the last committed entry."""

    logits: Array  # [B, DV]
    hidden: Array  # [B, W]
    known: Array  # [B] bool: there is such an entry


def read_pending(
    reader: Reader, pending: Pending, context: Context, shift: int
) -> tuple[Start, Cache]:
    """Reads the entries of the tokens that the last round has committed.

    Args:
      shift: entry i reads the token at position i + shift; there are `lengths - shift` in all.

    Returns:
      The state after the last one, and the cache with them.
    """
    held, hidden = pending.cache, pending.hidden
    steps = hidden.shape[1]
    count = context.lengths - shift - held.lengths
    positions = held.lengths[:, None] + jnp.arange(steps)[None, :]
    last = context.tokens.shape[1] - 1
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(positions + shift, last), axis=1)
    causal = jnp.tril(jnp.ones((1, steps, steps), bool))
    out = reader.forward(tokens, hidden, positions, held, causal)
    at = jnp.maximum(count - 1, 0)[:, None, None]
    pick = lambda x: jnp.take_along_axis(x, at, axis=1)[:, 0]
    start = Start(
        logits=reader.logits(pick(out.hidden)),
        hidden=pick(out.features[0]),
        known=held.lengths + count > 0,
    )
    return start, cache.append(held, out.block, held.lengths + count)


class Chooser(NamedTuple):
    """How the nodes of a level are chosen from the logits of the level before."""

    width: int  # nodes of a level that are read on
    levels: int
    # level, logits [B, W or 1, DV], extra -> tokens [B, W] (target ids), origin [B, W] (which node
    # of the level before), extra, and what is kept of the level
    choose: Callable[[Array, Array, PyTree], tuple[Array, Array, PyTree, PyTree]]
    extra: PyTree


def grow(reader: Reader, start: Start, held: Cache, chooser: Chooser) -> tuple[PyTree, PyTree]:
    """Runs the levels. Each but the first is one pass of the network over `width` nodes.

    Args:
      held: entries of the committed tokens, all of them.

    Returns:
      What the chooser kept of the first level, and of the others (`levels - 1` leading).
    """
    width, levels = chooser.width, chooser.levels
    batch = held.lengths.shape[0]
    rows = jnp.arange(batch)[:, None]
    first = jnp.zeros((), jnp.int32)
    tokens, _, extra, kept = chooser.choose(first, start.logits[:, None], chooser.extra)
    if levels == 1:
        return kept, None
    hidden = jnp.broadcast_to(start.hidden[:, None], (batch, width, start.hidden.shape[-1]))
    room = (levels - 1) * width
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool)[None], (batch, width, width))

    def empty(slots: Array) -> Array:
        shape = (*slots.shape[:2], room, *slots.shape[3:])
        return jnp.zeros(shape, slots.dtype)

    earlier = Block(
        keys=jax.tree.map(empty, held.keys),
        values=jax.tree.map(empty, held.values),
    )
    above = jnp.zeros((batch, width, room), bool)  # which entries each node descends from

    def level(carry, i):
        tokens, hidden, earlier, above, extra = carry
        positions = jnp.broadcast_to((held.lengths + i - 1)[:, None], tokens.shape)
        mask = jnp.concatenate([above, own], axis=2)
        out = reader.forward(tokens, hidden, positions, held, mask, earlier)
        at = (i - 1) * width
        earlier = jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2),
            earlier,
            out.block,
        )
        tokens, origin, extra, kept = chooser.choose(i, reader.logits(out.hidden), extra)
        above = above[rows, origin] | ((at + origin)[..., None] == jnp.arange(room)[None, None, :])
        return (tokens, out.features[0][rows, origin], earlier, above, extra), kept

    carry = (tokens, hidden, earlier, above, extra)
    _, others = jax.lax.scan(level, carry, jnp.arange(1, levels, dtype=jnp.int32))
    return kept, others


def _all_levels(first: PyTree, others: PyTree) -> PyTree:
    """Both results of `grow` as one, levels in the second axis."""
    if others is None:
        return jax.tree.map(lambda a: a[:, None], first)
    return jax.tree.map(
        lambda a, b: jnp.concatenate([a[:, None], b.swapaxes(0, 1)], axis=1), first, others
    )


def draft(
    reader: Reader, start: Start, held: Cache, shape: Shape, key: Array, context: Context
) -> Proposal:
    """A draft of some shape.

    Args:
      key: `[B]`, of this round.
    """
    batch = context.lengths.shape[0]
    if isinstance(shape, Paths):
        return sampled(reader, start, held, key, context, shape.depth, shape.count)
    if isinstance(shape, DynamicTree):
        return dynamic(reader, start, held, shape, batch)
    return ranked(reader, start, held, shape, batch)


# --- chains and paths, drawn from the network's law ------------------------------------------


def sampled(
    reader: Reader, start: Start, held: Cache, key: Array, context: Context, depth: int, count: int
) -> Proposal:
    """`count` independent paths of `depth` tokens, each drawn from the law after its parent.

    Node `d * count + w + 1` is at depth d + 1 of path w. With one path this is a chain.

    Args:
      key: `[B]`, of this round.

    Returns:
      A proposal with that law as `probs`. A path ends where the network has no law.
    """
    batch = context.lengths.shape[0]

    def choose(level: Array, logits: Array, extra):
        each = []
        for w, (seen, sound) in enumerate(extra):
            own = logits[:, min(w, logits.shape[1] - 1)]
            sound = sound & jnp.isfinite(jnp.max(own, axis=-1))
            keys = sampling.at_positions(key, Purpose.DRAFT, context.lengths + level)
            if count > 1:
                keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, w)
            token, probs = sampling.sample(keys, reader.target_logits(own), context.sampling, seen)
            each.append((token, probs, sound, seen_lib.after(seen, token)))
        tokens, probs, sound = (jnp.stack([x[i] for x in each], axis=1) for i in range(3))
        origin = jnp.broadcast_to(jnp.arange(count)[None, :], tokens.shape)
        extra = tuple((seen, sound) for _, _, sound, seen in each)
        return tokens, origin, extra, (tokens, probs, sound)

    chooser = Chooser(count, depth, choose, ((context.seen, start.known),) * count)
    levels = _all_levels(*grow(reader, start, held, chooser))
    tokens, probs, sound = (x.reshape(batch, depth * count, *x.shape[3:]) for x in levels)
    nodes = jnp.arange(depth * count, dtype=jnp.int32)
    return Proposal(
        tokens=tokens,
        parents=jnp.maximum(nodes - count + 1, 0),
        probs=probs,
        valid=sound,
        candidate=jnp.ones(tokens.shape, bool),
    )


# --- trees of the most likely tokens ---------------------------------------------------------


def ranked(reader: Reader, start: Start, held: Cache, shape: StaticTree, batch: int) -> Proposal:
    """A tree of one shape: each node is the token of its rank among those that follow its parent.

    Deterministic, hence without `probs`.
    """
    origins, ranks = (jnp.asarray(x) for x in shape.by_level())
    levels, width = ranks.shape
    best = max(shape.ranks) + 1

    def choose(level: Array, logits: Array, sound: Array):
        sound = sound & jnp.isfinite(jnp.max(logits, axis=-1))
        _, ids = jax.lax.top_k(_finite(logits), best)  # [B, W or 1, best]
        origin = jnp.broadcast_to(origins[level][None], (batch, width))
        from_node = jnp.minimum(origin, logits.shape[1] - 1)
        rank = jnp.broadcast_to(ranks[level][None], (batch, width))
        ids = jnp.take_along_axis(ids, from_node[..., None], axis=1)
        tokens = jnp.take_along_axis(ids, rank[..., None], axis=2)[..., 0]
        sound = jnp.take_along_axis(sound, from_node, axis=1)
        tokens = reader.target_ids(tokens.astype(jnp.int32))
        return tokens, origin, sound, (tokens, sound)

    chooser = Chooser(width, levels, choose, start.known[:, None])
    found = _all_levels(*grow(reader, start, held, chooser))
    tokens, sound = (x.reshape(batch, levels * width)[:, shape.slots] for x in found)
    return Proposal(
        tokens=tokens,
        parents=jnp.asarray(shape.parents, jnp.int32),
        probs=None,
        valid=sound,
        candidate=jnp.ones(tokens.shape, bool),
    )


def dynamic(reader: Reader, start: Start, held: Cache, shape: DynamicTree, batch: int) -> Proposal:
    """A tree that follows the network's confidence, another shape for each row.

    The score of a node is the logarithm of the probability of its path. Candidates are numbered
    by level, then by parent, then by rank; those proposed keep this order. Deterministic given the
    text, hence without `probs`.

    Reference: Li et al. 2024 (arXiv:2406.16858), section 4.
    """
    k = shape.top_k

    def choose(level: Array, logits: Array, extra):
        scores, flat, sound = extra  # of the nodes that were read: [B, W or 1]
        sound = sound & jnp.isfinite(jnp.max(logits, axis=-1))
        log_probs = jax.nn.log_softmax(_finite(logits), axis=-1)
        best, ids = jax.lax.top_k(log_probs, k)  # [B, W or 1, k]
        best = scores[..., None] + jnp.where(sound[..., None], best, -jnp.inf)
        tokens = reader.target_ids(ids.astype(jnp.int32)).reshape(batch, -1)
        parent = jnp.broadcast_to(flat[..., None], best.shape).reshape(batch, -1)
        best = best.reshape(batch, -1)
        first = jnp.where(level == 0, 0, k + (level - 1) * k * k)  # candidates before
        top, at = jax.lax.top_k(best, k)
        pick = lambda x: jnp.take_along_axis(x, at, axis=1)
        sound = jnp.broadcast_to(sound[..., None], (*sound.shape, k)).reshape(batch, -1)
        # A first level has `k` candidates, later ones `k * k`.
        gap = [(0, 0), (0, k * k - best.shape[1])]
        kept = (
            jnp.pad(tokens, gap),
            jnp.pad(parent, gap),
            jnp.pad(best, gap, constant_values=-jnp.inf),
        )
        # `flat` 0 is the root, hence the 1.
        extra = (top, first + at + 1, pick(sound))
        return pick(tokens), at // k, extra, kept

    root = jnp.zeros((batch, 1), jnp.float32), jnp.zeros((batch, 1), jnp.int32)
    chooser = Chooser(k, shape.depth, choose, (*root, start.known[:, None]))
    first, others = grow(reader, start, held, chooser)
    parts = [tuple(x[:, :k] for x in first)]
    if others is not None:
        parts.append(tuple(x.swapaxes(0, 1).reshape(batch, -1) for x in others))
    tokens, parent, score = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    if shape.min_probability > 0:
        score = jnp.where(score >= math.log(shape.min_probability), score, -jnp.inf)
    score, chosen = jax.lax.top_k(score, shape.nodes)
    # Those that are left out come last, so that the others are the first nodes.
    chosen = jnp.where(score > -jnp.inf, chosen, chosen + tokens.shape[1])
    order = jnp.argsort(chosen, axis=1)
    pick = lambda x: jnp.take_along_axis(x, order, axis=1)
    score, chosen = pick(score), pick(chosen)
    at = lambda x: jnp.take_along_axis(x, chosen % tokens.shape[1], axis=1)
    # A parent's place is how many of the chosen come before it.
    parents = jnp.sum(chosen[:, None, :] + 1 < at(parent)[:, :, None], axis=-1) + 1
    parents = jnp.where((at(parent) == 0) | (score == -jnp.inf), 0, parents).astype(jnp.int32)
    return Proposal(
        tokens=at(tokens),
        parents=parents,
        probs=None,
        valid=score > -jnp.inf,
        candidate=jnp.ones(parents.shape, bool),
    )


def _finite(logits: Array) -> Array:
    """Without NaN, which would win a comparison."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)
