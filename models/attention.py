"""Attention over the cached tokens and the tokens of one pass, plain and latent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.config import DecoderConfig
from specjax.models.layers import Linear, RMSNorm
from specjax.models.quantized import QuantizedTensor, as_array, stored_like
from specjax.models.rope import rotate
from specjax.types import PyTree, record

__all__ = ["Attention", "KeysValues", "LatentAttention", "Pass", "attend", "joined"]

_FEW_QUERIES = 64  # rows of a product with the keys

Held = Array | QuantizedTensor
KeysValues = tuple[Held, Held]


@record
class Pass:
    """What all layers of one pass share."""

    positions: Array  # [B, T] int32
    lengths: Array  # [B] int32: tokens in the cache
    mask: Array  # [1 or B, T, U] bool: which keys of the block each query sees
    rotation: tuple[Array, Array] | None  # cos and sin [B, T, rotated / 2]


def attend(
    query: Array,
    block: KeysValues,
    cache: KeysValues,
    here: Pass,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Grouped-query attention over the cached tokens and the tokens of this block, one softmax.

    Args:
      query: `[B, T, H, D]`; heads `g * H / G ...` share key/value head g.
      block: keys `[B, G, U, D]` and values `[B, G, U, DV]` of this pass, in the cache's form. U is
        T, or more if keys of earlier passes, which are not in the cache, come first. These must
        lie within the window of every query that sees them.
      cache: keys `[B, G, S, D]` and values `[B, G, S, DV]`; position p lies in slot p mod S.
      here: positions, lengths and mask.
      scale: on the queries.
      window: a query sees the last so many tokens, itself included; None: all.
      softcap: c of c tanh(scores / c), before the mask.

    Returns:
      `[B, T, H, DV]`, dtype of `query`.
    """
    batch, steps, heads, size = query.shape
    groups = block[0].shape[1]
    repeat = heads // groups
    # The queries of all heads of a group are rows of one product: [B, G, R * T, D].
    q = query.reshape(batch, steps, groups, repeat, size)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, groups, repeat * steps, size)
    q = q.astype(jnp.float32) * scale

    def product(equation: str, a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
        return jnp.einsum(
            equation, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32
        )

    def scores(keys: Held) -> Array:
        if isinstance(keys, QuantizedTensor):
            s = by_key(keys.values.astype(keys.dtype)) * _by_token(keys)
        else:
            s = by_key(keys)
        return s if softcap is None else softcap * jnp.tanh(s / softcap)

    def by_key(keys: Array) -> Array:
        if jax.default_backend() != "cpu" or q.shape[2] > _FEW_QUERIES:
            return product("bgxd,bgsd->bgxs", q, keys)
        # The long operand on the left: for a few queries XLA's CPU backend is twice as fast, for
        # many up to three times slower. The barrier keeps it from turning the product round again.
        turned = product("bgsd,bgxd->bgsx", keys, q.astype(keys.dtype))
        return jax.lax.optimization_barrier(turned).swapaxes(2, 3)

    def weighted(equation: str, weights: Array, values: Held) -> Array:
        if isinstance(values, QuantizedTensor):
            weights = weights * _by_token(values)
            values = values.values.astype(values.dtype)
        return product(equation, weights, values)

    slots = cache[0].shape[2]
    old, new = scores(cache[0]), scores(block[0])
    if window is None:
        seen = jnp.arange(slots)[None, :] < here.lengths[:, None]  # [B, S]
        old = jnp.where(seen[:, None, None, :], old, -jnp.inf)
        mask = here.mask
    else:
        seen = _in_window(here, slots, window)  # [B, T, S]
        old = old.reshape(batch, groups, repeat, steps, slots)
        old = jnp.where(seen[:, None, None], old, -jnp.inf)
        old = old.reshape(batch, groups, repeat * steps, slots)
        # Keys of earlier passes are ancestors, a few places before their node at most.
        near = here.positions[:, :, None] - here.positions[:, None, :] < window
        more = here.mask.shape[2] - steps
        mask = here.mask & jnp.pad(near, [(0, 0), (0, 0), (more, 0)], constant_values=True)
    new = new.reshape(batch, groups, repeat, steps, -1)
    new = jnp.where(mask[:, None, None, :, :], new, -jnp.inf)
    new = new.reshape(batch, groups, repeat * steps, -1)

    # Every query sees at least itself, so the maximum is finite.
    top = jnp.maximum(jnp.max(old, axis=-1, initial=-jnp.inf), jnp.max(new, axis=-1))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = jnp.sum(old, axis=-1, keepdims=True) + jnp.sum(new, axis=-1, keepdims=True)
    out = weighted("bgxs,bgsd->bgxd", old, cache[1]) + weighted("bgxt,bgtd->bgxd", new, block[1])
    out = (out / total).reshape(batch, groups, repeat, steps, -1)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, steps, heads, -1).astype(query.dtype)


