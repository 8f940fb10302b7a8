"""Drafters of trees over a Markov draft law, for tests: `params.draft` is `[V, V]` logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.sampling import Purpose
from specjax.types import Drafter, Proposal


@functools.cache
def markov_tree(parents: tuple[int, ...], drawn: str, depth: int) -> Drafter:
    """Drafts a tree of one shape, with random numbers that are new in each round.

    Args:
      drawn: how siblings are drawn, as in `tests.accept.laws.drafts`.
    """

    def init(params, prefill):
        return ()

    def draft(params, key, state, context):
        tokens, laws = [], []
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        for node, parent in enumerate(parents, start=1):
            base = jax.nn.softmax(params.draft[tokens[parent - 1] if parent else last], axis=-1)
            own = base
            for sibling in range(1, node):
                if drawn != "replacement" and parents[sibling - 1] == parent:
                    taken = jax.nn.one_hot(tokens[sibling - 1], base.shape[-1]) > 0
                    own = jnp.where(taken, 0.0, own)
            own = own / jnp.sum(own, axis=-1, keepdims=True)
            if drawn == "top_k":
                token = jnp.argmax(own, axis=-1).astype(jnp.int32)
            else:
                keys = sampling.at_positions(key, Purpose.DRAFT, context.lengths)
                keys = jax.vmap(lambda k, node=node: jax.random.fold_in(k, node))(keys)
                token = sampling.draw(keys, own)
            tokens.append(token)
            laws.append(base if drawn == "base" else own)
        tokens = jnp.stack(tokens, axis=1)
        yes = jnp.ones(tokens.shape, bool)
        proposal = Proposal(
            tokens=tokens,
            parents=jnp.asarray(parents, jnp.int32),
            probs=None if drawn == "top_k" else jnp.stack(laws, axis=1),
            valid=yes,
            candidate=yes,
        )
        return proposal, state

    def update(params, state, outcome):
        return state

    return Drafter(
        init=init, draft=draft, update=update, name="markov_tree", depth=depth, nodes=len(parents)
    )
