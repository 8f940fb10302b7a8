"""The public step: arrays in, a verdict out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.accept.chain import speculative_sampling
from specjax.accept.laws import dense_law
from specjax.accept.rule import Acceptance
from specjax.types import Proposal, Verdict, check_verdict

__all__ = ["accept_and_resample"]


@functools.partial(jax.jit, static_argnames=("acceptance",))
def accept_and_resample(
    key: Array,
    proposal: Proposal,
    probs: Array,
    *,
    positions: Array | None = None,
    acceptance: Acceptance | None = None,
) -> Verdict:
    """Decides on a proposal from the target's probabilities: sees neither models nor caches.

    Args:
      key: `[B]` keys, one a row, or one key, from which each row gets its own.
      proposal: N nodes a row.
      probs: `[B, M, V]` float32, p after each node (node 0 is the root).
      positions: `[B]` int32, where each row's first drafted token would stand (default 0); two
        calls for the same row must not give the same position an outcome twice.
      acceptance: the rule; default `speculative_sampling()`.

    Returns:
      The accepted path, and the tokens to emit: accepted drafts, then one more.
    """
    batch, nodes = proposal.tokens.shape
    rule = speculative_sampling() if acceptance is None else acceptance
    key = sampling.threefry(key)
    keys = sampling.row_keys(key, batch) if key.ndim == 0 else key
    if positions is None:
        positions = jnp.zeros(batch, jnp.int32)
    verdict = rule.judge(keys, proposal, dense_law(probs), positions, nodes)
    check_verdict(verdict, {"B": batch, "P": nodes + 1})
    return verdict
