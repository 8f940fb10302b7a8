"""The decoder-only transformer, once: every family is a configuration of this one.

A pass reads the cache but never writes it: the keys and values of its own tokens come back as a
`Block`, and the caller appends those that it wants to keep. So a rejected draft never enters a
cache, for chains and for trees alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.config import DecoderConfig
from specjax.models.rope import inverse_frequencies, rotate, rotation
from specjax.types import Block, Cache, Forward, Model

__all__ = ["Decoder", "abstract_weights", "decoder_model", "first_layers", "random_weights"]


def matmul(x: Array, weight: Array) -> Array:
    """`x [..., in]` times `weight [out, in]` transposed, accumulated in float32: `[..., out]`."""
    lead = x.shape[:-1]
    x = x.reshape(math.prod(lead), x.shape[-1]).astype(weight.dtype)
    rows = x.shape[0]
    product = _matmul_on_cpu if jax.default_backend() == "cpu" else _dot
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


def look_up(table: Array, index: Array) -> Array:
    """Rows of `table [V, E]` at `index`."""
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
            y = y + self.bias[...].astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("embed",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """`[..., E]` to `[..., E]`, dtype of `x`."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


def attend(
    query: Array,
    block: tuple[Array, Array],
    cache: tuple[Array, Array],
    lengths: Array,
    mask: Array,
) -> Array:
    """Grouped-query attention over the cached tokens and the tokens of this block, one softmax.

    Args:
      query: `[B, T, H, D]`; heads `g * H / G ...` share key/value head g.
      block: keys and values `[B, G, T, D]` of this pass.
      cache: keys and values `[B, G, S, D]`; slots below `lengths` are seen by every query.
      lengths: `[B]` int32.
      mask: `[1 or B, T, T]` bool, who sees whom within the block.

    Returns:
      `[B, T, H, D]`, dtype of `query`.
    """
    batch, steps, heads, size = query.shape
    groups = block[0].shape[1]
    repeat = heads // groups
    # The queries of all heads of a group are rows of one product: [B, G, R * T, D].
    q = query.reshape(batch, steps, groups, repeat, size)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, groups, repeat * steps, size)
    q = q.astype(jnp.float32) * size**-0.5

    def product(equation: str, a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
        return jnp.einsum(
            equation, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32
        )

    slots = cache[0].shape[2]
    seen = jnp.arange(slots)[None, :] < lengths[:, None]  # [B, S]
    old = product("bgxd,bgsd->bgxs", q, cache[0])
    old = jnp.where(seen[:, None, None, :], old, -jnp.inf)
    new = product("bgxd,bgtd->bgxt", q, block[0])
    new = new.reshape(batch, groups, repeat, steps, steps)
    new = jnp.where(mask[:, None, None, :, :], new, -jnp.inf)
    new = new.reshape(batch, groups, repeat * steps, steps)

    # Every query sees at least itself, so the maximum is finite.
    top = jnp.maximum(jnp.max(old, axis=-1, initial=-jnp.inf), jnp.max(new, axis=-1))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = jnp.sum(old, axis=-1, keepdims=True) + jnp.sum(new, axis=-1, keepdims=True)
    out = product("bgxs,bgsd->bgxd", old, cache[1]) + product("bgxt,bgtd->bgxd", new, block[1])
    out = (out / total).reshape(batch, groups, repeat, steps, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, steps, heads, size).astype(query.dtype)


class Attention(nnx.Module):
    """Multi-head attention with shared key/value heads (Ainslie et al. 2023) and RoPE."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        width, size = config.hidden_size, config.head_dim
        heads, groups = config.num_heads * size, config.num_kv_heads * size
        bias = config.attention_bias
        self.head_dim = size
        # Only whole heads are split over devices.
        self.q = Linear((("heads", size), "embed"), (heads, width), bias, rngs)
        self.k = Linear((("kv_heads", size), "embed"), (groups, width), bias, rngs)
        self.v = Linear((("kv_heads", size), "embed"), (groups, width), bias, rngs)
        self.o = Linear(("embed", ("heads", size)), (width, heads), bias, rngs)

    def __call__(self, x, cos, sin, cache, lengths, mask) -> tuple[Array, tuple[Array, Array]]:
        """`x [B, T, E]` to `[B, T, E]`, and this block's keys and values `[B, G, T, D]`."""
        batch, steps, _ = x.shape

        def split(y: Array) -> Array:
            return y.reshape(batch, steps, -1, self.head_dim)

        def stored(y: Array) -> Array:
            return y.swapaxes(1, 2).astype(cache[0].dtype)

        query = rotate(split(self.q(x)), cos, sin)
        keys, values = stored(rotate(split(self.k(x)), cos, sin)), stored(split(self.v(x)))
        out = attend(query, (keys, values), cache, lengths, mask)
        return self.o(out.reshape(batch, steps, -1)), (keys, values)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = Linear(("mlp", "embed"), (inner, width), bias, rngs)
        self.up = Linear(("mlp", "embed"), (inner, width), bias, rngs)
        self.down = Linear(("embed", "mlp"), (width, inner), bias, rngs)

    def __call__(self, x: Array) -> Array:
        """`[B, T, E]` to `[B, T, E]`."""
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32))
        return self.down((gate * self.up(x).astype(jnp.float32)).astype(x.dtype))


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, cos, sin, cache, lengths, mask) -> tuple[Array, tuple[Array, Array]]:
        """`[B, T, E]` to `[B, T, E]`, and this block's keys and values."""
        out, block = self.attn(self.attn_norm(x), cos, sin, cache, lengths, mask)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), block


