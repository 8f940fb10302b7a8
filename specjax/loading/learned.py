"""Trained drafters: which network and which way of drafting a checkpoint's method means."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax import checkpoints, drafters, sharding
from specjax.loading.reading import Target, from_target, read_weights, tree_of
from specjax.models.block_decoder import block_network
from specjax.models.decoder import decoder_model, first_layers
from specjax.models.eagle import eagle_network
from specjax.models.medusa import medusa_heads
from specjax.models.mtp import mtp_network
from specjax.types import Drafter, Model, PyTree

__all__ = ["METHODS", "method_of", "own_drafter", "within_target"]

_Build = Callable[[Target], tuple[Drafter, PyTree]]


def method_of(source: str | os.PathLike[str]) -> str | None:
    """The method of a drafter's checkpoint; None if the source is none."""
    path = Path(source)
    found = checkpoints.draft_format(path) if path.is_dir() else None
    return None if found is None else found.method


def _build(
    method: str,
    model: str | os.PathLike[str] | None,
    make: Callable[[checkpoints.DraftCheckpoint, dict[str, Any]], tuple[Drafter, Any]],
    options: Mapping[str, Any],
) -> _Build:
    """Reads the checkpoint once the target is known.

    Args:
      make: (checkpoint, options) -> the drafter, and logical axes of its weights.
      options: of the caller; those that are None are the checkpoint's to choose.
    """
    count = options.get("num_speculative_tokens")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ValueError(
            f"num_speculative_tokens of the drafter {method!r} must be an integer of at least 1, "
            f"got {count!r}"
        )
    if model is not None and (not isinstance(model, (str, os.PathLike)) or not os.fspath(model)):
        raise ValueError(
            f'"model" of the drafter {method!r} must be the folder of its checkpoint, got {model!r}'
        )
    if model is not None and not Path(model).is_dir():
        raise FileNotFoundError(
            f'"model" of the drafter {method!r} is {os.fspath(model)!r}, and there is no such '
            "folder; wanted a drafter's checkpoint"
        )

    def build(target: Target) -> tuple[Drafter, PyTree]:
        path = own_drafter(method, target) if model is None else Path(model)
        found = checkpoints.read_draft(path, target.loaded.config, method, target.how.dtype)
        given = {name: value for name, value in options.items() if value is not None}
        mapped = {} if found.offsets is None else {"mapped": True}
        drafter, axes = make(found, {**found.options, **given, **mapped})
        weights = _weights(found, axes, target)
        if found.offsets is not None:
            size = target.loaded.model.vocab_size
            weights = weights, drafters.vocabulary_map(found.offsets, size)
        return drafter, weights

    return build


def own_drafter(method: str, target: Target) -> Path:
    """The drafter that lies within the target's own folder, or comes with the package for it.

    Raises:
      ValueError: there is none.
    """
    own = target.loaded.checkpoint.path
    if own.is_dir() and checkpoints.draft_format(own, method) is not None:
        return own
    found = checkpoints.bundled(own, method)
    if found is None:
        raise ValueError(
            f"the drafter {method!r} needs "
            + ('one of "model", ' if method == "draft_model" else '"model", ')
            + "its checkpoint"
            + (', "draft_layers" and "quantize"' if method == "draft_model" else "")
            + f": the target {own} holds none, and none comes with the package"
        )
    return found


def _weights(found: checkpoints.DraftCheckpoint, axes: Any, target: Target) -> PyTree:
    """Drafters are small: on a mesh every device holds all of one."""
    how = target.how._replace(mesh=None, bits=None)
    stored = {**found.weights, **from_target(found, target)}
    weights = read_weights(stored, axes, {}, how)
    return weights if target.how.mesh is None else sharding.onto(weights, target.how.mesh)


