"""Two drafters as one: the second where the first has nothing, or both drafts as one tree.

Both learn what every round accepted, whoever guessed it, so that either can go on from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.accept.tree import topology
from specjax.types import (
    Context,
    Drafter,
    InitFn,
    Outcome,
    Params,
    Prefill,
    Proposal,
    PyTree,
    UpdateFn,
    check_proposal,
)

__all__ = ["fallback", "joined", "merged", "require_count"]


def fallback(first: Drafter, second: Drafter, least: int = 1) -> Drafter:
    """Drafts with `first` in the rows in which it finds something, else with `second`.

    `params.draft` is the pair of their weights, and the state is the pair of their states. Lossless
    with the rules that either is lossless with: which one drafts is known before it draws.

    Args:
      first: e.g. `ngram()`, which drafts nothing where the text does not repeat itself.
      second: asked in every round, too: the rows of a batch may differ.
      least: `first` is used where its longest path has at least so many nodes. Above 1 it must not
        draw its drafts: a path's length may tell something of what was drawn.

    Raises:
      ValueError: no drafters, one that never drafts, or a `least` that `first` cannot reach. When
        drafting: a `least` above 1 and a `first` that draws.

    Example:
      >>> from specjax.drafters import ngram
      >>> fallback(ngram(3), ngram(5, prompt_lookup_max=1)).nodes
      5
    """
    _check_parts(first, second)
    require_count("least", least)
    if least > first.depth:
        raise ValueError(
            f"least must be at most {first.depth}, the longest path of {first.name}, got {least}"
        )
    return _fallback(first, second, least)


def merged(first: Drafter, second: Drafter, nodes: int | None = None) -> Drafter:
    """Drafts one tree that has the nodes of both; those that say the same text are one node.

    `params.draft` is the pair of their weights, and the state is the pair of their states. Rules
    for trees that are lossless with both are so with the tree, as told at `joined`; those that
    need one law q for all drafts after a text (`spectr`) are refused.

    Args:
      first: its nodes always fit.
      second: drafts with random numbers of its own.
      nodes: N; default and at most as many as both have. Nodes of `second` that do not fit are left
        out, the last ones first. If neither draws its drafts, only those count that a row has.

    Raises:
      ValueError: no drafters, one that never drafts, or `nodes` that leave no room for `second`.

    Example:
      >>> from specjax.drafters import ngram
      >>> made = merged(ngram(3), ngram(5, prompt_lookup_max=1))
      >>> made.nodes, made.depth
      (8, 5)
    """
    _check_parts(first, second)
    both = first.nodes + second.nodes
    if nodes is not None:
        require_count("nodes", nodes)
        if not first.nodes < nodes <= both:
            raise ValueError(
                f"nodes must be from {first.nodes + 1}, one more than {first.name} has, to {both}, "
                f"all of both drafters, got {nodes}"
            )
    return _merged(first, second, both if nodes is None else nodes)


def require_count(name: str, value: Any) -> int:
    """The value, if it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


@functools.cache
def _fallback(first: Drafter, second: Drafter, least: int) -> Drafter:
    depth, nodes = max(first.depth, second.depth), max(first.nodes, second.nodes)
    both = _pair(first, second, nodes)
    branches = _branches(first) or _branches(second)

    def draft(params: Params, key: Array, state: PyTree, context: Context):
        one, other, state = both.draft(params, (key, key), state, context)
        if least > 1 and one.probs is not None:
            raise ValueError(
                f"least is {least}, but {first.name} draws its drafts: that a path got so long may "
                "tell what was drawn, and the output's law would not be the target's; use least=1"
            )
        shape = topology(one, first.depth)
        longest = jnp.max(jnp.where(shape.eligible, shape.depth, 0), axis=1)
        chosen = longest >= least
        one, other = (_padded(part, nodes) for part in _alike(one, other, params.model.vocab_size))

        def choose(a: Array, b: Array) -> Array:
            return jnp.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

        proposal = jax.tree.map(choose, one, other)
        if not branches:
            proposal = dataclasses.replace(proposal, parents=jnp.asarray(tree.chain(nodes)))
        return proposal, state

    return Drafter(
        init=both.init,
        draft=draft,
        update=both.update,
        name=f"fallback({first.name}, {second.name})",
        depth=depth,
        nodes=nodes,
        features=both.features,
        tree=branches,
        # Siblings without `probs` get some, each its own, beside those of the other drafter.
        mixed=branches,
    )


