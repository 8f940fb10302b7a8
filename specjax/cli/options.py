"""The options of the commands, one declaration each, in the panels that `--help` shows."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

__all__ = [
    "Acceptance",
    "Compare",
    "Destination",
    "DraftLayers",
    "Drafter",
    "Dtype",
    "DtypeOption",
    "Format",
    "FrequencyPenalty",
    "IgnoreEos",
    "JsonSchema",
    "MaxNewTokens",
    "MinNewTokens",
    "MinP",
    "Model",
    "NumSpeculativeTokens",
    "Plain",
    "PresencePenalty",
    "Prompt",
    "Raw",
    "Regex",
    "RepetitionPenalty",
    "Seed",
    "Source",
    "Stop",
    "StoredDtype",
    "Temperature",
    "To",
    "TopK",
    "TopP",
]


class Dtype(enum.StrEnum):
    """Of the weights and the cache."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 2**32:  # a key drops what is beyond 32 bits
        raise typer.BadParameter(f"{value} is not in the range 0..{2**32 - 1}")
    return value


Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="The text; - reads it from standard input.")
]

# --- the model -------------------------------------------------------------------------------

_MODEL = "Model"
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A name that `specjax models` lists, or the path of a model.",
        rich_help_panel=_MODEL,
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        metavar="DTYPE",
        help="Of weights and cache: float32, bfloat16 or float16.",
        show_default="float32 on a CPU, else bfloat16",
        rich_help_panel=_MODEL,
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Continue the text as it is: no chat template.",
        rich_help_panel=_MODEL,
    ),
]

# --- speculation -----------------------------------------------------------------------------

_SPECULATION = "Speculation"
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFTER",
        help="What guesses: ngram; draft_model, with --draft-layers; the checkpoint of a smaller "
        "model; or a JSON object.",
        show_default="ngram",
        rich_help_panel=_SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=1,
        help="Tokens guessed a round.",
        show_default="the method's own",
        rich_help_panel=_SPECULATION,
    ),
]
DraftLayers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Draft with the model's own first N layers.",
        rich_help_panel=_SPECULATION,
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="Which guesses stand: a rule that `specjax models` lists, or a JSON object.",
        show_default="speculative_sampling",
        rich_help_panel=_SPECULATION,
    ),
]
Plain = Annotated[
    bool,
    typer.Option("--plain", help="Decode without a drafter.", rich_help_panel=_SPECULATION),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Decode without a drafter too, and compare.",
        rich_help_panel=_SPECULATION,
    ),
]

# --- sampling --------------------------------------------------------------------------------

_SAMPLING = "Sampling"
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T",
        min=0,
        help="Divides logits; 0 takes the most likely token.",
        show_default="0, greedy",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=0,
        help="Keep the K most likely tokens.",
        show_default="all",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0,
        max=1,
        help="Keep the fewest most likely tokens with mass P or more.",
        show_default="all",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0,
        max=1,
        help="Keep tokens at least P times as likely as the best.",
        show_default="all",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Divides the logit of a token in prompt or output, multiplies one below 0.",
        show_default="1, off",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Taken from the logit of such a token.",
        show_default="0, off",
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Taken from it as often as the token stands there.",
        show_default="0, off",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=_seed,
        help="Repeats a run whose tokens are drawn.",
        show_default="a fresh one",
        rich_help_panel=_SAMPLING,
    ),
]

# --- the end ---------------------------------------------------------------------------------

_ENDING = "Ending"
MaxNewTokens = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="At most so many tokens.", rich_help_panel=_ENDING),
]
MinNewTokens = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="At least so many, before an end token or --stop ends the text.",
        show_default="0, off",
        rich_help_panel=_ENDING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End before this text. May be given several times.",
        rich_help_panel=_ENDING,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="End tokens do not end the text.", rich_help_panel=_ENDING),
]

# --- grammar ---------------------------------------------------------------------------------

_GRAMMAR = "Grammar"
Regex = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="The whole text must match this regular expression.",
        rich_help_panel=_GRAMMAR,
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEMA",
        help="The text must be JSON that satisfies this schema: a file, or a JSON text that "
        "starts with {.",
        rich_help_panel=_GRAMMAR,
    ),
]

# --- converting ------------------------------------------------------------------------------


class Format(enum.StrEnum):
    """Of a checkpoint that is written."""

    safetensors = "safetensors"
    orbax = "orbax"
    gguf = "gguf"


class _StoredDtype(enum.StrEnum):
    """Of weights in a file."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    q8_0 = "q8_0"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="A name that `specjax models` lists, or the path of a model."
    ),
]
Destination = Annotated[
    str,
    typer.Argument(metavar="DESTINATION", help="A new folder; with --to gguf a new file."),
]
To = Annotated[
    Format,
    typer.Option(
        metavar="FORMAT",
        help="safetensors (a Hugging Face folder), orbax, or gguf (Llama, Qwen2 and Qwen3).",
    ),
]
StoredDtype = Annotated[
    _StoredDtype | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16; with --to gguf also q8_0.",
        show_default="as stored; of GGUF float32",
    ),
]
