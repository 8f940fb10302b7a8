"""Routed experts at decode sizes: forms of the same sum, timed in turns.

    uv run python benchmarks/experts.py --out experts.json

`one_by_one` is what `specjax.models.feed_forward` does; `all` multiplies every token with every
expert; `gathered` copies the chosen experts' weights for each token; `grouped` sorts tokens by
expert and calls `jax.lax.ragged_dot`. Ratios are to `all`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import environment, write_report

from specjax.models.config import ExpertsConfig
from specjax.models.feed_forward import grouped, one_by_one, route


def everything(x, chosen, weights, gate, up, down):
    """Every expert for every token."""
    share = jnp.zeros((x.shape[0], gate.shape[0]))
    share = share.at[jnp.arange(x.shape[0])[:, None], chosen].add(weights)
    inner = jax.nn.silu(jnp.einsum("re,xie->xri", x, gate)) * jnp.einsum("re,xie->xri", x, up)
    return jnp.einsum("xri,xei,rx->re", inner, down, share)


def gathered(x, chosen, weights, gate, up, down):
    """The weights of the chosen experts, copied for each token."""
    inner = jax.nn.silu(jnp.einsum("re,rkie->rki", x, gate[chosen]))
    inner = inner * jnp.einsum("re,rkie->rki", x, up[chosen])
    return jnp.einsum("rki,rkei,rk->re", inner, down[chosen], weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = ExpertsConfig(
        num_experts=args.experts,
        experts_per_token=args.per_token,
        intermediate_size=args.inner,
    )
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (args.experts, args.inner, args.width)
    gate, up = (jax.random.normal(k, shape) * args.width**-0.5 for k in keys[:2])
    down = jax.random.normal(keys[2], (args.experts, args.width, args.inner)) * args.inner**-0.5
    forms = {
        "one_by_one": lambda *a: one_by_one(*a, "silu"),
        "all": everything,
        "gathered": gathered,
        "grouped": lambda *a: grouped(*a, "silu"),
    }
    report = {"environment": environment(), "sizes": vars(args) | {"out": None}, "results": []}
    for rows in (1, 4, 8, 128):
        x = jax.random.normal(keys[3], (rows, args.width))
        scores = jax.random.normal(keys[4], (rows, args.experts))
        chosen, weights = route(scores, None, config)
        run = {n: jax.jit(f) for n, f in forms.items() if rows < 64 or n != "gathered"}
        operands = x, chosen, weights, gate, up, down
        outs = {name: np.asarray(f(*operands)) for name, f in run.items()}
        for out in outs.values():
            np.testing.assert_allclose(out, outs["all"], atol=2e-4)
        best = dict.fromkeys(run, np.inf)
        for _ in range(args.repeats):
            for name, f in run.items():
                start = time.perf_counter()
                f(*operands).block_until_ready()
                best[name] = min(best[name], time.perf_counter() - start)
        report["results"].append(
            {
                "rows": rows,
                "experts_used": int(np.unique(chosen).size),
                "ms": {name: round(1e3 * t, 2) for name, t in best.items()},
                "ratio_to_all": {name: round(t / best["all"], 3) for name, t in best.items()},
            }
        )
    write_report(report, args.out)


if __name__ == "__main__":
    main()
