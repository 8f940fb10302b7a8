"""Temperatures for a DSpark drafter's confidences, and how far these are off before and after.

    uv run python benchmarks/calibrate.py --drafter checkpoints/bundled/smollm2-135m/dspark \\
        --texts TEXTS --data ../shared/data/spec_bench_dev.jsonl --write \\
        --out benchmarks/results/calibration.json

Temperatures are found on prompts of the texts (those with odd numbers; the drafter may have trained
on their answers at other draws, but drafts at temperature 1 are new) and judged on prompts that
nothing was fitted to: the even ones, and those of a file. The error is that of the chance that a
slot is reached and stands, the largest and the mean over slots, in percent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
from measure import environment, write_report

import specjax
from specjax.text import encode_prompt
from specjax.train.confidence import (
    Confidences,
    calibrate,
    calibration_error,
    confidences,
    write_temperatures,
)
from specjax.train.evaluation import read_groups
from specjax.train.texts import read_shards


def own_prompts(texts: Path, shards: int, each: int, longest: int) -> list[list[int]]:
    """Prompts of the last shards, a few of each."""
    found = []
    for shard in list(read_shards(texts))[-shards:]:
        starts = np.cumsum(shard.lengths) - shard.lengths
        short = np.flatnonzero(shard.prompts <= longest)
        for i in short[np.linspace(0, len(short) - 1, min(each, len(short))).astype(int)]:
            found.append(shard.tokens[starts[i] : starts[i] + shard.prompts[i]].tolist())
    return found


def errors(found: Confidences, temperatures: tuple[float, ...] | None) -> dict[str, float]:
    """In percent."""
    each = 100 * calibration_error(found, temperatures)
    return {"largest": round(float(each.max()), 2), "mean": round(float(each.mean()), 2)}


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--each", type=int, default=16, help="prompts of a shard")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--data", type=Path, help="prompts, as for specjax eval")
    parser.add_argument("--limit", type=int, default=8, help="of a group")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="put them into the drafter's folder")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    method = {"method": "dspark", "model": args.drafter}
    params = specjax.load(args.model, method, dtype="float32")
    ones = (1.0,) * params.drafter.depth
    params = specjax.load(args.model, {**method, "confidence_temperatures": ones}, dtype="float32")
    options = {"max_new_tokens": args.tokens, "rows": args.rows}
    prompts = own_prompts(args.texts, args.shards, args.each, args.longest)
    fitted = confidences(params, prompts[1::2], **options)
    temperatures = calibrate(fitted)
    judged = {"own prompts, held out": confidences(params, prompts[0::2], seed=99, **options)}
    if args.data:
        texts = [text for group in read_groups(args.data, args.limit).values() for text in group]
        ids = [encode_prompt(params, text) for text in texts]
        ids = [x for x in ids if len(x) <= args.longest]
        judged[f"{args.data.name}, prompts of up to {args.longest} tokens"] = confidences(
            params, ids, seed=7, **options
        )
    report = {
        "environment": environment(),
        "model": args.model,
        "settings": {
            name: getattr(args, name)
            for name in ("shards", "each", "longest", "limit", "tokens", "rows")
        },
        "temperature": 1.0,
        "temperatures": [round(x, 4) for x in temperatures],
        "fitted_rounds": len(fitted.logits),
        "expected_calibration_error_percent": {
            name: {
                "rounds": len(found.logits),
                "before": errors(found, None),
                "after": errors(found, temperatures),
            }
            for name, found in judged.items()
        },
    }
    if args.write:
        write_temperatures(args.drafter, temperatures)
    write_report(report, args.out)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
