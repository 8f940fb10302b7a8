"""Plain decoding against each drafter, interleaved, on a list of prompts: JSON on standard output.

    uv run python benchmarks/decode.py --prompts 4 --dtypes float32 bfloat16 --out decode.json

Ratios are what to read: the runs of one prompt alternate, so that a busy machine slows all alike.
A time is from the first committed tokens to the last (neither compilation nor the prompt is in it),
the best of the repeats; tau is tokens a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import jax
import numpy as np
from measure import environment, timed_stream, write_report

import specjax
from specjax import Params

BUILT_IN = [
    "Why is the sky blue?",
    "Repeat this list three times: red, orange, yellow, green, blue, indigo, violet.",
    "Write a short story about a lighthouse keeper.",
    "Explain in three sentences how a transistor works.",
]
DRAFTERS = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "ngram", "num_speculative_tokens": 8},
    {"method": "draft_model", "draft_layers": 4, "num_speculative_tokens": 3},
]


def prompts(path: Path | None, count: int) -> list[str]:
    """First turns of a Spec-Bench file, spread over its categories, or the built-in ones."""
    if path is None:
        return BUILT_IN[:count]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [rows[i]["turns"][0] for i in np.linspace(0, len(rows) - 1, count).astype(int)]


def measure_dtype(args: argparse.Namespace, texts: list[str], dtype: str) -> list[dict]:
    """One record a drafter, plain decoding first."""
    plain = specjax.load(args.model, dtype=dtype)
    runs: list[tuple[str, Params]] = [("plain", plain)]
    for spec in args.drafters:
        loaded = specjax.load(args.model, spec, dtype=dtype)
        # One copy of the target's weights serves all; a draft of its first layers needs its own.
        runs.append((json.dumps(spec), loaded.replace(target=plain.target)))
    kept: dict[str, list[dict]] = {name: [] for name, _ in runs}
    for text in texts:
        ids = specjax.text.encode_prompt(plain, text)
        best: dict[str, dict] = {}
        for repeat in range(args.repeats + 1):  # the first one compiles
            for name, params in runs:
                one = timed_stream(params, ids, args.max_new_tokens, args.temperature)
                if repeat and (name not in best or one["seconds"] < best[name]["seconds"]):
                    best[name] = one
        expected = best["plain"]["tokens"]
        for name, one in best.items():
            one["ms_per_token"] = 1e3 * one["seconds"] / one["timed_tokens"]
            one["ratio"] = best["plain"]["seconds"] / best["plain"]["timed_tokens"]
            one["ratio"] /= one["seconds"] / one["timed_tokens"]
            one["same_text"] = one.pop("tokens") == expected
            kept[name].append(one)
        print(f"{dtype}: {text[:40]!r} done", file=sys.stderr)
    return [
        {
            "dtype": dtype,
            "drafter": name,
            "ms_per_token": statistics.median(r["ms_per_token"] for r in rows),
            "ms_per_round": statistics.median(1e3 * r["seconds"] / r["timed_rounds"] for r in rows),
            "tau": sum(r["emitted"] for r in rows) / sum(r["rounds"] for r in rows),
            "ratio": statistics.geometric_mean([r["ratio"] for r in rows]),
            "prompts": rows,
        }
        for name, rows in kept.items()
    ]


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-file", type=Path, help="a Spec-Bench .jsonl; default built in")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--drafters", type=json.loads, nargs="+", default=DRAFTERS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    texts = prompts(args.prompt_file, args.prompts)
    results = [row for dtype in args.dtypes for row in measure_dtype(args, texts, dtype)]
    report = {
        "environment": environment(),
        "model": args.model,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "lossless": True,
        "results": results,
    }
    write_report(report, args.out)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
