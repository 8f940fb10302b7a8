"""Drafters of trees over a Markov draft law, for tests: `params.draft` is `[V, V]` logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.sampling import Purpose
from specjax.types import Drafter, Proposal


@functools.cache
def markov_tree(parents: tuple[int, ...], drawn: str, depth: int, fresh: bool = True) -> Drafter:
    """Drafts a tree of one shape.

    Args:
      drawn: how siblings are drawn, as in `tests.accept.laws.drafts`.
      fresh: whether random numbers are new in each round, as rules that judge a draft as a whole
        need them, or those of the token's position.
    """

    def init(params, prefill):
        return ()

    def draft(params, key, state, context):
        level, tokens, laws = [0], [], []
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        for node, parent in enumerate(parents, start=1):
            level.append(level[parent] + 1)
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
                at = context.lengths + (0 if fresh else level[node] - 1)
                keys = sampling.at_positions(key, Purpose.DRAFT, at)
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
