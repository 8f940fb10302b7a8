"""Rotary position embedding: inverse frequencies for each scaling kind, and the rotation itself.

Reference: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Peng et al. 2023, "YaRN"
(arXiv:2309.00071).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models.config import RopeConfig

__all__ = ["KINDS", "inverse_frequencies", "rotate", "rotation"]


def _default(rope: RopeConfig, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    return inv_freq, 1.0


def _linear(rope: RopeConfig, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    return inv_freq / rope.factor, 1.0


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    original = rope.original_max_position
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq, 1.0


def _yarn(rope: RopeConfig, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    """Dimensions that turn often are kept, slow ones divided by `factor`, a linear ramp between."""
    dim = 2 * inv_freq.size

    def dimension_of(turns: float) -> float:  # which dimension makes so many turns in the context
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    attention = rope.attention_factor
    if attention is None:
        attention = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp), attention


KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular speed of each pair of dimensions.

    Args:
      rope: kind and constants.
      head_dim: D, even.

    Returns:
      `[D / 2]` float32 radians a position, and the factor on cos and sin (1 but for yarn).

    Raises:
      ValueError: unknown kind, or a kind whose original context length is missing.
    """
    if rope.kind not in KINDS:
        raise ValueError(
            f"rope kind {rope.kind!r} is not supported; supported kinds: {', '.join(KINDS)}"
        )
    if rope.kind in ("llama3", "yarn") and not rope.original_max_position:
        raise ValueError(f"rope kind {rope.kind!r} needs original_max_position, got none")
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaled, attention = KINDS[rope.kind](rope, plain)
    return scaled.astype(np.float32), float(attention)


def rotation(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin of every angle.

    Args:
      positions: `[B, T]` int32, absolute.

    Returns:
      Two arrays `[B, T, D / 2]` float32.
    """
    inv_freq, attention = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * inv_freq[None, None, :]
    return jnp.cos(angles) * attention, jnp.sin(angles) * attention


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates each pair (d, d + R/2) of the first R dimensions of every head by its angle.

    Args:
      x: `[B, T, H, D]`.
      cos, sin: `[B, T, R / 2]` from `rotation`.

    Returns:
      `[B, T, H, D]`, dtype of `x`; computed in float32.
    """
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if rest.shape[-1]:
        parts.append(rest)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
