"""One run of `generate` or `demo`, from loading to the table."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import typer
from rich.console import Console
from rich.text import Text

from specjax import constraints, drafters, loading
from specjax.accept import Acceptance
from specjax.accept.names import rule
from specjax.cli import running, showing
from specjax.cli.wrapping import WordWrap
from specjax.decoding import default_rule
from specjax.sampling import Sampling
from specjax.text import encode_prompt
from specjax.types import Params, Status

__all__ = ["Job", "run"]


class Job(NamedTuple):
    """What to generate."""

    prompt: str
    model: str
    drafter: Mapping[str, Any] | None  # as for `specjax.load`
    dtype: str | None = None
    chat: bool = True
    acceptance: str | Mapping[str, Any] | None = None  # None: what suits the drafter
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()  # scalars
    seed: int | None = None
    stop: Sequence[str] = ()
    regex: str | None = None
    json_schema: str | None = None  # JSON text
    compare: bool = False


def run(job: Job) -> None:
    """Streams the text to standard output; progress and figures go to standard error.

    Raises:
      ValueError, FileNotFoundError: what the library refuses.
      typer.Exit: code 1, if the model's logits were not finite.
    """
    console = Console(stderr=True, highlight=False)
    if job.acceptance is not None:
        rule(job.acceptance)  # a bad one is refused before anything is loaded
    began = time.perf_counter()
    with console.status(f"Loading {Text(job.model).markup} ..."):
        params = loading.load(job.model, drafter=job.drafter, dtype=job.dtype)
        jax.block_until_ready(params.target)
    acceptance = default_rule(params) if job.acceptance is None else rule(job.acceptance)
    load_seconds = time.perf_counter() - began

    ids = encode_prompt(params, job.prompt, chat=job.chat)
    seed = secrets.randbits(32) if job.seed is None else job.seed
    options = {
        "max_new_tokens": job.max_new_tokens,
        "sampling": job.sampling,
        "key": jax.random.key(seed),
        "stop": job.stop,
        "constraint": _grammar(console, params, job),
    }
    streamed = _stream(console, params, ids, options | {"acceptance": acceptance})
    notes = [
        f"Loading took {load_seconds:.1f} s; compiling, reading the prompt and the first round "
        f"{streamed.to_first:.1f} s.",
        "Neither is in tokens/s: timed is decoding, from the end of the first round on.",
    ]
    if job.sampling.temperature > 0 or not acceptance.lossless:  # such a rule may toss coins
        notes.append(f"Drawn with --seed {seed}.")
    if job.compare:
        _show_comparison(console, params, ids, options, acceptance, notes)
    else:
        table = showing.run_table({_heading(params): streamed})
        showing.print_figures(console, _title(params, ids), table, notes)
    if int(streamed.result.status[0]) == Status.NONFINITE:
        typer.secho("Error: the model's logits were not finite", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _grammar(console: Console, params: Params, job: Job) -> constraints.Constraint | None:
    if job.regex is None and job.json_schema is None:
        return None
    with console.status("Building the grammar ..."):
        try:
            if job.regex is not None:
                return constraints.regex(params, job.regex)
            return constraints.json_schema(params, job.json_schema)
        except ImportError as error:  # says which package is missing
            raise ValueError(str(error)) from error


def _stream(
    console: Console, params: Params, ids: list[int], options: Mapping[str, Any]
) -> running.Run:
    wrap = WordWrap(Console().width) if sys.stdout.isatty() else None
    ended_line = True
    with console.status("Compiling and reading the prompt ...") as status:

        def write(text: str) -> None:
            nonlocal ended_line
            if text:
                status.stop()  # the text and the spinner may share a terminal
                typer.echo(text, nl=False)
                ended_line = text.endswith("\n")

        def show(piece: str) -> None:
            write(piece if wrap is None else wrap.push(piece))

        streamed = running.stream_text(params, ids, show, **options)
        if wrap is not None:
            write(wrap.flush())
    if not ended_line:
        typer.echo()
    return streamed


def _show_comparison(
    console: Console,
    params: Params,
    ids: list[int],
    options: Mapping[str, Any],
    acceptance: Acceptance,
    notes: list[str],
) -> None:
    heading = _heading(params)
    plain = params.replace(drafter=drafters.plain(), draft=None)
    both = {heading: (params, {"acceptance": acceptance}), "plain": (plain, {})}
    with console.status(f"Timing {Text(heading).markup} and plain decoding ..."):
        runs, repeats = running.measure(both, ids, **options)
    best = f"the best of {repeats} runs each, taken in turns" if repeats > 1 else "one run each"
    notes.append(f"Both were timed without streaming, {best}.")
    ours, theirs = runs.values()
    greedy, dtype = options["sampling"].temperature == 0, showing.dtype_of(params)
    same = showing.same_text(ours, theirs, greedy=greedy, dtype=dtype)
    table = showing.run_table(runs, ratio=showing.speed_up(ours, theirs))
    showing.print_figures(console, _title(params, ids), table, [same, *notes])


def _heading(params: Params) -> str:
    depth = params.drafter.depth
    return f"{params.drafter.name}, K = {depth}" if depth else params.drafter.name


def _title(params: Params, ids: list[int]) -> str:
    device = jax.devices()[0].device_kind
    return f"{params.name} in {showing.dtype_of(params)} on {device}, prompt of {len(ids)} tokens"
