"""Writing a drafter's folder, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.checkpoints.finishing import unfinished
from specjax.checkpoints.safetensors_writing import Outgoing, write_shards
from specjax.models.config import DecoderConfig
from specjax.models.functional import leaves
from specjax.models.own_drafts import NETWORKS, written_config

__all__ = ["save_draft", "set_options"]

_ONE_FILE = 1 << 62


def save_draft(
    path: str | os.PathLike[str],
    method: str,
    config: Any,
    weights: Any,
    target: DecoderConfig,
    *,
    draft_ids: np.ndarray | None = None,
    from_target: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Writes a drafter; `specjax.load(target, drafter=path)` reads it.

    Args:
      path: a folder that does not exist yet or is empty.
      method: as `specjax.load` knows it.
      config: of its network.
      weights: its tree, without the parameters in `from_target`.
      target: the model it drafts for.
      draft_ids: `[DV]` increasing target ids, if it has a vocabulary of its own.
      from_target: parameters that are the target's rows: path -> "head" or "embed".
      options: of drafting.
      dtype: of the matrices; vectors stay float32.

    Returns:
      The folder.

    Raises:
      FileExistsError: there is something at `path`.
      ValueError: an unknown method, or weights that are not the network's.
    """
    if method not in NETWORKS:
        raise ValueError(f"method {method!r} has no format; known: {', '.join(NETWORKS)}")
    from_target = dict(from_target or {})
    wanted = {
        key: leaf.shape
        for key, leaf in leaves(NETWORKS[method].abstract(config)).items()
        if key not in from_target
    }
    found = leaves(weights)
    shapes = {key: leaf.shape for key, leaf in found.items()}
    if shapes != wanted:
        differs = sorted(k for k in wanted | shapes if wanted.get(k) != shapes.get(k))
        raise ValueError(
            f"weights are not those of the network: {differs[0]} is {shapes.get(differs[0])}, "
            f"wanted {wanted.get(differs[0])}"
        )
    matrix = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = [_tensor(key, leaf, matrix) for key, leaf in sorted(found.items())]
    if draft_ids is not None:
        offsets = (draft_ids - np.arange(draft_ids.size)).astype(np.int32)
        tensors.append(Outgoing("d2t", offsets.shape, offsets.dtype, lambda: offsets))
    content = written_config(method, config, target, from_target, options or {})
    path = Path(path).expanduser()
    with unfinished(path) as made:
        made.mkdir()
        (made / "config.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        write_shards(made, tensors, _ONE_FILE)
    return path


def set_options(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Puts options of drafting into the folder of a drafter: `specjax.load` takes them as defaults.

    Args:
      path: what `save_draft` wrote.
      options: those of the method, as `specjax.load` takes them. They replace what is there.
    """
    file = Path(path) / "config.json"
    config = json.loads(file.read_text("utf-8"))
    config["options"] = {**config["options"], **options}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    os.replace(part, file)


def _tensor(key: str, leaf: Any, matrix: np.dtype) -> Outgoing:
    dtype = matrix if leaf.ndim > 1 else np.dtype(np.float32)
    return Outgoing(key, leaf.shape, dtype, lambda: np.asarray(jax.device_get(leaf)).astype(dtype))
