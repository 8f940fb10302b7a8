"""Saving what is loaded, and converting checkpoints from one format to another."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import orbax_folder
from specjax.checkpoints.finishing import unfinished
from specjax.checkpoints.gguf_writing import KINDS, write_gguf
from specjax.checkpoints.reading import Checkpoint, read
from specjax.checkpoints.safetensors_folder import DTYPES, read_folder
from specjax.checkpoints.safetensors_writing import Outgoing, write_shards
from specjax.checkpoints.tokenizer import SpecialIds, Tokenizer
from specjax.checkpoints.tokenizer_writing import write_ids, write_tokenizer
from specjax.models import families
from specjax.models.config import DecoderConfig
from specjax.models.config_writing import config_to_hf
from specjax.models.naming import parameters, sources
from specjax.types import Params

__all__ = ["FORMATS", "convert", "save"]

FORMATS = ("safetensors", "orbax", "gguf")
_NUMBER = re.compile(r"\d+")
_FLOATS = ("float32", "bfloat16", "float16")
# Beside the weights of a Hugging Face folder.
_TEXT_FILES = """
added_tokens.json chat_template.jinja generation_config.json merges.txt special_tokens_map.json
tokenizer.json tokenizer.model tokenizer_config.json vocab.json LICENSE LICENSE.txt LICENSE.md
""".split()


def save(
    params: Params, path: str | os.PathLike[str], *, asynchronous: bool = False
) -> concurrent.futures.Future[Path]:
    """Saves the target's weights, configuration and tokenizer; `specjax.load(path)` reads them.

    Arrays that are spread over devices are written part by part, and can be loaded onto another
    mesh. The drafter is not saved.

    Args:
      params: what `specjax.load` returned, perhaps with other weights.
      path: a folder that does not exist yet or is empty.
      asynchronous: whether to return once the arrays are copied, and write in the background. What
        is in `params` may be changed or donated then.

    Returns:
      A future of the folder; done unless `asynchronous`. Its `result()` waits, and raises what
      went wrong in the background.

    Raises:
      FileExistsError: there is something at `path`.
      ValueError: the weights are quantised, or not those of a decoder.

    Example:
      >>> import specjax, tempfile
      >>> params = specjax.load("smollm2-135m", dtype="bfloat16")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saved = save(params, f"{folder}/mine").result()
      ...     specjax.load(saved).name
      'smollm2-135m'
    """
    config = params.model.config
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"the model's configuration is {type(config).__name__}; only decoders that "
            "specjax.load can load are saved. Save other weights with Orbax itself."
        )
    arrays = _named(params.target, config)
    header = orbax_folder.Header(
        params.name, _model_type(config), config, params.eos_ids, params.pad_id
    )
    tokenizer = params.tokenizer if isinstance(params.tokenizer, Tokenizer) else None
    bos = None if tokenizer is None else tokenizer.ids.bos
    text = functools.partial(
        _write_text, tokenizer=tokenizer, ids=SpecialIds(bos, params.eos_ids, params.pad_id)
    )
    return _save(Path(path).expanduser(), arrays, header, _exact(config), text, asynchronous)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a checkpoint in another format or type.

    Tensors are read and written one after the other, except for Orbax, which takes all at once.
    From a Hugging Face folder to another, names, config.json and tokenizer files stay as they are.

    Args:
      source: a registry name, or a checkpoint of any format that can be read.
      destination: a folder, or a file for GGUF; nothing may be there yet.
      to: "safetensors" (a Hugging Face folder), "orbax" or "gguf" (Llama, Qwen2 and Qwen3).
      dtype: "float32", "bfloat16" or "float16", for GGUF also "q8_0". None keeps the stored types;
        what GGUF stores becomes float32.
      shard_bytes: safetensors files do not become larger than this, unless a tensor is.

    Returns:
      The destination.

    Raises:
      FileNotFoundError: no such name or file.
      FileExistsError: there is something at the destination.
      ValueError: a bad argument, a damaged or unsupported checkpoint, or one that the format
        cannot hold.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = convert("smollm2-135m", f"{folder}/mine", dtype="bfloat16")
      ...     sorted(file.name for file in path.iterdir())[:3]
      ['config.json', 'generation_config.json', 'model.safetensors']
    """
    if to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    known = tuple(KINDS) if to == "gguf" else _FLOATS
    if dtype is not None and dtype not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)} for {to}, got {dtype!r}")
    path = Path(destination).expanduser()
    # GGUF rounds what it writes by itself, and not every tensor.
    plain = None if to == "gguf" else dtype
    checkpoint = read(source, plain)
    if to == "orbax":
        _to_orbax(checkpoint, path)
        return path
    with unfinished(path) as made:
        if to == "gguf":
            write_gguf(made, checkpoint, dtype, _types(checkpoint, None))
        elif _is_hf(checkpoint.path):
            made.mkdir()
            _copy_folder(checkpoint, made, plain, shard_bytes)
        else:
            made.mkdir()
            _to_folder(checkpoint, made, plain, shard_bytes)
    return path


