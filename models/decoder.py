"""The decoder-only transformer, once: every family is a configuration of this one.

A pass reads the cache but never writes it: the keys and values of its own tokens come back as a
`Block`, and the caller appends those that it wants to keep. So a rejected draft never enters a
cache, for chains and for trees alike.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import Attention, KeysValues, LatentAttention, Pass
from specjax.models.config import DecoderConfig
from specjax.models.feed_forward import MLP, Experts
from specjax.models.functional import Functional, functional
from specjax.models.layers import Linear, Table, look_up, matmul, norm
from specjax.models.quantized import BITS, empty_slots
from specjax.models.rope import inverse_frequencies, rotation
from specjax.types import Block, Cache, Forward, Model

__all__ = [
    "Decoder",
    "Layer",
    "abstract_weights",
    "decoder_model",
    "embed_rows",
    "empty_cache",
    "final_norm",
    "first_layers",
    "head_rows",
    "known_after",
    "random_weights",
    "rotated_size",
]


_RING_STEP = 128  # slots of a ring: a multiple of this, so that no chunk of a prompt wraps round


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, rngs: nnx.Rngs):
        self.attn_norm = norm(config)
        if config.latent is None:
            self.attn = Attention(config, config.window(index), rngs)
        else:
            self.attn = LatentAttention(config, rngs)
        self.mlp_norm = norm(config)
        if config.has_experts(index):
            self.mlp = Experts(config, rngs)
        else:
            self.mlp = MLP(config, config.intermediate_size, rngs)
        if config.post_norms:
            self.attn_post_norm, self.mlp_post_norm = norm(config), norm(config)
        self.parallel = config.parallel

    def __call__(
        self, x: Array, cache: KeysValues, here: Pass, earlier: KeysValues | None = None
    ) -> tuple[Array, KeysValues]:
        """`[B, T, E]` to `[B, T, E]`, and this block's keys and values."""
        out, block = self.attn(self.attn_norm(x), cache, here, earlier)
        if hasattr(self, "attn_post_norm"):
            out = self.attn_post_norm(out)
        if self.parallel:
            return x + out + self.mlp(self.mlp_norm(x)), block
        x = x + out
        out = self.mlp(self.mlp_norm(x))
        if hasattr(self, "mlp_post_norm"):
            out = self.mlp_post_norm(out)
        return x + out, block


