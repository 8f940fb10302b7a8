"""Which form of a small matmul XLA runs fastest on a CPU: JSON on standard output.

    uv run python benchmarks/matmul.py --out matmul.json

Ten layers of SmolLM2's products and its unembedding, for a few rows, in each form that
`specjax.models.layers.matmul` chooses from; all interleaved, ratios to one float32 row.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import environment, write_report

from specjax.models.layers import matmul as matmul_of_layers
from specjax.models.quantized import dequantize, quantize

WIDTH, INNER, VOCAB, LAYERS = 576, 1536, 49152, 10
SHAPES = [(960, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER)]


def weight_right(x, w):
    """x w^T, as written."""
    return jax.lax.dot_general(
        x.astype(w.dtype), w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def weight_left(x, w):
    """(w x^T)^T, rows padded to fours, with barriers that keep it so."""
    x = jax.lax.optimization_barrier(jnp.pad(x.astype(w.dtype), ((0, -x.shape[0] % 4), (0, 0))))
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T


def padded(rows):
    """weight_right on at least so many rows."""
    return lambda x, w: weight_right(jnp.pad(x, ((0, max(rows - x.shape[0], 0)), (0, 0))), w)


def converted_whole(x, w):
    """A quantised weight, converted to float32 before the product."""
    return weight_right(x, dequantize(w, jnp.float32))


FORMS = {
    "weight_right": weight_right,
    "weight_left": weight_left,
    "weight_right_2_rows": padded(2),
    "weight_right_8_rows": padded(8),
}
QUANTISED_FORMS = {"converted_whole": converted_whole, "converted_in_blocks": matmul_of_layers}


def network(matmul):
    """Ten layers of products of the right shapes, then the unembedding."""

    @jax.jit
    def run(x, layers, unembed):
        rows = x.shape[0]
        for qkv, out, gate_up, down in layers:
            x = x + 0.1 * matmul(matmul(x, qkv)[:, :WIDTH], out)[:rows]
            h = matmul(x, gate_up)
            x = x + 0.1 * matmul(jax.nn.silu(h[:, :INNER]) * h[:, INNER:], down)[:rows]
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return matmul(x, unembed)[:rows]

    return run


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 5, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    key = jax.random.key(0)
    runs, weights = {}, {}
    for dtype in ("float32", "bfloat16"):
        layers = [
            tuple(
                (0.04 * jax.random.normal(jax.random.fold_in(key, 4 * i + j), shape)).astype(dtype)
                for j, shape in enumerate(SHAPES)
            )
            for i in range(LAYERS)
        ]
        weights[dtype] = layers, (0.04 * jax.random.normal(key, (VOCAB, WIDTH))).astype(dtype)
    pack = jax.jit(lambda w: quantize(w, 8))
    weights["int8"] = jax.tree.map(pack, weights["float32"])
    for dtype in weights:
        forms = QUANTISED_FORMS if dtype == "int8" else FORMS
        for form, matmul in forms.items():
            for rows in args.rows:
                if form.endswith("_rows") and rows > 1:
                    continue
                x = jax.random.normal(key, (rows, WIDTH))
                call = network(matmul)
                call(x, *weights[dtype]).block_until_ready()
                runs[dtype, form, rows] = call, x
    best: dict = {}
    for _ in range(args.repeats):
        for name, (call, x) in runs.items():
            begin = time.perf_counter()
            call(x, *weights[name[0]]).block_until_ready()
            seconds = time.perf_counter() - begin
            best[name] = min(best.get(name, seconds), seconds)
    base = best["float32", "weight_right", 1] if 1 in args.rows else min(best.values())
    rows = [
        {"dtype": d, "form": f, "rows": r, "ms_best": 1e3 * s, "ratio": s / base}
        for (d, f, r), s in best.items()
    ]
    report = {"environment": environment(), "results": rows}
    write_report(report, args.out)


if __name__ == "__main__":
    main()
