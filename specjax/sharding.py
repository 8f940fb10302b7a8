"""Logical axis names to mesh axes: one table, for weights and caches.

An axis of an array is named by what it counts ("heads", "mlp", "batch", ...), and `RULES` says
which mesh axis such a thing is split over. What does not divide evenly is replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from specjax.types import Cache, Model, PyTree

__all__ = [
    "RULES",
    "auto",
    "constrain_cache",
    "constrain_rows",
    "mesh_of",
    "onto",
    "place",
    "place_axes",
    "spec",
]

# A logical axis is a name, or (name, unit): only whole units of so many elements are split,
# e.g. ("kv_heads", D) for an axis of G * D elements.
Axis = str | tuple[str, int] | None  # None: never split

RULES: Mapping[str, str | None] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "slots": None,
    "head_dim": None,
}

_CACHE_AXES: tuple[Axis, ...] = ("batch", "kv_heads", "slots", "head_dim")


def spec(axes: tuple[Axis, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The partition of one array.

    Args:
      axes: a logical axis for each dimension.
      shape: its size.
      mesh: mesh axes that a rule names but the mesh lacks count as absent.

    Raises:
      KeyError: a logical name that `RULES` does not have.

    Example:
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> tuple(spec(("vocab", "embed"), (8, 4), mesh))
      ('model', None)
    """
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        name, unit = axis if isinstance(axis, tuple) else (axis, 1)
        target = None if name is None else RULES[name]
        count = mesh.shape.get(target)
        # A part of a weight, such as its scales, may be smaller than a unit.
        splits = count is not None and size % count == 0 and (size // unit) % count == 0
        parts.append(target if splits else None)
    return PartitionSpec(*parts)


def auto(mesh: Mesh) -> Mesh:
    """The same devices and names, with all axes left to the compiler's partitioner."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def mesh_of(weights: PyTree) -> Mesh | None:
    """The mesh that weights lie on, if they lie on one of several devices."""
    for leaf in jax.tree.leaves(weights):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh if sharding.mesh.size > 1 else None
    return None


def place(model: Model, weights: PyTree, mesh: Mesh) -> PyTree:
    """Puts every weight where `RULES` wants it. Weights that are there already do not move."""
    return place_axes(model.logical_axes, weights, mesh)


def place_axes(logical_axes: Any, weights: PyTree, mesh: Mesh) -> PyTree:
    """As `place`, with `((path, axes), ...)` of the weights, of which there may be fewer."""
    axes = dict(logical_axes)

    def put(path: Any, leaf: Any) -> Any:
        # The parts of a record that stands for a weight have the weight's axes.
        names = axes[tuple(entry.key for entry in path if isinstance(entry, DictKey))]
        return jax.device_put(leaf, NamedSharding(mesh, spec(names, leaf.shape, mesh)))

    return jax.tree_util.tree_map_with_path(put, weights)


def onto(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies what does not lie on the mesh's devices to all of them."""

    def put(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and sharding.device_set == set(mesh.devices.flat):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, tree)


def constrain_cache(cache: Cache, mesh: Mesh | None) -> Cache:
    """Inside jit: keeps a cache split over rows and key/value heads."""
    if mesh is None:
        return cache

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, spec(_CACHE_AXES, x.shape, mesh))
        )

    keys, values = jax.tree.map(constrain, (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def constrain_rows(rows: PyTree, mesh: Mesh | None) -> PyTree:
    """Inside jit: keeps arrays with a leading row axis split over rows."""
    if mesh is None:
        return rows

    def constrain(x: jax.Array) -> jax.Array:
        axes = ("batch",) + ("slots",) * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, x.shape, mesh)))

    return jax.tree.map(constrain, rows)
