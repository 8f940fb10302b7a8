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
from specjax.models.naming import parameters
from specjax.models.quantized import BITS, QuantizedTensor, quantize_weight
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


class _How(NamedTuple):
    """In what form a model is wanted, and where."""

    dtype: jnp.dtype
    mesh: Mesh | None
    bits: int | None = None  # of quantised weights
    kv_cache: str | None = None


class _Target(NamedTuple):
    """What a drafter may be built from."""

    loaded: _Loaded
    how: _How


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
      drafter: None for plain decoding; a method's name (`"ngram"`); a checkpoint, which becomes a
        draft model; a `Drafter`; or a dict, e.g.
        `{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}`,
        `{"method": "draft_model", "model": "path/to/folder"}`,
        `{"method": "draft_model", "draft_layers": 8}` (the target's own first layers),
        `{"method": "draft_model", "quantize": "int8"}` (the target itself, in 8 bits). All three
        kinds of draft models take "quantize".
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
    bits = _bits(quantize)
    build = _builder(drafter)
    if mesh is not None:
        mesh = sharding.auto(mesh)
    how = _How(jnp.dtype(wanted), mesh, bits, kv_cache)
    loaded = _read(target, how)
    made, weights = build(_Target(loaded, how))
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


def _bits(quantize: Any) -> int | None:
    if quantize is None:
        return None
    if not isinstance(quantize, str) or quantize not in BITS:
        raise ValueError(
            f"quantize must be None or one of {', '.join(map(repr, BITS))}, got {quantize!r}"
        )
    return BITS[quantize]


def _read(source: str | os.PathLike[str], how: _How) -> _Loaded:
    """Reads one tensor at a time, rounds it if wanted, and puts it where it belongs."""
    checkpoint = checkpoints.read(source, how.dtype)
    model = decoder_model(checkpoint.config, kv_cache=how.kv_cache)
    mesh, axes = how.mesh, dict(model.logical_axes)
    shapes = parameters(checkpoint.config)
    weights: dict[Any, Any] = {}
    for dotted, read in checkpoint.weights.items():
        path = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
        if mesh is None:
            leaf = jax.device_put(read())
        else:
            where = NamedSharding(mesh, sharding.spec(axes[path], shapes[dotted], mesh))
            place = checkpoint.place
            leaf = jax.device_put(read(), where) if place is None else place(dotted, where)
        if how.bits is not None:
            leaf = _rounded(path, leaf, how.bits)
        jax.block_until_ready(leaf)  # else a queue of copies could hold many tensors twice
        node = weights
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    if mesh is not None:
        weights = sharding.place(model, weights, mesh)
    return _Loaded(model, weights, checkpoint.config, checkpoint)


def _rounded(path: tuple[Any, ...], leaf: Any, bits: int) -> Any:
    """A weight in fewer bits, computed before the next one is read: two at a time would add up."""
    return jax.block_until_ready(quantize_weight(path, leaf, bits))


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
    quantize: str | None = None,
    num_speculative_tokens: int = 4,
) -> _Build:
    given = (model is not None) + (draft_layers is not None)
    if given == 2 or (given == 0 and quantize is None):
        raise ValueError(
            'drafter "draft_model" needs one of "model" (a checkpoint) and "draft_layers" (how '
            'many of the target\'s first layers), or "quantize" alone (the target itself, in fewer '
            f"bits), got model={model!r}, draft_layers={draft_layers}"
        )
    bits = _bits(quantize)
    if model is not None:
        _check_draft_exists(model)
    elif draft_layers is not None and (
        not isinstance(draft_layers, int) or isinstance(draft_layers, bool)
    ):
        raise ValueError(f"draft_layers must be an integer, got {draft_layers!r}")

    def build(target: _Target) -> tuple[Drafter, PyTree]:
        if model is None:
            config, weights = target.loaded.config, target.loaded.weights
            if draft_layers is not None:
                config, weights = first_layers(config, weights, draft_layers)
            elif target.how.bits is not None and target.how.bits <= bits:
                raise ValueError(
                    f"the draft would be the target itself: quantize={quantize!r} of the drafter "
                    "needs a target of more bits, or a draft_layers"
                )
            own = decoder_model(config, kv_cache=target.how.kv_cache)
            if bits is not None:
                weights = _in_bits(own, weights, bits, target.how.mesh)
            return drafters.draft_model(own, num_speculative_tokens), weights
        draft = _read(model, target.how._replace(bits=bits))
        ids = _vocabulary_map(draft, target.loaded)
        made = drafters.draft_model(draft.model, num_speculative_tokens, mapped=ids is not None)
        return made, draft.weights if ids is None else (draft.weights, ids)

    return build


def _in_bits(model: Model, weights: PyTree, bits: int, mesh: Mesh | None) -> PyTree:
    """Copies of those weights that have more bits, rounded one at a time; the others are shared."""

    def convert(path: Any, leaf: Any) -> Any:
        return _rounded(tuple(entry.key for entry in path), leaf, bits)

    weights = jax.tree_util.tree_map_with_path(
        convert, weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor)
    )
    return weights if mesh is None else sharding.place(model, weights, mesh)


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
