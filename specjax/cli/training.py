"""The commands `train` and `eval`: bars, tables and the line that loads the result."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specjax import loading
from specjax.train.evaluation import Group, Report, evaluate_prompts, read_groups
from specjax.train.running import Job, Stage, held_out_prompts, train_drafter
from specjax.types import Params

__all__ = ["Evaluation", "mesh_argument", "run_eval", "run_train"]


class Evaluation(NamedTuple):
    """What to measure."""

    target: str
    drafter: Any  # as for `specjax.load`
    data: Path
    tokens: int = 128
    temperature: float = 0.0
    rows: int = 8
    limit: int | None = None  # prompts of a group
    seed: int = 0
    dtype: str | None = None


def mesh_argument(text: str | None) -> jax.sharding.Mesh | None:
    """A mesh from "data=4,model=2".

    Raises:
      typer.BadParameter: another form, or more devices than there are.
    """
    if text is None:
        return None
    sizes = {"data": 1, "model": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise typer.BadParameter(
                f"--mesh is {text!r}; wanted data=N, model=N or both, e.g. data=4,model=2"
            )
        sizes[name] = int(size)
    count = sizes["data"] * sizes["model"]
    if count > len(jax.devices()):
        raise typer.BadParameter(
            f"--mesh {text} needs {count} devices, there are {len(jax.devices())}"
        )
    shape = (sizes["data"], sizes["model"])
    return jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:count])


class _Signals:
    """Asks to stop on the first signal; a second one interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Signals:
        signal.set_wakeup_fd(-1)  # the watcher of `process` would end the process at once
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *args: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def run_train(job: Job, prompts: Path | None) -> None:
    """Trains, shows how it goes, and measures the result.

    Raises:
      ValueError, FileNotFoundError: what the library refuses.
      typer.Exit: code 130, if a signal stopped it.
    """
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars, _Signals() as signals:
        tasks: dict[str, Any] = {}

        def watch(stage: Stage) -> None:
            if stage.name not in tasks:
                tasks[stage.name] = bars.add_task(stage.name, total=stage.total, figures="")
            figures = "" if stage.progress is None else _figures(stage.progress)
            bars.update(tasks[stage.name], completed=stage.done, figures=figures)

        made = train_drafter(job, watch, lambda: signals.asked)
    if made is None:
        console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130)
    params = loading.load(job.target, drafter=made, dtype=job.dtype)
    groups = held_out_prompts(job) if prompts is None else read_groups(prompts)
    report = _measured(console, params, groups)
    (job.out / "evaluation.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    typer.echo(f"params = specjax.load({job.target!r}, drafter={str(made)!r})")


def run_eval(job: Evaluation, as_json: bool) -> None:
    """Measures a drafter: a table, or JSON on standard output."""
    console = Console(stderr=True, highlight=False)
    groups = read_groups(job.data, job.limit)  # a bad file is refused before anything is loaded
    with console.status("Loading ..."):
        params = loading.load(job.target, drafter=job.drafter, dtype=job.dtype)
    options = {"max_new_tokens": job.tokens, "temperature": job.temperature}
    report = _measured(console, params, groups, rows=job.rows, seed=job.seed, **options)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))


def _measured(
    console: Console, params: Params, groups: Mapping[str, Any], **options: Any
) -> Report:
    found: dict[str, Group] = {}
    with console.status("Decoding ...") as status:
        for name, group in evaluate_prompts(params, groups, **options):
            found[name] = group
            status.update(f"Decoding ... {name}: tau {group.tau:.2f}")
    report = Report(found)
    console.print(_table(params, report))
    return report


def _table(params: Params, report: Report) -> Table:
    table = Table(
        title=f"{params.drafter.name} for {params.name}, tokens a round (tau)", box=box.SIMPLE
    )
    table.add_column("group")
    for name in ("prompts", "tokens", "tau"):
        table.add_column(name, justify="right")
    table.add_column("accepted at depth 1, 2, ...")
    for name, group in report.groups.items():
        before = np.concatenate([[group.rounds], group.accepted])[:-1]
        share = np.asarray(group.accepted) / np.maximum(before, 1)
        table.add_row(
            name,
            str(group.prompts),
            str(group.tokens),
            f"{group.tau:.2f}",
            " ".join(f"{x:.2f}" for x in share),
        )
    table.add_section()
    table.add_row("mean over groups", "", "", f"{report.tau:.2f}", "")
    return table


def _figures(progress: Any) -> str:
    depths = " ".join(f"{x:.2f}" for x in progress.agreed)
    return f"loss {progress.loss:.3f}  accepted {depths}  {progress.rate:.0f} tokens/s"
