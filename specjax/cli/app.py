"""The commands. What is slow to import is imported inside them, so that `--help` is not."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer

from specjax.cli import process
from specjax.cli.drafter_options import drafter_argument

__all__ = ["DEMO_PROMPT", "app", "main"]

# SmolLM2-135M answers it word by word, which is the best case for the ngram drafter.
DEMO_PROMPT = """Repeat this text exactly:

The lighthouse stands on a rock at the end of the bay. Every evening, the keeper climbs the stairs \
and lights the lamp. Every morning, the keeper climbs the stairs and puts out the lamp. One night, \
a storm came over the bay, and the lamp would not burn. The keeper rang the bell until the storm \
was over, and every ship came home."""
_DEMO_DRAFTER = {"method": "ngram", "num_speculative_tokens": 7}

app = typer.Typer(
    name="specjax",
    help="Speculative decoding in pure JAX: the same law of the output, fewer passes over the "
    "weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(enum.StrEnum):
    """Of the weights and the cache."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def main() -> None:
    """Runs the command line and exits."""
    process.stop_on_interrupt()
    process.keep_compiled_programs()
    app()


def _version(wanted: bool) -> None:
    if wanted:
        import specjax

        typer.echo(f"specjax {specjax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    pass


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 2**32:  # a key drops what is beyond 32 bits
        raise typer.BadParameter(f"{value} is not in the range 0..{2**32 - 1}")
    return value


_Dtype = Annotated[
    Dtype | None,
    typer.Option(
        metavar="DTYPE",
        help="Of weights and cache: float32, bfloat16 or float16.",
        show_default="float32 on a CPU, else bfloat16",
    ),
]


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text; - reads it from standard input.")
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A name that `specjax models` lists, a Hugging Face folder or a GGUF file.",
        ),
    ] = "smollm2-135m",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTER",
            help="What guesses: ngram; draft_model, with --draft-layers; the checkpoint of a "
            "smaller model; or a JSON object.",
            show_default="ngram",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Tokens guessed a round.",
            show_default="the method's own",
        ),
    ] = None,
    draft_layers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Draft with the model's own first N layers."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="At most so many tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0, help="0 is greedy; else logits are divided by T.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            callback=_seed,
            help="Repeats a run at a temperature above 0.",
            show_default="a fresh one",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without a drafter.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode without a drafter too, and compare.")
    ] = False,
    dtype: _Dtype = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")
    ] = False,
) -> None:
    """Generate text, and show what speculation gained.

    The text goes to standard output as it is committed, and nothing else
    does; progress and the table of figures go to standard error. So
    `specjax generate "..." > answer.txt` keeps the text alone.

    A drafter as a JSON object has the keys that `specjax models` lists:
    --drafter '{"method": "ngram", "num_speculative_tokens": 8}'
    """
    if plain and compare:
        raise typer.BadParameter(
            "--compare sets a drafter against plain decoding; with --plain there is no drafter"
        )
    from specjax.cli import generating

    with process.errors_in_one_line():
        chosen = drafter_argument(
            drafter,
            plain=plain,
            num_speculative_tokens=num_speculative_tokens,
            draft_layers=draft_layers,
        )
        generating.run(
            generating.Job(
                prompt=sys.stdin.read() if prompt == "-" else prompt,
                model=model,
                drafter=chosen,
                dtype=None if dtype is None else dtype.value,
                chat=not raw,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                compare=compare,
            )
        )


@app.command()
def demo(dtype: _Dtype = None) -> None:
    """Show speculation at its best: copying from the prompt, compared with plain decoding.

    The output goes where that of `generate` goes.
    """
    from rich.console import Console
    from rich.text import Text

    from specjax.cli import generating

    Console(stderr=True).print(Text(f"{DEMO_PROMPT}\n", style="dim"))
    with process.errors_in_one_line():
        generating.run(
            generating.Job(
                prompt=DEMO_PROMPT,
                model="smollm2-135m",
                drafter=_DEMO_DRAFTER,
                dtype=None if dtype is None else dtype.value,
                compare=True,
            )
        )


@app.command()
def models() -> None:
    """List what can be loaded, and what can draft."""
    from rich.console import Console

    from specjax.checkpoints import available
    from specjax.cli.showing import loadable
    from specjax.loading import METHODS
    from specjax.models.families import FAMILIES

    with process.errors_in_one_line():
        Console().print(loadable(available(), FAMILIES, METHODS))
