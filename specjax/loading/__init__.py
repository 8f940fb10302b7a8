"""Loading: a target and a drafter from names, folders and files, as one `Params`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax import sharding
from specjax.loading.learned import method_of
from specjax.loading.methods import METHODS, builder
from specjax.loading.reading import How, Target, bits_of, read
from specjax.types import Drafter, Params

__all__ = ["METHODS", "default_dtype", "load", "method_of"]

_DTYPES = ("float32", "bfloat16", "float16")


def default_dtype() -> str:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    target: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | Drafter | Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    kv_cache: str | None = None,
) -> Params:
    """Loads a model to decode with, and what drafts for it.

    Args:
      target: a registry name (`specjax models` lists them), a Hugging Face checkpoint folder, a
        GGUF file, or a folder that `specjax.save` wrote.
      drafter: None for plain decoding; `"default"`, the one that measured best with a target of
        the registry; a method's name (`"ngram"`); a checkpoint, which becomes a draft model; a
        `Drafter`; or a dict, e.g.
        `{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}`,
        `{"method": "draft_model", "model": "path/to/folder"}`,
        `{"method": "draft_model", "draft_layers": 8}` (the target's own first layers),
        `{"method": "draft_model", "quantize": "int8"}` (the target itself, in 8 bits). All three
        kinds of draft models take "quantize". The folder of a published drafter is recognised
        (EAGLE, EAGLE-3, Medusa, MTP, DFlash, DSpark, in their own formats or in that of
        speculators); `{"method": "eagle3", "model": "path/to/folder", "tree": {"nodes": 24,
        "depth": 5, "top_k": 6}}` gives options of its method. A method without "model" means
        modules within the target's own checkpoint, or the drafter that comes with the package.
        Two drafters become one by
        `{"method": "fallback", "first": "ngram", "second": "path/to/folder"}` (the second where
        the first finds nothing) and `{"method": "merged", ...}` (the trees of both as one). With
        any method, "verify_sizes", e.g. [0, 3], compiles shorter verifying passes for drafts of at
        most so many nodes.
      mesh: devices to spread the weights over, with axes "data" and "model".
      dtype: "float32", "bfloat16" or "float16"; default float32 on a CPU, else bfloat16.
      quantize: "int8" or "int4" rounds the target's weights as they are read, with a scale for
        each 32 inputs; what a file holds in as many bits (GGUF's Q8_0, Q4_0, Q4_1) stays as it is.
        Embedding and head take int8; norms, biases and routers are not rounded.
      kv_cache: "int8" rounds keys and values, of the target and of a draft model, with a scale for
        each token and head.

    Returns:
      Weights, functions, tokenizer and special ids.

    Raises:
      FileNotFoundError: no such name or file.
      ValueError: a bad argument, a damaged or unsupported checkpoint, or a draft that does not fit.

    Example:
      >>> params = load("smollm2-135m", drafter="ngram")
      >>> params.drafter.name
      'ngram'
    """
    if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
        raise ValueError(f"target must be a name or a path, got {target!r}")
    name = default_dtype() if dtype is None else dtype
    wanted = getattr(name, "__name__", None) or str(name)
    if wanted not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if kv_cache not in (None, "int8"):
        raise ValueError(f'kv_cache must be None or "int8", got {kv_cache!r}')
    bits = bits_of(quantize)
    build = builder(drafter)
    if mesh is not None:
        mesh = sharding.auto(mesh)
    how = How(jnp.dtype(wanted), mesh, bits, kv_cache)
    loaded = read(target, how)
    made, weights = build(Target(loaded, how))
    return Params(
        target=loaded.weights,
        draft=weights,
        model=loaded.model,
        drafter=made,
        tokenizer=loaded.checkpoint.tokenizer,
        eos_ids=loaded.checkpoint.eos_ids,
        pad_id=loaded.checkpoint.pad_id,
        name=loaded.checkpoint.name,
    )
