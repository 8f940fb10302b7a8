"""The KV cache: written at each row's own length, rolled back by a smaller length.

A forward pass only reads the cache, and `append` is its only writer. Tokens beyond `lengths` may be
garbage: the next append overwrites them and no query ever sees them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specjax.types import Block, Cache, Forward, Model, PyTree

__all__ = ["append", "prefill", "read_chunks", "truncate"]


def append(cache: Cache, block: Block, lengths: Array) -> Cache:
    """Writes a block after each row's tokens.

    Args:
      cache: its slots must hold `cache.lengths + T` tokens in every row, kept or not; a ring must
        have T more slots than its window.
      block: T tokens a row.
      lengths: `[B]` int32, the new lengths: how much of the block is kept.

    Returns:
      The cache with the block at `[lengths, lengths + T)` of the old lengths; zeros where it is not
      kept, so that not even a NaN of a rejected draft stays behind. A ring keeps what it held
      there.
    """
    start = cache.lengths
    steps = block.keys[0].shape[2]
    kept = jnp.arange(steps)[None, :] < (lengths - start)[:, None]  # [B, T]

    def write(slots: Array, new: Array) -> Array:
        new = jnp.where(kept[:, None, :, None], new, jnp.zeros_like(new))
        if start.shape[0] == 1:
            return jax.lax.dynamic_update_slice_in_dim(slots, new, start[0], axis=2)
        return jax.vmap(
            lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, axis=1)
        )(slots, new, start)

    def write_ring(slots: Array, new: Array) -> Array:
        size = slots.shape[2]
        if size < steps:
            raise ValueError(f"a ring of {size} slots cannot take a block of {steps} tokens")
        place = (start[:, None] + jnp.arange(steps)[None, :]) % size
        place = jnp.where(kept, place, size)  # beyond the ring: dropped
        return jax.vmap(lambda row, part, at: row.at[:, at].set(part, mode="drop"))(
            slots, new, place
        )

    return _written(cache, block, write, write_ring, lengths)


def _written(
    cache: Cache,
    block: Block,
    write: Callable[[Array, Array], Array],
    write_ring: Callable[[Array, Array], Array],
    lengths: Array,
) -> Cache:
    """The cache after one of two ways of writing for each layer."""
    rings = cache.rings or (False,) * len(cache.keys)

    def each(held: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        layers = zip(held, new, rings, strict=True)
        return tuple(
            jax.tree.map(write_ring if ring else write, slots, part) for slots, part, ring in layers
        )

    return dataclasses.replace(
        cache,
        keys=each(cache.keys, block.keys),
        values=each(cache.values, block.values),
        lengths=lengths,
    )


def truncate(cache: Cache, lengths: Array) -> Cache:
    """Rolls rows back to at most `lengths [B]` tokens.

    What a ring held before the tokens that go is lost, so its window must leave room for them.
    """
    return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, lengths))


def prefill(
    model: Model,
    weights: PyTree,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    *,
    chunk: int,
    features: tuple[int, ...] = (),
    constrain: Callable[[Cache], Cache] = lambda cache: cache,
    also: Callable[[Array, Forward], tuple[Array, ...]] = lambda start, out: (),
) -> tuple[Cache, tuple[Array, ...]]:
    """Reads prompts into an empty cache, `chunk` tokens of every row at a time.

    All rows advance together, so that a chunk is one write at one offset; chunks beyond the
    longest prompt are not run.

    Args:
      cache: empty, with at least P slots.
      tokens: `[B, P]` int32, P a multiple of `chunk`.
      lengths: `[B]` int32, tokens to read of each row; may be 0.
      chunk: C tokens a pass.
      features: layers whose states are wanted.
      constrain: applied to the cache after each write (sharding).
      also: what else to keep of each pass, as arrays `[B, C, ...]`, given where the chunk starts.

    Returns:
      The cache with `lengths` tokens a row, and features `[B, P, E]`, then what `also` gives,
      `[B, P, ...]`; zero where nothing was read.
    """
    batch = tokens.shape[0]
    causal = jnp.tril(jnp.ones((1, chunk, chunk), bool))

    def run(start: Array, read: Cache) -> Forward:
        part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None, :], (batch, chunk))
        return model.forward(weights, part, positions, read, causal, features)

    return read_chunks(run, cache, lengths, tokens.shape[1], chunk, constrain=constrain, also=also)


def read_chunks(
    run: Callable[[Array, Cache], Forward],
    cache: Cache,
    lengths: Array,
    total: int,
    chunk: int,
    *,
    constrain: Callable[[Cache], Cache] = lambda cache: cache,
    also: Callable[[Array, Forward], tuple[Array, ...]] = lambda start, out: (),
) -> tuple[Cache, tuple[Array, ...]]:
    """Fills an empty cache from passes over C tokens of every row; see `prefill`.

    Args:
      run: the pass over tokens `[start, start + C)`; the cache that it is given ends at `start`.
      total: P, a multiple of C.
    """
    batch = lengths.shape[0]
    chunks = (jnp.max(lengths) + chunk - 1) // chunk

    def at(start: Array, cache: Cache) -> Forward:
        filled = jnp.broadcast_to(start, (batch,)).astype(jnp.int32)
        return run(start, dataclasses.replace(cache, lengths=filled))

    def body(i: Array, carry):
        cache, kept = carry
        start = i * chunk
        out = at(start, cache)

        def write(slots: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis=2)

        def write_ring(slots: Array, new: Array) -> Array:
            # Rows that have ended keep what they hold: here a slot is never beyond the end.
            at = start % slots.shape[2]
            old = jax.lax.dynamic_slice_in_dim(slots, at, chunk, axis=2)
            real = (start + jnp.arange(chunk))[None, :] < lengths[:, None]
            new = jnp.where(real[:, None, :, None], new, old)
            return jax.lax.dynamic_update_slice_in_dim(slots, new, at, axis=2)

        kept = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
            for old, new in zip(kept, (*out.features, *also(start, out)), strict=True)
        )
        return constrain(_written(cache, out.block, write, write_ring, cache.lengths)), kept

    def keeps(start: Array, cache: Cache) -> tuple[Array, ...]:
        out = at(start, cache)
        return (*out.features, *also(start, out))

    shapes = jax.eval_shape(keeps, jnp.int32(0), cache)
    kept = tuple(jnp.zeros((batch, total, *s.shape[2:]), s.dtype) for s in shapes)
    cache, kept = jax.lax.fori_loop(0, chunks, body, (cache, kept))
    return dataclasses.replace(cache, lengths=lengths), kept
