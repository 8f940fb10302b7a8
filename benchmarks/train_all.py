"""Trains every drafter that ships with SmolLM2, on one set of texts that it writes itself.

    uv run python benchmarks/train_all.py --out trained --scale 1.0

At scale 1 that is 20 million tokens, meant for one large GPU; --scale 0.001 rehearses it on a CPU.
Each drafter goes to OUT/METHOD, with the log of each stage in OUT/METHOD-run-STAGE, and a summary
as JSON to standard output. What is done is not done again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import jax
from measure import environment

from specjax.checkpoints import set_options
from specjax.train.prompts import KINDS
from specjax.train.running import Job, Stage, train_drafter

TOKENS = 20_000_000
LARGEST = 14_000_000  # bytes of a drafter
# Sizes that keep each drafter below LARGEST in bfloat16, and what its stages differ in: the share
# of the epochs, and options. Nothing counts behind a wrong first guess, so a block network learns
# that one first, at nearly every place of a window, and then whole blocks.
DENSE = (0.5, {"block_size": 2, "anchors": 380})
BLOCKS = (0.5, {"anchors": 96})
DRAFTERS = {
    "eagle3": ({"num_kv_heads": 9}, [(0.5, {"steps": 1}), (0.5, {"steps": 4})]),
    "medusa": ({"num_heads": 4, "num_layers": 1}, [(1.0, {})]),
    "dflash": ({"intermediate_size": 1024}, [DENSE, BLOCKS]),
    "dspark": ({"intermediate_size": 512, "markov_rank": 16}, [DENSE, BLOCKS]),
    "draft_model": ({"layers": (0, 29), "intermediate_size": 1408}, [(1.0, {})]),
}
# How those draft whose method's own default is not for them: 20 nodes, a CPU pays for each.
DRAFTING = {
    "medusa": {
        "choices": [[i] for i in range(8)]
        + [[i, j] for i in range(3) for j in range(3)]
        + [[0, 0, 0], [0, 1, 0], [1, 0, 0]]
    },
    "draft_model": {"num_speculative_tokens": 5},
}


def writing(scale: float) -> dict:
    """Few lengths, so that few programs are compiled; large batches, so that a GPU is busy."""
    kinds = tuple(kind._replace(tokens=192 if kind.closings else 48) for kind in KINDS)
    return {"kinds": kinds, "rows": max(8, round(2048 * min(1.0, scale)))}


def training(scale: float) -> dict:
    """Steps of 16 windows at full size."""
    rows = max(2, round(16 * min(1.0, scale)))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    rates = {"learning_rate": 2e-3, "warmup": 100, "candidates": 8192 if scale >= 0.1 else 4096}
    return {"rows": rows, "compute_dtype": dtype, "save_every": 1000, "measure_every": 0, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--epochs", type=float, default=1.0)
    args = parser.parse_args()
    began = time.monotonic()
    rows = []
    for name in args.drafters:
        start = time.monotonic()
        stages: dict[str, float] = {}
        last: list[Stage] = []
        sizes, parts = DRAFTERS[name]
        made: Path | None = None
        for number, (share, options) in enumerate(parts):

            def watch(stage: Stage, number: int = number) -> None:
                stages[f"{number}: {stage.name}"] = time.monotonic() - start  # noqa: B023
                last[:] = [stage]  # noqa: B023

            made = train_drafter(
                Job(
                    target=args.target,
                    drafter=name,
                    out=args.out / f"{name}-run-{number}",
                    texts=args.out / "texts",
                    start=made,
                    tokens=round(TOKENS * args.scale),
                    epochs=args.epochs * share,
                    options={**sizes, **options},
                    training=training(args.scale),
                    writing=writing(args.scale),
                    online=True,
                ),
                watch,
            )
            if made is None:
                sys.exit(130)
        final = args.out / name
        if not final.exists():
            shutil.copytree(made, final)
        set_options(final, DRAFTING.get(name, {}))
        size = sum(file.stat().st_size for file in final.iterdir())
        progress = last[0].progress if last else None
        row = {
            "drafter": name,
            "bytes": size,
            "seconds": round(time.monotonic() - start, 1),
            "stages": {key: round(value, 1) for key, value in stages.items()},
            "agreed": None if progress is None else progress.agreed,
            "tau_by_depth": None if progress is None else round(progress.tau, 3),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
        if size > LARGEST:
            sys.exit(f"{final} has {size} bytes, more than {LARGEST}")
    report = {
        "environment": environment(),
        "scale": args.scale,
        "seconds": round(time.monotonic() - began, 1),
        "drafters": rows,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
