"""What callers pass, checked and packed into arrays of bucketed shape.

Everything here runs on the host before any compilation. Traced arguments (a caller's own `jax.jit`)
are checked by shape and used at the size that they have.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax import controls, stopping
from specjax.automaton import Automaton
from specjax.constraints import Constraint
from specjax.controls import Sampling
from specjax.sampling import threefry
from specjax.types import Params, record

__all__ = ["Prepared", "Request", "bounded", "positive", "prepare", "round_up"]

_MIN_PROMPT, _MIN_OUTPUT, _SLOT_STEP, _CHUNK, _EOS_STEP = 16, 16, 64, 128, 4


@record
class Request:
    """What stays the same while a batch is decoded."""

    keys: Array  # [B] keys
    sampling: Sampling  # fields [B]
    eos_ids: Array  # [n] int32, padded with -1
    prompt_lengths: Array  # [B] int32
    limits: Array  # [B] int32: no more committed tokens than this, prompt included
    max_new_tokens: Array  # [] int32
    active: Array  # [B] bool; False: a row that only fills the bucket
    stop: Automaton | None  # searches stop sequences and strings
    held: Array | None  # [B, V] bool: tokens that wait for min_new_tokens
    constraint: Constraint | None  # its `start` has one entry a row


class Prepared(NamedTuple):
    """A request in its bucket."""

    request: Request
    prompt: Any  # [B, P] int32
    rows: int  # rows that the caller asked for; the others are padding
    longest: int  # tokens of the longest prompt
    slots: int  # S
    chunk: int  # C
    width: int  # tokens of the output buffer


def _traced(*trees: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def _bucket(n: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def round_up(n: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-n // step) * step


def _is_int(x: Any) -> bool:
    if isinstance(x, (bool, jax.core.Tracer)):
        return False
    if isinstance(x, (int, np.integer)):
        return True
    return getattr(x, "ndim", None) == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def positive(name: str, value: Any) -> int:
    """An integer of at least 1 that fits an int32, or a ValueError naming the argument."""
    return bounded(name, value, 1, (1 << 30) - 1)


def bounded(name: str, value: Any, low: int, high: int) -> int:
    """An integer in low..high, or a ValueError naming the argument."""
    if not _is_int(value) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


def _rows(prompt: Any, prompt_lengths: Any, vocab_size: int) -> list[np.ndarray]:
    """The prompt as one int array a row."""
    if isinstance(prompt, str):
        raise ValueError(
            "prompt is text; decode takes token ids. Use specjax.generate(params, text), or "
            "params.tokenizer.encode(text)"
        )
    if hasattr(prompt, "ndim"):
        array = np.asarray(prompt)
        if array.ndim not in (1, 2):
            raise ValueError(f"prompt must be [T] or [B, T], got shape {array.shape}")
        rows = [array] if array.ndim == 1 else list(array)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        nested = [hasattr(row, "__len__") for row in prompt]
        if any(nested) and not all(nested):
            raise ValueError("prompt mixes token ids and rows of token ids; pass one or the other")
        rows = [np.asarray(r) for r in (prompt if any(nested) else [prompt])]
    else:
        raise ValueError(
            f"prompt must be an int array [T] or [B, T], or lists of token ids, got {type(prompt)}"
        )
    if not rows:
        raise ValueError("prompt has no rows; pass at least one token")
    if prompt_lengths is not None:
        lengths = np.atleast_1d(np.asarray(prompt_lengths))
        if lengths.shape != (len(rows),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"prompt_lengths must be one integer a row ({len(rows)}), got {prompt_lengths!r}"
            )
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            if not 1 <= n <= row.size:
                raise ValueError(f"prompt_lengths[{i}] must be between 1 and {row.size}, got {n}")
        rows = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"prompt row {i} must be a flat list of ids, got shape {row.shape}")
        if row.size == 0:
            raise ValueError(
                f"prompt row {i} is empty; pass at least one token (e.g. the bos token)"
            )
        if row.dtype.kind not in "iu":
            raise ValueError(f"prompt row {i} must hold integer token ids, got {row.dtype}")
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"prompt row {i} holds token id {bad}, outside the model's vocabulary "
                f"0..{vocab_size - 1}; was it made by another tokenizer?"
            )
    return rows


class _Prompt(NamedTuple):
    """The prompts in their bucket."""

    packed: Any  # [B, P] int32
    lengths: Any  # [B] int32
    active: Any  # [B] bool
    rows: int
    longest: int


def _traced_prompt(prompt: Any, prompt_lengths: Any) -> _Prompt:
    """A caller's own program: the prompt keeps its size."""
    shape = getattr(prompt, "shape", None)
    if shape is None or len(shape) not in (1, 2) or 0 in shape:
        raise ValueError(
            f"inside jax.jit prompt must be an array [T] or [B, T] (with prompt_lengths for "
            f"rows of different length), got {prompt!r}"
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"prompt must hold integer token ids, got {prompt.dtype}")
    packed = jnp.atleast_2d(prompt)
    rows, longest = packed.shape
    lengths = jnp.full(rows, longest, jnp.int32) if prompt_lengths is None else prompt_lengths
    lengths = jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (rows,):
        raise ValueError(
            f"prompt_lengths must have one value a row ({rows}), got shape {lengths.shape}"
        )
    return _Prompt(packed, lengths, jnp.ones(rows, bool), rows, longest)


