"""EAGLE: a one-layer network guesses from the target's states, then from its own.

Entry i is the pair of the target's state at position i and the token at i + 1. The state after the
last entry gives the first guess; a guess and the state that it came from are the next entry.

Reference: Li et al. 2024 (arXiv:2401.15077), EAGLE-1; Li et al. 2024 (arXiv:2406.16858), EAGLE-2;
Li et al. 2025 (arXiv:2503.01840), EAGLE-3.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import cache
from specjax.drafters import growing
from specjax.drafters.growing import (
    DynamicTree,
    Paths,
    Pending,
    Reader,
    Shape,
    shape_of,
    size_of,
)
from specjax.drafters.vocabulary import VocabularyMap, check_map, onto_target, split_draft
from specjax.types import (
    Context,
    Drafter,
    FeatureNetwork,
    Forward,
    Outcome,
    Params,
    Prefill,
    PyTree,
)

__all__ = ["check_target", "eagle", "reader_of"]

_SHIFT = 1  # entry i reads the token at position i + 1


def eagle(
    network: FeatureNetwork,
    num_speculative_tokens: int = 5,
    *,
    tree: DynamicTree | str | Any = None,
    paths: int = 1,
    mapped: bool = False,
    name: str = "eagle",
) -> Drafter:
    """Drafts with an EAGLE head, whose weights are `params.draft`.

    Without a tree, tokens are drawn from the same law as the target's, and that law is kept as q.
    The nodes of a tree are the most likely tokens: q is one-hot. The state is the head's KV cache
    and the target's states of the last round.

    Args:
      network: the head.
      num_speculative_tokens: K of a chain or of paths; a tree has its own.
      tree: None; a `dynamic_tree(...)`; or what `named_tree` takes: the name of a published
        shape, or a list of paths of ranks.
      paths: k independent chains from the root (SpecTr); 1: a chain.
      mapped: the head has a vocabulary of its own; `params.draft` is then the pair
        `(weights, specjax.drafters.vocabulary_map(...))`.
      name: of the drafter, in messages and statistics.

    Raises:
      ValueError: a bad number, both a tree and paths, or a tree that needs more tokens than the
        head has.
    """
    shape = shape_of(num_speculative_tokens, tree, paths, network.vocab_size)
    return _eagle(network, shape, mapped, name)


@functools.cache
def _eagle(network: FeatureNetwork, shape: Shape, mapped: bool, name: str) -> Drafter:
    depth, nodes = size_of(shape)

    def reader(params: Params) -> Reader:
        weights, ids = split_draft(params, name, mapped)
        return reader_of(network, params, weights, ids)

    def init(params: Params, prefill: Prefill) -> Pending:
        weights, ids = split_draft(params, name, mapped)
        check_map(params, ids, network.vocab_size)
        check_target(network, params, name)
        batch, total = prefill.tokens.shape
        read = reader(params)
        following = jnp.roll(prefill.tokens, -_SHIFT, axis=1)
        fuse = functools.partial(network.fuse, weights)
        causal = jnp.tril(jnp.ones((1, prefill.chunk, prefill.chunk), bool))

        def run(start: Array, held: cache.Cache):
            cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, prefill.chunk, axis=1)
            states = fuse(tuple(cut(x) for x in prefill.features))
            positions = (start + jnp.arange(prefill.chunk))[None, :]
            positions = jnp.broadcast_to(positions, (batch, prefill.chunk))
            out = read.forward(cut(following), states, positions, held, causal)
            return Forward(hidden=out.hidden, features=(), block=out.block)

        # The last entry is read by the first draft, which needs what comes out of it.
        ready = jnp.maximum(prefill.lengths - _SHIFT - 1, 0)
        empty = network.init_cache(weights, batch, prefill.slots)
        held, _ = cache.read_chunks(run, empty, ready, total, prefill.chunk)
        at = ready[:, None, None]
        last = fuse(tuple(jnp.take_along_axis(x, at, axis=1) for x in prefill.features))
        room = params.drafter.depth + 1  # entries that a round may commit
        hidden = jnp.zeros((batch, room, last.shape[-1]), last.dtype)
        return Pending(cache=held, hidden=hidden.at[:, :1].set(last))

    def draft(params: Params, key: Array, state: Pending, context: Context):
        read = reader(params)
        start, held = growing.read_pending(read, state, context, _SHIFT)
        proposal = growing.draft(read, start, held, shape, key, context)
        return proposal, Pending(cache=held, hidden=state.hidden)

    def update(params: Params, state: Pending, outcome: Outcome) -> Pending:
        weights, _ = split_draft(params, name, mapped)
        at = outcome.path[..., None]
        states = tuple(jnp.take_along_axis(x, at, axis=1) for x in outcome.scores.features)
        return Pending(cache=state.cache, hidden=network.fuse(weights, states))

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name=name,
        depth=depth,
        nodes=nodes,
        features=network.features,
        tree=not isinstance(shape, Paths) or shape.count > 1,
    )


def reader_of(
    network: FeatureNetwork, params: Params, weights: PyTree, ids: VocabularyMap | None
) -> Reader:
    """The network with its weights, and the target's embedding and head."""
    model, target = params.model, params.target
    embed = functools.partial(model.embed, target)
    unembed = functools.partial(model.unembed, target)

    def forward(tokens, hidden, positions, held, mask, earlier=None):
        embedded = network.embed(weights, embed, tokens)
        return network.forward(weights, embedded, hidden, positions, held, mask, earlier)

    d2t = None if ids is None else ids.d2t
    return Reader(
        forward=forward,
        logits=lambda hidden: network.unembed(weights, unembed, hidden),
        target_ids=lambda tokens: tokens if d2t is None else tokens + d2t[tokens],
        target_logits=lambda logits: onto_target(logits, model.vocab_size, d2t),
    )


def check_target(network: FeatureNetwork, params: Params, name: str) -> None:
    """Refuses a target that the network was not made for.

    Raises:
      ValueError: the target has no embedding function, or another vocabulary.
    """
    if params.model.embed is None:
        raise ValueError(f"params.model has no `embed`, which the drafter {name} needs")
    if params.model.vocab_size != network.target_vocab:
        raise ValueError(
            f"the drafter {name} was made for a target of {network.target_vocab} tokens, "
            f"params.model has {params.model.vocab_size}"
        )
