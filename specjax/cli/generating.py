"""One run of `generate` or `demo`, from loading to the table."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import typer
from rich.console import Console
from rich.text import Text

from specjax import drafters, loading
from specjax.accept import Acceptance, speculative_sampling
from specjax.cli import running, showing
from specjax.cli.wrapping import WordWrap
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
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    compare: bool = False


def run(job: Job) -> None:
    """Streams the text to standard output; progress and figures go to standard error.

    Raises:
      ValueError, FileNotFoundError: what the library refuses.
      typer.Exit: code 1, if the model's logits were not finite.
    """
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    with console.status(f"Loading {Text(job.model).markup} ..."):
        params = loading.load(job.model, drafter=job.drafter, dtype=job.dtype)
        jax.block_until_ready(params.target)
    load_seconds = time.perf_counter() - began

    ids = encode_prompt(params, job.prompt, chat=job.chat)
    seed = secrets.randbits(32) if job.seed is None else job.seed
    rule = speculative_sampling()
    options = {
        "max_new_tokens": job.max_new_tokens,
        "sampling": Sampling(temperature=job.temperature),
        "key": jax.random.key(seed),
        "acceptance": rule,
    }
    streamed = _stream(console, params, ids, options)
    notes = [
        f"Loading took {load_seconds:.1f} s; compiling, reading the prompt and the first round "
        f"{streamed.to_first:.1f} s.",
        "Neither is in tokens/s: timed is decoding, from the end of the first round on.",
    ]
    if job.temperature > 0:
        notes.append(f"Drawn with --seed {seed}.")
    if job.compare:
        _show_comparison(console, params, ids, options, rule, job, notes)
    else:
        table = showing.run_table({_heading(params): streamed}, rule)
        showing.print_figures(console, _title(params, ids), table, notes)
    if int(streamed.result.status[0]) == Status.NONFINITE:
        typer.secho("Error: the model's logits were not finite", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


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
    rule: Acceptance,
    job: Job,
    notes: list[str],
) -> None:
    heading = _heading(params)
    both = {heading: params, "plain": params.replace(drafter=drafters.plain(), draft=None)}
    with console.status(f"Timing {Text(heading).markup} and plain decoding ..."):
        runs, repeats = running.measure(both, ids, **options)
    best = f"the best of {repeats} runs each, taken in turns" if repeats > 1 else "one run each"
    notes.append(f"Both were timed without streaming, {best}.")
    ours, plain = runs.values()
    dtype = showing.dtype_of(params)
    same = showing.same_text(ours, plain, greedy=job.temperature == 0, dtype=dtype)
    table = showing.run_table(runs, rule, ratio=showing.speed_up(ours, plain))
    showing.print_figures(console, _title(params, ids), table, [same, *notes])


def _heading(params: Params) -> str:
    depth = params.drafter.depth
    return f"{params.drafter.name}, K = {depth}" if depth else params.drafter.name


def _title(params: Params, ids: list[int]) -> str:
    device = jax.devices()[0].device_kind
    return f"{params.name} in {showing.dtype_of(params)} on {device}, prompt of {len(ids)} tokens"
