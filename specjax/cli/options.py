"""The options of the commands, one declaration each, in the panels that `--help` shows."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Acceptance",
    "AsJson",
    "Compare",
    "Data",
    "Destination",
    "DraftLayers",
    "DraftVocab",
    "Drafter",
    "Dtype",
    "DtypeOption",
    "Epochs",
    "EvalData",
    "Format",
    "FrequencyPenalty",
    "IgnoreEos",
    "JsonSchema",
    "Limit",
    "MaxNewTokens",
    "Mesh",
    "MinNewTokens",
    "MinP",
    "Model",
    "NumSpeculativeTokens",
    "Online",
    "Out",
    "Plain",
    "PresencePenalty",
    "Prompt",
    "Prompts",
    "Raw",
    "RecipeOptions",
    "Regex",
    "RepetitionPenalty",
    "Rows",
    "Seed",
    "Source",
    "Start",
    "Stop",
    "StoredDtype",
    "Target",
    "Temperature",
    "Texts",
    "To",
    "Tokens",
    "TopK",
    "TopP",
    "TrainedDrafter",
    "TrainingOptions",
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
        help="What guesses: default, the best one known for the model; ngram; eagle3, medusa, "
        "dflash, dspark or draft_model, where the model comes with one; draft_model with "
        "--draft-layers; the checkpoint of a drafter or of a smaller model; or a JSON object.",
        show_default="default, or ngram if none is known",
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
        show_default="speculative_sampling; recursive_rejection for trees",
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

# --- training and measuring ------------------------------------------------------------------

_TRAINING = "Training"
Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The model to draft for: a name that `specjax models` lists, or a path.",
        rich_help_panel=_MODEL,
    ),
]
TrainedDrafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="METHOD",
        help="eagle, eagle3, mtp, medusa, dflash, dspark or draft_model.",
        rich_help_panel=_TRAINING,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Where texts, checkpoints and the drafter go.",
        rich_help_panel=_TRAINING,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts, .jsonl or .txt; conversations too.",
        show_default="the model makes its own",
        rich_help_panel=_TRAINING,
    ),
]
Texts = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder of texts to share between drafters.",
        show_default="DIR/texts",
        rich_help_panel=_TRAINING,
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A trained drafter of the same sizes to go on from.",
        rich_help_panel=_TRAINING,
    ),
]
Tokens = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Of texts.", rich_help_panel=_TRAINING),
]
Epochs = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.0, help="How often each text is seen.", rich_help_panel=_TRAINING
    ),
]
DraftVocab = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens that eagle3, dflash and dspark draft; 0: all of the model's.",
        rich_help_panel=_TRAINING,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE",
        help="Devices to share the work, e.g. data=8 or data=4,model=2.",
        show_default="one",
        rich_help_panel=_TRAINING,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts to measure the drafter on when it is done, as for `specjax eval`.",
        show_default="texts that were not trained on",
        rich_help_panel=_TRAINING,
    ),
]
RecipeOptions = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="JSON",
        help="Options of the recipe, e.g. '{\"steps\": 5}'.",
        rich_help_panel=_TRAINING,
    ),
]
TrainingOptions = Annotated[
    str | None,
    typer.Option(
        "--training",
        metavar="JSON",
        help='Settings of the loop, e.g. \'{"rows": 16, "learning_rate": 0.001}\'.',
        rich_help_panel=_TRAINING,
    ),
]
Online = Annotated[
    bool,
    typer.Option(
        "--online",
        help="Compute the model's states when they are needed; do not keep them on disk.",
        rich_help_panel=_TRAINING,
    ),
]
EvalData = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Prompts: .jsonl with turns, prompt or text."),
]
Rows = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Prompts decoded at a time.", rich_help_panel=_TRAINING),
]
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Most prompts of a category.",
        show_default="all",
        rich_help_panel=_TRAINING,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Figures as JSON on standard output.", rich_help_panel=_TRAINING),
]
