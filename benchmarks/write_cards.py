"""Writes the card of each bundled drafter, from what training logged and benchmarks measured.

    uv run python benchmarks/write_cards.py

Figures come from benchmarks/results/training.json (benchmarks/collect_training.py) and
benchmarks/results/bundled.json (benchmarks/bundled.py). A card is the README.md beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUNDLED = HERE.parent / "checkpoints" / "bundled"

ABOUT = {
    "eagle3": ("EAGLE-3 head", ["eagle3, chain of 5", "eagle3, tree of 24"]),
    "medusa": ("Medusa heads", ["medusa, tree"]),
    "dflash": ("DFlash block network", ["dflash"]),
    "dspark": ("DSpark block network", ["dspark"]),
    "draft": ("Distilled draft model", ["draft, chain of 5"]),
}

NAMES = {"draft": "draft_model"}


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tau_of(
    method: str, names: list[str], rows: dict[str, Any], measured: dict[str, Any]
) -> list[str]:
    """What the benchmark says."""
    groups = list(rows[names[0]]["groups"])
    tau = [[g, *(f"{rows[n]['groups'][g]:.2f}" for n in names)] for g in groups]
    tau.append(["mean over groups", *(f"{rows[n]['tau']:.2f}" for n in names)])
    equal = ", ".join(f"{n}: {rows[n]['same_texts']}" for n in names)
    return [
        f"**tau**, tokens a round, greedy, {measured['max_new_tokens']} tokens, float32, "
        f"{measured['prompts_a_group']} prompts a group of `{measured['data']}` "
        f"(`benchmarks/bundled.py`; texts equal to plain decoding's: {equal}):",
        table(["group", *names], tau),
        f"`uv run specjax eval {measured['data']} --drafter {method} "
        f"--limit {measured['prompts_a_group']}` measures the first column again.",
    ]


def card(method: str, training: dict[str, Any], measured: dict[str, Any]) -> str:
    """One README."""
    title, wanted = ABOUT[method]
    rows = {row["drafter"]: row for row in measured["acceptance"]}
    names = [name for name in wanted if name in rows]
    stages = training["stages"]
    seen = sum(stage["tokens_seen"] for stage in stages)
    minutes = sum(stage["seconds"] for stage in stages) / 60
    name, texts = NAMES.get(method, method), training["texts"]
    parts = [
        f"# {title} for SmolLM2-135M-Instruct",
        f'`specjax.load("smollm2-135m", drafter="{name}")`; {training["bytes"] / 1e6:.1f} MB.',
        f"**Data**: {texts['tokens']:,} tokens in {texts['conversations']:,} conversations, all of "
        "them written by SmolLM2-135M-Instruct itself, its prompts included "
        "(`specjax.train.prompts`); no other data. Spec-Bench was never trained on.",
        f"**Training**: {seen:,} tokens seen, {minutes:.0f} minutes on one core "
        f"({measured['environment']['cpu']}, {measured['environment']['cpu_flags']}), float32.",
        "```sh\n" + "\n".join(stage["command"] for stage in stages) + "\n```",
        "Share of places where the likeliest guess was the target's likeliest token, on texts that "
        "were held out, by step ahead:",
        table(
            ["tokens seen", "loss", "agreed at depth 1, 2, ...", "tau of a greedy chain"],
            [
                [
                    f"{point['tokens']:,}",
                    f"{point['loss']:.2f}",
                    " ".join(f"{x:.2f}" for x in point["agreed"]),
                    f"{point['tau']:.2f}",
                ]
                for stage in stages
                for point in stage["curve"]
            ],
        ),
    ]
    parts += tau_of(name, names, rows, measured)
    # The default drafts with the EAGLE-3 head, where lookup finds nothing.
    fast = measured.get("speed", []) if method == "eagle3" else []
    if fast:
        parts += [
            "**Speed**, time of plain decoding over that of the drafter, one prompt at a time, "
            "bfloat16, on 2 cores of the same machine:",
            table(
                ["group", *(row["drafter"] for row in fast)],
                [[g, *(f"{row['groups'][g]:.2f}" for row in fast)] for g in fast[0]["groups"]]
                + [["mean over groups", *(f"{row['ratio']:.2f}" for row in fast)]],
            ),
        ]
    if training.get("note"):
        parts.append(training["note"])
    parts.append("**Licence**: Apache-2.0.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Writes all of them."""
    training = json.loads((HERE / "results" / "training.json").read_text())
    measured = json.loads((HERE / "results" / "bundled.json").read_text())
    for method in ABOUT:
        folder = BUNDLED / "smollm2-135m" / method
        (folder / "README.md").write_text(card(method, training["drafters"][method], measured))


if __name__ == "__main__":
    main()
