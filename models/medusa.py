"""Medusa: heads over the target's last state, and the two ways in which they are published.

Of head i, with L residual blocks and h the state after the target's final norm,

    z_0 = h,    z_l = z_(l-1) + silu(W_l z_(l-1) + b_l),    logits = U z_L

where U is the head's own output matrix, or the target's. A mixed head begins with z_0 = M h, so
that the best linear guess of a state ahead is a head of this kind.

Reference: Cai et al. 2024 (arXiv:2401.10774), section 2.1.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.config import DecoderConfig
from specjax.models.drafting import DraftFormat, Found
from specjax.models.functional import Functional, functional, paths
from specjax.models.layers import Linear, matmul
from specjax.models.naming import Source
from specjax.types import Heads

__all__ = [
    "FORMATS",
    "MedusaConfig",
    "MedusaHeads",
    "abstract_medusa",
    "medusa_heads",
    "random_weights",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Sizes of the heads. Equal configs share one compiled network."""

    num_heads: int
    num_layers: int  # residual blocks of each head
    hidden_size: int
    vocab_size: int
    target_layers: int  # of the model whose last state they read
    own_output: bool = True  # False: they use the target's output matrix
    mixed: bool = False  # the first block reads a product with the state


class MedusaHead(nnx.Module):
    """Residual blocks and, perhaps, an output matrix."""

    def __init__(self, config: MedusaConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        blocks = range(config.num_layers)
        if config.mixed:
            self.mix = Linear(("embed", None), (width, width), False, rngs)
        self.blocks = nnx.List(
            [Linear(("mlp", "embed"), (width, width), True, rngs) for _ in blocks]
        )
        if config.own_output:
            self.output = Linear(("vocab", "embed"), (config.vocab_size, width), False, rngs)

    def __call__(self, hidden: Array, unembed: Callable[[Array], Array]) -> Array:
        """`[..., E]` to float32 logits `[..., V]`."""
        z = self.mix(hidden) if hasattr(self, "mix") else hidden
        for block in self.blocks:
            z = z + jax.nn.silu(block(z))
        return matmul(z, self.output.weight[...]) if hasattr(self, "output") else unembed(z)


class MedusaHeads(nnx.Module):
    """All heads over one state."""

    def __init__(self, config: MedusaConfig, rngs: nnx.Rngs):
        self.heads = nnx.List([MedusaHead(config, rngs) for _ in range(config.num_heads)])

    def __call__(self, hidden: Array, unembed: Callable[[Array], Array]) -> Array:
        """`[..., E]` to float32 logits `[..., heads, V]`."""
        return jnp.stack([head(hidden, unembed) for head in self.heads], axis=-2)


@functools.cache
def _functional(config: MedusaConfig) -> Functional:
    return functional(lambda rngs: MedusaHeads(config, rngs))


def abstract_medusa(config: MedusaConfig) -> dict[str, Any]:
    """The weights' tree with a `jax.ShapeDtypeStruct` for each leaf (float32)."""
    return _functional(config).abstract


def random_weights(config: MedusaConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Freshly initialised weights, e.g. for tests and for training."""
    return _functional(config).random(key, dtype)


@functools.cache
def medusa_heads(config: MedusaConfig) -> Heads:
    """The pure functions of a configuration. Equal arguments give the same record."""
    parts = _functional(config)

    def logits(weights: Any, unembed: Callable[[Array], Array], hidden: Array) -> Array:
        return parts.bind(weights)(hidden, unembed)

    return Heads(
        logits=logits,
        heads=config.num_heads,
        vocab_size=config.vocab_size,
        feature=config.target_layers,
        logical_axes=parts.axes,
        config=config,
    )


# --- checkpoints -----------------------------------------------------------------------------

_MERGED = "medusa_head."
# A block `0.1.linear.weight`, its bias, or the output matrix `0.2.weight` that follows the blocks.
_TENSOR = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def _recognises(prefix: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    first = re.compile(re.escape(prefix) + _TENSOR.pattern)
    return "medusa_num_heads" in config and any(first.fullmatch(name) for name in names)


def _read(
    prefix: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: DecoderConfig,
) -> Found:
    """Counts heads and blocks from the tensors: published configurations are wrong about them."""
    own = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix) and _TENSOR.fullmatch(name.removeprefix(prefix))
    }
    read = MedusaConfig(
        **_counts(prefix, own),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target_layers=target.num_layers,
    )
    width, vocab = read.hidden_size, read.vocab_size
    sizes = {"weight": (vocab, width), "linear.weight": (width, width), "linear.bias": (width,)}
    for name, shape in own.items():
        if shape != sizes[_TENSOR.fullmatch(name)[3]]:
            raise ValueError(
                f"the Medusa tensor {prefix}{name} has the shape {shape}, but the target has the "
                f"hidden size {width} and {vocab} tokens. Take heads that were trained for this "
                "target."
            )
    sources = {}
    for path, shape in paths(_functional(read).abstract).items():
        head, inner = re.fullmatch(r"heads\.(\d+)\.(.*)", path).groups()
        block = re.fullmatch(r"blocks\.(\d+)\.(weight|bias)", inner)
        name = f"{block[1]}.linear.{block[2]}" if block else f"{read.num_layers}.weight"
        sources[path] = Source((f"{prefix}{head}.{name}",), shape)
    ignored = (lambda name: not name.startswith(prefix)) if prefix else (lambda name: False)
    return Found(config=read, sources=sources, ignored=ignored)


def _counts(prefix: str, names: Collection[str]) -> dict[str, Any]:
    """How many heads, how many blocks each, and whether they have outputs: the same for all."""
    blocks: dict[int, set[int]] = {}
    outputs: dict[int, set[int]] = {}
    for name in names:
        head, place, kind = _TENSOR.fullmatch(name).groups()
        found = outputs if kind == "weight" else blocks
        found.setdefault(int(head), set()).add(int(place))
    heads = set(blocks) | set(outputs)
    missing = set(range(max(heads))) - heads
    if missing:
        raise ValueError(
            f"the Medusa head {min(missing)} is missing ({prefix}{min(missing)}.0...), but there "
            f"is a head {max(heads)}: download the checkpoint again."
        )
    layers = len(blocks.get(0, ()))
    for head in sorted(heads):
        here, output = blocks.get(head, set()), outputs.get(head, set())
        same = here == set(range(layers)) and bool(output) == bool(outputs.get(0))
        if not same or not output <= {layers}:
            raise ValueError(
                f"the Medusa head {prefix}{head} has the blocks {sorted(here)} and the outputs "
                f"{sorted(output)}, but head {prefix}0 has {layers} blocks and "
                f"{'an output after them' if outputs.get(0) else 'no output'}: heads must be of "
                "one form. Download the checkpoint again."
            )
    return {"num_heads": len(heads), "num_layers": layers, "own_output": bool(outputs)}


def _format(name: str, prefix: str) -> DraftFormat:
    return DraftFormat(
        name=name,
        method="medusa",
        recognises=functools.partial(_recognises, prefix),
        read=functools.partial(_read, prefix),
    )


FORMATS = (
    _format("Medusa heads", ""),
    _format("Medusa heads merged into their target", _MERGED),
)
