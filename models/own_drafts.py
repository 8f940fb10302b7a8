"""The drafters that specjax trains, in a folder of its own: config.json and one safetensors file.

config.json holds

    specjax_drafter   the method, as `specjax.load` knows it
    network           the fields of the network's configuration
    target            hidden_size, num_layers and vocab_size of the target it was trained for
    from_target       parameters that are not stored: rows of the target's head or embedding
    options           of drafting, e.g. num_speculative_tokens; may be missing

and tensors have the parameters' own paths as names. `d2t` is there where the draft has a vocabulary
of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from specjax.models.block_decoder import BlockConfig, abstract_block
from specjax.models.config import DecoderConfig
from specjax.models.config_json import config_from_json, config_to_json
from specjax.models.decoder import abstract_weights
from specjax.models.drafting import DraftFormat, Found, check_size
from specjax.models.eagle import EagleConfig, abstract_eagle
from specjax.models.functional import paths
from specjax.models.medusa import MedusaConfig, abstract_medusa
from specjax.models.mtp import MtpConfig, abstract_mtp
from specjax.models.naming import Source

__all__ = ["FORMATS", "NETWORKS", "Network", "written_config"]

_KEY = "specjax_drafter"
_TARGET = ("hidden_size", "num_layers", "vocab_size")


class Network(NamedTuple):
    """The networks that a method's drafters are."""

    config: type
    abstract: Callable[[Any], dict[str, Any]]  # configuration -> the weights' tree of shapes
    vocab: Callable[[Any], int | None]  # configuration -> its own vocabulary, if it has one


NETWORKS: Mapping[str, Network] = {
    "eagle": Network(EagleConfig, abstract_eagle, lambda c: c.draft_vocab),
    "eagle3": Network(EagleConfig, abstract_eagle, lambda c: c.draft_vocab),
    "mtp": Network(MtpConfig, abstract_mtp, lambda c: None),
    "medusa": Network(MedusaConfig, abstract_medusa, lambda c: None),
    "dflash": Network(BlockConfig, abstract_block, lambda c: c.draft_vocab),
    "dspark": Network(BlockConfig, abstract_block, lambda c: c.draft_vocab),
    "draft_model": Network(DecoderConfig, abstract_weights, lambda c: None),
}


def written_config(
    method: str,
    config: Any,
    target: DecoderConfig,
    from_target: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What config.json holds."""
    return {
        _KEY: method,
        "network": config_to_json(config),
        "target": {name: getattr(target, name) for name in _TARGET},
        "from_target": dict(from_target),
        "options": dict(options),
    }


def _read(
    method: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: DecoderConfig,
) -> Found:
    network = NETWORKS[method]
    for name in ("network", "target", "from_target", "options"):
        if not isinstance(config.get(name), Mapping):
            raise ValueError(f"{name} is {config.get(name)!r}; wanted an object. Train it again.")
    for name in _TARGET:
        check_size(name, config["target"].get(name), getattr(target, name))
    try:
        made = config_from_json(network.config, config["network"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"network does not hold what it should ({error}).") from error
    stored = {
        path: shape
        for path, shape in paths(network.abstract(made)).items()
        if path not in config["from_target"]
    }
    mapped = "d2t" in shapes
    return Found(
        config=made,
        sources={path: Source((path,), shape) for path, shape in stored.items()},
        ignored=lambda name: name == "d2t",
        d2t="d2t" if mapped else None,
        draft_vocab=network.vocab(made) if mapped else None,
        # What JSON lists are tuples for factories, whose arguments must be hashable.
        options={k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()},
        from_target=config["from_target"],
    )


def _recognises(method: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    return config.get(_KEY) == method


FORMATS: tuple[DraftFormat, ...] = tuple(
    DraftFormat(
        name=f"specjax {method}",
        method=method,
        recognises=functools.partial(_recognises, method),
        read=functools.partial(_read, method),
    )
    for method in NETWORKS
)
