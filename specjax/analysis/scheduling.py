"""How much of each row's draft to verify, when a larger batch makes every step slower.

With a the chance that a row's draft stands up to some slot, B the tokens that a step verifies, tau
the tokens that it is expected to emit, and SPS(B) steps a second, throughput is tau * SPS(B). Slots
are taken from the highest a down, as long as each one raises it, and the first that does not ends
the search. So whether a slot is verified depends on confidences of slots before it or as high as
its own, never on what was drafted later, and the law of the output stays the target's.

Reference: DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

__all__ = ["verify_lengths"]


def verify_lengths(
    confidence: Array, steps_per_second: Sequence[float] | Array, running: Array | None = None
) -> Array:
    """How many drafts of each row to verify.

    Args:
      confidence: `[R, K]`, of each slot if the drafts before it stand, 0 to 1.
      steps_per_second: SPS(1), SPS(2), ...; sizes beyond the last one are never chosen.
      running: `[R]` bool, rows that count; None: all.

    Returns:
      `[R]` int32, 0 to K; 0 for rows that do not run.

    Example:
      >>> verify_lengths(jnp.array([[0.9, 0.2]]), (10.0, 9.0, 8.0))
      Array([1], dtype=int32)
    """
    rows, depth = confidence.shape
    speeds = jnp.asarray(steps_per_second, jnp.float32)
    running = jnp.ones(rows, bool) if running is None else running
    chance = jnp.cumprod(confidence.astype(jnp.float32), axis=1)
    chance = jnp.where(running[:, None], chance, -1.0).reshape(-1)
    # Stable: of equal chances in a row the earlier slot comes first.
    order = jnp.argsort(-chance, stable=True)
    gain = chance[order]
    count = jnp.sum(running, dtype=jnp.int32)
    size = count + jnp.arange(rows * depth + 1)
    expected = count + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.maximum(gain, 0.0))])
    known = (size >= 1) & (size <= speeds.size)
    speed = jnp.where(known, speeds[jnp.clip(size - 1, 0, speeds.size - 1)], 0.0)
    throughput = expected * speed
    better = (throughput[1:] > throughput[:-1]) & (gain >= 0)
    taken = jnp.cumprod(better.astype(jnp.int32))
    return jnp.zeros(rows * depth, jnp.int32).at[order].set(taken).reshape(rows, depth).sum(axis=1)
