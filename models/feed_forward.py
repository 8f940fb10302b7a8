"""Feed-forward blocks: one for all tokens, or experts that tokens are routed to."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.config import DecoderConfig, ExpertsConfig
from specjax.models.layers import ACTIVATIONS, Linear, matmul
from specjax.models.quantized import QuantizedTensor

__all__ = ["MLP", "Experts", "grouped", "one_by_one", "route"]


class MLP(nnx.Module):
    """down(act(gate x) * up x) (Shazeer 2020), or down(act(up x)) without a gate."""

    def __init__(self, config: DecoderConfig, inner: int, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.mlp_bias
        if config.gated:
            self.gate = Linear(("mlp", "embed"), (inner, width), bias, rngs)
        self.up = Linear(("mlp", "embed"), (inner, width), bias, rngs)
        self.down = Linear(("embed", "mlp"), (width, inner), bias, rngs)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        """`[B, T, E]` to `[B, T, E]`."""
        act = ACTIVATIONS[self.activation]
        up = self.up(x).astype(jnp.float32)
        inner = act(self.gate(x).astype(jnp.float32)) * up if hasattr(self, "gate") else act(up)
        return self.down(inner.astype(x.dtype))


def route(scores: Array, bias: Array | None, config: ExpertsConfig) -> tuple[Array, Array]:
    """Which experts each token visits, and with what weight.

    Experts of groups that are not kept count as -inf, as in DeepSeek's code, vLLM and
    transformers. Releases of transformers before its pull request 45441 set them to 0, which
    wins over a kept expert that the bias has pushed below 0.

    Args:
      scores: `[R, X]` router logits, float32.
      bias: `[X]` added for the choice only, or None.

    Returns:
      Experts `[R, k]` int32 and weights `[R, k]` float32.
    """
    squash = jax.nn.sigmoid if config.scoring == "sigmoid" else jax.nn.softmax
    weights = squash(scores)
    choice = weights if bias is None else weights + bias[None, :]
    if config.groups > 1:
        # A group counts by the sum of its two best; only the best groups stay.
        grouped = choice.reshape(choice.shape[0], config.groups, -1)
        worth = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, kept = jax.lax.top_k(worth, config.groups_kept)
        stays = jnp.any(kept[:, :, None] == jnp.arange(config.groups)[None, None, :], axis=1)
        choice = jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, config.experts_per_token)
    picked = jnp.take_along_axis(weights, chosen, axis=-1)
    if config.normalise:
        picked = picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20)
    return chosen, picked * config.scale


class Experts(nnx.Module):
    """Every token visits k of X feed-forward blocks, and a shared one if there is one."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        experts, width = config.experts, config.hidden_size
        count, inner = experts.num_experts, experts.intermediate_size
        self.config, self.activation = experts, config.activation
        self.router = Linear((None, "embed"), (count, width), False, rngs)
        if experts.scoring == "sigmoid":
            self.choice_bias = nnx.Param(jnp.zeros(count, jnp.float32), logical_axes=(None,))

        def stacked(axes: tuple[Any, ...], shape: tuple[int, int]) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (count, *shape), jnp.float32)
            return nnx.Param(values * shape[1] ** -0.5, logical_axes=(None, *axes))

        # The inner width is split over devices, so that each holds a part of every expert.
        self.gate = stacked(("mlp", "embed"), (inner, width))
        self.up = stacked(("mlp", "embed"), (inner, width))
        self.down = stacked(("embed", "mlp"), (width, inner))
        if experts.shared_size:
            self.shared = MLP(config, experts.shared_size, rngs)

    def __call__(self, x: Array) -> Array:
        """`[B, T, E]` to `[B, T, E]`."""
        lead = x.shape[:-1]
        rows = x.reshape(math.prod(lead), x.shape[-1])
        scores = matmul(rows.astype(jnp.float32), self.router.weight[...].astype(jnp.float32))
        bias = None
        if hasattr(self, "choice_bias"):
            bias = self.choice_bias[...].astype(jnp.float32)
        chosen, weights = route(scores, bias, self.config)
        stacks = self.gate[...], self.up[...], self.down[...]
        # On a CPU one after the other is fastest at every size; elsewhere turns of a loop cost.
        # Quantised weights would be converted as a whole for one product over all experts.
        alone = jax.default_backend() == "cpu" or isinstance(stacks[0], QuantizedTensor)
        visit = one_by_one if alone else grouped
        out = visit(rows, chosen, weights, *stacks, self.activation).reshape(*lead, -1)
        if hasattr(self, "shared"):
            out = out + self.shared(x).astype(jnp.float32)
        return out.astype(x.dtype)


def one_by_one(
    rows: Array,
    chosen: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    activation: str,
) -> Array:
    """Sum over each row's experts, one expert after the other.

    An expert that no row has chosen is skipped, and its weights are not read
    (benchmarks/experts.py).

    Args:
      rows: `[R, E]`.
      chosen: `[R, k]` int32.
      weights: `[R, k]` float32.
      gate, up: `[X, I, E]`.
      down: `[X, E, I]`.

    Returns:
      `[R, E]` float32.
    """
    act = ACTIVATIONS[activation]

    def visit(i: Array, total: Array) -> Array:
        share = jnp.sum(jnp.where(chosen == i, weights, 0.0), axis=-1, keepdims=True)

        def apply(total: Array) -> Array:
            inner = act(matmul(rows, gate[i])) * matmul(rows, up[i])
            return total + share * matmul(inner.astype(rows.dtype), down[i])

        return jax.lax.cond(jnp.any(chosen == i), apply, lambda total: total, total)

    return jax.lax.fori_loop(0, gate.shape[0], visit, jnp.zeros(rows.shape, jnp.float32))


def grouped(
    rows: Array,
    chosen: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    activation: str,
) -> Array:
    """The same sum, with the rows sorted by expert and one ragged product for all experts."""
    act, k = ACTIVATIONS[activation], chosen.shape[1]
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.sum(chosen.ravel()[:, None] == jnp.arange(gate.shape[0])[None, :], axis=0)
    sent = rows[order // k]

    def product(x: Array, weight: Array) -> Array:
        return jax.lax.ragged_dot(
            x.astype(weight.dtype),
            weight.swapaxes(1, 2),
            sizes.astype(jnp.int32),
            precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    inner = act(product(sent, gate)) * product(sent, up)
    out = product(inner.astype(rows.dtype), down) * weights.ravel()[order][:, None]
    return jnp.zeros(rows.shape, jnp.float32).at[order // k].add(out)
