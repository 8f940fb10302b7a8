"""A smaller model drafts a tree, or independent paths.

Reference: Miao et al. 2023 (arXiv:2305.09781), SpecInfer; Sun et al. 2023 (arXiv:2310.15141),
SpecTr.
"""

from __future__ import annotations

import functools
from typing import Any

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
from specjax.drafters.vocabulary import check_map, draft_ids, onto_target, split_draft
from specjax.types import Context, Drafter, Forward, Model, Outcome, Params, Prefill

__all__ = ["draft_tree"]


def draft_tree(
    model: Model,
    num_speculative_tokens: int = 4,
    *,
    tree: DynamicTree | str | Any = None,
    paths: int = 1,
    mapped: bool = False,
) -> Drafter:
    """Drafts with `model`, whose weights are `params.draft`.

    Paths are drawn from the same law as the target's, and that law is kept as q. The nodes of a
    tree are the most likely tokens: q is one-hot. The state is the draft's KV cache, which holds
    committed tokens only: a round first reads those that the last one committed.

    Args:
      model: a decoder. Vocabularies as for `draft_model`.
      num_speculative_tokens: K of the paths; a tree has its own.
      tree: None; a `dynamic_tree(...)`; the name of a published shape, or a list of paths of ranks.
      paths: k independent chains from the root.
      mapped: as for `draft_model`.

    Raises:
      ValueError: a bad number, both a tree and paths, or a tree that needs more tokens than the
        draft has.
    """
    shape = shape_of(num_speculative_tokens, tree, paths, model.vocab_size)
    return _draft_tree(model, shape, mapped)


@functools.cache
def _draft_tree(model: Model, shape: Shape, mapped: bool) -> Drafter:
    depth, nodes = size_of(shape)

    def reader(params: Params) -> Reader:
        weights, ids = split_draft(params, "draft_tree", mapped)

        def forward(tokens, hidden, positions, held, mask, earlier=None) -> Forward:
            own = draft_ids(tokens, ids, model.vocab_size)
            out = model.forward(weights, own, positions, held, mask, (), earlier)
            return Forward(hidden=out.hidden, features=(hidden,), block=out.block)

        d2t = None if ids is None else ids.d2t
        return Reader(
            forward=forward,
            logits=functools.partial(model.unembed, weights),
            target_ids=lambda tokens: tokens if d2t is None else tokens + d2t[tokens],
            target_logits=lambda logits: onto_target(logits, params.model.vocab_size, d2t),
        )

    def init(params: Params, prefill: Prefill) -> Pending:
        weights, ids = split_draft(params, "draft_tree", mapped)
        check_map(params, ids, model.vocab_size)
        batch = prefill.tokens.shape[0]
        held, _ = cache.prefill(
            model,
            weights,
            model.init_cache(weights, batch, prefill.slots),
            draft_ids(prefill.tokens, ids, model.vocab_size),
            prefill.lengths - 1,
            chunk=prefill.chunk,
        )
        # A model hands on no state beside its cache; a round commits up to so many tokens.
        return Pending(cache=held, hidden=jnp.zeros((batch, params.drafter.depth + 1, 0)))

    def draft(params: Params, key: Array, state: Pending, context: Context):
        read = reader(params)
        start, held = growing.read_pending(read, state, context, 0)
        proposal = growing.draft(read, start, held, shape, key, context)
        return proposal, Pending(cache=held, hidden=state.hidden)

    def update(params: Params, state: Pending, outcome: Outcome) -> Pending:
        return state

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="draft_tree",
        depth=depth,
        nodes=nodes,
        tree=not isinstance(shape, Paths) or shape.count > 1,
    )
