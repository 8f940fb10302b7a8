"""A block of masks, filled in one pass that sees the target's states: the network of DFlash.

A few Qwen3 layers read the last committed token and masks in place of those that follow. Keys and
values of committed tokens are made from the target's states, which one product and one norm fuse
for all layers; keys and values of a block are never kept. Inside a block all slots see each other.
DSpark's heads on top of it are in `specjax.models.dspark`, checkpoints in `specjax.models.dflash`.

Reference: DFlash, 2026 (arXiv:2602.06036).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.models.attention import Pass
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Layer, empty_cache
from specjax.models.dspark import Confidence, Markov
from specjax.models.functional import Functional, functional
from specjax.models.layers import Linear, Table, matmul, norm
from specjax.models.rope import inverse_frequencies, rotation
from specjax.types import Block, BlockNetwork, Cache

__all__ = ["BlockConfig", "BlockDecoder", "abstract_block", "block_network", "random_block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a block network looks like. Equal configs share one compiled network.

    `decoder` describes the layers; its vocabulary is the target's, and a window of w lets a block
    see the last w - 1 committed tokens before its first one.

    With `mixed` = m, the i-th slot that guesses starts from M_i [norm e ; norm v] in place of a
    mask's embedding, where e is the embedding of the block's first token, and v what the first
    layer keeps as values of the last token in the cache; slots beyond the m-th share the last
    product. So the best linear guess of the states ahead is a network of this kind, and training
    can start from there.
    """

    decoder: DecoderConfig
    features: tuple[int, ...]  # states of the target: i is what layer i reads, L the final norm's
    target_size: int  # E
    draft_vocab: int  # DV
    block_size: int
    mask_token_id: int
    from_anchor: bool = False
    window_causal: bool = False  # layers with a window: a slot sees no later ones of its block
    mixed: int = 0
    own_embedding: bool = False
    own_head: bool = False
    markov_rank: int = 0  # 0: no Markov head
    markov_kind: str = "vanilla"  # or "gated", "rnn"
    confidence: bool = False
    confidence_markov: bool = False  # whether the confidence head sees the Markov embedding


