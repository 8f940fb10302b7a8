"""Rows for closed-form starts: the target's states ahead, and what a drafter knows of them.

place t   states t, and perhaps the token at t + 1, tell of the states at t + 1, t + 2, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.train.least_squares import least_squares, unit_rms
from specjax.train.recipe import aligned, same_text, worth
from specjax.train.windows import Batch
from specjax.types import Params, PyTree

__all__ = ["Rows", "solved", "states_ahead", "token_and_states"]

# A batch to x [B, T, D] and y [B, T, n E], and how much each place counts [B, T].
Rows = Callable[[PyTree, Batch], tuple[Array, Array, Array]]


def token_and_states(
    params: Params, target: PyTree, batch: Batch, features: tuple[int, ...]
) -> Array:
    """The next token's embedding and the states here, each with a root mean square of 1."""
    token = params.model.embed(target, aligned(batch.tokens, 1))
    parts = [unit_rms(token), *(unit_rms(batch.state(i)) for i in features)]
    return jnp.concatenate(parts, axis=-1)


def states_ahead(batch: Batch, last: int, count: int, prompt_weight: float) -> tuple[Array, Array]:
    """The `count` next states, `[B, T, count E]`, and how much places count that have them all."""
    goals = [aligned(batch.state(last), 1 + i) for i in range(count)]
    known = same_text(batch, 0, 1 + count) & aligned(batch.known, count)
    return jnp.concatenate(goals, axis=-1), worth(known, aligned(batch.answer, 2), prompt_weight)


def solved(
    target: PyTree, rows: Rows, batches: Iterable[Batch]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The least squares of all batches.

    Returns:
      A `[n E, D]`; and x, y of the places of the first batch that count, to measure sizes on.
    """
    run = jax.jit(rows)
    first: list[tuple[np.ndarray, np.ndarray]] = []

    def flat() -> Iterator[tuple[Array, Array, Array]]:
        for batch in batches:
            x, y, here = run(target, batch)
            x, y, here = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), here.reshape(-1)
            if not first and bool(jnp.any(here > 0)):
                chosen = np.asarray(here) > 0
                first.append((np.asarray(x)[chosen], np.asarray(y)[chosen]))
            yield x, y, here

    found, _ = least_squares(flat())
    return found, *first[0]
