"""The heads of EAGLE-1 and EAGLE-3: a decoder layer that reads a target's states and tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import Attention, KeysValues, Pass
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Layer, empty_cache, known_after
from specjax.models.feed_forward import MLP
from specjax.models.functional import Functional, functional
from specjax.models.layers import Linear, Table, matmul, norm
from specjax.models.rope import rotation
from specjax.types import Block, Cache, FeatureNetwork, Forward

__all__ = ["EagleConfig", "abstract_eagle", "eagle_network", "random_eagle"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """What a head looks like.

    With e the embedding of a token and f the target's states at one position:

        fused = False (EAGLE-1)   x = fc [e ; f]            x + attn(x)
        fused = True  (EAGLE-3)   g = fc [f1 ; f2 ; f3]     g + attn([norm e ; norm g])
        mixed = True              g = fc [f1 ; f2 ; ...]    M r + attn(r),  r = [norm e ; norm g]

    A mixed head has the best linear guess of the next state within it, and can start from there.
    """

    decoder: DecoderConfig  # of its layers; the vocabulary is the target's
    features: tuple[int, ...]  # which states of the target
    target_size: int  # E of the target
    fused: bool = True
    mixed: bool = False  # of a fused one: the sum starts from a product with what attention reads
    fc_bias: bool = False
    draft_vocab: int | None = None  # of its own head; None: the target's head
    own_embedding: bool = False
    norm_before_residual: bool = False  # the sum starts from norm g
    norm_before_fc: bool = False  # one norm over [f1 ; f2 ; f3]
    fc_norm: bool = False  # one norm for each f
    norm_output: bool = False  # the state that is handed on is normed


class _First(nnx.Module):
    """The layer that reads tokens and states."""

    def __init__(self, config: EagleConfig, rngs: nnx.Rngs):
        decoder = config.decoder
        self.fused, self.norm_before_residual = config.fused, config.norm_before_residual
        width = decoder.hidden_size * (2 if config.fused else 1)
        if config.fused:
            self.token_norm, self.state_norm = norm(decoder), norm(decoder)
        if config.mixed:
            self.mix = Linear(("embed", None), (decoder.hidden_size, width), False, rngs)
        self.attn = Attention(decoder, decoder.window(0), rngs, width)
        self.mlp_norm = norm(decoder)
        self.mlp = MLP(decoder, decoder.intermediate_size, rngs)

    def __call__(
        self, embedded: Array, x: Array, cache: KeysValues, here: Pass, earlier: KeysValues | None
    ) -> tuple[Array, KeysValues]:
        read = x
        if self.fused:
            normed = self.state_norm(x)
            read = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
            x = normed if self.norm_before_residual else x
        if hasattr(self, "mix"):
            x = self.mix(read)
        out, block = self.attn(read, cache, here, earlier)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), block


class Eagle(nnx.Module):
    """The whole head."""

    def __init__(self, config: EagleConfig, rngs: nnx.Rngs):
        self.config, decoder = config, config.decoder
        width, size = decoder.hidden_size, config.target_size
        if config.own_embedding:
            self.embed = Table(decoder.vocab_size, width, "vocab", rngs)
        inputs = len(config.features) * size if config.fused else 2 * size
        if config.norm_before_fc:
            self.input_norm = norm(dataclasses.replace(decoder, hidden_size=inputs))
        if config.fc_norm:
            one = dataclasses.replace(decoder, hidden_size=size)
            self.fc_norm = nnx.List([norm(one) for _ in config.features])
        self.fc = Linear(("embed", None), (width, inputs), config.fc_bias, rngs)
        first = _First(config, rngs)
        others = [Layer(decoder, i, rngs) for i in range(1, decoder.num_layers)]
        self.layers = nnx.List([first, *others])
        if config.fused:
            self.norm = norm(decoder)
        if config.draft_vocab is not None:
            self.head = Linear(("vocab", "embed"), (config.draft_vocab, width), False, rngs)

    def fuse(self, features: tuple[Array, ...]) -> Array:
        """The target's states, `[B, T, E]` each, to `[B, T, W]`."""
        features = tuple(x.astype(jnp.float32) for x in features)
        if not self.config.fused:
            return features[0]
        if self.config.fc_norm:
            features = tuple(n(x) for n, x in zip(self.fc_norm, features, strict=True))
        x = jnp.concatenate(features, axis=-1)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        return self.fc(x)

    def __call__(
        self,
        embedded: Array,
        hidden: Array,
        positions: Array,
        cache: Cache,
        mask: Array,
        earlier: Block | None = None,
    ) -> Forward:
        """See `specjax.types.PairsFn`."""
        decoder = self.config.decoder
        here = Pass(
            positions=positions,
            lengths=cache.lengths,
            mask=mask,
            rotation=rotation(decoder.rope, decoder.head_dim, positions),
        )
        x = hidden
        if not self.config.fused:
            x = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
        blocks = []
        for i, layer in enumerate(self.layers):
            held = cache.keys[i], cache.values[i]
            before = None if earlier is None else (earlier.keys[i], earlier.values[i])
            read = (embedded, x) if i == 0 else (x,)
            x, block = layer(*read, held, here, before)
            blocks.append(block)
        normed = self.norm(x) if self.config.fused else x
        keys, values = zip(*blocks, strict=True)
        return Forward(
            hidden=normed,
            features=(normed if self.config.norm_output else x,),
            block=Block(keys=keys, values=values),
        )


@functools.cache
def _functional(config: EagleConfig) -> Functional:
    return functional(lambda rngs: Eagle(config, rngs))


def abstract_eagle(config: EagleConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return _functional(config).abstract


def random_eagle(config: EagleConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    return _functional(config).random(key, dtype)


@functools.cache
def eagle_network(config: EagleConfig) -> FeatureNetwork:
    """The pure functions of a configuration. Equal configurations give the same record.

    Raises:
      ValueError: mixed, but not fused.
    """
    if config.mixed and not config.fused:
        raise ValueError("mixed=True needs fused=True: an EAGLE-1 head is such a product already")
    parts = _functional(config)

    def forward(weights, embedded, hidden, positions, cache, mask, earlier=None) -> Forward:
        out = parts.bind(weights)(embedded, hidden, positions, cache, mask, earlier)
        block = known_after(out.hidden, out.block)
        return Forward(hidden=out.hidden, features=out.features, block=block)

    def embed(weights: Any, target: Callable[[Array], Array], tokens: Array) -> Array:
        return parts.bind(weights).embed(tokens) if config.own_embedding else target(tokens)

    def unembed(weights: Any, target: Callable[[Array], Array], hidden: Array) -> Array:
        if config.draft_vocab is None:
            return target(hidden)
        return matmul(hidden, parts.bind(weights).head.weight[...])

    def init_cache(weights: Any, batch: int, slots: int) -> Cache:
        return empty_cache(config.decoder, weights["fc"]["weight"].dtype, batch, slots)

    return FeatureNetwork(
        fuse=lambda weights, features: parts.bind(weights).fuse(features),
        forward=forward,
        embed=embed,
        unembed=unembed,
        init_cache=init_cache,
        features=config.features,
        target_size=config.target_size,
        target_vocab=config.decoder.vocab_size,
        vocab_size=config.draft_vocab or config.decoder.vocab_size,
        logical_axes=parts.axes,
        config=config,
    )