class BlockDecoder(nnx.Module):
    """Fusion of the target's states, layers, final norm, and the heads that the config asks for."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs):
        self.config, decoder = config, config.decoder
        width, vocab = decoder.hidden_size, decoder.vocab_size
        fused = len(config.features) * config.target_size
        self.fc = Linear(("embed", None), (width, fused), False, rngs)
        self.hidden_norm = norm(decoder)
        if config.mixed:
            sized = lambda size: norm(dataclasses.replace(decoder, hidden_size=size))
            values = decoder.num_kv_heads * decoder.head_dim
            self.fc_norm = nnx.List([sized(config.target_size) for _ in config.features])
            self.token_norm, self.value_norm = norm(decoder), sized(values)
            axes, shape = ("embed", None), (width, width + values)
            self.mix = nnx.List([Linear(axes, shape, False, rngs) for _ in range(config.mixed)])
        self.layers = nnx.List([Layer(decoder, i, rngs) for i in range(decoder.num_layers)])
        self.norm = norm(decoder)
        if config.own_embedding:
            self.embed = Table(vocab, width, "vocab", rngs)
        if config.own_head:
            self.head = Linear(("vocab", "embed"), (config.draft_vocab, width), False, rngs)
        if config.markov_rank:
            self.markov = Markov(
                config.markov_kind, width, config.markov_rank, vocab, config.draft_vocab, rngs
            )
        if config.confidence:
            rank = config.markov_rank if config.confidence_markov else 0
            self.confidence = Confidence(width, rank, rngs)

    def fuse(self, features: tuple[Array, ...]) -> Array:
        """States `[B, T, E]` of the target to `[B, T, W]` float32."""
        features = tuple(x.astype(jnp.float32) for x in features)
        if self.config.mixed:
            features = tuple(n(x) for n, x in zip(self.fc_norm, features, strict=True))
        return self.hidden_norm(self.fc(jnp.concatenate(features, axis=-1)))

    def project(self, fused: Array, cache: Cache) -> Block:
        """See `specjax.types.ProjectFn`."""
        here = self._passes(fused.shape[1], cache.lengths)[False]
        made = [
            layer.attn.keys_values(fused, (cache.keys[i], cache.values[i]), here)
            for i, layer in enumerate(self.layers)
        ]
        keys, values = zip(*made, strict=True)
        return Block(keys=keys, values=values)

    def __call__(self, embedded: Array, cache: Cache) -> Array:
        """See `specjax.types.BlockFn`."""
        x = embedded.astype(jnp.float32)
        if self.config.mixed:
            x = self._mixed(x, cache)
        passes = self._passes(x.shape[1], cache.lengths)
        for i, layer in enumerate(self.layers):
            local = self.config.decoder.window(i) is not None
            x, _ = layer(x, (cache.keys[i], cache.values[i]), passes[local])
        return self.norm(x)

    def _mixed(self, embedded: Array, cache: Cache) -> Array:
        """What the slots start from, `[B, T, W]`; one that does not guess keeps its embedding."""
        values = cache.values[0]
        at = jnp.maximum(cache.lengths - 1, 0) % values.shape[2]  # in a ring, too
        at = at[:, None, None, None]
        last = jnp.take_along_axis(values, at, axis=2).astype(jnp.float32)
        last = last.reshape(last.shape[0], -1)
        read = jnp.concatenate([self.token_norm(embedded[:, 0]), self.value_norm(last)], axis=-1)
        made = jnp.stack([mix(read) for mix in self.mix], axis=1)
        first = 0 if self.config.from_anchor else 1
        slots = embedded.shape[1] - first
        made = made[:, np.minimum(np.arange(slots), self.config.mixed - 1)]
        return jnp.concatenate([embedded[:, :first], made], axis=1)

    def _passes(self, steps: int, lengths: Array) -> dict[bool, Pass]:
        """What layers share: those that see everything, and (True) those with a window.

        A window ends at the same committed token for the whole block: the positions that it is
        measured from are all the first slot's, while keys and queries are turned by their own.
        """
        decoder = self.config.decoder
        positions = lengths[:, None] + jnp.arange(steps)[None, :]
        everything = jnp.ones((1, steps, steps), bool)
        masks = {
            False: everything,
            True: jnp.tril(everything) if self.config.window_causal else everything,
        }
        return {
            local: Pass(
                positions=jnp.broadcast_to(lengths[:, None], positions.shape),
                lengths=lengths,
                mask=mask,
                rotation=rotation(decoder.rope, decoder.head_dim, positions),
            )
            for local, mask in masks.items()
        }


@functools.cache
def _functional(config: BlockConfig) -> Functional:
    return functional(lambda rngs: BlockDecoder(config, rngs))


def abstract_block(config: BlockConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return _functional(config).abstract


def random_block(config: BlockConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    return _functional(config).random(key, dtype)


@functools.cache
def block_network(config: BlockConfig) -> BlockNetwork:
    """The pure functions of a configuration. Equal arguments give the same record.

    Raises:
      ValueError: a rope kind, a kind of Markov head, or a combination that is not supported.
    """
    decoder = config.decoder
    if decoder.rope is None or decoder.latent is not None:
        raise ValueError("the layers of a block network need rotary embeddings and plain attention")
    inverse_frequencies(decoder.rope, decoder.head_dim)  # refuse a bad rope before compilation
    if config.confidence and config.confidence_markov and not config.markov_rank:
        raise ValueError(
            "confidence_markov is True but markov_rank is 0; a confidence head that sees the "
            "Markov embedding needs a Markov head"
        )
    parts = _functional(config)
    bind = parts.bind

    def embed(weights, target, tokens) -> Array:
        return bind(weights).embed(tokens) if config.own_embedding else target(tokens)

    def unembed(weights, target, hidden) -> Array:
        if not config.own_head:
            return target(hidden)
        return matmul(hidden, bind(weights).head.weight[...])

    def init_cache(weights, batch, slots) -> Cache:
        dtype = weights["layers"][0]["attn"]["k"]["weight"].dtype
        return empty_cache(decoder, dtype, batch, slots)

    def correct(weights, state, tokens, hidden) -> tuple[Array, Array]:
        return bind(weights).markov(state, tokens, hidden)

    def confidence(weights, hidden, tokens) -> Array:
        module = bind(weights)
        before = module.markov.before(tokens) if config.confidence_markov else None
        return module.confidence(hidden, before)

    return BlockNetwork(
        fuse=lambda weights, features: bind(weights).fuse(features),
        project=lambda weights, fused, cache: bind(weights).project(fused, cache),
        forward=lambda weights, embedded, cache: bind(weights)(embedded, cache),
        embed=embed,
        unembed=unembed,
        init_cache=init_cache,
        features=config.features,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        from_anchor=config.from_anchor,
        target_size=config.target_size,
        target_vocab=decoder.vocab_size,
        vocab_size=config.draft_vocab,
        logical_axes=parts.axes,
        correct=correct if config.markov_rank else None,
        markov_rank=config.markov_rank,
        confidence=confidence if config.confidence else None,
        config=config,
    )
