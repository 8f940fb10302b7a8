"""What drafts, by the names and options that engine users know."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import checkpoints, drafters, sharding
from specjax.loading import combined, learned
from specjax.loading.reading import Loaded, Target, bits_of, read, rounded, tree_of
from specjax.models.decoder import decoder_model, first_layers
from specjax.models.quantized import QuantizedTensor
from specjax.types import Drafter, Model, PyTree

__all__ = ["METHODS", "builder"]

_PADDING = 1 / 8  # vocabularies whose sizes differ by no more than this are one, padded
_Build = Callable[[Target], tuple[Drafter, PyTree]]


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
    num_speculative_tokens: int | None = None,
    tree: Any = None,
    paths: int = 1,
) -> _Build:
    tree = tree_of(tree, num_speculative_tokens)
    if model is not None:
        _check_draft_exists(model)
    own = model is not None and learned.method_of(model) == "draft_model"
    # Of a draft that shares the target's embedding and head the first layers may be enough.
    if model is not None and draft_layers is not None and not own:
        raise ValueError(
            'drafter "draft_model" takes "model" (a checkpoint) or "draft_layers" (how many of the '
            f"target's first layers), not both; got model={model!r}, draft_layers={draft_layers}"
        )
    bits = bits_of(quantize)
    if draft_layers is not None and (
        not isinstance(draft_layers, int) or isinstance(draft_layers, bool)
    ):
        raise ValueError(f"draft_layers must be an integer, got {draft_layers!r}")

    def found(target: Target) -> _Draft:
        if own:
            return _Draft(*learned.within_target(Path(model), target, bits, draft_layers))
        if model is not None:
            draft = read(model, target.how._replace(bits=bits))
            return _Draft(draft.model, draft.weights, {}, _vocabulary_map(draft, target.loaded))
        if draft_layers is None and quantize is None:
            path = learned.own_drafter("draft_model", target)
            return _Draft(*learned.within_target(path, target, None, None))
        return _of_target(target, draft_layers, quantize)

    def build(target: Target) -> tuple[Drafter, PyTree]:
        network, weights, says, ids = found(target)
        depth = num_speculative_tokens
        if depth is None:
            depth = says.get("num_speculative_tokens", 4)
        mapped = ids is not None
        if tree is None and paths == 1:
            drafter = drafters.draft_model(network, depth, mapped=mapped)
        else:
            drafter = drafters.draft_tree(network, depth, tree=tree, paths=paths, mapped=mapped)
        return drafter, (weights, ids) if mapped else weights

    return build


class _Draft(NamedTuple):
    """A draft model, wherever it is from."""

    network: Model
    weights: PyTree
    says: Mapping[str, Any]  # options that its folder gives
    ids: drafters.VocabularyMap | None = None


def _of_target(target: Target, layers: int | None, quantize: str | None) -> _Draft:
    """The target's first layers, or the target in fewer bits, or both."""
    config, weights, bits = target.loaded.config, target.loaded.weights, bits_of(quantize)
    if layers is not None:
        config, weights = first_layers(config, weights, layers)
    elif target.how.bits is not None and target.how.bits <= bits:
        raise ValueError(
            f"the draft would be the target itself: quantize={quantize!r} of the drafter needs a "
            "target of more bits, or a draft_layers"
        )
    early = decoder_model(config, kv_cache=target.how.kv_cache)
    if bits is not None:
        weights = _inbits_of(early, weights, bits, target.how.mesh)
    return _Draft(early, weights, {})


def _inbits_of(model: Model, weights: PyTree, bits: int, mesh: Mesh | None) -> PyTree:
    """Copies of those weights that have more bits, rounded one at a time; the others are shared."""

    def convert(path: Any, leaf: Any) -> Any:
        return rounded(tuple(entry.key for entry in path), leaf, bits)

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


def builder(drafter: Any) -> _Build:
    """What makes the drafter, with its options checked, before the target is read."""
    if drafter is None:
        return _plain()
    if isinstance(drafter, Drafter):
        return lambda target: (drafter, None)
    if isinstance(drafter, (str, os.PathLike)):
        known = os.fspath(drafter) in METHODS
        drafter = {"method": drafter} if known else _of_checkpoint(drafter)
    if not isinstance(drafter, Mapping) or "method" not in drafter:
        raise ValueError(
            'drafter must be a name, a checkpoint, a Drafter, or a dict with a "method", '
            f"got {drafter!r}"
        )
    options = dict(drafter)
    method, sizes = options.pop("method"), options.pop("verify_sizes", None)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"drafter method {method!r} is not known; known: {', '.join(METHODS)}")
    make = METHODS[method]
    known = set(inspect.signature(make).parameters)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"drafter method {method!r} has no option {', '.join(map(repr, unknown))}; "
            f"it has: {', '.join(sorted({*known, 'verify_sizes'}))}"
        )
    build = make(**options)
    return build if sizes is None else _sized(build, sizes)


def _sized(build: _Build, sizes: Any) -> _Build:
    def sized(target: Target) -> tuple[Drafter, PyTree]:
        made, weights = build(target)
        return drafters.sized(made, sizes), weights

    return sized


def _of_checkpoint(source: str | os.PathLike[str]) -> dict[str, Any]:
    """A drafter's own checkpoint tells its method; any other becomes a draft model."""
    found = learned.method_of(source)
    return {"method": "draft_model" if found is None else found, "model": source}


def _default() -> _Build:
    def build(target: Target) -> tuple[Drafter, PyTree]:
        path = target.loaded.checkpoint.path
        best = checkpoints.default_drafter(path)
        if best is None:
            raise ValueError(
                f"no drafter is known to be the best for {path}; name one, for instance "
                'drafter="ngram", which needs no weights'
            )
        return builder(best)(target)

    return build


METHODS: Mapping[str, Callable[..., _Build]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
    **learned.METHODS,
    **combined.methods(builder),
    "default": _default,
}


def _vocabulary_map(draft: Loaded, target: Loaded) -> drafters.VocabularyMap | None:
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
