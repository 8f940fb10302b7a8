"""How well drafts were accepted, from the counters of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specjax.types import Stats

__all__ = ["AcceptanceSummary", "summary"]


class AcceptanceSummary(NamedTuple):
    """Over all rows of a run. NaN where nothing was counted."""

    tau: float  # block efficiency: tokens a round (Leviathan et al. 2023, section 3)
    cumulative: np.ndarray  # [K]: share of rounds that accepted depth 1..K
    conditional: np.ndarray  # [K]: of the rounds that accepted the depth before, the share
    hits: np.ndarray  # [N]: share of rounds that accepted node 1..N of a tree of one shape


def summary(stats: Stats) -> AcceptanceSummary:
    """Acceptance by depth and by node.

    A round that the end of its row cut counts with the tokens that it emitted as drafts, and with
    one more, as if it had been whole.

    Args:
      stats: of `specjax.decode`.

    Example:
      >>> import jax.numpy as jnp
      >>> counted = Stats(
      ...     rounds=jnp.array([4]), histogram=jnp.array([[1, 1, 2]]), proposed=jnp.array([[4, 4]]),
      ...     accepted=jnp.array([[3, 2]]), hits=jnp.array([[3, 2]]))
      >>> found = summary(counted)
      >>> found.tau, found.cumulative.tolist(), found.conditional.round(3).tolist()
      (2.25, [0.75, 0.5], [0.75, 0.667])
    """
    add = lambda x: np.sum(np.asarray(x), axis=0, dtype=np.float64)
    rounds, accepted, hits = add(stats.rounds), add(stats.accepted), add(stats.hits)
    with np.errstate(invalid="ignore", divide="ignore"):
        before = np.concatenate([rounds[None], accepted])[:-1]
        return AcceptanceSummary(
            tau=float(1 + np.sum(accepted) / rounds),
            cumulative=accepted / rounds,
            conditional=accepted / before,
            hits=hits / rounds,
        )