class Decoder(nnx.Module):
    """Embedding, layers, final norm; the head is a method of its own."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.hidden_size
        self.embed = Table(config.vocab_size, width, "vocab", rngs)
        if config.learned_positions:
            self.positions = Table(config.max_position, width, "slots", rngs)
        self.layers = nnx.List([Layer(config, i, rngs) for i in range(config.num_layers)])
        self.norm = norm(config)
        if not config.tie_embeddings:
            self.head = Linear(("vocab", "embed"), (config.vocab_size, width), False, rngs)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: Cache,
        mask: Array,
        features: tuple[int, ...] = (),
        earlier: Block | None = None,
    ) -> Forward:
        """One pass; see `specjax.types.ForwardFn`."""
        config = self.config
        # Activations stay in float32; products take them in the dtype of their weights.
        x = self.embedded(tokens)
        if config.learned_positions:
            x = x + self.positions(jnp.minimum(positions, config.max_position - 1))
        passes = self._passes(positions, cache.lengths, mask)
        states, blocks = [], []
        for i, layer in enumerate(self.layers):
            states.append(x)
            local = config.local_rope is not None and config.window(i) is not None
            before = None if earlier is None else (earlier.keys[i], earlier.values[i])
            x, block = layer(x, (cache.keys[i], cache.values[i]), passes[local], before)
            blocks.append(block)
        hidden = self.norm(x)
        states.append(hidden)
        keys, values = zip(*blocks, strict=True)
        return Forward(
            hidden=hidden,
            features=tuple(states[i] for i in features),
            block=Block(keys=keys, values=values),
        )

    def _passes(self, positions: Array, lengths: Array, mask: Array) -> dict[bool, Pass]:
        """What layers share: those that see everything, and (True) those with a window."""
        rotated = rotated_size(self.config)
        ropes = {False: self.config.rope, True: self.config.local_rope}
        return {
            local: Pass(
                positions=positions,
                lengths=lengths,
                mask=mask,
                rotation=None if rope is None else rotation(rope, rotated, positions),
            )
            for local, rope in ropes.items()
        }

    def embedded(self, tokens: Array) -> Array:
        """`[...]` int32 to `[..., E]` float32: what the first layer reads, without positions."""
        x = self.embed(tokens)
        return x if self.config.embed_scale is None else x * self.config.embed_scale

    def unembed(self, hidden: Array) -> Array:
        """`[..., E]` to float32 logits `[..., V]`."""
        embed = self.embed if self.config.tie_embeddings else self.head
        logits, cap = matmul(hidden, embed.weight[...]), self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def rotated_size(config: DecoderConfig) -> int:
    """How many dimensions of a head are rotated."""
    if config.latent is not None:
        return config.latent.rope_dim
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


@functools.cache
def _functional(config: DecoderConfig) -> Functional:
    return functional(lambda rngs: Decoder(config, rngs))


def abstract_weights(config: DecoderConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return _functional(config).abstract


def random_weights(config: DecoderConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    return _functional(config).random(key, dtype)


def known_after(hidden: Array, block: Block) -> Block:
    """The same block, known only once the whole pass is over.

    Whoever appends it has then read all of the old cache, and XLA can write the cache in place;
    otherwise it may copy every layer first (an optimization barrier does not survive that long).
    """
    first = hidden.reshape(-1)[0].astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(first, jnp.int32) & 0x7FFFFFFF
    over = jnp.minimum(bits, 0) == 0  # always, but the compiler does not know that
    return jax.tree.map(lambda x: jnp.where(over, x, jnp.zeros_like(x)), block)


def decoder_model(config: DecoderConfig, *, kv_cache: str | None = None) -> Model:
    """The pure functions of a configuration. Equal arguments give the same record.

    Args:
      config: what the decoder looks like.
      kv_cache: None for a cache in the type of the weights, "int8" for one byte an element and a
        scale for each token and head. Then a pass sees the keys and values of its own tokens
        rounded, too, as they will be read later.

    Raises:
      ValueError: a rope kind or a cache that is not supported.
    """
    if kv_cache not in (None, "int8"):
        raise ValueError(f'kv_cache must be None or "int8", got {kv_cache!r}')
    return _decoder_model(config, kv_cache)


@functools.cache
def _decoder_model(config: DecoderConfig, kv_cache: str | None) -> Model:
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            inverse_frequencies(
                rope, rotated_size(config)
            )  # refuse a bad rope before any compilation
    parts = _functional(config)
    bits = None if kv_cache is None else BITS[kv_cache]

    def forward(weights, tokens, positions, cache, mask, features=(), earlier=None) -> Forward:
        out = parts.bind(weights)(tokens, positions, cache, mask, features, earlier)
        return Forward(
            hidden=out.hidden, features=out.features, block=known_after(out.hidden, out.block)
        )

    def unembed(weights, hidden) -> Array:
        return parts.bind(weights).unembed(hidden)

    def embed(weights, tokens) -> Array:
        return parts.bind(weights).embedded(tokens)

    def init_cache(weights, batch, slots) -> Cache:
        dtype = weights["layers"][0]["attn"]["k"]["weight"].dtype
        return empty_cache(config, dtype, batch, slots, bits)

    return Model(
        forward=forward,
        unembed=unembed,
        init_cache=init_cache,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        logical_axes=parts.axes,
        config=config,
        embed=embed,
    )


def empty_cache(
    config: DecoderConfig, dtype: Any, batch: int, slots: int, bits: int | None = None
) -> Cache:
    """A cache for the layers of a configuration, whose weights have the type `dtype`."""
    if jax.default_backend() == "cpu":
        # XLA's CPU backend would convert a whole bfloat16 cache to write one token into it.
        dtype = jnp.float32
    layers = range(config.num_layers)
    keys, values = zip(*(_layer_slots(config, i, slots) for i in layers), strict=True)
    return Cache(
        keys=tuple(empty_slots((batch, *shape), dtype, bits) for shape in keys),
        values=tuple(empty_slots((batch, *shape), dtype, bits) for shape in values),
        lengths=jnp.zeros(batch, jnp.int32),
        rings=tuple(config.window(i) is not None for i in layers),
    )


def _layer_slots(
    config: DecoderConfig, layer: int, slots: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a row's keys and values in one layer."""
    if config.latent is not None:
        return (1, slots, config.latent.kv_rank + config.latent.rope_dim), (1, slots, 0)
    window = config.window(layer)
    if window is not None:
        # Beside the window, a chunk of the prompt or a block of drafts that is rolled back.
        ring = -(-(window + _RING_STEP) // _RING_STEP) * _RING_STEP
        slots = min(slots, ring)
    shape = (config.num_kv_heads, slots, config.head_dim)
    return shape, shape


def head_rows(config: DecoderConfig, weights: dict[str, Any], ids: Array) -> Array:
    """Rows `[n, E]` float32 of the head, for the tokens `ids [n]`."""
    table = weights["embed" if config.tie_embeddings else "head"]["weight"]
    return look_up(table, ids).astype(jnp.float32)


def final_norm(config: DecoderConfig, weights: dict[str, Any], hidden: Array) -> Array:
    """What the head reads, from the state behind any layer; `weights` may lack all but the norm."""
    module = functional(lambda rngs: norm(config)).bind(weights["norm"])
    return module(hidden)


def embed_rows(config: DecoderConfig, weights: dict[str, Any], ids: Array) -> Array:
    """Rows `[n, E]` float32 of the embedding, for the tokens `ids [n]`."""
    return look_up(weights["embed"]["weight"], ids).astype(jnp.float32)


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
    changes = {
        "num_layers": layers,
        "windows": config.windows[:layers],
        "expert_layers": config.expert_layers[:layers],
    }
    return dataclasses.replace(config, **changes), {**weights, "layers": kept}
