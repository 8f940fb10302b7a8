"""Runs of the decoder, and what is timed of them: decoding only.

Loading, compiling, reading the prompt and the first round are left out of every rate: a rate counts
the tokens of the second round to the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.decoding import stream_tokens
from specjax.text import pieces, stop_strings
from specjax.types import DecodeResult, Params

__all__ = ["Run", "Timing", "first_difference", "measure", "stream_text", "token_ids"]

_MOST_REPEATS, _ENOUGH_SECONDS = 3, 10.0


class Timing(NamedTuple):
    """Time from the end of the first round to the end of the last."""

    tokens: int
    rounds: int
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was nothing to time."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    @property
    def milliseconds_per_round(self) -> float | None:
        """None where there was nothing to time."""
        return 1e3 * self.seconds / self.rounds if self.rounds and self.seconds > 0 else None


class Run(NamedTuple):
    """A finished run of one row."""

    result: DecodeResult
    timing: Timing
    to_first: float  # seconds to the end of the first round, compiling included if it was needed


def stream_text(
    params: Params, ids: Sequence[int], show: Callable[[str], None], **options: Any
) -> Run:
    """Decodes round by round and shows the text as it is committed.

    Only the time spent in the decoder counts, not that in `show`.

    Args:
      ids: the prompt's token ids.
      show: takes each piece of text.
      **options: as for `specjax.stream_tokens`.
    """
    log: list[tuple[float, DecodeResult]] = []

    def logged() -> Iterator[DecodeResult]:
        start = time.perf_counter()
        for result in stream_tokens(params, list(ids), **options):
            log.append((time.perf_counter() - start, result))
            yield result
            start = time.perf_counter()

    for piece in pieces(params, logged(), stop_strings(options.get("stop"))):
        show(piece)
    seconds = sum(waited for waited, _ in log[1:])
    return Run(log[-1][1], _timing(log[0][1], log[-1][1], seconds), log[0][0])


def measure(
    runs: Mapping[str, tuple[Params, Mapping[str, Any]]],
    ids: Sequence[int],
    *,
    repeats: int = _MOST_REPEATS,
    enough: float = _ENOUGH_SECONDS,
    **options: Any,
) -> tuple[dict[str, Run], int]:
    """Times several drafters on one prompt, without the host in the loop.

    Per repeat and drafter, one call runs the first round and another one all rounds; their
    difference is the time of the others. The best of the repeats counts. Repeats alternate between
    the drafters, so that a change in the machine's load meets all of them.

    Args:
      runs: name -> params, and options that are its own.
      ids: the prompt's token ids.
      repeats: at most so many.
      enough: no further repeat is begun after so many seconds.
      **options: of all runs, as for `specjax.stream_tokens`, with `max_new_tokens`.

    Returns:
      Name -> run, and the repeats made.
    """
    every = options["max_new_tokens"]  # a round emits at least one token
    runs = {name: (params, options | own) for name, (params, own) in runs.items()}
    for params, own in runs.values():
        _first_result(params, ids, 1, own)  # compiles
    shortest: dict[str, tuple[float, float]] = {}
    results: dict[str, tuple[DecodeResult, DecodeResult]] = {}
    began = time.perf_counter()
    made = 0
    while made < repeats and (made == 0 or time.perf_counter() - began < enough):
        for name, (params, own) in runs.items():
            one, first = _first_result(params, ids, 1, own)
            all_, last = _first_result(params, ids, every, own)
            before = shortest.get(name, (one, all_))
            shortest[name] = min(before[0], one), min(before[1], all_)
            results[name] = first, last
        made += 1
    timed = {}
    for name, (one, all_) in shortest.items():
        first, last = results[name]
        timed[name] = Run(last, _timing(first, last, all_ - one), one)
    return timed, made


def _first_result(
    params: Params, ids: Sequence[int], rounds: int, options: Mapping[str, Any]
) -> tuple[float, DecodeResult]:
    start = time.perf_counter()
    result = next(stream_tokens(params, list(ids), rounds=rounds, **options))
    return time.perf_counter() - start, result


def _timing(first: DecodeResult, last: DecodeResult, seconds: float) -> Timing:
    return Timing(
        tokens=int(last.lengths[0]) - int(first.lengths[0]),
        rounds=int(last.stats.rounds[0]) - int(first.stats.rounds[0]),
        seconds=seconds,
    )


def token_ids(result: DecodeResult) -> list[int]:
    """The tokens that row 0 emitted."""
    return np.asarray(result.tokens[0])[: int(result.lengths[0])].tolist()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ (one may end there), None if they are equal.

    Example:
      >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1], [1, 2])
      (2, 1)
      >>> first_difference([1, 2], [1, 2]) is None
      True
    """
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
