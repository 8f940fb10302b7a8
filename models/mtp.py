"""Modules that predict further tokens: a decoder layer over a token and a state (DeepSeek-V3).

With e the embedding of a token and h the target's last state, or what the module before gave:

    x = layer(fc [norm e ; norm h])        y = norm x        logits = target's head(y)

y is also what the next module reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models import config_reading as reading
from specjax.models import families
from specjax.models.attention import Pass
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Layer, empty_cache, known_after, rotated_size
from specjax.models.drafting import DraftFormat, Found, check_size, proposal_tokens
from specjax.models.functional import Functional, functional, paths
from specjax.models.layers import Linear, norm
from specjax.models.naming import Layout, Source, source_of
from specjax.models.rope import rotation
from specjax.types import Block, Cache, FeatureNetwork, Forward

__all__ = ["FORMATS", "MtpConfig", "abstract_mtp", "mtp_axes", "mtp_network", "random_mtp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """What the modules look like; all are alike."""

    decoder: DecoderConfig  # of the one layer of each
    target_layers: int
    modules: int = 1


class Module(nnx.Module):
    """One of them."""

    def __init__(self, config: MtpConfig, rngs: nnx.Rngs):
        decoder = self.config = config.decoder
        width = decoder.hidden_size
        self.token_norm, self.state_norm = norm(decoder), norm(decoder)
        self.fc = Linear(("embed", None), (width, 2 * width), False, rngs)
        self.layer = Layer(decoder, 0, rngs)
        self.norm = norm(decoder)

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
        decoder = self.config
        here = Pass(
            positions=positions,
            lengths=cache.lengths,
            mask=mask,
            rotation=rotation(decoder.rope, rotated_size(decoder), positions),
        )
        x = self.fc(jnp.concatenate([self.token_norm(embedded), self.state_norm(hidden)], axis=-1))
        before = None if earlier is None else (earlier.keys[0], earlier.values[0])
        x, (keys, values) = self.layer(x, (cache.keys[0], cache.values[0]), here, before)
        y = self.norm(x)
        return Forward(hidden=y, features=(y,), block=Block(keys=(keys,), values=(values,)))


@functools.cache
def _functional(config: MtpConfig) -> Functional:
    return functional(lambda rngs: Module(config, rngs))


def abstract_mtp(config: MtpConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return {"modules": dict.fromkeys(range(config.modules), _functional(config).abstract)}


def mtp_axes(config: MtpConfig) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """(path, logical axes) of every weight of the whole tree."""
    axes = _functional(config).axes
    return tuple(
        (("modules", i, *path), names) for i in range(config.modules) for path, names in axes
    )


def random_mtp(config: MtpConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    keys = jax.random.split(key, config.modules)
    return {"modules": {i: _functional(config).random(k, dtype) for i, k in enumerate(keys)}}


@functools.cache
def mtp_network(config: MtpConfig) -> FeatureNetwork:
    """The pure functions of one module, over its own weights (`weights["modules"][i]`)."""
    parts = _functional(config)
    decoder = config.decoder

    def forward(weights, embedded, hidden, positions, cache, mask, earlier=None) -> Forward:
        out = parts.bind(weights)(embedded, hidden, positions, cache, mask, earlier)
        block = known_after(out.hidden, out.block)
        return Forward(hidden=out.hidden, features=out.features, block=block)

    def init_cache(weights: Any, batch: int, slots: int) -> Cache:
        return empty_cache(decoder, weights["fc"]["weight"].dtype, batch, slots)

    return FeatureNetwork(
        fuse=lambda weights, features: features[0].astype(jnp.float32),
        forward=forward,
        embed=lambda weights, target, tokens: target(tokens),
        unembed=lambda weights, target, hidden: target(hidden),
        init_cache=init_cache,
        features=(config.target_layers,),
        target_size=decoder.hidden_size,
        target_vocab=decoder.vocab_size,
        vocab_size=decoder.vocab_size,
        logical_axes=parts.axes,
        config=config,
    )


# --- published formats -----------------------------------------------------------------------


def _sources(
    config: MtpConfig, layout: Layout, prefixes: list[str], own: Mapping[str, str]
) -> dict[str, Source]:
    """`prefixes` are those of the modules' layers; `own` names what a module has beside it, with
    {} for the prefix."""
    found = {}
    for path, shape in paths(abstract_mtp(config)).items():
        _, number, inner = path.split(".", 2)
        prefix = prefixes[int(number)]
        if inner.startswith("layer."):
            found[path] = source_of(
                layout, inner.removeprefix("layer."), config.decoder, prefix, shape
            )
        else:
            module = inner.rpartition(".")[0]
            found[path] = Source((f"{own[module].format(prefix)}.weight",), shape)
    return found


def _one_layer(config: DecoderConfig) -> DecoderConfig:
    """A layer as the last one of a model."""
    windows = config.windows[-1:] if any(config.windows) else ()
    return dataclasses.replace(config, num_layers=1, windows=windows, expert_layers=())


_DEEPSEEK = {
    "token_norm": "{}enorm",
    "state_norm": "{}hnorm",
    "fc": "{}eh_proj",
    "norm": "{}shared_head.norm",
}


def _deepseek(config: Mapping[str, Any], shapes: Any, target: DecoderConfig) -> Found:
    family = families.by_model_type(config.get("model_type"))
    first = target.num_layers
    count = 0
    while f"model.layers.{first + count}.eh_proj.weight" in shapes:
        count += 1
    made = MtpConfig(decoder=_one_layer(target), target_layers=first, modules=count)
    prefixes = [family.hf.layer.format(first + i) for i in range(count)]
    return Found(
        config=made,
        sources=_sources(made, family.hf, prefixes, _DEEPSEEK),
        ignored=lambda name: True,  # the target's own tensors
        options={"num_speculative_tokens": 1},
    )


_QWEN = {
    "token_norm": "mtp.pre_fc_norm_embedding",
    "state_norm": "mtp.pre_fc_norm_hidden",
    "fc": "mtp.fc",
    "norm": "mtp.norm",
}


def _qwen(config: Mapping[str, Any], shapes: Any, target: DecoderConfig) -> Found:
    family = families.by_model_type(config.get("model_type"))
    made = MtpConfig(decoder=_one_layer(target), target_layers=target.num_layers)
    return Found(
        config=made,
        sources=_sources(made, family.hf, ["mtp.layers.0."], _QWEN),
        ignored=lambda name: True,
        options={"num_speculative_tokens": 1},
    )


_SPECULATORS = {
    "token_norm": "{}token_layernorm",
    "state_norm": "{}hidden_layernorm",
    "fc": "{}input_proj",
    "norm": "{}final_layernorm",
}
_SPECULATORS_KEYS = frozenset(
    """
    architectures auto_map dtype num_nextn_predict_layers speculators_config
    speculators_model_type speculators_version tie_word_embeddings torch_dtype
    transformer_layer_config transformers_version
    """.split()
)


def _speculators(config: Mapping[str, Any], shapes: Any, target: DecoderConfig) -> Found:
    reading.refuse_unknown(config, _SPECULATORS_KEYS)
    reading.expect(config, num_nextn_predict_layers=1)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(f"transformer_layer_config is {layers!r}; wanted an object.")
    family = families.by_model_type(layers.get("model_type"))
    decoder = family.config_from_hf(layers)
    check_size("vocabulary", decoder.vocab_size, target.vocab_size)
    check_size("width", decoder.hidden_size, target.hidden_size)
    made = MtpConfig(decoder=_one_layer(decoder), target_layers=target.num_layers)
    return Found(
        config=made,
        sources=_sources(made, family.hf, ["mtp_layers.0."], _SPECULATORS),
        options=proposal_tokens(config),
    )


FORMATS: tuple[DraftFormat, ...] = (
    DraftFormat(
        "speculators MTP",
        "mtp",
        lambda config, names: config.get("speculators_model_type") == "mtp",
        _speculators,
    ),
    DraftFormat(
        "MTP modules of a DeepSeek-V3 checkpoint",
        "mtp",
        lambda config, names: (
            f"model.layers.{config.get('num_hidden_layers')}.eh_proj.weight" in names
        ),
        _deepseek,
        within_target=True,
    ),
    DraftFormat(
        "MTP module of a Qwen checkpoint",
        "mtp",
        lambda config, names: "mtp.fc.weight" in names,
        _qwen,
        within_target=True,
    ),
)
