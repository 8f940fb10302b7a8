"""Drafters of the reference data that guess blocks, with their target."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import drafters
from specjax.checkpoints.safetensors_folder import read_folder
from specjax.checkpoints.tensors import match
from specjax.draft import draft_step
from specjax.models.block_decoder import block_network
from specjax.models.dflash import FORMATS
from specjax.models.drafting import DraftFormat, Found
from specjax.types import BlockNetwork, Cache, Context, Params, Prefill, Proposal

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


class Loaded(NamedTuple):
    """A drafter's folder, read."""

    params: Params  # of the target, with the drafter's weights
    network: BlockNetwork
    weights: dict
    expected: dict  # arrays of the reference
    found: Found
    format: DraftFormat


def understood(folder: Path, target, config: dict | None = None, drop=(), extra=None):
    """The format of a folder, and what it says, perhaps with another configuration."""
    read = read_folder(folder)
    config = read.config if config is None else config
    shapes = {name: t.shape for name, t in read.tensors.items() if name not in drop}
    shapes |= extra or {}
    (kind,) = [form for form in FORMATS if form.recognises(config, shapes.keys())]
    return kind, kind.read(config, shapes, target)


@functools.cache
def load(folder: Path) -> Loaded:
    """Reads a folder and the target beside it, in float32."""
    target = specjax.load(folder.parent / "target-qwen3-deep", dtype="float32")
    kind, found = understood(folder, target.model.config)
    tensors = read_folder(folder).tensors
    weights: dict = {}
    for dotted, stored in match(found.sources, tensors, found.ignored, folder).items():
        *path, last = [int(part) if part.isdigit() else part for part in dotted.split(".")]
        node = weights
        for part in path:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(stored[0].read())
    draft = weights
    if found.d2t is not None:
        offsets = tensors[found.d2t].read()
        draft = (weights, drafters.vocabulary_map(offsets, target.model.vocab_size))
    return Loaded(
        params=target.replace(draft=draft),
        network=block_network(found.config),
        weights=weights,
        expected=dict(np.load(folder / "expected.npz")),
        found=found,
        format=kind,
    )


def fuse_and_append(loaded: Loaded, held: Cache, features) -> Cache:
    """A cache with the context `[T, len(features) * E]` behind what it holds."""
    network = loaded.network
    parts = jnp.split(jnp.asarray(features)[None], len(network.features), axis=-1)

    def run(weights, held, parts):
        fused = network.fuse(weights, tuple(parts))
        block = network.project(weights, fused, held)
        return specjax.cache.append(held, block, held.lengths + fused.shape[1])

    return jax.jit(run)(loaded.weights, held, parts)


def block_hidden(loaded: Loaded, held: Cache, tokens) -> jax.Array:
    """Hidden states of blocks `[B, T]` behind a cache."""
    network, params = loaded.network, loaded.params
    target = lambda tokens: params.model.embed(params.target, tokens)

    def run(weights, held, tokens):
        return network.forward(weights, network.embed(weights, target, tokens), held)

    return jax.jit(run)(loaded.weights, held, jnp.asarray(tokens, jnp.int32))


def anchored(loaded: Loaded) -> jax.Array:
    """Hidden states of the blocks behind some places of one text, each a row of its own."""
    expected, network = loaded.expected, loaded.network
    anchors = expected["anchors"]
    held = network.init_cache(loaded.weights, 1, expected["features"].shape[0])
    held = fuse_and_append(loaded, held, expected["features"])
    rows = lambda x: jnp.repeat(x, len(anchors), axis=0)
    held = dataclasses.replace(jax.tree.map(rows, held), lengths=jnp.asarray(anchors, jnp.int32))
    tokens = np.full((len(anchors), network.block_size), network.mask_token_id)
    tokens[:, 0] = expected["input_ids"][0, anchors]
    return block_hidden(loaded, held, tokens)


def first_proposal(params: Params, prompt, features) -> Proposal:
    """What is drafted after prompts `[B, T]` whose states `[B, T - 1, n * E]` are given."""
    tokens, drafter = jnp.asarray(prompt, jnp.int32), params.drafter
    batch, size = tokens.shape
    parts = jnp.split(jnp.asarray(features), len(drafter.features), axis=-1)
    total = -(-size // 8) * 8
    pad = lambda x: jnp.pad(x, ((0, 0), (0, total - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    lengths = jnp.full(batch, size, jnp.int32)
    prefill = Prefill(
        tokens=pad(tokens),
        lengths=lengths,
        features=tuple(map(pad, parts)),
        slots=total + 32,
        chunk=8,
    )
    context = Context(
        tokens=pad(tokens),
        lengths=lengths,
        sampling=specjax.Sampling(),
        active=jnp.ones(batch, bool),
    )
    keys = jax.random.split(jax.random.key(0), batch)
    run = jax.jit(lambda params: draft_step(params, keys, drafter.init(params, prefill), context))
    return run(params)[0]


def logits(loaded: Loaded, hidden) -> jax.Array:
    """Logits `[..., DV]` of hidden states."""
    params = loaded.params
    target = lambda hidden: params.model.unembed(params.target, hidden)
    return loaded.network.unembed(loaded.weights, target, hidden)


def rounds(params: Params, prompt, new: int, **options) -> tuple[list[int], list[int], list[int]]:
    """The text, tokens emitted a round and tokens drafted a round, of one row."""
    emitted, drafted, before = [], [], np.zeros(params.drafter.depth, np.int64)
    length = 0
    for out in specjax.stream_tokens(params, prompt, max_new_tokens=new, eos_ids=[], **options):
        emitted.append(int(out.lengths[0]) - length)
        drafted.append(int(np.sum(np.asarray(out.stats.proposed[0]) - before)))
        length, before = int(out.lengths[0]), np.asarray(out.stats.proposed[0])
    return np.asarray(out.tokens)[0, :length].tolist(), emitted, drafted