def joined(earlier: PyTree, block: PyTree) -> PyTree:
    """Keys or values of earlier passes, then of this one, along the axis of tokens."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), earlier, block)


def _by_token(held: QuantizedTensor) -> Array:
    """The scales of keys or values `[B, G, S, D]`, along scores: `[B, G, 1, S]`."""
    return held.scales.swapaxes(2, 3)


def _in_window(here: Pass, slots: int, window: int) -> Array:
    """Which slots of a ring each query sees, `[B, T, S]` bool.

    S = 4, 6 tokens so far      slot      0 1 2 3
                                holds     4 5 2 3
    window 3, query at 6        sees      x x . .
    """
    last = here.lengths[:, None] - 1
    held = last - (last - jnp.arange(slots)[None, :]) % slots  # [B, S]: the position in each slot
    near = held[:, None, :] > here.positions[:, :, None] - window
    return near & (held >= 0)[:, None, :]


class Attention(nnx.Module):
    """Multi-head attention with shared key/value heads (Ainslie et al. 2023) and RoPE."""

    def __init__(
        self, config: DecoderConfig, window: int | None, rngs: nnx.Rngs, width: int | None = None
    ):
        width_out, size = config.hidden_size, config.head_dim
        width = width_out if width is None else width  # of what queries, keys and values read
        heads, groups = config.num_heads * size, config.num_kv_heads * size
        bias = config.attention_bias
        self.head_dim, self.window = size, window
        self.softcap = config.attention_softcap
        self.scale = size**-0.5 if config.query_scale is None else config.query_scale
        # Only whole heads are split over devices.
        self.q = Linear((("heads", size), "embed"), (heads, width), bias, rngs)
        self.k = Linear((("kv_heads", size), "embed"), (groups, width), bias, rngs)
        self.v = Linear((("kv_heads", size), "embed"), (groups, width), bias, rngs)
        self.o = Linear(("embed", ("heads", size)), (width_out, heads), config.output_bias, rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.norm_eps, config.norm_offset, "head_dim")
            self.k_norm = RMSNorm(size, config.norm_eps, config.norm_offset, "head_dim")

    def __call__(
        self, x: Array, cache: KeysValues, here: Pass, earlier: KeysValues | None = None
    ) -> tuple[Array, KeysValues]:
        """`x [B, T, E]` to `[B, T, E]`, and this block's keys and values `[B, G, T, D]`."""
        query = self._turned(self.q(x), "q_norm", here)
        block = self.keys_values(x, cache, here)
        out = attend(
            query,
            block if earlier is None else joined(earlier, block),
            cache,
            here,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return self.o(out.reshape(*x.shape[:2], -1)), block

    def keys_values(self, x: Array, cache: KeysValues, here: Pass) -> KeysValues:
        """Keys and values `[B, G, T, D]` of `x [B, T, E]`, in the cache's form."""
        keys = self._turned(self.k(x), "k_norm", here).swapaxes(1, 2)
        values = self._split(self.v(x)).swapaxes(1, 2)
        return stored_like(cache[0], keys), stored_like(cache[1], values)

    def _split(self, y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1, self.head_dim)

    def _turned(self, y: Array, norm: str, here: Pass) -> Array:
        y = self._split(y)
        if hasattr(self, norm):
            y = getattr(self, norm)(y)
        return y if here.rotation is None else rotate(y, *here.rotation)


class LatentAttention(nnx.Module):
    """Multi-head latent attention: the cache holds one compressed key a token for all heads.

    With c the normed latent and r the rotated key of a token, a head's key is [W_k c; r] and its
    value W_v c. Here W_k is moved to the query and W_v behind the softmax, so that all heads share
    the cached [c; r] as a key, and c as a value.

    Reference: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1 and appendix on absorption.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        latent, width, heads = config.latent, config.hidden_size, config.num_heads
        self.latent, self.heads = latent, heads
        size = latent.nope_dim + latent.rope_dim
        self.scale = size**-0.5 if config.query_scale is None else config.query_scale
        rank, bias = latent.query_rank, config.attention_bias
        if rank is not None:
            self.q_a = Linear((None, "embed"), (rank, width), bias, rngs)
            self.q_norm = RMSNorm(rank, latent.norm_eps, axis=None)
        self.q = Linear((("heads", size), None), (heads * size, rank or width), False, rngs)
        shape = (latent.kv_rank + latent.rope_dim, width)
        self.kv_a = Linear((None, "embed"), shape, bias, rngs)
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps, axis=None)
        for name, part in (("k", latent.nope_dim), ("v", latent.value_dim)):
            shape = (heads * part, latent.kv_rank)
            setattr(self, name, Linear((("heads", part), None), shape, False, rngs))
        axes = ("embed", ("heads", latent.value_dim))
        self.o = Linear(axes, (width, heads * latent.value_dim), config.output_bias, rngs)

    def __call__(
        self, x: Array, cache: KeysValues, here: Pass, earlier: KeysValues | None = None
    ) -> tuple[Array, KeysValues]:
        """`x [B, T, E]` to `[B, T, E]`; this block's keys `[B, 1, T, rank + rope]`, no values."""
        batch, steps, _ = x.shape
        latent, heads = self.latent, self.heads
        hidden = self.q_norm(self.q_a(x)) if hasattr(self, "q_a") else x
        query = self.q(hidden).reshape(batch, steps, heads, -1)
        plain, turned = jnp.split(query, [latent.nope_dim], axis=-1)
        compressed, shared = jnp.split(self.kv_a(x), [latent.kv_rank], axis=-1)
        key = jnp.concatenate(
            [self.kv_norm(compressed), rotate(shared[:, :, None], *here.rotation)[:, :, 0]], axis=-1
        )
        block = stored_like(cache[0], key[:, None])

        def by_head(weight: Array | QuantizedTensor, size: int) -> Array:
            return as_array(weight).reshape(heads, size, latent.kv_rank)

        to_key = by_head(self.k.weight[...], latent.nope_dim)
        query = jnp.concatenate(
            [_per_head("bthd,hdr->bthr", plain, to_key), rotate(turned, *here.rotation)], axis=-1
        )
        values = lambda keys: keys[..., : latent.kv_rank]
        keys = block if earlier is None else joined(earlier[0], block)
        out = attend(
            query, (keys, values(keys)), (cache[0], values(cache[0])), here, scale=self.scale
        )
        out = _per_head("bthr,hdr->bthd", out, by_head(self.v.weight[...], latent.value_dim))
        return self.o(out.reshape(batch, steps, -1).astype(x.dtype)), (block, block[..., :0])


def _per_head(equation: str, x: Array, weight: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum(
        equation,
        x.astype(weight.dtype),
        weight,
        precision=precision,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
