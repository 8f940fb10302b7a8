"""Confidences beside what became of the drafts, and temperatures that make them agree.

Drafts are made and verified by the driver; of every round but a row's last, which its end may have
cut, the confidences and how far the draft stood are kept.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.analysis import (
    expected_calibration_error,
    sequential_temperature_scaling,
    survival,
)
from specjax.checkpoints import set_options
from specjax.train.evaluation import decoded
from specjax.types import Context, Drafter, Outcome, Params, PyTree, record

__all__ = ["Confidences", "calibrate", "calibration_error", "confidences", "write_temperatures"]


class Confidences(NamedTuple):
    """Rounds of a drafter."""

    logits: np.ndarray  # [N, K] float32, of the confidence of each slot
    stood: np.ndarray  # [N, K] int32: the drafts up to this slot all stood


@record
class _Keeping:
    inner: PyTree
    now: Array  # [B, K] float32: confidences of this round
    kept: Array  # [B, R, K] float32
    accepted: Array  # [B, R] int32
    rounds: Array  # [B] int32


@functools.cache
def _keeping(drafter: Drafter, rounds: int) -> Drafter:
    depth = drafter.depth

    def init(params: Params, prefill: Any) -> _Keeping:
        batch = prefill.tokens.shape[0]
        return _Keeping(
            inner=drafter.init(params, prefill),
            now=jnp.zeros((batch, depth), jnp.float32),
            kept=jnp.zeros((batch, rounds, depth), jnp.float32),
            accepted=jnp.zeros((batch, rounds), jnp.int32),
            rounds=jnp.zeros(batch, jnp.int32),
        )

    def draft(params: Params, key: Array, state: _Keeping, context: Context):
        proposal, inner = drafter.draft(params, key, state.inner, context)
        if proposal.confidence is None or drafter.nodes != depth:
            raise ValueError(
                f"the drafter {drafter.name} has no confidence for each slot of a chain"
            )
        kept = {"kept": state.kept, "accepted": state.accepted, "rounds": state.rounds}
        return proposal, _Keeping(inner=inner, now=proposal.confidence, **kept)

    def update(params: Params, state: _Keeping, outcome: Outcome) -> _Keeping:
        here = jnp.arange(rounds)[None, :] == state.rounds[:, None]
        return _Keeping(
            inner=drafter.update(params, state.inner, outcome),
            now=state.now,
            kept=jnp.where(here[..., None], state.now[:, None], state.kept),
            accepted=jnp.where(here, outcome.accepted[:, None], state.accepted),
            rounds=state.rounds + 1,
        )

    return drafter._replace(init=init, draft=draft, update=update)


def confidences(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    rows: int = 8,
    seed: int = 0,
) -> Confidences:
    """Decodes, and keeps the confidence of every draft beside how far it stood.

    Args:
      params: from `specjax.load`, with a drafter of chains that has confidences, with no threshold
        and no temperatures of its own: what a draft leaves out cannot be judged.
      prompts: token ids.
      max_new_tokens: of each answer.
      temperature: of target and drafts.
      rows: prompts decoded at a time.
      seed: of the sampling.

    Raises:
      ValueError: a drafter without confidences, or no row with two rounds.
    """
    made = params.replace(drafter=_keeping(params.drafter, max_new_tokens))
    logits, stood = [], []
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    for count, result, state in decoded(made, prompts, rows=rows, seed=seed, **options):
        kept, accepted = np.asarray(state.kept), np.asarray(state.accepted)
        for row, rounds in enumerate(np.asarray(result.stats.rounds)[:count].tolist()):
            chance = np.clip(kept[row, : rounds - 1], 1e-6, 1 - 1e-6)
            logits.append(np.log(chance) - np.log1p(-chance))
            slot = np.arange(chance.shape[1])[None, :]
            stood.append(slot < accepted[row, : rounds - 1, None])
    if not sum(map(len, logits)):
        raise ValueError("no row has a round before its last: give prompts with longer answers")
    return Confidences(
        np.concatenate(logits).astype(np.float32), np.concatenate(stood).astype(np.int32)
    )


def calibrate(found: Confidences, *, least: int = 200) -> tuple[float, ...]:
    """Temperatures for `confidence_temperatures`, by sequential temperature scaling.

    Args:
      found: rounds.
      least: a slot that fewer of them reached says too little of itself, and keeps 1.
    """
    reached = np.concatenate([[len(found.stood)], found.stood.sum(axis=0)[:-1]])
    enough = int(np.sum(reached >= least))  # these are the first ones
    if not enough:
        return (1.0,) * len(reached)
    some = sequential_temperature_scaling(found.logits[:, :enough], found.stood[:, :enough])
    return (*(float(x) for x in some), *(1.0,) * (len(reached) - enough))


def calibration_error(
    found: Confidences, temperatures: Sequence[float] | None = None
) -> np.ndarray:
    """The expected calibration error of each slot's chance to be reached and to stand, `[K]`.

    Args:
      found: rounds that the temperatures were not found on.
      temperatures: of the slots; None: 1.
    """
    scale = np.ones(found.logits.shape[1]) if temperatures is None else np.asarray(temperatures)
    chance = np.asarray(jax.nn.sigmoid(found.logits / scale[None, :]))
    return expected_calibration_error(survival(chance), found.stood)


def write_temperatures(folder: str | os.PathLike[str], temperatures: Sequence[float]) -> None:
    """Puts the temperatures among the options of a drafter's folder, for `specjax.load`."""
    found = [round(x, 4) for x in temperatures]
    set_options(folder, {"confidence_temperatures": found})
