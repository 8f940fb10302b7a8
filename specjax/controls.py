"""The sampling controls as a user gives them, checked, and as arrays that a program takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import record

__all__ = ["Sampling", "check_sampling", "packed", "resolved"]


@record
class Sampling:
    """How tokens are chosen. Every field is one value, or one value a row.

    What is seen by penalties is the whole text so far: prompt, output, and, at a drafted token,
    the drafts before it.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0, -1 and V keep all.
    top_p: keep the fewest most likely tokens with at least this mass; 1 keeps all.
    min_p: keep tokens at least this many times as likely as the most likely one; 0 keeps all.
    repetition_penalty: a seen token's logit is divided by it if positive, else multiplied;
      1 is off (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    presence_penalty: taken from the logit of a seen token; 0 is off.
    frequency_penalty: taken from it as often as it was seen; 0 is off.
    logit_bias: added to logits: {token id: bias}, or an array `[V]`; for rows a list of the
      former or `[B, V]`. -inf bans a token.
    allowed: token ids, the only ones that can be drawn; None: all. For rows a list of lists (or
      None).
    banned: token ids that are never drawn; for rows a list of lists (or None).
    min_new_tokens: end tokens (and single tokens in `stop`) are held back until a row has so many
      new tokens; stop sequences that complete earlier do not end it.
    ignore_eos: end-of-sequence tokens do not end the row.
    """

    temperature: Any = 0.0  # [] or [B] float32
    top_k: Any = 0  # [] or [B] int32
    top_p: Any = 1.0  # [] or [B] float32
    min_p: Any = 0.0  # [] or [B] float32
    repetition_penalty: Any = 1.0  # [] or [B] float32
    presence_penalty: Any = 0.0  # [] or [B] float32
    frequency_penalty: Any = 0.0  # [] or [B] float32
    logit_bias: Any = None  # {id: bias}, [V], [B, V] float32 or a list of mappings
    allowed: Any = None  # ids, or a list of ids a row
    banned: Any = None  # ids, or a list of ids a row
    min_new_tokens: Any = 0  # [] or [B] int32
    ignore_eos: Any = False  # [] or [B] bool


class _Number(NamedTuple):
    """What a numeric field may hold."""

    dtype: Any
    good: Callable[[np.ndarray], np.ndarray]
    wanted: str
    off: float | None = None  # the value that switches it off
    also_off: Callable[[np.ndarray, int], np.ndarray] = lambda x, vocab: np.zeros(x.shape, bool)


_finite = np.isfinite
_NUMBERS: Mapping[str, _Number] = {
    "temperature": _Number(
        np.float32, lambda x: _finite(x) & (x >= 0), "finite and >= 0 (0 is greedy)"
    ),
    "top_k": _Number(
        np.int32,
        lambda x: x >= -1,
        "an integer, the tokens to keep (0 and -1: all)",
        off=0,
        also_off=lambda x, vocab: (x < 1) | (x >= vocab),
    ),
    "top_p": _Number(np.float32, lambda x: (x >= 0) & (x <= 1), "from 0 to 1 (1: off)", off=1.0),
    "min_p": _Number(np.float32, lambda x: (x >= 0) & (x <= 1), "from 0 to 1 (0: off)", off=0.0),
    "repetition_penalty": _Number(
        np.float32, lambda x: _finite(x) & (x > 0), "finite and above 0 (1: off)", off=1.0
    ),
    "presence_penalty": _Number(np.float32, _finite, "finite (0: off)", off=0.0),
    "frequency_penalty": _Number(np.float32, _finite, "finite (0: off)", off=0.0),
    "min_new_tokens": _Number(np.int32, lambda x: x >= 0, "an integer of at least 0", off=0),
    "ignore_eos": _Number(bool, lambda x: np.ones(x.shape, bool), "True or False"),
}
# Fields that one piece of the program serves: all of them are arrays, or all are None.
_GROUPS = (
    ("top_k", "top_p", "min_p"),
    ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ("min_new_tokens",),
)
_INT32 = np.iinfo(np.int32)


def _traced(*trees: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_sampling(sampling: Sampling, batch: int | None, vocab: int) -> None:
    """Refuses bad values before anything is compiled. Traced values are checked by shape.

    Args:
      batch: rows; None where there is no batch axis, so that only scalars fit.
      vocab: V.

    Raises:
      ValueError: naming the field, what came and what was wanted.
    """
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a specjax.Sampling, got {type(sampling)}")
    for name, number in _NUMBERS.items():
        value = getattr(sampling, name)
        if value is not None:
            _check_number(name, value, number, batch)
    bias = _bias(sampling, vocab)
    if bias is None:
        return
    if bias.ndim == 2 and bias.shape[0] != batch:
        raise ValueError(
            f"sampling.logit_bias, allowed and banned must be for all rows or have one entry a row "
            f"({batch}), got {bias.shape[0]}"
        )
    if not _traced(bias):
        bare = np.flatnonzero(~np.isfinite(np.atleast_2d(bias)).any(axis=-1))
        if bare.size:
            raise ValueError(
                f"sampling.logit_bias, allowed and banned leave row {bare[0]} no token to draw"
            )


def _check_number(name: str, value: Any, number: _Number, batch: int | None) -> None:
    if isinstance(value, jax.core.Tracer):
        whole = np.dtype(number.dtype).kind == "i"
        if whole and not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"sampling.{name} must be {number.wanted}, got {value.dtype}")
    elif _traced(value):
        raise ValueError(f"sampling.{name} must be an array inside jax.jit; use jnp.stack")
    else:
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"sampling.{name} must be a number, got {value!r}") from error
        kinds = {"f": "fiub", "i": "iu", "b": "b"}[np.dtype(number.dtype).kind]
        # bfloat16 and its kin are numbers too, though numpy knows no kind for them.
        ours = jnp.issubdtype(value.dtype, jnp.floating) and "f" in kinds
        if value.dtype.kind not in kinds and not ours:
            raise ValueError(
                f"sampling.{name} must be {number.wanted}, got {value.tolist()!r} ({value.dtype})"
            )
        wide = value.astype(np.float64)
        fits = number.dtype is not np.int32 or bool((wide <= _INT32.max).all())
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        if not (fits and bool(np.all(number.good(narrow if number.dtype is np.float32 else wide)))):
            raise ValueError(f"sampling.{name} must be {number.wanted}, got {value.tolist()!r}")
    shapes = ((),) if batch is None else ((), (batch,))
    if value.shape not in shapes:
        rows = "" if batch is None else f" or have one value a row ({batch})"
        raise ValueError(f"sampling.{name} must be a scalar{rows}, got shape {value.shape}")


def resolved(sampling: Sampling, vocab: int) -> Sampling:
    """The same controls with bias and bans as one `logit_bias`, and what is off as None.

    A group of controls that is off in every row costs nothing in a program.
    """
    changes: dict[str, Any] = {}
    for group in _GROUPS:
        values = {name: getattr(sampling, name) for name in group}
        if all(_is_off(_NUMBERS[name], value, vocab) for name, value in values.items()):
            changes.update(dict.fromkeys(group))
            continue
        for name, value in values.items():
            number = _NUMBERS[name]
            changes[name] = jnp.asarray(number.off if value is None else value, number.dtype)
    for name, default in (("temperature", 0.0), ("ignore_eos", False)):
        if getattr(sampling, name) is None:
            changes[name] = default
    bias = _bias(sampling, vocab)
    return dataclasses.replace(sampling, **changes, logit_bias=bias, allowed=None, banned=None)


def _is_off(number: _Number, value: Any, vocab: int) -> bool:
    if value is None:
        return True
    if _traced(value):
        return False
    value = np.asarray(value)
    return bool(np.all((value == number.off) | number.also_off(value, vocab)))


def packed(sampling: Sampling, rows: int, batch: int, vocab: int) -> Sampling:
    """`resolved`, every field as one value a row, so that scalars and rows share a program.

    Args:
      rows: rows asked for; `batch` of them with padding.
    """
    plain = resolved(sampling, vocab)
    xp = jnp if _traced(plain) else np

    def spread(value: Any, dtype: Any, rank: int) -> Any:
        value = xp.asarray(value, dtype)
        if value.ndim == rank:
            return xp.broadcast_to(value, (batch, *value.shape))
        return xp.pad(value, ((0, batch - rows),) + ((0, 0),) * rank)

    fields = {
        name: None if getattr(plain, name) is None else spread(getattr(plain, name), n.dtype, 0)
        for name, n in _NUMBERS.items()
    }
    if plain.logit_bias is not None:
        fields["logit_bias"] = spread(plain.logit_bias, np.float32, 1)
    return Sampling(**(dict.fromkeys(("logit_bias", "allowed", "banned")) | fields))


# --- bias and bans ---------------------------------------------------------------------------


def _bias(sampling: Sampling, vocab: int) -> Array | np.ndarray | None:
    """logit_bias, allowed and banned as what is added to logits: `[V]` or `[B, V]` float32."""
    parts = [
        _each_row("logit_bias", sampling.logit_bias, lambda x: _dense_bias(x, vocab)),
        _each_row("allowed", sampling.allowed, lambda x: _ban("allowed", x, vocab, inside=False)),
        _each_row("banned", sampling.banned, lambda x: _ban("banned", x, vocab, inside=True)),
    ]
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    xp = jnp if _traced(parts) else np
    total, *rest = parts
    for part in rest:
        if total.ndim == part.ndim == 2 and total.shape != part.shape:
            raise ValueError(
                "sampling.logit_bias, allowed and banned must have the same number of rows, got "
                f"{total.shape[0]} and {part.shape[0]}"
            )
        if total.ndim != part.ndim:
            total, part = xp.atleast_2d(total), xp.atleast_2d(part)
        total = total + part
    return total


def _each_row(name: str, value: Any, dense: Callable[[Any], Any]) -> Any:
    """A field for all rows as `[V]`, or one that is a list of such fields as `[B, V]`."""
    if value is None:
        return None
    is_array = hasattr(value, "ndim")
    if is_array and (value.ndim < 2 or name == "logit_bias"):
        return dense(value)
    if isinstance(value, Mapping) or (not is_array and not isinstance(value, Sequence)):
        return dense(value)
    if isinstance(value, (str, bytes)):
        raise ValueError(f"sampling.{name} must hold token ids, got {value!r}")
    entries = list(value)
    if not any(x is None or isinstance(x, (Mapping, Sequence)) or np.ndim(x) for x in entries):
        return dense(value)
    rows = [dense(x) for x in entries]
    return (jnp if _traced(rows) else np).stack(rows)


def _dense_bias(value: Any, vocab: int) -> Any:
    """{id: bias}, None or an array to what is added."""
    if value is None:
        return np.zeros(vocab, np.float32)
    if isinstance(value, Mapping):
        ids = _ids("logit_bias", list(value), vocab)
        if _traced(list(value.values())):
            added = jnp.stack([jnp.asarray(v, jnp.float32) for v in value.values()])
            return jnp.zeros(vocab, jnp.float32).at[ids].set(added, mode="drop")
        bias = np.zeros(vocab, np.float32)
        bias[ids] = _bias_values([float(v) for v in value.values()])
        return bias
    if not hasattr(value, "ndim"):
        raise ValueError(f"sampling.logit_bias must be a dict or an array [V], got {value!r}")
    if value.shape[-1:] != (vocab,) or value.ndim > 2:
        raise ValueError(
            f"sampling.logit_bias must be [V] or [B, V] with V = {vocab}, got shape {value.shape}"
        )
    return value.astype(jnp.float32) if _traced(value) else _bias_values(value)


def _bias_values(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"sampling.logit_bias must hold numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if np.isnan(array).any() or (array == np.inf).any():
        raise ValueError("sampling.logit_bias must not hold NaN or +inf (-inf bans a token)")
    return array


def _ban(name: str, ids: Any, vocab: int, *, inside: bool) -> Any:
    """-inf at these ids (or everywhere else), 0 elsewhere; None bans nothing."""
    if ids is None:
        return np.zeros(vocab, np.float32)
    index = _ids(name, ids, vocab)
    if _traced(index):
        named = jnp.zeros(vocab, bool).at[index].set(True, mode="drop")
        return jnp.where(named == inside, -jnp.inf, 0.0).astype(jnp.float32)
    named = np.zeros(vocab, bool)
    named[index] = True
    return np.where(named == inside, -np.inf, 0.0).astype(np.float32)


def _ids(name: str, ids: Any, vocab: int) -> Any:
    """Token ids as an int array, in range."""
    if _traced(ids):
        ids = jnp.atleast_1d(jnp.asarray(ids))
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"sampling.{name} must hold integer token ids, got {ids.dtype}")
        return jnp.where(ids < 0, vocab, ids)  # padding: beyond the vocabulary, so dropped
    try:
        array = np.atleast_1d(np.asarray(sorted(ids) if isinstance(ids, (set, frozenset)) else ids))
    except ValueError as error:
        raise ValueError(f"sampling.{name} must hold token ids, got {ids!r}") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"sampling.{name} must hold integer token ids, got {ids!r}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"sampling.{name} holds token id {low if low < 0 else high}, outside the vocabulary "
            f"0..{vocab - 1}"
        )
    return array
