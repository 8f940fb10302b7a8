"""Arrays in 8 or 4 bits: integers, and a scale for each row or for each group of a row.

A weight `[out, in]`, a stack of them, or the keys and values of tokens: the last axis is the one
that is cut into groups. An element is its integer times the scale of its group; zero stays zero.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.types import record, static

__all__ = [
    "BITS",
    "QuantizedTensor",
    "as_array",
    "dequantize",
    "empty_slots",
    "integers",
    "quantize",
    "quantize_weight",
    "stored_like",
]

BITS = {"int8": 8, "int4": 4}
_GROUP = 32  # of 4 bits


@record
class QuantizedTensor:
    """An array `[..., out, in]` in few bits, wherever a plain array may stand in weights."""

    values: Array  # [..., in] int8; of 4 bits [..., in / 2] uint8, two integers to a byte
    scales: Array  # [..., in / group] float32; of 4 bits bfloat16
    bits: int = static()
    dtype: Any = static()  # what it stands for: products are taken in this type

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        *lead, last = self.values.shape
        return (*lead, last * (8 // self.bits))

    @property
    def ndim(self) -> int:
        """Of the array that it stands for."""
        return self.values.ndim

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """A part of it; the last axis can be cut only where one scale serves all of it."""
        return jax.tree.map(lambda x: x[index], self)


def quantize(array: Any, bits: int, group: int | None = None) -> QuantizedTensor:
    """Rounds to the nearest multiple of a scale that makes the largest element just fit.

    Args:
      array: `[..., in]` of a floating type.
      bits: 8 or 4.
      group: elements of the last axis that share a scale; None: all of them with 8 bits, 32 with 4.

    Returns:
      The integers and scales; with 8 bits no element is off by more than half a scale.

    Raises:
      ValueError: bits, or a group that does not divide the last axis (or is odd, with 4 bits).

    Example:
      >>> small = quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), 8)
      >>> small.values.tolist(), dequantize(small).round(2).tolist()
      ([[127, -64, 32, 0]], [[1.0, -0.5, 0.25, 0.0]])
    """
    array = jnp.asarray(array)
    if bits not in BITS.values():
        raise ValueError(f"bits must be 8 or 4, got {bits!r}")
    if not array.ndim or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"array must be floating point with at least one axis, got {array.dtype} of shape "
            f"{array.shape}"
        )
    size = array.shape[-1]
    if group is None:
        group = size if bits == 8 else _GROUP
    if group < 1 or size % group or (bits == 4 and group % 2):
        raise ValueError(
            f"group must divide the last axis ({size}){' and be even' if bits == 4 else ''}, "
            f"got {group}"
        )
    return _quantize(array, bits, group)


@functools.partial(jax.jit, static_argnames=("bits", "group"), inline=True)
def _quantize(array: Array, bits: int, group: int) -> QuantizedTensor:
    *lead, size = array.shape
    x = array.astype(jnp.float32).reshape(*lead, size // group, group)
    high = 2 ** (bits - 1) - 1
    if bits == 8:
        scales = jnp.max(jnp.abs(x), axis=-1) / high
    else:
        # There is one more integer below zero than above: the largest element becomes it.
        low, top = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
        scales = jnp.where(-low > top, -low, -top) / (high + 1)
        scales = scales.astype(jnp.bfloat16)
    step = scales.astype(jnp.float32)[..., None]
    x = jnp.round(x / jnp.where(step == 0, 1.0, step))
    x = jnp.clip(x, -high if bits == 8 else -high - 1, high).astype(jnp.int8)
    if bits == 4:
        # A byte holds an element of a group's first half below one of its second half.
        first, second = jnp.split((x + 8).astype(jnp.uint8), 2, axis=-1)
        x = first | (second << 4)
    return QuantizedTensor(values=x.reshape(*lead, -1), scales=scales, bits=bits, dtype=array.dtype)


def integers(tensor: QuantizedTensor) -> Array:
    """The integers as int8, `[..., in / group, group]`."""
    *lead, groups = tensor.scales.shape
    values = tensor.values.reshape(*lead, groups, -1)
    if tensor.bits == 8:
        return values
    both = jnp.concatenate([values & 15, values >> 4], axis=-1)
    return both.astype(jnp.int8) - 8


def dequantize(tensor: QuantizedTensor, dtype: Any = None) -> Array:
    """The array that it stands for, `[..., in]`."""
    x = integers(tensor).astype(jnp.float32) * tensor.scales.astype(jnp.float32)[..., None]
    return x.reshape(tensor.shape).astype(tensor.dtype if dtype is None else dtype)


def as_array(array: Array | QuantizedTensor) -> Array:
    """The array itself, or what it stands for."""
    return dequantize(array) if isinstance(array, QuantizedTensor) else array


# --- which weights ---------------------------------------------------------------------------


def quantize_weight(
    path: tuple[Any, ...], weight: Array | QuantizedTensor, bits: int
) -> Array | QuantizedTensor:
    """A weight of a decoder in at most so many bits.

    Vectors, routers and tables of positions stay as they are. With 4 bits the embedding and the
    head take 8: they are what rounding hurts most.

    Args:
      path: of the weight in the tree, e.g. `("layers", 3, "attn", "q", "weight")`.
      weight: `[out, in]`, or a stack of them.
      bits: 8 or 4.
    """
    if weight.ndim < 2 or "router" in path or "positions" in path:
        return weight
    if bits == 4 and path[0] in ("embed", "head"):
        bits = 8
    if isinstance(weight, QuantizedTensor) and weight.bits <= bits:
        return weight
    group = None if bits == 8 else math.gcd(weight.shape[-1], _GROUP)
    return quantize(as_array(weight), bits, group)


# --- keys and values -------------------------------------------------------------------------


def empty_slots(shape: tuple[int, ...], dtype: Any, bits: int | None) -> Array | QuantizedTensor:
    """Cache slots `[B, G, S, D]` of zeros; with bits, a scale for each slot of each head."""
    if bits is None:
        return jnp.zeros(shape, dtype)
    *lead, size = shape
    return QuantizedTensor(
        values=jnp.zeros(shape, jnp.int8),
        scales=jnp.zeros((*lead, min(size, 1)), jnp.float32),
        bits=bits,
        dtype=jnp.dtype(dtype),
    )


def stored_like(slots: Array | QuantizedTensor, new: Array) -> Array | QuantizedTensor:
    """Keys or values `[B, G, T, D]` in the form in which a cache holds them.

    What is not finite is held as 0: a token that is masked has weight 0 elsewhere, and 0 * NaN
    would spread. The token's own state stays as it is, so that its logits tell.
    """
    new = jnp.where(jnp.isfinite(new), new, 0)
    if isinstance(slots, QuantizedTensor):
        return quantize(new.astype(slots.dtype), slots.bits)
    return new.astype(slots.dtype)
