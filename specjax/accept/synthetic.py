"""Synthetic acceptance: drafts stand at given rates, whatever they are. For studies of speed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.accept.chain import chain_tried, judge_by_depth
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance
from specjax.types import Proposal

__all__ = ["synthetic_acceptance"]


def synthetic_acceptance(rates: Sequence[float]) -> Acceptance:
    """Keeps the draft at depth i with chance `rates[i - 1]`, given that those before it stand.

    Lossy: accepted tokens are the draft's own; it shows what a drafter with these acceptance rates
    would cost and gain. Beyond the given rates nothing stands. The next token is drawn from p at
    the last accepted draft. For chains, like `speculative_sampling`.

    Args:
      rates: numbers in [0, 1], at least one.

    Raises:
      ValueError: no rates, or one outside [0, 1].
    """
    try:
        values = np.asarray(rates, np.float64)
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 1 or not values.size or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(
            f"rates must be one number in [0, 1] for each depth, such as (0.8, 0.6), got {rates!r}"
        )
    return _synthetic(tuple(values.tolist()))


@functools.cache
def _synthetic(rates: tuple[float, ...]) -> Acceptance:
    def keep(proposal: Proposal, law: TargetLaw, depth: int) -> Array:
        padded = np.zeros(depth, np.float32)
        padded[: len(rates)] = rates[:depth]
        return jnp.where(chain_tried(proposal, depth), jnp.asarray(padded)[None, :], 0.0)

    def following(proposal: Proposal, law: TargetLaw, accepted: Array, depth: int) -> Array:
        return law.row(accepted)

    judge = judge_by_depth(keep, following)
    return Acceptance(judge=judge, name="synthetic_acceptance", lossless=False, chain=True)
