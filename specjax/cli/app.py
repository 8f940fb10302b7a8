"""The commands. What is slow to import is imported inside them, so that `--help` is not."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specjax.cli import options, process
from specjax.cli.arguments import acceptance_argument, json_object, schema_argument
from specjax.cli.drafter_options import drafter_argument

__all__ = ["DEMO_PROMPT", "app", "main"]

# SmolLM2-135M answers it word by word, which is the best case for prompt lookup.
DEMO_PROMPT = """Repeat this text exactly:

The lighthouse stands on a rock at the end of the bay. Every evening, the keeper climbs the stairs \
and lights the lamp. Every morning, the keeper climbs the stairs and puts out the lamp. One night, \
a storm came over the bay, and the lamp would not burn. The keeper rang the bell until the storm \
was over, and every ship came home."""
_DEMO_DRAFTER = {"method": "default"}

app = typer.Typer(
    name="specjax",
    help="Speculative decoding in pure JAX: the same law of the output, fewer passes over the "
    "weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


@app.command()
def generate(
    prompt: options.Prompt,
    model: options.Model = "smollm2-135m",
    dtype: options.DtypeOption = None,
    raw: options.Raw = False,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    draft_layers: options.DraftLayers = None,
    acceptance: options.Acceptance = None,
    plain: options.Plain = False,
    compare: options.Compare = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 128,
    min_new_tokens: options.MinNewTokens = 0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    regex: options.Regex = None,
    json_schema: options.JsonSchema = None,
) -> None:
    """Generate text, and show what speculation gained.

    The text goes to standard output as it is committed, and nothing else
    does; progress and the table of figures go to standard error. So
    `specjax generate "..." > answer.txt` keeps the text alone.

    A drafter or a rule as a JSON object has the keys that `specjax models`
    lists: --drafter '{"method": "ngram", "num_speculative_tokens": 8}'
    """
    if plain and compare:
        raise typer.BadParameter(
            "--compare sets a drafter against plain decoding; with --plain there is no drafter"
        )
    rule = acceptance_argument(acceptance, plain=plain)
    schema = schema_argument(json_schema, regex=regex)
    from specjax.cli import generating
    from specjax.sampling import Sampling

    with process.errors_in_one_line():
        generating.run(
            generating.Job(
                prompt=sys.stdin.read() if prompt == "-" else prompt,
                model=model,
                drafter=drafter_argument(
                    drafter,
                    plain=plain,
                    num_speculative_tokens=num_speculative_tokens,
                    draft_layers=draft_layers,
                    model=model,
                ),
                dtype=None if dtype is None else dtype.value,
                chat=not raw,
                acceptance=rule,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    repetition_penalty=repetition_penalty,
                    presence_penalty=presence_penalty,
                    frequency_penalty=frequency_penalty,
                    min_new_tokens=min_new_tokens,
                    ignore_eos=ignore_eos,
                ),
                seed=seed,
                stop=tuple(stop or ()),
                regex=regex,
                json_schema=schema,
                compare=compare,
            )
        )


@app.command()
def demo(dtype: options.DtypeOption = None) -> None:
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
    """List what can be loaded, what can draft, and which rules verify."""
    from rich.console import Console

    from specjax.accept.names import RULES
    from specjax.checkpoints import available
    from specjax.cli.showing import loadable
    from specjax.loading import METHODS
    from specjax.models.families import FAMILIES

    with process.errors_in_one_line():
        Console().print(loadable(available(), FAMILIES, METHODS, RULES))


@app.command()
def convert(
    source: options.Source,
    destination: options.Destination,
    to: options.To = options.Format.safetensors,
    dtype: options.StoredDtype = None,
) -> None:
    """Write a model in another format or type.

    Nothing is overwritten. From a Hugging Face folder to another, config.json and the tokenizer
    stay as they are.
    """
    from specjax import checkpoints

    with process.errors_in_one_line():
        path = checkpoints.convert(
            source, destination, to=to.value, dtype=None if dtype is None else dtype.value
        )
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        size = sum(file.stat().st_size for file in files)
        typer.echo(f"{path}: {size / 1e6:.1f} MB")


@app.command()
def train(
    target: options.Target,
    drafter: options.TrainedDrafter,
    out: options.Out,
    data: options.Data = None,
    texts: options.Texts = None,
    start: options.Start = None,
    tokens: options.Tokens = 1_000_000,
    epochs: options.Epochs = 2.0,
    draft_vocab: options.DraftVocab = 16384,
    online: options.Online = False,
    mesh: options.Mesh = None,
    dtype: options.DtypeOption = None,
    prompts: options.Prompts = None,
    recipe: options.RecipeOptions = None,
    training: options.TrainingOptions = None,
) -> None:
    """Train a drafter on what the model itself writes.

    Without --data the model makes its own prompts. Ctrl-C stops after the
    step in progress; the same command goes on from there.
    """
    chosen = json_object("--recipe", recipe) if recipe else {}
    settings = json_object("--training", training) if training else {}
    from specjax.cli import training as running
    from specjax.train.running import Job

    with process.errors_in_one_line():
        running.run_train(
            Job(
                target=target,
                drafter=drafter,
                out=out,
                data=data,
                texts=texts,
                start=start,
                tokens=tokens,
                epochs=epochs,
                draft_vocab=draft_vocab or None,
                online=online,
                options=chosen,
                training=settings,
                dtype=None if dtype is None else dtype.value,
                mesh=running.mesh_argument(mesh),
            ),
            prompts,
        )


@app.command("eval")
def evaluate(
    data: options.EvalData,
    target: options.Target = "smollm2-135m",
    drafter: options.Drafter = None,
    tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    rows: options.Rows = 8,
    limit: options.Limit = None,
    dtype: options.DtypeOption = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how many tokens a round a drafter is worth, by category of prompts."""
    chosen = drafter_argument(
        drafter, plain=False, num_speculative_tokens=None, draft_layers=None, model=target
    )
    from specjax.cli import training as running

    with process.errors_in_one_line():
        running.run_eval(
            running.Evaluation(
                target=target,
                drafter=chosen,
                data=data,
                tokens=tokens,
                temperature=temperature,
                rows=rows,
                limit=limit,
                dtype=None if dtype is None else dtype.value,
            ),
            as_json,
        )
