"""Loading: a target and a drafter from names, folders and files, as one `Params`."""

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
from specjax.models.decoder import decoder_model, first_layers
from specjax.types import Drafter, Model, Params, PyTree

__all__ = ["METHODS", "default_dtype", "load"]

_PADDING = 1 / 8  # vocabularies whose sizes differ by no more than this are one, padded
_DTYPES = ("float32", "bfloat16", "float16")


class _Loaded(NamedTuple):
    """A causal language model in device memory."""

    model: Model
    weights: PyTree
    config: DecoderConfig
    checkpoint: checkpoints.Checkpoint


class _Target(NamedTuple):
    """What a drafter may be built from."""

    loaded: _Loaded
    dtype: jnp.dtype
    mesh: Mesh | None


def default_dtype() -> str:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    target: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | Drafter | Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> Params:
    """Loads a model to decode with, and what drafts for it.

    Args:
      target: a registry name (`specjax models` lists them), a Hugging Face checkpoint folder, or a
        GGUF file.
      drafter: None for plain decoding; a method's name (`"ngram"`); a checkpoint, which becomes a
        draft model; a `Drafter`; or a dict, e.g.
        `{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}`,
        `{"method": "draft_model", "model": "path/to/folder"}`,
        `{"method": "draft_model", "draft_layers": 8}` (the target's own first layers).
      mesh: devices to spread the weights over, with axes "data" and "model".
      dtype: "float32", "bfloat16" or "float16"; default float32 on a CPU, else bfloat16.

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
    build = _builder(drafter)
    if mesh is not None:
        mesh = sharding.auto(mesh)
    loaded = _read(target, jnp.dtype(wanted), mesh)
    made, weights = build(_Target(loaded, jnp.dtype(wanted), mesh))
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


def _read(source: str | os.PathLike[str], dtype: jnp.dtype, mesh: Mesh | None) -> _Loaded:
    """Reads one tensor at a time and puts it where it belongs."""
    checkpoint = checkpoints.read(source, dtype)
    model = decoder_model(checkpoint.config)
    axes = dict(model.logical_axes)
    weights: dict[Any, Any] = {}
    for dotted, read in checkpoint.weights.items():
        path = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
        array = read()
        if mesh is None:
            leaf = jnp.asarray(array)
        else:
            where = NamedSharding(mesh, sharding.spec(axes[path], array.shape, mesh))
            leaf = jax.device_put(array, where)
        node = weights
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return _Loaded(model, weights, checkpoint.config, checkpoint)


# --- drafters --------------------------------------------------------------------------------

_Build = Callable[[_Target], tuple[Drafter, PyTree]]


def _plain() -> _Build:
    return lambda target: (drafters.plain(), None)


def _ngram(
    *, num_speculative_tokens: int = 5, prompt_lookup_min: int = 1, prompt_lookup_max: int = 3
) -> _Build:
    made = drafters.ngram(
        num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
    )
    return lambda target: (made, None)


def _draft_model(
    *,
    model: str | os.PathLike[str] | None = None,
    draft_layers: int | None = None,
    num_speculative_tokens: int = 4,
) -> _Build:
    if (model is None) == (draft_layers is None):
        raise ValueError(
            'drafter "draft_model" needs one of "model" (a checkpoint) and "draft_layers" (how '
            f"many of the target's first layers), got model={model!r}, draft_layers={draft_layers}"
        )

    if model is not None:
        _check_draft_exists(model)
    elif not isinstance(draft_layers, int) or isinstance(draft_layers, bool):
        raise ValueError(f"draft_layers must be an integer, got {draft_layers!r}")

    def build(target: _Target) -> tuple[Drafter, PyTree]:
        if draft_layers is not None:
            config, weights = first_layers(
                target.loaded.config, target.loaded.weights, draft_layers
            )
            return drafters.draft_model(decoder_model(config), num_speculative_tokens), weights
        draft = _read(model, target.dtype, target.mesh)
        ids = _vocabulary_map(draft, target.loaded)
        made = drafters.draft_model(draft.model, num_speculative_tokens, mapped=ids is not None)
        return made, draft.weights if ids is None else (draft.weights, ids)

    return build


def _check_draft_exists(model: Any) -> None:
    """A misspelt method's name looks like a checkpoint: say so before the target is read."""
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f'"model" of a draft model must be a name or a path, got {model!r}')
    try:
        checkpoints.resolve(model)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"drafter {os.fspath(model)!r} is neither a method ({', '.join(METHODS)}) nor a draft "
            f"model: {error}"
        ) from error


METHODS: Mapping[str, Callable[..., _Build]] = {"ngram": _ngram, "draft_model": _draft_model}


def _builder(drafter: Any) -> _Build:
    """What makes the drafter, with its options checked, before the target is read."""
    if drafter is None:
        return _plain()
    if isinstance(drafter, Drafter):
        return lambda target: (drafter, None)
    if isinstance(drafter, (str, os.PathLike)):
        known = os.fspath(drafter) in METHODS
        drafter = {"method": drafter} if known else {"method": "draft_model", "model": drafter}
    if not isinstance(drafter, Mapping) or "method" not in drafter:
        raise ValueError(
            'drafter must be a name, a checkpoint, a Drafter, or a dict with a "method", '
            f"got {drafter!r}"
        )
    options = dict(drafter)
    method = options.pop("method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"drafter method {method!r} is not known; known: {', '.join(METHODS)}")
    make = METHODS[method]
    known = set(inspect.signature(make).parameters)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"drafter method {method!r} has no option {', '.join(map(repr, unknown))}; "
            f"it has: {', '.join(sorted(known))}"
        )
    return make(**options)


def _vocabulary_map(draft: _Loaded, target: _Loaded) -> drafters.VocabularyMap | None:
    """How a draft model's tokens are found among the target's; None if both number them alike."""
    ours, theirs = target.checkpoint.tokenizer, draft.checkpoint.tokenizer
    if ours is None or theirs is None:
        sizes = draft.model.vocab_size, target.model.vocab_size
        if max(sizes) > (1 + _PADDING) * min(sizes):
            raise ValueError(
                f"the draft model {draft.checkpoint.name} has {sizes[0]} tokens, the target "
                f"{target.checkpoint.name} has {sizes[1]}, and without both tokenizers it is not "
                "known which are the same; put tokenizer.json beside both, or use a draft of the "
                "same model family"
            )
        return None
    if ours == theirs:
        return None
    here, there = _named(ours), _named(theirs)
    if all(here.get(name, i) == i for name, i in there.items()):
        return None
    size = target.model.vocab_size
    ids = np.full(draft.model.vocab_size, size)
    shared = {i: here[name] for name, i in there.items() if name in here}
    ids[list(shared)] = list(shared.values())
    if len(shared) < len(there) / 2:
        raise ValueError(
            f"the draft model {draft.checkpoint.name} shares only {len(shared)} of its "
            f"{len(there)} tokens with the target {target.checkpoint.name}; use a draft of a "
            "related vocabulary, such as one of the same model family"
        )
    return drafters.vocabulary_map(ids - np.arange(ids.size), size)


def _named(tokenizer: checkpoints.Tokenizer) -> dict[str | bytes, int]:
    """Ids by what tells tokens apart: their bytes, or the name of those without text."""
    words = tokenizer.token_bytes()
    names: dict[str | bytes, int] = {}
    for name, i in sorted(tokenizer.backend.get_vocab().items(), key=lambda pair: pair[1]):
        names.setdefault(words[i] or name, i)
    return names
