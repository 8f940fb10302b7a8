"""What training logged, as JSON: data, settings, and the curve of agreement against tokens.

    uv run python benchmarks/collect_training.py --bundled checkpoints/bundled/smollm2-135m \\
        --texts TEXTS --out benchmarks/results/training.json eagle3=RUN1@332443,RUN2 medusa=RUN3

A run is a folder that `specjax train` made; several are stages, each of which went on from the one
before. One that had fewer tokens of texts than there are now says so behind an @. What the file
holds of other drafters is kept. With --more the runs went on from those that the file holds, on
texts of their own.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from measure import environment, write_report

from specjax.train.texts import read_shards


def stage(text: str, tokens: int) -> dict[str, Any]:
    """One run, `RUN` or `RUN@TOKENS`."""
    name, _, fewer = text.partition("@")
    run, tokens = Path(name), int(fewer or tokens)
    job = json.loads((run / "job.json").read_text())
    lines = [json.loads(x) for x in (run / "training" / "curve.jsonl").read_text().splitlines()]
    settings = json.loads((run / "training" / "training.json").read_text())
    last = max(lines, key=lambda line: line["step"])
    seconds = last["tokens"] / max(x["rate"] for x in lines if x["step"] == last["step"])
    products = [
        1 + sum(_product(line["agreed"][:k]) for k in range(1, len(line["agreed"]) + 1))
        for line in lines
    ]
    return {
        "command": command(job, tokens),
        "windows": settings["windows"],
        "tokens_seen": last["tokens"],
        "seconds": round(seconds),
        "curve": [
            {
                "tokens": line["tokens"],
                "loss": round(line["loss"], 4),
                "agreed": line["agreed"],
                "accepted": line["accepted"],
                "tau": round(tau, 3),
            }
            for line, tau in zip(lines, products, strict=True)
            if line["measured"]
        ],
    }


def _product(values: list[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


def command(job: dict[str, Any], tokens: int) -> str:
    """The command line that a run's settings mean."""
    parts = ["specjax", "train", "--target", job["target"], "--drafter", job["drafter"]]
    parts += ["--out", "DIR", "--texts", "TEXTS", "--tokens", str(tokens)]
    parts += ["--epochs", str(round(job["epochs"], 4))]
    if job["draft_vocab"]:
        parts += ["--draft-vocab", str(job["draft_vocab"])]
    if job["start"] not in (None, "None"):
        parts += ["--start", "BEFORE"]
    for name, key in (("--recipe", "options"), ("--training", "training")):
        if job[key]:
            parts += [name, json.dumps(job[key])]
    return shlex.join(parts)


def joined(before: dict[str, Any], texts: dict[str, Any]) -> dict[str, Any]:
    """Both texts counted together."""
    return {
        "tokens": before.get("tokens", 0) + texts["tokens"],
        "conversations": before.get("conversations", 0) + texts["conversations"],
        "kinds": sorted({*before.get("kinds", []), *texts["kinds"]}),
    }


def main() -> None:
    """Reads the runs, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="METHOD=RUN[@TOKENS][,RUN ...]")
    parser.add_argument("--bundled", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", help="for the cards of these drafters")
    parser.add_argument("--more", action="store_true", help="stages behind those in the file")
    args = parser.parse_args()
    shards = list(read_shards(args.texts))
    texts = {
        "tokens": sum(len(shard.tokens) for shard in shards),
        "conversations": sum(len(shard.lengths) for shard in shards),
        "kinds": sorted({shard.kind for shard in shards}),
    }
    report = json.loads(args.out.read_text()) if args.out.exists() else {"drafters": {}}
    for text in args.runs:
        method, _, runs = text.partition("=")
        folder = args.bundled / method
        before = report["drafters"][method] if args.more else {"texts": {}, "stages": []}
        note = args.note or before.get("note")
        report["drafters"][method] = {
            "bytes": sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".md"),
            "texts": joined(before["texts"], texts),
            "stages": before["stages"] + [stage(run, texts["tokens"]) for run in runs.split(",")],
            **({"note": note} if note else {}),
        }
    write_report({**report, "environment": environment()}, args.out)


if __name__ == "__main__":
    main()