def _is_hf(path: Path) -> bool:
    return path.is_dir() and not orbax_folder.is_orbax_folder(path)


# --- safetensors -----------------------------------------------------------------------------


def _copy_folder(checkpoint: Checkpoint, made: Path, dtype: str | None, shard_bytes: int) -> None:
    """Every tensor under its own name, also those that no parameter is made of."""
    source = checkpoint.path
    layout = checkpoint.family.hf
    # By names without numbers: layers behind the last, which predict further tokens, count, too.
    exact = {
        _NUMBER.sub("", name)
        for entry in sources(checkpoint.config, layout).values()
        if entry.exact
        for name in entry.names
    }
    folder = read_folder(source)
    tensors = []
    for name, tensor in folder.tensors.items():
        stored = DTYPES[tensor.kind]
        casts = dtype is not None and jnp.issubdtype(stored, jnp.floating)
        wanted = (
            np.dtype(dtype)
            if casts and _NUMBER.sub("", layout.rename(name)) not in exact
            else stored
        )
        cast = functools.partial(_cast, tensor.read, wanted)
        tensors.append(Outgoing(name, tensor.shape, wanted, cast))
    write_shards(made, tensors, shard_bytes)
    for name in _TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, made / name)
    if dtype is None:
        shutil.copyfile(source / "config.json", made / "config.json")
    else:
        # Libraries that load a checkpoint in its own type look here for it.
        changed = {key: dtype for key in ("torch_dtype", "dtype") if key in folder.config}
        _write_json(made / "config.json", folder.config | (changed or {"torch_dtype": dtype}))


def _to_folder(checkpoint: Checkpoint, made: Path, dtype: str | None, shard_bytes: int) -> None:
    """Parameters under the names of the family's Hugging Face checkpoints."""
    family = checkpoint.family
    config = config_to_hf(checkpoint.config, None if family is None else family.model_type)
    layout = families.by_model_type(config["model_type"]).hf
    types = _types(checkpoint, dtype)
    # Parts of a stack are written one after the other: it is read once, and one stack is kept.
    whole = functools.lru_cache(maxsize=1)(lambda key: checkpoint.weights[key]())
    tensors = []
    for key, entry in sources(checkpoint.config, layout).items():
        if entry.turn is not None:
            raise ValueError(
                f"{checkpoint.path}: {entry.names[0]} of the family {config['model_type']} is "
                "stored in another order, which cannot be written. Use --to orbax."
            )
        reads: list[Callable[[], np.ndarray]] = [checkpoint.weights[key]]
        if entry.stacked:
            reads = [lambda key=key, i=i: whole(key)[i] for i in range(len(entry.names))]
        for name, part in zip(entry.names, reads, strict=True):
            tensors.append(Outgoing(name, entry.shape, types[key], part))
    write_shards(made, tensors, shard_bytes)
    _write_text(made, checkpoint.tokenizer, _ids(checkpoint))
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.size
    _write_json(made / "config.json", config | {"torch_dtype": max(sizes, key=sizes.__getitem__)})


