"""Reading one model into device memory: a tensor at a time, rounded if wanted, where it belongs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax import checkpoints, drafters, sharding
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, embed_rows, head_rows
from specjax.models.naming import parameters
from specjax.models.quantized import BITS, quantize_weight
from specjax.types import Model, PyTree

__all__ = [
    "How",
    "Loaded",
    "Target",
    "bits_of",
    "from_target",
    "read",
    "read_weights",
    "rounded",
    "tree_of",
]


class Loaded(NamedTuple):
    """A causal language model in device memory."""

    model: Model
    weights: PyTree
    config: DecoderConfig
    checkpoint: checkpoints.Checkpoint


class How(NamedTuple):
    """In what form a model is wanted, and where."""

    dtype: jnp.dtype
    mesh: Mesh | None
    bits: int | None = None  # of quantised weights
    kv_cache: str | None = None


class Target(NamedTuple):
    """What a drafter may be built from."""

    loaded: Loaded
    how: How


def bits_of(quantize: Any) -> int | None:
    if quantize is None:
        return None
    if not isinstance(quantize, str) or quantize not in BITS:
        raise ValueError(
            f"quantize must be None or one of {', '.join(map(repr, BITS))}, got {quantize!r}"
        )
    return BITS[quantize]


def read(source: str | os.PathLike[str], how: How) -> Loaded:
    """Reads a causal language model."""
    checkpoint = checkpoints.read(source, how.dtype)
    model = decoder_model(checkpoint.config, kv_cache=how.kv_cache)
    shapes = parameters(checkpoint.config)
    weights = read_weights(checkpoint.weights, model.logical_axes, shapes, how, checkpoint.place)
    if how.mesh is not None:
        weights = sharding.place(model, weights, how.mesh)
    return Loaded(model, weights, checkpoint.config, checkpoint)


def read_weights(
    stored: Mapping[str, Callable[[], np.ndarray]],
    logical_axes: Any,
    shapes: Mapping[str, tuple[int, ...]],
    how: How,
    place: checkpoints.Place | None = None,
) -> dict[Any, Any]:
    """Reads one tensor at a time, rounds it if wanted, and puts it where it belongs.

    Args:
      stored: parameter path -> reads one array.
      logical_axes: (path, axes) of every parameter.
      shapes: of every parameter, by dotted path.
      place: reads one parameter straight to where it belongs, if the format can.
    """
    axes, mesh = dict(logical_axes), how.mesh
    weights: dict[Any, Any] = {}
    for dotted, load in stored.items():
        path = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
        if mesh is None:
            leaf = jax.device_put(load())
        else:
            where = NamedSharding(mesh, sharding.spec(axes[path], shapes[dotted], mesh))
            leaf = jax.device_put(load(), where) if place is None else place(dotted, where)
        if how.bits is not None:
            leaf = rounded(path, leaf, how.bits)
        jax.block_until_ready(leaf)  # else a queue of copies could hold many tensors twice
        node = weights
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return weights


def from_target(
    found: checkpoints.DraftCheckpoint, target: Target
) -> dict[str, Callable[[], np.ndarray]]:
    """What a drafter's checkpoint does not store, because it is the target's.

    Rows of the head or of the embedding, those of the draft's own tokens if it has a vocabulary of
    its own.
    """
    config, weights = target.loaded.config, target.loaded.weights
    if found.offsets is None:
        ids = jnp.arange(config.vocab_size)
    else:
        ids = jnp.arange(found.offsets.size) + jnp.asarray(found.offsets)
    rows = {"head": head_rows, "embed": embed_rows}

    def read(part: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(rows[part](config, weights, ids).astype(target.how.dtype))

    return {path: read(part) for path, part in found.from_target.items()}


def rounded(path: tuple[Any, ...], leaf: Any, bits: int) -> Any:
    """A weight in fewer bits, computed before the next one is read: two at a time would add up."""
    return jax.block_until_ready(quantize_weight(path, leaf, bits))


def tree_of(tree: Any, num_speculative_tokens: Any) -> Any:
    """The option `tree`, where a mapping, as in configuration files, means a dynamic tree.

    Raises:
      ValueError: an unknown key, or a tree and `num_speculative_tokens`.
    """
    if tree is not None and num_speculative_tokens is not None:
        raise ValueError(
            f"give tree or num_speculative_tokens, not both: a tree has its own depth; got "
            f"tree={tree!r}, num_speculative_tokens={num_speculative_tokens!r}"
        )
    if not isinstance(tree, Mapping):
        return tree
    known = list(inspect.signature(drafters.dynamic_tree).parameters)
    unknown = sorted(set(tree) - set(known))
    if unknown:
        raise ValueError(
            f"tree has no option {', '.join(map(repr, unknown))}; it has: {', '.join(known)}"
        )
    return drafters.dynamic_tree(**tree)
