"""The loop: batches, a pure `train_step`, checkpoints that resume exactly, a log of every step.

What a step does depends on its number and the state alone: the batch, the sample of the vocabulary
and the learning rate are functions of the number. A run that was killed goes on from its last
checkpoint along the same curve.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.train.choosing import choose
from specjax.train.recipe import Choice, Frozen, Metrics, Recipe
from specjax.train.settings import agree
from specjax.train.windows import Batch, Windows, batch_at, with_states
from specjax.types import Model, PyTree, record

__all__ = [
    "Progress",
    "TrainState",
    "Training",
    "evaluate",
    "has_checkpoint",
    "optimizer",
    "train",
    "train_step",
]


@record
class TrainState:
    """What a step changes."""

    weights: PyTree  # float32
    opt_state: PyTree
    step: Array  # int32


class Training(NamedTuple):
    """How long and how fast. A batch is `rows` windows, in `accumulate` parts one after another."""

    steps: int
    rows: int = 2
    accumulate: int = 1
    learning_rate: float = 2e-3
    warmup: int = 100  # steps
    final_rate: float = 0.05  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of a gradient
    candidates: int = 4096  # tokens that laws are compared on
    seed: int = 0
    compute_dtype: str = "float32"
    save_every: int = 200  # steps
    measure_every: int = 200  # steps; 0: only at the end
    measure_rows: int = 16  # windows


class Progress(NamedTuple):
    """One line of the log."""

    step: int
    tokens: int  # seen so far
    loss: float
    agreed: list[float]  # share of places, by step ahead
    accepted: list[float]  # mean of sum_x min(p, q), by step ahead
    rate: float  # tokens a second since the last line; not part of the curve
    measured: bool = False  # on windows that are held out

    @property
    def tau(self) -> float:
        """Tokens a pass that this acceptance by depth would give a greedy chain."""
        return 1 + sum(math.prod(self.agreed[:k]) for k in range(1, len(self.agreed) + 1))


def optimizer(training: Training) -> optax.GradientTransformation:
    """AdamW with clipped gradients, a warm-up and a cosine. Vectors are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        training.learning_rate,
        min(training.warmup, training.steps // 2),
        training.steps,
        training.final_rate * training.learning_rate,
    )
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=training.weight_decay, mask=matrices),
    )


def train_step(
    recipe: Recipe,
    model: Model | None,
    rule: optax.GradientTransformation,
    compute_dtype: str,
    state: TrainState,
    frozen: Frozen,
    batch: Batch,
    choice: Choice,
    key: Array,
) -> tuple[TrainState, Array, Metrics]:
    """One step, pure.

    Args:
      recipe: what is trained, and its loss.
      model: the target, where batches come without its states and they are computed here; None
        where batches hold them.
      rule: the optimizer.
      compute_dtype: matrices are rounded to it on their way into products.
      state: weights in float32.
      frozen: the target.
      batch: each leaf `[A, B / A, ...]`: A parts, whose gradients are added up one by one.
      choice: the tokens that laws are compared on.
      key: of the recipe's own draws.

    Returns:
      The new state; the mean loss; how well the batch was guessed.
    """

    def loss(weights: PyTree, part: Batch, key: Array) -> tuple[Array, Metrics]:
        small = lambda x: x.astype(compute_dtype) if x.ndim > 1 else x
        part = _complete(recipe, model, frozen, part)
        return recipe.loss(jax.tree.map(small, weights), frozen, part, choice, key)

    def add(total: PyTree, part: tuple[Batch, Array]) -> tuple[PyTree, None]:
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.weights, *part)
        return jax.tree.map(jnp.add, total, (value, gradients, metrics)), None

    count = batch.tokens.shape[0]
    keys = jax.random.split(key, count)
    zero = jnp.zeros((), jnp.float32)
    each = jnp.zeros(recipe.steps, jnp.float32)
    empty = Metrics(agreed=each, accepted=each, places=each)
    start = (zero, jax.tree.map(jnp.zeros_like, state.weights), empty)
    (value, gradients, metrics), _ = jax.lax.scan(add, start, (batch, keys))
    gradients = jax.tree.map(lambda x: x / count, gradients)
    changes, opt_state = rule.update(gradients, state.opt_state, state.weights)
    weights = optax.apply_updates(state.weights, changes)
    state = TrainState(weights=weights, opt_state=opt_state, step=state.step + 1)
    return state, value / count, metrics


def _complete(recipe: Recipe, model: Model | None, frozen: Frozen, batch: Batch) -> Batch:
    """The batch with the states that the recipe needs."""
    if model is None:
        return batch
    return with_states(model, frozen.target, batch, recipe.features)


def evaluate(
    recipe: Recipe,
    model: Model | None,
    weights: PyTree,
    frozen: Frozen,
    windows: Windows,
    draft_ids: np.ndarray,
    rows: int,
) -> tuple[float, Metrics]:
    """Loss and metrics on the first `rows` windows, over the whole of the draft's vocabulary."""
    run = _measure(recipe, model)
    everything = choose(np.zeros(0, np.int32), draft_ids, np.zeros(0, np.int32), draft_ids.size, [])
    values, sums = [], []
    for i in range(min(rows, len(windows.places))):
        batch = batch_at(windows, i, 1)
        value, metrics = run(weights, frozen, batch, everything, jax.random.key(0))
        values.append(float(value))
        sums.append(metrics)
    return float(np.mean(values)), jax.tree.map(lambda *x: sum(x), *sums)


@functools.lru_cache(maxsize=8)
def _measure(recipe: Recipe, model: Model | None) -> Callable[..., tuple[Array, Metrics]]:
    def run(weights, frozen, batch, choice, key):
        batch = _complete(recipe, model, frozen, batch)
        return recipe.loss(weights, frozen, batch, choice, key, training=False)

    return jax.jit(run)


