"""Draft: guess the next tokens cheaply."""

from __future__ import annotations

import functools

import jax
from jax import Array

from specjax.types import Context, Params, Proposal, PyTree, check_proposal

__all__ = ["draft_step"]


@functools.partial(jax.jit, inline=True)
def draft_step(
    params: Params, key: Array, state: PyTree, context: Context
) -> tuple[Proposal, PyTree]:
    """One call of the drafter.

    Args:
      params: its `drafter` is asked.
      key: `[B]` keys, one a row.
      state: the drafter's, from its `init` or `update`.
      context: the rows so far.

    Returns:
      A proposal of N nodes a row, and the drafter's state.
    """
    proposal, state = params.drafter.draft(params, key, state, context)
    check_proposal(
        proposal,
        {"B": context.lengths.shape[0], "N": params.drafter.nodes, "V": params.model.vocab_size},
    )
    return proposal, state
