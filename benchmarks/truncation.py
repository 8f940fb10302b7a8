"""Top-k and top-p at a large vocabulary: threshold search against a full sort.

    uv run python benchmarks/truncation.py --out truncation.json

Both are timed in turns in one process; what counts is the ratio. Prints JSON.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import environment, write_report

from specjax.truncation import truncate


def by_sort(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The same rules by sorting all logits of a row."""
    falling = jnp.sort(scaled, axis=-1)[..., ::-1]
    place = jnp.arange(scaled.shape[-1])[None, :]
    falling = jnp.where((place < top_k) | (top_k < 1), falling, -jnp.inf)
    probs = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = ((before < top_p) | (top_p >= 1)) & jnp.isfinite(falling)
    least = jnp.min(jnp.where(kept, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= least, scaled, -jnp.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = {"environment": environment(), "vocab": args.vocab, "results": []}
    ours, theirs = jax.jit(truncate), jax.jit(by_sort)
    for rows in (1, 8):
        logits = jax.random.normal(jax.random.key(rows), (rows, args.vocab)) * 3
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
        column = lambda value, rows=rows: jnp.full((rows, 1), value)
        off = column(0.0)
        for name, top_k, top_p in (
            ("top_k=50, top_p=0.9", column(50), column(0.9)),
            ("top_k=50", column(50), column(1.0)),
            ("top_p=0.9", column(0), column(0.9)),
            ("off", column(0), column(1.0)),
        ):
            runs = {
                "search": lambda k=top_k, p=top_p, s=scaled, o=off: ours(s, k, p, o),
                "sort": lambda k=top_k, p=top_p, s=scaled: theirs(s, k, p),
            }
            different = int(jnp.sum(jnp.isfinite(runs["search"]()) != jnp.isfinite(runs["sort"]())))
            times = {label: [] for label in runs}
            for _ in range(args.repeats):
                for label, run in runs.items():
                    start = time.perf_counter()
                    run().block_until_ready()
                    times[label].append(time.perf_counter() - start)
            best = {label: min(values) for label, values in times.items()}
            report["results"].append(
                {
                    "rows": rows,
                    "controls": name,
                    "search_ms": round(1e3 * best["search"], 3),
                    "sort_ms": round(1e3 * best["sort"], 3),
                    "sort_over_search": round(best["sort"] / best["search"], 2),
                    "median_ratio": round(
                        float(np.median(times["sort"]) / np.median(times["search"])), 2
                    ),
                    "tokens_kept_differently": different,
                }
            )
    write_report(report, args.out)


if __name__ == "__main__":
    main()
