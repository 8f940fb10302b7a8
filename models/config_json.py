"""Configurations as JSON, where tuples are lists and records are objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.config import DecoderConfig, ExpertsConfig, LatentConfig, RopeConfig

__all__ = ["config_from_json", "config_to_json"]

_RECORDS = {
    "decoder": DecoderConfig,
    "rope": RopeConfig,
    "local_rope": RopeConfig,
    "experts": ExpertsConfig,
    "latent": LatentConfig,
}


def config_to_json(config: Any) -> dict[str, Any]:
    """The fields of a configuration record, records within as objects."""
    return dataclasses.asdict(config)


def config_from_json(record: type, fields: Mapping[str, Any]) -> Any:
    """A configuration record from its fields.

    Raises:
      ValueError: an unknown field.
      TypeError: a field is missing.
    """
    known = {field.name for field in dataclasses.fields(record)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"the configuration has the key {unknown[0]!r}, which is not known")
    values: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            value = config_from_json(_RECORDS[key], value)
        values[key] = tuple(value) if isinstance(value, list) else value
    return record(**values)
