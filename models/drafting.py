"""What a published format of drafters says: how to recognise it, and where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

from specjax.models.config import DecoderConfig
from specjax.models.config_reading import positive_int
from specjax.models.naming import Source

__all__ = [
    "DraftFormat",
    "Found",
    "check_features",
    "check_size",
    "proposal_tokens",
    "renamed",
    "target_fields",
]

Shapes = Mapping[str, tuple[int, ...]]


class Found(NamedTuple):
    """A drafter's checkpoint, understood by its headers."""

    config: Hashable  # of the network
    sources: Mapping[str, Source]  # parameter path -> tensors
    ignored: Callable[[str], bool] = lambda name: False  # tensors that may be there
    d2t: str | None = None  # tensor of offsets [DV], if the drafter has a vocabulary of its own
    draft_vocab: int | None = None  # DV
    options: Mapping[str, Any] = {}  # what the checkpoint says of drafting: options of the method
    from_target: Mapping[str, str] = {}  # parameter path -> "embed" or "head": the target's rows


class DraftFormat(NamedTuple):
    """One way in which drafters are published."""

    name: str  # for messages
    method: str  # as `specjax.load` knows it
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]  # config.json, tensor names
    # config.json, shapes of its tensors, the target
    read: Callable[[Mapping[str, Any], Shapes, DecoderConfig], Found]
    within_target: bool = False  # its tensors lie in the target's own checkpoint


def check_size(what: str, own: int, target: int) -> None:
    """Refuses a drafter of another target.

    Raises:
      ValueError: the sizes differ.
    """
    if own != target:
        raise ValueError(
            f"the drafter was made for a target whose {what} is {own}, but the target's is "
            f"{target}. Take the drafter that belongs to this target."
        )


def check_features(key: str, ids: Any, layers: int, offset: int = 0) -> tuple[int, ...]:
    """Which states of the target are read, from a list of layers in a config.json.

    Args:
      key: of the list, for messages.
      ids: the list.
      layers: of the target.
      offset: 0 where id i is the input of layer i, 1 where it is that layer's output.

    Returns:
      Indices as `specjax.types.ForwardFn` has them.

    Raises:
      ValueError: no list of integers, or a layer that the target does not have.
    """
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{key} is {ids!r}; wanted a list of layers. Correct config.json.")
    found = tuple(i + offset for i in ids)
    bad = [i for i, at in zip(ids, found, strict=True) if not 0 <= at <= layers]
    if bad:
        raise ValueError(
            f"{key} names the layer {bad[0]}, but the target has {layers} layers. Take the "
            "drafter that belongs to this target."
        )
    return found


def proposal_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens a speculators config.json drafts, as an option of the method."""
    spec = config.get("speculators_config")
    spec = {} if spec is None else spec
    if not isinstance(spec, Mapping):
        raise ValueError(f"speculators_config is {spec!r}; wanted an object. Correct config.json.")
    methods = spec.get("proposal_methods")
    methods = [] if methods is None else methods
    if not isinstance(methods, list) or not all(isinstance(m, Mapping) for m in methods):
        raise ValueError(
            f"proposal_methods is {methods!r}; wanted a list of objects. Correct config.json."
        )
    if not methods or methods[0].get("speculative_tokens") is None:
        return {}
    return {"num_speculative_tokens": positive_int(methods[0], "speculative_tokens")}


def target_fields(config: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A config.json without the keys that a format adds to those of a decoder's layers."""
    return {key: value for key, value in config.items() if key not in own}


def renamed(
    shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, str], leaves: Mapping[str, str]
) -> dict[str, Source]:
    """Sources of parameters that are one tensor each under another name.

    Args:
      shapes: of the parameters, by path.
      modules: module path -> tensor name without its last part; "scale" is called "weight".
        The longest path that fits counts; what follows it stays as it is.
      leaves: parameter path -> whole tensor name.
    """
    found = {}
    for path, shape in shapes.items():
        if path in leaves:
            found[path] = Source((leaves[path],), shape)
            continue
        module, _, kind = path.rpartition(".")
        name = modules[module]
        found[path] = Source((f"{name}.{'weight' if kind == 'scale' else kind}",), shape)
    return found
