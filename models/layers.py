"""The parts that layers are made of: products with weights, norms, look-up in tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.config import DecoderConfig
from specjax.models.quantized import QuantizedTensor, dequantize, elements, in_order_of

__all__ = ["ACTIVATIONS", "LayerNorm", "Linear", "RMSNorm", "Table", "look_up", "matmul", "norm"]

_BLOCK = 1 << 17  # elements of a quantised weight that a CPU converts at a time, at most

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def matmul(x: Array, weight: Array | QuantizedTensor) -> Array:
    """`x [..., in]` times `weight [out, in]` transposed, accumulated in float32: `[..., out]`."""
    lead = x.shape[:-1]
    x = x.reshape(math.prod(lead), x.shape[-1]).astype(weight.dtype)
    rows, cpu = x.shape[0], jax.default_backend() == "cpu"
    if isinstance(weight, QuantizedTensor):
        product = _matmul_quantized_on_cpu if cpu else _dot_quantized
    else:
        product = _matmul_on_cpu if cpu else _dot
    return product(x, weight)[:rows].reshape(*lead, weight.shape[0])


def _dot(a: Array, b: Array) -> Array:
    """`[m, k]` and `[n, k]` to float32 `[m, n]`."""
    exact = b.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _matmul_on_cpu(x: Array, weight: Array) -> Array:
    """The form that XLA's CPU backend runs fastest at decode sizes (benchmarks/matmul.py).

    A few rows of float32 go faster with the weight as the left operand, in fours; the barriers
    keep the compiler from turning the product round again. One row below float32 takes a slow
    path, two rows do not. May return more rows than it got.
    """
    rows = x.shape[0]
    if weight.dtype != jnp.float32:
        return _dot(jnp.pad(x, ((0, 1), (0, 0))) if rows == 1 else x, weight)
    if not 1 < rows < 64:
        return _dot(x, weight)
    x = jax.lax.optimization_barrier(jnp.pad(x, ((0, -rows % 4), (0, 0))))
    return jax.lax.optimization_barrier(_dot(weight, x)).T


def _dot_quantized(x: Array, weight: QuantizedTensor) -> Array:
    """Converts the weight on its way into the product; a scale a row is left for the result."""
    if weight.offsets is not None:
        return _dot(x, dequantize(weight))
    return _dot(x, weight.values.astype(weight.dtype)) * weight.scales[None, :, 0]


@jax.jit  # traced once for equal shapes
def _matmul_quantized_on_cpu(x: Array, weight: QuantizedTensor) -> Array:
    """Converts a few rows of the weight at a time, which then stay in the processor's cache.

    In float32, where a conversion as a whole takes longer than the product
    (benchmarks/matmul.py). May return more rows than it got.
    """
    x, (out, width) = x.astype(jnp.float32), weight.shape
    size = 1 << max((_BLOCK // width).bit_length() - 1, 0)  # rows of a block
    blocks = out // size
    # Bytes that hold two elements are never put in one order: each half meets its own inputs.
    columns = in_order_of(weight, x)

    def product(block: QuantizedTensor) -> Array:
        return sum(map(_matmul_on_cpu, columns, elements(block, jnp.float32)))

    found = []
    if blocks:
        full = weight[: blocks * size]
        split = jax.tree.map(lambda part: part.reshape(blocks, size, part.shape[-1]), full)
        y = jax.lax.map(product, split)  # [blocks, rows, size]
        found.append(y.swapaxes(0, 1).reshape(y.shape[1], blocks * size))
    if out % size:
        found.append(product(weight[blocks * size :]))
    return jnp.concatenate(found, axis=1)


def look_up(table: Array | QuantizedTensor, index: Array) -> Array:
    """Rows of `table [V, E]` at `index`."""
    if isinstance(table, QuantizedTensor):
        return dequantize(table[index])
    if table.dtype.itemsize != 2 or jax.default_backend() != "cpu":
        return table[index]
    # XLA's CPU backend would keep a float32 copy of a whole 16-bit float table to gather from, and
    # without the barrier a copy of the bits.
    table, index = jax.lax.optimization_barrier((table, index))
    rows = jax.lax.bitcast_convert_type(table, jnp.uint16)[index]
    return jax.lax.bitcast_convert_type(rows, table.dtype)


class Linear(nnx.Module):
    """An affine map with its weight stored [out, in]."""

    def __init__(self, axes: tuple[Any, Any], shape: tuple[int, int], bias: bool, rngs: nnx.Rngs):
        scale = shape[1] ** -0.5
        self.weight = nnx.Param(
            scale * jax.random.normal(rngs.params(), shape, jnp.float32), logical_axes=axes
        )
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape[0], jnp.float32), logical_axes=axes[:1])

    def __call__(self, x: Array) -> Array:
        """`[..., in]` to `[..., out]`, dtype of `x`."""
        y = matmul(x, self.weight[...])
        if hasattr(self, "bias"):
            y = y + _last(self.bias[...], y.ndim)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale), in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, axis: str = "embed"):
        self.scale = nnx.Param(jnp.full(size, 1.0 - offset, jnp.float32), logical_axes=(axis,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Array) -> Array:
        """`[..., E]` to `[..., E]`, dtype of `x`."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * (self.offset + _last(self.scale[...], y.ndim))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias, in float32 (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("embed",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """`[..., E]` to `[..., E]`, dtype of `x`."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * _last(self.scale[...], y.ndim) + _last(self.bias[...], y.ndim)
        return y.astype(x.dtype)


def norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """A norm over the model's width, of the kind that a configuration wants."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


class Table(nnx.Module):
    """One row an index, `[rows, E]`: tokens or positions."""

    def __init__(self, rows: int, width: int, axis: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (rows, width), jnp.float32),
            logical_axes=(axis, "embed"),
        )

    def __call__(self, index: Array) -> Array:
        """Rows at `index`, float32."""
        return look_up(self.weight[...], index).astype(jnp.float32)


def _last(x: Array, rank: int) -> Array:
    """A vector in float32, shaped to broadcast along the last of `rank` axes."""
    return x.astype(jnp.float32).reshape((1,) * (rank - 1) + (-1,))
