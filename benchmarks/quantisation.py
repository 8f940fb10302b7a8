"""What weights and caches in fewer bits cost and save: JSON on standard output.

    uv run python benchmarks/quantisation.py --prompts prompts.json --out quantisation.json

Of a float32 target and its copies in bfloat16, int8 and int4, and of an int8 KV cache: bytes; the
time of a pass over one token and over eight at batch 1, all interleaved; how many prompts get the
same greedy text, and how long the texts are the same on average; and what a copy is worth as the
draft of the float32 target: tokens a round and the share of drafts accepted. `prompts` is a JSON
file with `cases`, each with `prompt_ids`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import environment, write_report
from verify_cost import step

import specjax
from specjax import drafters

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
    "float32, int8 cache": {"dtype": "float32", "kv_cache": "int8"},
    "int8, int8 cache": {"dtype": "float32", "quantize": "int8", "kv_cache": "int8"},
}


def tree_bytes(tree: Any) -> int:
    """Of all arrays in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_token(params: specjax.Params) -> int:
    """Of keys and values, in a cache as it is on this device."""
    init = params.model.init_cache
    caches = (jax.eval_shape(lambda w, n=n: init(w, 1, n), params.target) for n in (1, 2))
    one, two = map(tree_bytes, caches)
    return two - one


def same_until(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def texts(result: specjax.DecodeResult) -> list[list[int]]:
    """The emitted tokens of each row."""
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = [case["prompt_ids"] for case in json.loads(args.prompts.read_text())["cases"]]
    kinds = ["float32"] + [kind for kind in args.kinds if kind != "float32"]
    models = {kind: specjax.load(args.model, **KINDS[kind]) for kind in kinds}
    full = models["float32"]

    runs = {(k, n): step(models[k], n, 128, 256) for k in kinds for n in args.nodes}
    times: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))

    rows, expected = [], None
    for kind, params in models.items():
        result = specjax.decode(params, prompts, max_new_tokens=args.tokens)
        ours = texts(result)
        expected = expected or ours
        row: dict[str, Any] = {
            "kind": kind,
            "weight_bytes": tree_bytes(params.target),
            "weight_ratio": tree_bytes(params.target) / tree_bytes(full.target),
            "cache_bytes_per_token": bytes_per_token(params),
            "same_texts": sum(a == b for a, b in zip(ours, expected, strict=True)),
            "of_prompts": len(prompts),
            "same_tokens_on_average": float(np.mean(list(map(same_until, ours, expected)))),
        }
        for nodes in args.nodes:
            ms, base = times[kind, nodes], times["float32", nodes]
            row[f"ms_{nodes}_median"] = float(np.median(ms))
            row[f"ms_{nodes}_best"] = float(np.min(ms))
            row[f"ratio_{nodes}_median"] = float(np.median(ms) / np.median(base))
            row[f"ratio_{nodes}_best"] = float(np.min(ms) / np.min(base))
        if kind != "float32":
            drafter = drafters.draft_model(params.model, args.depth)
            drafted = full.replace(drafter=drafter, draft=params.target)
            result = specjax.decode(drafted, prompts, max_new_tokens=args.tokens)
            stats = result.stats
            row["tokens_a_round"] = float(np.sum(result.lengths) / np.sum(stats.rounds))
            row["accepted"] = float(np.sum(stats.accepted) / np.sum(stats.proposed))
            row["lossless"] = texts(result) == expected
        rows.append(row)
    report = {
        "environment": environment(),
        "model": args.model,
        "draft_depth": args.depth,
        "new_tokens": args.tokens,
        "results": rows,
    }
    write_report(report, args.out)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
