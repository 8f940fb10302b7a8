"""Arrays in 8 or 4 bits: integers, and a scale for each row or for each group of a row.

A weight `[out, in]`, a stack of them, or the keys and values of tokens: the last axis is the one
that is cut into groups. An element is its integer times the scale of its group, plus the offset of
its group.
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
    "elements",
    "empty_slots",
    "in_order_of",
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

    values: Array  # [..., in] int8 or uint8; of 4 bits [..., in / 2] uint8, two to a byte
    scales: Array  # [..., in / group] float16; float32 without offsets
    offsets: Array | None = None  # [..., in / group] float16; None: 0, and one group
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
    """Rounds each element to the nearest of 2^bits levels.

    They are evenly spaced from the smallest to the largest element of a group; with 8 bits and one
    scale for the whole axis they lie evenly about zero, so that a product is scaled only once.

    Args:
      array: `[..., in]` of a floating type.
      bits: 8 or 4.
      group: elements of the last axis that share a scale; None: all of them with 8 bits, 32 with 4.

    Returns:
      The integers, scales and offsets: no element is off by more than half a scale, and what
      float16 loses of a group's scale and offset.

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
    if bits == 8 and group == size:
        scales, offsets = jnp.max(jnp.abs(x), axis=-1) / 127, None
        numbers = _nearest(x, scales[..., None], -127, 127).astype(jnp.int8)
    else:
        scales, offsets = _spacing(x, bits)
        above = x - offsets.astype(jnp.float32)[..., None]
        numbers = _nearest(above, scales.astype(jnp.float32)[..., None], 0, 2**bits - 1).astype(
            jnp.uint8
        )
    if bits == 4:
        # A byte holds an element of a group's first half below one of its second half.
        first, second = jnp.split(numbers, 2, axis=-1)
        numbers = first | (second << 4)
    return QuantizedTensor(
        values=numbers.reshape(*lead, -1),
        scales=scales,
        offsets=offsets,
        bits=bits,
        dtype=array.dtype,
    )


def _spacing(x: Array, bits: int) -> tuple[Array, Array]:
    """Scales and offsets `[...]` of groups `[..., group]`, those that err least.

    Levels from the smallest to the largest element, or about zero with the largest in size on the
    first level; with 8 bits also 16 times the levels of 4 bits, or the largest on the last level.
    So what was in 4 or 8 bits before (GGUF: Q4_1, Q4_0, Q8_0) stays exactly as it was.
    """
    low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
    span, extreme = high - low, jnp.where(high > -low, high, low)
    half = 2 ** (bits - 1)
    first = extreme / -half
    choices = [(span / (2**bits - 1), low), (first, -half * first)]
    if bits == 8:
        last = jnp.abs(extreme) / 127
        choices += [(span / 240, low), (last, -half * last)]

    def error(choice: tuple[Array, Array]) -> Array:
        # Float16 holds less than float32: what is stored is what elements are rounded by.
        scale, offset = (part.astype(jnp.float32)[..., None] for part in choice)
        levels = _nearest(x - offset, scale, 0, 2**bits - 1)
        return jnp.max(jnp.abs(levels * scale + offset - x), axis=-1)

    stored = [jax.tree.map(lambda part: part.astype(jnp.float16), choice) for choice in choices]
    best = stored[0]
    for other in stored[1:]:
        better = error(other) < error(best)
        best = jax.tree.map(functools.partial(jnp.where, better), other, best)
    return best


def _nearest(x: Array, scales: Array, low: int, high: int) -> Array:
    scales = jnp.where(scales == 0, 1.0, scales)
    return jnp.clip(jnp.round(x / scales), low, high)


def integers(tensor: QuantizedTensor) -> Array:
    """The integers, one a byte: `[..., in / group, group]`."""
    return jnp.concatenate(_numbers(tensor), axis=-1)


def _numbers(tensor: QuantizedTensor) -> list[Array]:
    """The first and the second half of each group `[..., in / group, group / 2]`; of 8 bits both
    as one `[..., in / group, group]`."""
    *lead, groups = tensor.scales.shape
    values = tensor.values.reshape(*lead, groups, -1)
    return [values] if tensor.bits == 8 else [values & 15, values >> 4]


def elements(tensor: QuantizedTensor, dtype: Any) -> list[Array]:
    """The array that it stands for in the parts in which its bytes hold it, whose order
    `in_order_of` gives to other arrays: `[..., in]`, or of 4 bits two `[..., in / 2]`."""
    scales = tensor.scales.astype(jnp.float32)[..., None]
    found = []
    for numbers in _numbers(tensor):
        x = numbers.astype(jnp.float32) * scales
        if tensor.offsets is not None:
            x = x + tensor.offsets.astype(jnp.float32)[..., None]
        found.append(x.reshape(*x.shape[:-2], -1).astype(dtype))
    return found


def in_order_of(tensor: QuantizedTensor, x: Array) -> list[Array]:
    """Parts of `x [..., in]` that belong to the parts of `elements(tensor)`."""
    if tensor.bits == 8:
        return [x]
    grouped = x.reshape(*x.shape[:-1], tensor.scales.shape[-1], 2, -1)
    return [grouped[..., half, :].reshape(*x.shape[:-1], -1) for half in range(2)]


def dequantize(tensor: QuantizedTensor, dtype: Any = None) -> Array:
    """The array that it stands for, `[..., in]`."""
    wanted = tensor.dtype if dtype is None else dtype
    grouped = [part.reshape(*tensor.scales.shape, -1) for part in elements(tensor, wanted)]
    return jnp.concatenate(grouped, axis=-1).reshape(tensor.shape)


def as_array(array: Array | QuantizedTensor) -> Array:
    """The array itself, or what it stands for."""
    return dequantize(array) if isinstance(array, QuantizedTensor) else array


# --- which weights ---------------------------------------------------------------------------


def quantize_weight(
    path: tuple[Any, ...], weight: Array | QuantizedTensor, bits: int
) -> Array | QuantizedTensor:
    """A weight of a decoder in at most so many bits, with a scale for each 32 inputs.

    Vectors, routers and tables of positions stay as they are. Embedding and head take 8 bits: they
    are what 4 bits hurt most.

    Args:
      path: of the weight in the tree, e.g. `("layers", 3, "attn", "q", "weight")`.
      weight: `[out, in]`, or a stack of them.
      bits: 8 or 4.
    """
    if weight.ndim < 2 or "router" in path or "positions" in path:
        return weight
    group = math.gcd(weight.shape[-1], _GROUP)
    bits = 8 if path[0] in ("embed", "head") or group < 8 else bits
    if isinstance(weight, QuantizedTensor) and weight.bits <= bits:
        return weight
    return quantize(as_array(weight), bits, weight.shape[-1] if group < 8 else group)


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