def _packed_prompt(params: Params, prompt: Any, prompt_lengths: Any, mesh: Mesh | None) -> _Prompt:
    """Rows padded to the bucket's number and width."""
    row_list = _rows(prompt, prompt_lengths, params.model.vocab_size)
    rows = len(row_list)
    longest = max(row.size for row in row_list)
    step = mesh.shape.get("data", 1) if mesh is not None and rows > 1 else 1
    batch = round_up(_bucket(rows, 1), step)
    packed = np.zeros((batch, _bucket(longest, _MIN_PROMPT)), np.int32)
    lengths = np.ones(batch, np.int32)
    for i, row in enumerate(row_list):
        packed[i, : row.size], lengths[i] = row, row.size
    return _Prompt(packed, lengths, np.arange(batch) < rows, rows, longest)


def _eos(eos_ids: Any, params: Params) -> np.ndarray:
    ids = params.eos_ids if eos_ids is None else eos_ids
    ids = np.atleast_1d(np.asarray(ids if np.size(ids) else np.zeros(0, np.int32)))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"eos_ids must be an integer or a list of them, got {eos_ids!r}")
    if ids.size and not (ids.min() >= 0 and ids.max() < params.model.vocab_size):
        raise ValueError(
            f"eos_ids must lie in 0..{params.model.vocab_size - 1}, got {ids.tolist()}"
        )
    padded = np.full(max(_EOS_STEP, round_up(ids.size, _EOS_STEP)), -1, np.int32)
    padded[: ids.size] = ids
    return padded


def _traced_eos(eos_ids: Any) -> Array:
    if not isinstance(eos_ids, jax.Array) or eos_ids.ndim > 1:
        raise ValueError(f"inside jax.jit eos_ids must be an array [] or [n], got {eos_ids!r}")
    if not jnp.issubdtype(eos_ids.dtype, jnp.integer):
        raise ValueError(f"eos_ids must be integers, got {eos_ids.dtype}")
    return jnp.atleast_1d(eos_ids)