def within_target(
    path: Path, target: Target, bits: int | None, layers: int | None
) -> tuple[Model, PyTree, Mapping[str, Any]]:
    """A trained draft model, whose embedding and head are the target's: the arrays are shared.

    Args:
      path: its folder.
      target: the model it drafts for.
      bits: of its own matrices; None: as they are.
      layers: how many of its layers are used; None: all.

    Returns:
      The model, its weights, and what its folder says of drafting.
    """
    found = checkpoints.read_draft(path, target.loaded.config, "draft_model", target.how.dtype)
    whole = decoder_model(found.config, kv_cache=target.how.kv_cache)
    how = target.how._replace(mesh=None, bits=bits)
    weights = read_weights(found.weights, whole.logical_axes, {}, how)
    config = found.config
    if layers is not None and layers != config.num_layers:
        config, weights = first_layers(config, weights, layers)
    model = decoder_model(config, kv_cache=target.how.kv_cache)
    if target.how.mesh is not None:
        weights = sharding.place_axes(model.logical_axes, weights, target.how.mesh)
    shared = {part: target.loaded.weights[part] for part in found.from_target.values()}
    return model, {**weights, **shared}, found.options


def _eagle(
    method: str,
    *,
    model: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
    tree: Any = None,
    paths: int | None = None,
) -> _Build:
    tree = tree_of(tree, num_speculative_tokens)

    def make(found: checkpoints.DraftCheckpoint, options: dict[str, Any]):
        network = eagle_network(found.config)
        if options.get("tree") is not None:
            options.pop("num_speculative_tokens", None)
        return drafters.eagle(network, name=method, **options), network.logical_axes

    options = {
        "num_speculative_tokens": num_speculative_tokens,
        "tree": tree,
        "paths": paths,
    }
    return _build(method, model, make, options)


def _mtp(
    *, model: str | os.PathLike[str] | None = None, num_speculative_tokens: int | None = None
) -> _Build:
    def make(found: checkpoints.DraftCheckpoint, options: dict[str, Any]):
        network = mtp_network(found.config)
        made = drafters.mtp(network, modules=found.config.modules, **options)
        return made, network.logical_axes

    return _build("mtp", model, make, {"num_speculative_tokens": num_speculative_tokens})


def _medusa(
    *,
    model: str | os.PathLike[str] | None = None,
    choices: Any = None,
    num_speculative_tokens: int | None = None,
) -> _Build:
    def make(found: checkpoints.DraftCheckpoint, options: dict[str, Any]):
        heads = medusa_heads(found.config)
        return drafters.medusa(heads, **options), heads.logical_axes

    options = {"choices": choices, "num_speculative_tokens": num_speculative_tokens}
    return _build("medusa", model, make, options)


def _dflash(
    *, model: str | os.PathLike[str] | None = None, num_speculative_tokens: int | None = None
) -> _Build:
    def make(found: checkpoints.DraftCheckpoint, options: dict[str, Any]):
        network = block_network(found.config)
        return drafters.dflash(network, **options), network.logical_axes

    return _build("dflash", model, make, {"num_speculative_tokens": num_speculative_tokens})


def _dspark(
    *,
    model: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
    confidence_threshold: float | None = None,
    confidence_temperatures: Any = None,
    steps_per_second: Any = None,
) -> _Build:
    def make(found: checkpoints.DraftCheckpoint, options: dict[str, Any]):
        network = block_network(found.config)
        return drafters.dspark(network, **options), network.logical_axes

    def listed(name: str, values: Any) -> tuple[Any, ...] | None:
        if values is not None and not isinstance(values, (list, tuple)):
            raise ValueError(f"{name} must be a list of numbers, got {values!r}")
        return None if values is None else tuple(values)

    options = {
        "num_speculative_tokens": num_speculative_tokens,
        "confidence_threshold": confidence_threshold,
        "confidence_temperatures": listed("confidence_temperatures", confidence_temperatures),
        "steps_per_second": listed("steps_per_second", steps_per_second),
    }
    return _build("dspark", model, make, options)


METHODS: Mapping[str, Callable[..., _Build]] = {
    "eagle": functools.partial(_eagle, "eagle"),
    "eagle3": functools.partial(_eagle, "eagle3"),
    "mtp": _mtp,
    "medusa": _medusa,
    "dflash": _dflash,
    "dspark": _dspark,
}