def train(
    recipe: Recipe,
    frozen: Frozen,
    start: PyTree,
    windows: Windows,
    held: Windows,
    training: Training,
    folder: str | os.PathLike[str],
    *,
    frequent: np.ndarray,
    model: Model | None = None,
    mesh: Mesh | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> tuple[PyTree, bool]:
    """Trains, or goes on with what is in `folder`.

    Args:
      recipe: what is trained.
      frozen: the target.
      start: weights to start from, float32.
      windows: to train on.
      held: to measure on.
      training: how long and how fast.
      folder: for checkpoints and the log `curve.jsonl`.
      frequent: draft ids that are always among the tokens that laws are compared on.
      model: the target, for windows without states; None: windows hold them.
      mesh: with axes "data" (rows) and "model" (parts of weights).
      report: is called with every line of the log.

    Returns:
      The weights, and whether all steps were done: a signal (SIGINT, SIGTERM) ends training after
      the step in progress, with a checkpoint.

    Raises:
      ValueError: the folder holds a run of other settings, or the rows do not divide.
    """
    if training.rows % training.accumulate:
        raise ValueError(f"rows={training.rows} must be a multiple of {training.accumulate=}")
    mesh = None if mesh is None else sharding.auto(mesh)
    folder = Path(folder).absolute()
    made_with = {"recipe": recipe.name, "windows": len(windows.places), **training._asdict()}
    agree(folder / "training.json", made_with, "a run")
    rule = optimizer(training)
    run = jax.jit(
        functools.partial(train_step, recipe, model, rule, training.compute_dtype),
        donate_argnums=0,
    )
    state = TrainState(
        # A copy: the first step donates it.
        weights=_placed(recipe, jax.tree.map(jnp.array, start), mesh),
        opt_state=None,
        step=jnp.zeros((), jnp.int32),
    )
    state = dataclasses.replace(state, opt_state=jax.jit(rule.init)(state.weights))
    if mesh is not None:
        state, frozen = sharding.onto(state, mesh), sharding.onto(frozen, mesh)
    draft_ids = np.asarray(frozen.draft_ids)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        done = manager.latest_step()
        if done is not None:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        first = 0 if done is None else done
        with _Curve(folder / "curve.jsonl", first) as curve, _Stop() as stop:
            began, seen = time.monotonic(), 0
            size = training.rows * windows.length
            for step in range(first, training.steps):
                batch = batch_at(windows, step, training.rows, training.seed)
                choice = choose(
                    batch.tokens,
                    draft_ids,
                    frequent,
                    training.candidates,
                    [training.seed, step],
                )
                key = jax.random.fold_in(jax.random.key(training.seed), step)
                state, loss, metrics = run(
                    state, frozen, _parts(batch, training.accumulate, mesh), choice, key
                )
                seen += size
                line = _progress(step + 1, (step + 1) * size, loss, metrics)
                rate = seen / (time.monotonic() - began)
                report(curve.write(line._replace(rate=rate)))
                last = step + 1 == training.steps or stop.asked
                every = training.measure_every
                if last or (every and (step + 1) % every == 0):
                    value, sums = evaluate(
                        recipe, model, state.weights, frozen, held, draft_ids, training.measure_rows
                    )
                    line = _progress(step + 1, (step + 1) * size, value, sums)
                    report(curve.write(line._replace(rate=rate, measured=True)))
                if last or (step + 1) % training.save_every == 0:
                    curve.flush()
                    manager.save(step + 1, args=ocp.args.StandardSave(state), force=last)
                if last:
                    break
            manager.wait_until_finished()
    return state.weights, int(state.step) >= training.steps


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether `train` would go on from a checkpoint in the folder."""
    saved = Path(folder) / "checkpoints"
    return saved.is_dir() and any(ocp.utils.checkpoint_steps(saved))


def _parts(batch: Batch, count: int, mesh: Mesh | None) -> Batch:
    """`[B, ...]` to `[A, B / A, ...]`, rows spread over the mesh's axis "data"."""

    def split(x: np.ndarray) -> Array:
        x = x.reshape(count, x.shape[0] // count, *x.shape[1:])
        if mesh is None:
            return jnp.asarray(x)
        parts = mesh.shape.get("data", 1)
        axis = "data" if parts > 1 and x.shape[1] % parts == 0 else None
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, axis)))

    return jax.tree.map(split, batch)


def _placed(recipe: Recipe, weights: PyTree, mesh: Mesh | None) -> PyTree:
    """Weights where the rules of `specjax.sharding` want them."""
    if mesh is None:
        return weights
    return sharding.place_axes(recipe.logical_axes, weights, mesh)


def _progress(step: int, tokens: int, loss: Any, metrics: Metrics) -> Progress:
    places = np.maximum(np.asarray(metrics.places), 1)
    share = lambda x: [round(float(v), 4) for v in np.asarray(x) / places]
    return Progress(
        step=step,
        tokens=tokens,
        loss=float(loss),
        agreed=share(metrics.agreed),
        accepted=share(metrics.accepted),
        rate=0.0,
    )


class _Curve:
    """The log, a JSON object a line. What was logged behind the checkpoint is taken back."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            lines = path.read_text().splitlines()
            kept = [line for line in lines if line and json.loads(line)["step"] <= step]
        part = path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept))
        os.replace(part, path)
        self._file = path.open("a")

    def __enter__(self) -> _Curve:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def write(self, line: Progress) -> Progress:
        self._file.write(json.dumps(line._asdict()) + "\n")
        return line

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class _Stop:
    """Remembers that a signal asked to stop. Outside the main thread signals are left alone."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