def _types(checkpoint: Checkpoint, dtype: str | None) -> dict[str, np.dtype]:
    """The type in which `checkpoint.weights` reads each parameter."""
    if _is_hf(checkpoint.path):
        layout = checkpoint.family.hf
        tensors = read_folder(checkpoint.path).tensors
        stored = {layout.rename(name): DTYPES[tensor.kind] for name, tensor in tensors.items()}
        return {
            key: stored[entry.names[0]] if dtype is None or entry.exact else np.dtype(dtype)
            for key, entry in sources(checkpoint.config, layout).items()
        }
    if not orbax_folder.is_orbax_folder(checkpoint.path):
        return dict.fromkeys(checkpoint.weights, np.dtype(dtype or "float32"))
    folder = orbax_folder.read_orbax(checkpoint.path)
    return {
        key: np.dtype(tensor.kind if dtype is None or key in folder.exact else dtype)
        for key, tensor in folder.tensors.items()
    }


def _cast(read: Callable[[], np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.asarray(read(), dtype)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2), "utf-8")


def _ids(checkpoint: Checkpoint) -> SpecialIds:
    bos = None if checkpoint.tokenizer is None else checkpoint.tokenizer.ids.bos
    return SpecialIds(bos, checkpoint.eos_ids, checkpoint.pad_id)


def _write_text(made: Path, tokenizer: Tokenizer | None, ids: SpecialIds) -> None:
    write_ids(made, ids)
    if tokenizer is not None:
        write_tokenizer(made, tokenizer)


# --- Orbax -----------------------------------------------------------------------------------


def _to_orbax(checkpoint: Checkpoint, path: Path) -> None:
    family = checkpoint.family
    header = orbax_folder.Header(
        checkpoint.name,
        None if family is None else family.model_type,
        checkpoint.config,
        checkpoint.eos_ids,
        checkpoint.pad_id,
    )
    text = functools.partial(_write_text, tokenizer=checkpoint.tokenizer, ids=_ids(checkpoint))
    _save(path, checkpoint.weights, header, _exact(checkpoint.config), text, asynchronous=False)


def _save(
    path: Path,
    arrays: Mapping[str, Any],
    header: orbax_folder.Header,
    exact: frozenset[str],
    text: Callable[[Path], None],
    asynchronous: bool,
) -> concurrent.futures.Future[Path]:
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(unfinished(path))
        made.mkdir()
        arrays = {key: _on_host(read()) if callable(read) else read for key, read in arrays.items()}
        shapes = {key: tuple(array.shape) for key, array in arrays.items()}
        wait = orbax_folder.start_arrays(made, arrays)
        del arrays
        rest = stack.pop_all()

    def finish() -> Path:
        with rest:
            wait()
            text(made)
            orbax_folder.write_header(made, header, shapes, exact)
        return path

    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="specjax-save")
    future = executor.submit(finish)
    executor.shutdown(wait=not asynchronous)  # what was submitted goes on
    if not asynchronous:
        future.result()
    return future


def _on_host(array: np.ndarray) -> jax.Array | np.ndarray:
    """Orbax writes an array of JAX as it lies; of one of NumPy it makes a copy first."""
    try:
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX runs without its CPU backend
        return array


def _named(weights: Any, config: DecoderConfig) -> dict[str, jax.Array]:
    """Weights by parameter path."""
    leaves = jax.tree_util.tree_flatten_with_path(
        weights, is_leaf=lambda node: not isinstance(node, Mapping)
    )[0]
    found = {".".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}
    wanted = parameters(config)
    for key in [*wanted, *found]:
        if key not in found or key not in wanted:
            raise ValueError(
                f"params.target {'has' if key in found else 'lacks'} {key}, which does not fit the "
                "model's configuration. Save the weights of the whole model, and no others."
            )
        leaf = found[key]
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(
                f"params.target has {key} as {type(leaf).__name__}; only plain arrays are saved. "
                "Save the weights before they are quantised: load them without `quantize`."
            )
        if leaf.shape != wanted[key]:
            raise ValueError(
                f"params.target has {key} of shape {leaf.shape}; its configuration wants "
                f"{wanted[key]}."
            )
    return found


def _model_type(config: DecoderConfig) -> str | None:
    """A family that can express the configuration."""
    try:
        return config_to_hf(config)["model_type"]
    except ValueError:
        return None


def _exact(config: DecoderConfig) -> frozenset[str]:
    """Parameters that keep their stored type, by any family that has all parameters."""
    exact: set[str] = set()
    for family in families.FAMILIES:
        with contextlib.suppress(KeyError, AttributeError):  # another family's parameters
            found = sources(config, family.hf)
            exact |= {key for key, source in found.items() if source.exact}
    return frozenset(exact)