class Embedding(nnx.Module):
    """One row a token, `[V, E]`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32), logical_axes=("vocab", "embed")
        )


class Decoder(nnx.Module):
    """Embedding, layers, final norm; the head is a method of its own."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            shape = (config.vocab_size, config.hidden_size)
            self.head = Linear(("vocab", "embed"), shape, False, rngs)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: Cache,
        mask: Array,
        features: tuple[int, ...] = (),
    ) -> Forward:
        """One pass; see `specjax.types.ForwardFn`."""
        # Activations stay in float32; products take them in the dtype of their weights.
        x = look_up(self.embed.weight[...], tokens).astype(jnp.float32)
        cos, sin = rotation(self.config.rope, self.config.head_dim, positions)
        states, blocks = [], []
        for i, layer in enumerate(self.layers):
            states.append(x)
            layer_cache = (cache.keys[i], cache.values[i])
            x, block = layer(x, cos, sin, layer_cache, cache.lengths, mask)
            blocks.append(block)
        hidden = self.norm(x)
        states.append(hidden)
        keys, values = zip(*blocks, strict=True)
        return Forward(
            hidden=hidden,
            features=tuple(states[i] for i in features),
            block=Block(keys=keys, values=values),
        )

    def unembed(self, hidden: Array) -> Array:
        """`[..., E]` to float32 logits `[..., V]`."""
        embed = self.embed if self.config.tie_embeddings else self.head
        return matmul(hidden, embed.weight[...])


@functools.cache
def _abstract(config: DecoderConfig) -> tuple[Any, dict[str, Any], tuple]:
    module = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    graph, state = nnx.split(module)
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        axes[path] = variable.get_metadata()["logical_axes"]
    return graph, nnx.to_pure_dict(state), tuple(sorted(axes.items(), key=str))


def abstract_weights(config: DecoderConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return _abstract(config)[1]


def random_weights(config: DecoderConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    state = nnx.state(Decoder(config, nnx.Rngs(params=key)))
    return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))


def _after(hidden: Array, block: Block) -> Block:
    """The same block, known only once the whole pass is over.

    Whoever appends it has then read all of the old cache, and XLA can write the cache in place;
    otherwise it may copy every layer first (an optimization barrier does not survive that long).
    """
    first = hidden.reshape(-1)[0].astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(first, jnp.int32) & 0x7FFFFFFF
    over = jnp.minimum(bits, 0) == 0  # always, but the compiler does not know that
    return jax.tree.map(lambda x: jnp.where(over, x, jnp.zeros_like(x)), block)


@functools.cache
def decoder_model(config: DecoderConfig) -> Model:
    """The pure functions of a configuration. Equal configurations give the same record.

    Raises:
      ValueError: a rope kind that is not supported.
    """
    inverse_frequencies(config.rope, config.head_dim)  # refuse a bad rope before any compilation
    graph, _, axes = _abstract(config)

    def bind(weights: Any) -> Decoder:
        return nnx.merge(graph, nnx.State(weights))

    def forward(weights, tokens, positions, cache, mask, features=()) -> Forward:
        out = bind(weights)(tokens, positions, cache, mask, features)
        return Forward(
            hidden=out.hidden, features=out.features, block=_after(out.hidden, out.block)
        )

    def unembed(weights, hidden) -> Array:
        return bind(weights).unembed(hidden)

    def init_cache(weights, batch, slots) -> Cache:
        shape = (batch, config.num_kv_heads, slots, config.head_dim)
        dtype = weights["layers"][0]["attn"]["k"]["weight"].dtype
        if jax.default_backend() == "cpu":
            # XLA's CPU backend would convert a whole bfloat16 cache to write one token into it.
            dtype = jnp.float32

        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

        return Cache(keys=zeros(), values=zeros(), lengths=jnp.zeros(batch, jnp.int32))

    return Model(
        forward=forward,
        unembed=unembed,
        init_cache=init_cache,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        logical_axes=axes,
        config=config,
    )


def first_layers(
    config: DecoderConfig, weights: dict[str, Any], layers: int
) -> tuple[DecoderConfig, dict[str, Any]]:
    """The first `layers` layers with the model's own embedding, final norm and head.

    The leaves are shared with `weights`, not copied.

    Raises:
      ValueError: `layers` is not in 1..L - 1.
    """
    if not 0 < layers < config.num_layers:
        raise ValueError(
            f"draft_layers must be between 1 and {config.num_layers - 1}, got {layers}"
        )
    kept = {i: weights["layers"][i] for i in range(layers)}
    return dataclasses.replace(config, num_layers=layers), {**weights, "layers": kept}
