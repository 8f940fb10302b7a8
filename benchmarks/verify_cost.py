"""What a verify pass costs against a plain step: JSON on standard output.

    uv run python benchmarks/verify_cost.py --out verify_cost.json

One pass of the target over M tokens (root and M - 1 drafts) with its logits, at batch 1, for each
dtype and M, all interleaved: a chain, and where asked for a tree in which every node has two
children. The ratio is to one float32 token, of the medians; noise of a shared machine shows in
`spread` (90th percentile over median).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import environment, write_report

import specjax
from specjax import tree
from specjax.types import Cache, Proposal


def step(params: specjax.Params, nodes: int, length: int, slots: int, branches: int = 1):
    """A compiled verify pass over `nodes` tokens after `length` cached ones.

    Every node has `branches` children; 1: a chain.
    """
    cache = params.model.init_cache(params.target, 1, slots)
    cache = Cache(keys=cache.keys, values=cache.values, lengths=jnp.array([length]))
    tokens = jnp.arange(1, nodes, dtype=jnp.int32)[None]
    yes = jnp.ones(tokens.shape, bool)
    proposal = Proposal(
        tokens=tokens,
        parents=jnp.asarray(tree.chain(nodes - 1) // branches),
        probs=None,
        valid=yes,
        candidate=yes,
    )
    root = jnp.array([1])
    run = jax.jit(lambda p: jnp.argmax(specjax.verify_step(p, cache, root, proposal).logits, -1))
    core = params.replace(tokenizer=None)
    run(core).block_until_ready()
    return lambda: run(core).block_until_ready()


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 5, 8, 9, 16])
    parser.add_argument("--trees", type=int, nargs="*", default=[17])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = {}
    for dtype in args.dtypes:
        params = specjax.load(args.model, dtype=dtype)
        for nodes in args.nodes:
            runs[dtype, "chain", nodes] = step(params, nodes, args.length, args.slots)
        for nodes in args.trees:
            runs[dtype, "tree", nodes] = step(params, nodes, args.length, args.slots, 2)
    times: dict[tuple[str, str, int], list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    base = times.get(("float32", "chain", 1)) or next(iter(times.values()))
    rows = [
        {
            "dtype": dtype,
            "shape": shape,
            "nodes": nodes,
            "ms_median": float(np.median(ms)),
            "ms_best": float(np.min(ms)),
            "ratio_median": float(np.median(ms) / np.median(base)),
            "ratio_best": float(np.min(ms) / np.min(base)),
            "spread": float(np.percentile(ms, 90) / np.median(ms)),
        }
        for (dtype, shape, nodes), ms in times.items()
    ]
    report = {
        "environment": environment(),
        "model": args.model,
        "cached_tokens": args.length,
        "slots": args.slots,
        "results": rows,
    }
    write_report(report, args.out)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
