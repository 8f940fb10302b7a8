"""The drafters that come with the package: tau, speed, and acceptance at temperature 1.

    uv run python benchmarks/bundled.py --data ../shared/data/spec_bench_dev.jsonl --limit 8 \\
        --out benchmarks/results/bundled.json

tau is tokens a round, greedy, float32, and every text is compared with that of plain decoding.
Speed is one prompt at a time in bfloat16, runs interleaved with plain decoding's, and a ratio of
whole generations without the prompt's pass; what the two programs cost to compile is not in it.
At temperature 1 the share of drafts that stood stands beside the mean of sum_x min(p, q).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import environment, timed_stream, write_report

import specjax
from specjax.text import encode_prompt
from specjax.train.evaluation import evaluate_prompts, packed, read_groups

LOOKUP = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 2}
CHAIN = {"method": "eagle3", "num_speculative_tokens": 5}
TREE = {"method": "eagle3", "tree": {"nodes": 24, "depth": 5, "top_k": 6}}
CONFIGURATIONS: dict[str, Any] = {
    "lookup alone": "ngram",
    "eagle3, chain of 5": CHAIN,
    "eagle3, tree of 24": TREE,
    "medusa, tree": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
    "draft, chain of 5": "draft_model",
    "lookup, else eagle3 chain": {"method": "fallback", "first": LOOKUP, "second": CHAIN},
    "lookup and eagle3 tree, merged": {"method": "merged", "first": LOOKUP, "second": TREE},
    "default": "default",
}


def acceptance(
    model: str, names: list[str], groups: dict, tokens: int, rows: int
) -> Iterator[dict[str, Any]]:
    """tau by group, and whether the texts are those of plain decoding."""
    plain = specjax.load(model, dtype="float32")
    ids = {
        group: sorted((encode_prompt(plain, text) for text in texts), key=len)
        for group, texts in groups.items()
    }
    batches = [
        (group, x[at : at + rows]) for group, x in ids.items() for at in range(0, len(x), rows)
    ]
    run = jax.jit(functools.partial(specjax.decode, max_new_tokens=tokens))

    def decode(params: specjax.Params, part: list[list[int]]) -> specjax.DecodeResult:
        prompts, lengths = packed(part, 256 if max(map(len, part)) <= 256 else 1024, 4096)
        return run(params, prompts, prompt_lengths=lengths)

    wanted = [np.asarray(decode(plain, part).tokens) for _, part in batches]
    for name in names:
        params = specjax.load(model, CONFIGURATIONS[name], dtype="float32").replace(
            target=plain.target
        )
        sums = {group: np.zeros(2, int) for group in groups}
        same = prompts = 0
        accepted = proposed = 0
        begin = time.monotonic()
        for (group, part), text in zip(batches, wanted, strict=True):
            done = decode(params, part)
            sums[group] += [int(np.sum(done.lengths)), int(np.sum(done.stats.rounds))]
            same += int(np.sum(np.all(np.asarray(done.tokens) == text, axis=1)))
            prompts += len(part)
            accepted = accepted + np.sum(np.asarray(done.stats.accepted), axis=0)
            proposed = proposed + np.sum(np.asarray(done.stats.proposed), axis=0)
        taus = {group: round(float(n / r), 3) for group, (n, r) in sums.items()}
        rounds = sum(r for _, r in sums.values())
        before = np.concatenate([[rounds], accepted])[:-1]
        row = {
            "drafter": name,
            "as": CONFIGURATIONS[name],
            "tau": round(statistics.mean(taus.values()), 3),
            "groups": taus,
            "accepted_by_depth": [round(float(x), 3) for x in accepted / np.maximum(before, 1)],
            "same_texts": f"{same} of {prompts}",
            "seconds": round(time.monotonic() - begin, 1),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        yield row
        jax.clear_caches()


def speed(model: str, names: list[str], groups: dict, tokens: int) -> list[dict[str, Any]]:
    """Time of plain decoding over that of each drafter, by group."""
    plain = specjax.load(model, dtype="bfloat16")
    runs = {"plain": plain} | {
        name: specjax.load(model, CONFIGURATIONS[name], dtype="bfloat16").replace(
            target=plain.target
        )
        for name in names
    }
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    took: dict[str, dict[str, float]] = {name: {} for name in runs}
    taus: dict[str, list[int]] = {name: [0, 0] for name in names}
    for group, texts in groups.items():
        for text in texts:
            ids = encode_prompt(plain, text)
            best: dict[str, float] = {}
            for repeat in range(3):  # the first one compiles
                for name, params in runs.items():
                    one = timed_stream(params, ids, tokens)
                    per = one["seconds"] / one["timed_tokens"]
                    if repeat:
                        best[name] = min(per, best.get(name, per))
                    elif name in taus:
                        taus[name][0] += one["emitted"]
                        taus[name][1] += one["rounds"]
            for name in runs:
                took[name][group] = took[name].get(group, 0.0) + best[name]
            for name in names:
                ratios[name].setdefault(group, []).append(best["plain"] / best[name])
        print(
            group,
            {n: round(took["plain"][group] / took[n][group], 3) for n in names},
            file=sys.stderr,
            flush=True,
        )
    return [
        {
            "drafter": name,
            "as": CONFIGURATIONS[name],
            "ratio": round(statistics.mean(took["plain"][g] / took[name][g] for g in groups), 3),
            "groups": {g: round(took["plain"][g] / took[name][g], 3) for g in groups},
            "prompts": {g: [round(x, 3) for x in row] for g, row in ratios[name].items()},
            "tau": round(taus[name][0] / taus[name][1], 3),
            "plain_ms_per_token": round(
                1e3 * sum(took["plain"].values()) / sum(map(len, groups.values())), 1
            ),
        }
        for name in names
    ]


def chances(model: str, groups: dict, tokens: int, rows: int) -> dict[str, Any]:
    """At temperature 1: the share of drafts that stood, and what 1 - TV says."""
    params = specjax.load(model, CHAIN, dtype="float32")
    options = {"max_new_tokens": tokens, "temperature": 1.0, "rows": rows, "chances": True}
    found = dict(evaluate_prompts(params, groups, **options))
    judged = np.sum([g.judged for g in found.values()], axis=0)
    expected = np.sum([np.multiply(g.chance, g.judged) for g in found.values()], axis=0)
    stood = np.sum([g.accepted for g in found.values()], axis=0)
    return {
        "drafter": "eagle3, chain of 5",
        "temperature": 1.0,
        "judged": int(judged.sum()),
        "stood": round(float(stood.sum() / judged.sum()), 4),
        "expected": round(float(expected.sum() / judged.sum()), 4),
        "stood_by_depth": [round(float(x), 4) for x in stood / np.maximum(judged, 1)],
        "expected_by_depth": [round(float(x), 4) for x in expected / np.maximum(judged, 1)],
        "tau": round(statistics.mean(g.tau for g in found.values()), 3),
    }


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True, help="prompts, as for specjax eval")
    parser.add_argument("--groups", nargs="*", help="only these; default all")
    parser.add_argument("--limit", type=int, help="prompts of a group; default all")
    parser.add_argument("--speed-limit", type=int, default=2, help="the same for speed")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument(
        "--drafters", nargs="*", choices=CONFIGURATIONS, default=list(CONFIGURATIONS)
    )
    parser.add_argument("--speed", nargs="*", choices=CONFIGURATIONS, default=["default"])
    parser.add_argument("--no-chances", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    chosen = lambda name: args.groups is None or name in args.groups
    some = lambda found: {k: v for k, v in found.items() if chosen(k)}
    groups = some(read_groups(args.data, args.limit))
    report: dict[str, Any] = {
        "environment": environment(),
        "model": args.model,
        "data": args.data.name,
        "prompts_a_group": args.limit,
        "max_new_tokens": args.tokens,
        "lossless": True,
    }
    rows = acceptance(args.model, args.drafters, groups, args.tokens, args.rows)
    for row in rows if args.drafters else ():
        report["acceptance"] = [row]
        if args.out:  # what is done is kept
            args.out.write_text(json.dumps(with_others(report, args.out), indent=1) + "\n")
    if args.speed:
        few = some(read_groups(args.data, args.speed_limit))
        report["speed"] = speed(args.model, args.speed, few, args.tokens)
    if not args.no_chances:
        report["temperature_1"] = chances(args.model, groups, args.tokens, args.rows)
    write_report(with_others(report, args.out), args.out)


def with_others(report: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The report, with what the file holds of other drafters, measured in the same way."""
    if path is None or not path.exists():
        return report
    before = json.loads(path.read_text())
    settings = ("model", "data", "prompts_a_group", "max_new_tokens")
    if any(before.get(name) != report[name] for name in settings):
        raise ValueError(f"{path} was measured in another way; name another file or remove it")
    for part in ("acceptance", "speed"):
        new = report.get(part, [])
        named = {row["drafter"] for row in new}
        kept = [row for row in before.get(part, []) if row["drafter"] not in named]
        order = {name: i for i, name in enumerate(CONFIGURATIONS)}
        if not new and not kept:
            continue
        report[part] = sorted(kept + new, key=lambda row: order.get(row["drafter"], len(order)))
    return {**before, **report}


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