def _keys(key: Any, seed: Any, rows: int, batch: int, greedy: bool) -> Array:
    """One key, or one a row padded to the bucket."""
    if seed is not None:
        if key is not None:
            raise ValueError("pass key or seed, not both")
        key = _seeded(seed, rows)
    if key is None:
        # Greedy rows toss no coin that matters; others must differ from call to call.
        return _key(0 if greedy else secrets.randbits(32))
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(
            f"key must be made by jax.random.key(seed) (or be one such key a row), "
            f"got {getattr(key, 'dtype', type(key))}; for an integer there is seed="
        )
    key = threefry(key)
    if key.ndim == 0:
        return key
    if key.shape != (rows,):
        raise ValueError(f"key must be one key, or one a row ({rows}), got shape {key.shape}")
    if batch == rows:
        return key
    data = jax.random.key_data(key)
    xp = jnp if _traced(data) else np
    data = xp.pad(xp.asarray(data), ((0, batch - rows), (0, 0)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _seeded(seed: Any, rows: int) -> Array:
    """The keys that seeds stand for."""
    last = (1 << 32) - 1
    if _traced(seed):
        raise ValueError("seed must not be traced; inside jax.jit pass key=jax.random.key(seed)")
    if _is_int(seed):
        return _key(bounded("seed", seed, 0, last))
    if isinstance(seed, (str, bytes)) or not (isinstance(seed, Sequence) or np.ndim(seed) == 1):
        raise ValueError(f"seed must be an integer, or one (or None) a row, got {seed!r}")
    seeds = list(seed)
    if len(seeds) != rows:
        raise ValueError(f"seed must be one integer, or one a row ({rows}), got {len(seeds)}")
    numbers = [
        secrets.randbits(32) if one is None else bounded(f"seed[{i}]", one, 0, last)
        for i, one in enumerate(seeds)
    ]
    return jax.vmap(_key)(np.array(numbers, np.uint32))


def _key(seed: Any) -> Array:
    return jax.random.key(jnp.asarray(seed, jnp.uint32), impl="threefry2x32")


def _inside_trace() -> bool:
    """Whether what is computed now becomes part of a program that runs again and again."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _stop(params: Params, stop: Any) -> tuple[Automaton | None, tuple[int, ...]]:
    """What searches the stop sequences and strings, and the ids that are one by themselves."""
    if stop is None:
        return None, ()
    if _traced(stop):
        raise ValueError("stop must not be traced; pass it as token ids, sequences or strings")
    one = isinstance(stop, str) or _is_int(stop)
    if not one and not (isinstance(stop, (Sequence, np.ndarray)) and not isinstance(stop, bytes)):
        raise ValueError(
            f"stop must be token ids, sequences of token ids, strings, or a list of those, "
            f"got {stop!r}"
        )
    parts = [stop] if one else list(stop)
    strings = tuple(part for part in parts if isinstance(part, str))
    sequences = tuple(
        (int(part),) if _is_int(part) else _sequence(part)
        for part in parts
        if not isinstance(part, str)
    )
    if strings and params.tokenizer is None:
        raise ValueError(
            f"stop holds text {strings[0]!r}, but params.tokenizer is None; pass token ids"
        )
    if not parts:
        return None, ()
    # A special token has no text to be found in: it is looked for by its id.
    special = [params.tokenizer.special_id(s) for s in strings] if strings else []
    sequences += tuple((i,) for i in special if i is not None)
    tokenizer = params.tokenizer if strings else None
    made = _stop_automaton(sequences, strings, tokenizer, params.model.vocab_size)
    return made, tuple(ids[0] for ids in sequences if len(ids) == 1)


def _sequence(part: Any) -> tuple[int, ...]:
    ids = list(part) if isinstance(part, (Sequence, np.ndarray)) else None
    if not ids or isinstance(part, bytes) or not all(map(_is_int, ids)):
        raise ValueError(
            f"stop must hold token ids, sequences of token ids (not empty) and strings, "
            f"got {part!r}"
        )
    return tuple(int(i) for i in ids)


@functools.lru_cache(maxsize=64)
def _stop_automaton(
    sequences: tuple[tuple[int, ...], ...],
    strings: tuple[str, ...],
    tokenizer: Any,
    vocab_size: int,
) -> Automaton:
    token_bytes = tokenizer.token_bytes() if strings else ()
    return stopping.stop_automaton(sequences, strings, token_bytes, vocab_size)


def _held(sampling: Sampling, eos_ids: Any, stop_ids: tuple[int, ...], vocab: int) -> Any:
    """Which tokens wait for min_new_tokens, `[B, V]`; None if there is no such number."""
    if sampling.min_new_tokens is None:
        return None
    xp = jnp if _traced(sampling, eos_ids) else np
    ids = xp.arange(vocab)
    eos = (ids[:, None] == xp.asarray(eos_ids)[None, :]).any(axis=1)
    ends = np.isin(np.arange(vocab), stop_ids)
    ignored = xp.asarray(sampling.ignore_eos)[:, None]
    return (eos[None, :] & ~ignored) | ends[None, :]


def _constraint(constraint: Any, rows: int, batch: int, vocab: int) -> Constraint | None:
    """The grammar with a first state for every row."""
    if constraint is None:
        return None
    if not isinstance(constraint, Constraint):
        raise ValueError(
            f"constraint must come from specjax.constraints, such as constraints.regex(params, "
            f"pattern), got {type(constraint)}"
        )

    size = jax.eval_shape(constraint.allowed, constraint.data, constraint.start).shape[-1]
    if size != vocab:
        raise ValueError(
            f"constraint is for a vocabulary of {size} tokens, but the model has {vocab}; make it "
            "with the params that decode"
        )

    def each(x: Any) -> Any:
        xp = jnp if _traced(x) else np
        x = xp.asarray(x)
        if x.ndim == 0 or (x.shape[0] == 1 and rows != 1):
            return xp.broadcast_to(x, (batch, *x.shape[1:]))
        if x.shape[0] != rows:
            raise ValueError(
                f"constraint is for {x.shape[0]} rows, but the prompt has {rows}; pass one for "
                "all rows, or constraints.per_row with one for each"
            )
        return xp.pad(x, ((0, batch - rows),) + ((0, 0),) * (x.ndim - 1))

    return dataclasses.replace(constraint, start=jax.tree.map(each, constraint.start))


def _room(params: Params, longest: int, needed: int, max_len: Any) -> int:
    """max_len: how many tokens a row may come to hold."""
    context = params.model.max_position
    if max_len is None:
        max_len = min(needed, context)
        if longest > max_len:
            raise ValueError(
                f"prompt has {longest} tokens, but the model's context length is {context}; "
                "shorten the prompt"
            )
        return max_len
    max_len = positive("max_len", max_len)
    if max_len > context:
        raise ValueError(f"max_len is {max_len}, but the model's context length is {context}")
    if longest > max_len:
        raise ValueError(
            f"prompt has {longest} tokens, more than max_len={max_len}; shorten the prompt or "
            "raise max_len"
        )
    return max_len


def prepare(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: Any,
    seed: Any,
    eos_ids: Any,
    stop: Any,
    constraint: Any,
    max_len: int | None,
    prompt_lengths: Any,
    mesh: Mesh | None,
) -> Prepared:
    """Checks the arguments of `specjax.decode` and packs them.

    Raises:
      ValueError: naming the argument, what came, what was wanted and the fix.
    """
    max_new_tokens = positive("max_new_tokens", max_new_tokens)
    traced = _traced(prompt, prompt_lengths, sampling, key, eos_ids, params)

    packed, lengths, active, rows, longest = (
        _traced_prompt(prompt, prompt_lengths)
        if _traced(prompt, prompt_lengths)
        else _packed_prompt(params, prompt, prompt_lengths, mesh)
    )
    batch, width_p = packed.shape

    vocab = params.model.vocab_size
    controls.check_sampling(sampling, rows, vocab)
    temperature = 0.0 if sampling.temperature is None else sampling.temperature
    greedy = not _traced(temperature) and not np.any(np.asarray(temperature) > 0)
    some_row = isinstance(seed, Sequence) and any(one is None for one in seed)
    fresh = key is None and (seed is None or some_row)
    if fresh and not greedy and (traced or _inside_trace()):
        raise ValueError(
            "key is needed to sample inside jax.jit, where fresh entropy would be the same in "
            "every call; pass key=jax.random.key(seed), or a seed for every row"
        )

    width = _bucket(max_new_tokens, _MIN_OUTPUT)
    capacity = _room(params, longest, longest + max_new_tokens, max_len)
    size = min(width_p + width, params.model.max_position) if max_len is None else capacity
    chunk = min(width_p, _CHUNK)
    slots = max(max(size, capacity) + params.drafter.nodes + 1, round_up(width_p, chunk))

    xp = jnp if traced else np
    sampling = controls.packed(sampling, rows, batch, vocab)
    ends = _traced_eos(eos_ids) if _traced(eos_ids) else _eos(eos_ids, params)
    search, stop_ids = _stop(params, stop)
    request = Request(
        keys=_keys(key, seed, rows, batch, greedy),
        sampling=sampling,
        eos_ids=ends,
        prompt_lengths=lengths,
        limits=xp.where(active, xp.minimum(lengths + max_new_tokens, capacity), lengths).astype(
            np.int32
        ),
        max_new_tokens=np.int32(max_new_tokens),
        active=active,
        stop=search,
        held=_held(sampling, ends, stop_ids, vocab),
        constraint=_constraint(constraint, rows, batch, vocab),
    )
    return Prepared(
        request=request,
        prompt=packed,
        rows=rows,
        longest=longest,
        slots=round_up(slots, _SLOT_STEP),
        chunk=chunk,
        width=width,
    )