@functools.cache
def _merged(first: Drafter, second: Drafter, nodes: int) -> Drafter:
    depth = min(max(first.depth, second.depth), nodes)
    both = _pair(first, second, nodes)

    def draft(params: Params, key: Array, state: PyTree, context: Context):
        # With the same random numbers siblings would not be drawn independently.
        keys = tuple(jax.vmap(jax.random.fold_in, in_axes=(0, None))(key, part) for part in (0, 1))
        one, other, state = both.draft(params, keys, state, context)
        return joined(one, other, nodes, depth, params.model.vocab_size), state

    return Drafter(
        init=both.init,
        draft=draft,
        update=both.update,
        name=f"merged({first.name}, {second.name})",
        depth=depth,
        nodes=nodes,
        features=both.features,
        tree=True,
        mixed=True,
    )


# --- two drafters ----------------------------------------------------------------------------


class _Pair(NamedTuple):
    """Two drafters, each of which is given its own weights, state and features."""

    init: InitFn
    draft: Callable[..., tuple[Proposal, Proposal, PyTree]]  # as DraftFn, with a key for each
    update: UpdateFn
    features: tuple[int, ...]


def _pair(first: Drafter, second: Drafter, nodes: int) -> _Pair:
    """The functions of both.

    Args:
      nodes: N of the drafter that they become.
    """
    parts = (first, second)
    features = tuple(sorted({*first.features, *second.features}))

    def own(params: Params) -> tuple[Params, Params]:
        weights = (None, None) if params.draft is None else params.draft
        if not (isinstance(weights, tuple) and len(weights) == 2):
            raise ValueError(
                f"params.draft must be the pair (weights of {first.name}, weights of "
                f"{second.name}), with None for one that has none, got {type(weights)}"
            )
        one, other = (params.replace(draft=w) for w in weights)
        return one, other

    def of(part: Drafter, states: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(states[features.index(layer)] for layer in part.features)

    def init(params: Params, prefill: Prefill) -> PyTree:
        def one(part: Drafter, params: Params) -> PyTree:
            # A cache needs room for all that a drafter guesses, proposed or not.
            slots = prefill.slots + max(part.nodes - nodes, 0)
            given = of(part, prefill.features)
            return part.init(params, dataclasses.replace(prefill, features=given, slots=slots))

        return tuple(map(one, parts, own(params)))

    def draft(params: Params, keys: tuple[Array, Array], state: PyTree, context: Context):
        proposals, states = [], []
        for part, weighed, key, held in zip(parts, own(params), keys, state, strict=True):
            proposal, held = part.draft(weighed, key, held, context)
            batch, vocab = context.lengths.shape[0], params.model.vocab_size
            check_proposal(proposal, {"B": batch, "N": part.nodes, "V": vocab})
            proposals.append(proposal)
            states.append(held)
        return *proposals, tuple(states)

    def update(params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        def one(part: Drafter, params: Params, held: PyTree) -> PyTree:
            given = of(part, outcome.scores.features)
            scores = dataclasses.replace(outcome.scores, features=given)
            return part.update(params, held, dataclasses.replace(outcome, scores=scores))

        return tuple(map(one, parts, own(params), state))

    return _Pair(init=init, draft=draft, update=update, features=features)


def _check_parts(first: Drafter, second: Drafter) -> None:
    for name, part in (("first", first), ("second", second)):
        if not isinstance(part, Drafter):
            raise ValueError(
                f"{name} must be a Drafter, e.g. specjax.drafters.ngram(), got {part!r}"
            )
        if part.nodes == 0:
            raise ValueError(
                f"{name} is {part.name}, which never drafts; use the other drafter alone"
            )
        if part.sizes:
            raise ValueError(
                f"{name} is {part.name} with verify_sizes {list(part.sizes)}, which belong to the "
                "drafter of both: drafts are verified together"
            )


def _branches(part: Drafter) -> bool:
    return part.tree or part.nodes > part.depth


# --- two proposals ---------------------------------------------------------------------------


def joined(first: Proposal, second: Proposal, nodes: int, depth: int, vocab: int) -> Proposal:
    """One tree of two; nodes that say the same text from the root on are one.

          r            r              r            second's `a` and `a b` are first's, to which
          |           / \\            / \\           `a c` is added
          a    +     a   d     =     a   d
          |         / \\             / \\
          b        b   c           b   c

    Rules try the children of a node in order, and a draft that fails takes its law q out of p.
    Drafts that were drawn come first. If x ~ q fails then p(x) < q(x), nothing of x is left in
    max(p - q, 0), and a certain draft of x (q one-hot) would be kept with probability 0 and leave p
    as it is: so it can be left out, without a trace in the law. The other way round that would be
    wrong. A draw that is forgotten because a certain draft says the same leaves its q in p; and if
    both were drawn, they count as two draws, and stand beside each other as two nodes. A rule
    goes on below both if one stands.

    Where anything was drawn places are fixed: what finds no room does not depend on tokens, so
    that nothing is told of draws that are yet to be tried. Where all is certain it is a function of
    the text, and the valid nodes move together first.

    Args:
      first, second: N1 and N2 nodes.
      nodes: N, at least N1; the last nodes of `second` are left out if there are more.
      depth: K, longest path that may be accepted.
      vocab: V.

    Returns:
      A proposal of N nodes.
    """
    room = nodes - first.tokens.shape[1]
    drawn = first.probs is not None or second.probs is not None
    twins = first.probs is None or second.probs is None
    second_leads = first.probs is None and second.probs is not None
    first, second = _alike(first, second, vocab)
    if drawn:
        second = jax.tree.map(lambda x: x[:, :room], second)
    front, back = (second, first) if second_leads else (first, second)
    found, place = _twins(front, back, depth) if twins else _apart(front, back)
    parents = jnp.take_along_axis(place, back.parents, axis=1)
    back = dataclasses.replace(back, parents=parents, valid=back.valid & ~found)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), front, back)
    if both.tokens.shape[1] > nodes:
        both = jax.tree.map(lambda x: x[:, :nodes], _together(both))
    return both


