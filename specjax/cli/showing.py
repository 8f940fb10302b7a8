"""What the commands print beside the text: tables and the sentences under them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from specjax.checkpoints.registry import Availability, Entry
from specjax.cli.running import Run, first_difference, token_ids
from specjax.models.family import Family
from specjax.types import Params, Stats, Status

__all__ = [
    "acceptance_by_depth",
    "dtype_of",
    "loadable",
    "print_figures",
    "run_table",
    "same_text",
    "speed_up",
]

_NONE = "-"
_ENDED = {
    Status.EOS: "end token",
    Status.STOP: "stop sequence",
    Status.LENGTH: "--max-new-tokens",
    Status.CACHE_FULL: "context length",
    Status.NONFINITE: "logits not finite",
}


def dtype_of(params: Params) -> str:
    """The dtype of the target's weights."""
    return str(jax.tree.leaves(params.target)[0].dtype)


def acceptance_by_depth(stats: Stats) -> list[float | None]:
    """Of the drafts that reached depth 1, 2, ..., the share that was accepted (row 0).

    None for a depth that no draft reached.
    """
    proposed, accepted = np.asarray(stats.proposed[0]), np.asarray(stats.accepted[0])
    return [int(a) / int(p) if p else None for p, a in zip(proposed, accepted, strict=True)]


def speed_up(run: Run, plain: Run) -> float | None:
    """The ratio of tokens per second, None where one of them was too short to time."""
    rates = run.timing.tokens_per_second, plain.timing.tokens_per_second
    return None if None in rates else rates[0] / rates[1]


def run_table(runs: Mapping[str, Run], ratio: float | None = None) -> Table:
    """One column a run.

    Args:
      runs: heading -> run; in a comparison the drafter's, then the plain one.
      ratio: of the two rates, shown if it is known.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for heading in runs:
        table.add_column(Text(heading), justify="right")
    all_ = list(runs.values())

    def row(name: str, cells: Sequence[str | Text]) -> None:
        table.add_row(name, *cells)

    row("tokens", [str(int(run.result.lengths[0])) for run in all_])
    row("rounds", [str(int(run.result.stats.rounds[0])) for run in all_])
    row("tau, tokens a round", [_number(_tau(run), ".2f") for run in all_])
    if any(run.result.stats.proposed.shape[1] for run in all_):
        row("% accepted, depth 1, 2, ...", [_shares(run.result.stats) for run in all_])
    row("ms a round", [_number(run.timing.milliseconds_per_round, ".1f") for run in all_])
    row("tokens/s", [_number(run.timing.tokens_per_second, ".1f") for run in all_])
    if ratio is not None:
        table.add_row("speed-up", f"{ratio:.2f}x", "1.00x", style="bold")
    row("ended by", [_ENDED[Status(int(run.result.status[0]))] for run in all_])
    row("rule", [_rule(run.result.stats) for run in all_])
    row("lossless", [_lossless(run.result.stats) for run in all_])
    return table


def _tau(run: Run) -> float | None:
    rounds = int(run.result.stats.rounds[0])
    return int(run.result.lengths[0]) / rounds if rounds else None


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _shares(stats: Stats) -> str:
    shares = acceptance_by_depth(stats)
    return " ".join(_NONE if x is None else f"{100 * x:.0f}" for x in shares) or _NONE


def _rule(stats: Stats) -> str:
    """The verification rule, if there was anything to verify."""
    return stats.rule if stats.proposed.shape[1] else _NONE


def _lossless(stats: Stats) -> Text:
    return Text("yes", style="green") if stats.lossless else Text("no", style="red")


def same_text(run: Run, plain: Run, *, greedy: bool, dtype: str) -> Text:
    """Whether the two runs gave the same tokens, and what that means."""
    lossy = None if run.result.stats.lossless else f"the rule {run.result.stats.rule} is lossy"
    if not greedy and lossy:
        return Text(f"Texts: draws from different laws, since {lossy}.", style="yellow")
    if not greedy:
        return Text("Texts: two draws from the same law (temperature above 0), so they may differ.")
    ours, theirs = token_ids(run.result), token_ids(plain.result)
    index = first_difference(ours, theirs)
    if index is None:
        return Text(f"Texts: equal, all {len(ours)} tokens.", style="green")
    rounding = (
        "float32 rounding at a near tie, or a bug"
        if dtype == "float32"
        else f"{dtype} rounding: a pass over several tokens rounds otherwise than one over one"
    )
    return Text(
        f"Texts: differ from token {index} on (of {len(ours)} and {len(theirs)}, counted from 0). "
        f"Likely cause: {lossy or rounding}.",
        style="yellow",
    )


def loadable(
    names: Sequence[Availability],
    families: Sequence[Family],
    methods: Mapping[str, Callable[..., object]],
    rules: Mapping[str, Callable[..., object]],
) -> RenderableType:
    """What `specjax.load` takes: names, formats and families, and what can draft and verify.

    Args:
      methods, rules: name -> function whose parameters are the options.
    """
    named = _listing("Models by name", "name", "what it is", "licence", "on this machine")
    for entry, path in names:
        if not entry.hub:
            lines = [entry.summary, entry.note]
            if entry.bundled:
                lines.append(f"comes with drafters: {', '.join(entry.bundled)}")
            if entry.drafter:
                lines.append(f"default drafter: {json.dumps(entry.drafter)}")
            what = Text("\n").join(map(Text, lines))
            named.add_row(Text(entry.name), what, Text(entry.licence), _here(entry, path))
    formats = _listing("Models by path", "format", "what it needs")
    formats.add_row("Hugging Face folder", "config.json, *.safetensors, tokenizer.json for text")
    formats.add_row("GGUF file", "one file, tokenizer included")
    formats.add_row("Orbax folder", "what `specjax.save` or `specjax convert --to orbax` wrote")
    kinds = _listing("Model families", "model_type in config.json", "GGUF architecture")
    for family in families:
        kinds.add_row(Text(str(family.model_type)), Text(str(family.gguf_architecture or _NONE)))
    drafting = _listing("Drafters", "method", "options, as keys of the JSON object")
    for name, make in methods.items():
        drafting.add_row(Text(name), _options(make))
    drafting.add_row(Text("any of these"), Text("verify_sizes"))
    verifying = _listing("Verification rules", "rule", "options, as keys of the JSON object")
    for name, make in rules.items():
        verifying.add_row(Text(name), _options(make))
    known = _listing("Models of the Hugging Face hub", "name", "what it is, and drafts for it")
    for entry, path in names:
        if entry.hub:
            lines = [entry.summary, entry.note, entry.licence, *entry.drafters]
            known.add_row(
                Text(entry.name), Text("\n").join([*map(Text, lines), _here(entry, path)])
            )
    return Group(named, formats, kinds, drafting, verifying, known)


def _here(entry: Entry, path: Path | None) -> Text:
    if path is not None:
        return Text("yes" if entry.package else "on this machine", style="green")
    return Text(f"no; get it with: {entry.how_to_get}" if entry.package else entry.how_to_get)


def _options(make: Callable[..., object]) -> Text:
    return Text(", ".join(inspect.signature(make).parameters) or _NONE)


def _listing(title: str, *columns: str) -> Table:
    headers = [Column(name, overflow="fold") for name in columns]  # ids are never cut
    return Table(
        *headers, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )


def print_figures(console: Console, title: str, table: Table, notes: Sequence[Text | str]) -> None:
    """Prints a title, a table and sentences under it, one a line; text is never markup."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)
    for note in notes:
        console.print(note if isinstance(note, Text) else Text(note, style="dim"))
