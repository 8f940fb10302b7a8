"""An NNX module as pure functions over its weights, a tree of plain dicts and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

__all__ = ["Functional", "functional", "leaves", "paths"]


class Functional(NamedTuple):
    """What is left of a module without its weights."""

    bind: Callable[[Any], Any]  # weights -> the module with them
    abstract: dict[str, Any]  # weights' tree of `jax.ShapeDtypeStruct` (float32)
    axes: tuple[tuple[Any, tuple[Any, ...]], ...]  # (path, logical axes) of every weight
    random: Callable[..., dict[str, Any]]  # (key, dtype) -> freshly initialised weights


def functional(make: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """Takes a module apart.

    Args:
      make: builds it. Every parameter has `logical_axes`.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    axes = {
        path: variable.get_metadata()["logical_axes"] for path, variable in nnx.to_flat_state(state)
    }

    def bind(weights: Any) -> Any:
        return nnx.merge(graph, nnx.State(weights))

    def random(key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
        fresh = nnx.state(make(nnx.Rngs(params=key)))
        return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(fresh))

    return Functional(
        bind=bind,
        abstract=nnx.to_pure_dict(state),
        axes=tuple(sorted(axes.items(), key=str)),
        random=random,
    )


def paths(tree: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """The dotted path and the shape of every leaf.

    Example:
      >>> paths({"layers": {0: {"weight": jax.ShapeDtypeStruct((4, 8), jnp.float32)}}})
      {'layers.0.weight': (4, 8)}
    """
    return {path: tuple(leaf.shape) for path, leaf in leaves(tree).items()}


def leaves(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Every leaf by its dotted path."""
    found: dict[str, Any] = {}

    def walk(path: str, node: Any) -> None:
        if isinstance(node, Mapping):
            for key, child in node.items():
                walk(f"{path}.{key}" if path else str(key), child)
        else:
            found[path] = node

    walk("", tree)
    return found