def _twins(front: Proposal, back: Proposal, depth: int) -> tuple[Array, Array]:
    """Which nodes of `back` say what one of `front` does, `[B, N2]` bool, and the place of each of
    the M2 in the tree of both, `[B, M2]` int32."""
    ours, theirs = topology(front, depth), topology(back, depth)
    levels = max(ours.texts.shape[2], theirs.texts.shape[2])

    def texts(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, levels - x.shape[2])])

    same = jnp.all(texts(theirs.texts)[:, :, None] == texts(ours.texts)[:, None], axis=-1)
    same = same & (theirs.depth[:, :, None] == ours.depth[:, None])
    same = same & theirs.eligible[:, :, None] & ours.eligible[:, None]  # [B, M2, M1]
    found = jnp.any(same, axis=-1)
    _, own = _apart(front, back)
    return found[:, 1:], jnp.where(found, jnp.argmax(same, axis=-1).astype(jnp.int32), own)


def _apart(front: Proposal, back: Proposal) -> tuple[Array, Array]:
    """The same for trees that share the root only."""
    rows, more = back.tokens.shape
    own = jnp.arange(more + 1, dtype=jnp.int32)
    own = jnp.where(own > 0, own + front.tokens.shape[1], 0)
    return jnp.zeros((rows, more), bool), jnp.broadcast_to(own[None, :], (rows, more + 1))


def _together(proposal: Proposal) -> Proposal:
    """Valid nodes first, in their order; for nodes without `probs`."""
    valid = jnp.pad(proposal.valid, ((0, 0), (1, 0)), constant_values=True)
    alive = jnp.all(valid[:, None, :] | ~tree.ancestors(proposal.parents), axis=-1)[:, 1:]
    order = jnp.argsort(~alive, axis=1, stable=True)
    place = jnp.pad(jnp.argsort(order, axis=1).astype(jnp.int32) + 1, ((0, 0), (1, 0)))
    moved = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), proposal)
    alive = jnp.take_along_axis(alive, order, axis=1)
    parents = jnp.where(alive, jnp.take_along_axis(place, moved.parents, axis=1), 0)
    return dataclasses.replace(moved, parents=parents, valid=alive)


def _alike(one: Proposal, other: Proposal, vocab: int) -> tuple[Proposal, Proposal]:
    """Both with the same fields: a row of parents each, and `probs` and `confidence` or neither.

    A draft without `probs` is certain, its law one-hot; without `confidence` it is not doubted.
    """
    drawn = one.probs is not None or other.probs is not None
    judged = one.confidence is not None or other.confidence is not None

    def complete(x: Proposal) -> Proposal:
        probs, confidence = x.probs, x.confidence
        if drawn and probs is None:
            probs = jax.nn.one_hot(x.tokens, vocab, dtype=jnp.float32)
        if judged and confidence is None:
            confidence = jnp.ones(x.tokens.shape, jnp.float32)
        parents = jnp.broadcast_to(jnp.atleast_2d(x.parents), x.tokens.shape)
        return dataclasses.replace(x, parents=parents, probs=probs, confidence=confidence)

    return complete(one), complete(other)


def _padded(proposal: Proposal, nodes: int) -> Proposal:
    """Invalid nodes below the root fill up to N."""
    more = nodes - proposal.tokens.shape[1]
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)), proposal
    )
