"""From a target to a drafter on disk: texts, training, saving, measuring."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import checkpoints, loading
from specjax.loading.reading import How, read_weights
from specjax.train.choosing import draft_vocabulary, token_counts
from specjax.train.prompts import read_prompts
from specjax.train.recipe import frozen
from specjax.train.recipes import PLANNERS, Plan, default_features
from specjax.train.settings import agree
from specjax.train.texts import Writing, read_shards, write_texts
from specjax.train.training import Progress, Training, has_checkpoint, train
from specjax.train.windows import Batch, Windows, batch_at, held_out, open_windows, with_states
from specjax.types import Params, PyTree

__all__ = [
    "Job",
    "Stage",
    "Watcher",
    "batch_plan",
    "held_out_prompts",
    "make_texts",
    "stated_bytes",
    "train_drafter",
]


class Job(NamedTuple):
    """What to train, on what, for how long."""

    target: str
    drafter: str  # a key of `PLANNERS`
    out: Path
    data: Path | None = None  # prompts; None: the target makes its own
    texts: Path | None = None  # a folder of texts to use or to fill; None: out / "texts"
    start: Path | None = None  # a trained drafter of the same sizes to go on from
    tokens: int = 1_000_000  # of texts
    epochs: float = 2.0
    draft_vocab: int | None = 16384  # None: the target's
    options: Mapping[str, Any] = {}  # of the recipe
    training: Mapping[str, Any] = {}  # fields of `Training`, for those who know
    writing: Mapping[str, Any] = {}  # fields of `Writing`
    window: int = 384
    online: bool = False  # states are computed when they are needed, and not kept on disk
    dtype: str | None = None  # of the target
    mesh: Mesh | None = None


class Stage(NamedTuple):
    """Where a run stands, for a progress bar."""

    name: str
    done: float
    total: float
    progress: Progress | None = None


Watcher = Callable[[Stage], None]

_HELD = 0.05  # share of the texts that is not trained on
_FREQUENT = 1024  # tokens that every step compares laws on
_FITTED = 300_000  # tokens that a closed-form start is fitted to, at most
_FIT_ROWS = 4


def stated_bytes(params: Params, features: int, tokens: int) -> int:
    """What texts of so many tokens take on disk, with their states in 16 bits."""
    return tokens * (4 + 2 * features * params.model.config.hidden_size)


def make_texts(
    params: Params, job: Job, folder: Path, watch: Watcher, stopped: Callable[[], bool]
) -> bool:
    """Writes texts until there are `job.tokens`; what is there counts.

    Returns:
      Whether there are enough: a signal may have ended it, between two shards.

    Raises:
      ValueError: the folder holds texts of other settings, or there is no room on the disk.
    """
    prompts = None if job.data is None else read_prompts(params, job.data)
    features = () if job.online else default_features(params.model.config)
    writing = Writing(
        features=features, data="" if job.data is None else job.data.name, **job.writing
    )
    needed, folder = stated_bytes(params, len(features), job.tokens), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed - held > free:
        raise ValueError(
            f"{job.tokens} tokens with the target's states take {needed / 1e9:.1f} GB, and "
            f"{str(folder)!r} has room for {free / 1e9:.1f} GB; give fewer tokens or another disk"
        )
    total, name = 0, f"texts, {needed / 1e9:.1f} GB"
    watch(Stage(name, 0, job.tokens))
    for _, tokens in write_texts(
        folder, params, writing, shards=itertools.count(), prompts=prompts
    ):
        total += tokens
        watch(Stage(name, min(total, job.tokens), job.tokens))
        if total >= job.tokens:
            return True
        if stopped():
            return False
    return True


def train_drafter(
    job: Job, watch: Watcher = lambda stage: None, stopped: Callable[[], bool] = lambda: False
) -> Path | None:
    """Trains a drafter and writes it to `job.out / "drafter"`.

    Whatever was done before, in the same folder with the same settings, is not done again.

    Args:
      job: what to do.
      watch: is told of progress.
      stopped: whether to stop between two shards of texts; training itself watches for signals.

    Returns:
      The drafter's folder; None if it was stopped before.

    Raises:
      ValueError: an unknown drafter or option, or a folder with other settings.
    """
    if job.drafter not in PLANNERS:
        raise ValueError(
            f"drafter {job.drafter!r} cannot be trained; those that can: {', '.join(PLANNERS)}"
        )
    made_with = {k: v for k, v in job._asdict().items() if k not in ("out", "texts", "mesh")}
    agree(job.out / "job.json", made_with, "a drafter")
    made = job.out / "drafter"
    if made.exists():
        return made
    params = loading.load(job.target, dtype=job.dtype, mesh=job.mesh)
    folder = job.out / "texts" if job.texts is None else job.texts
    if not make_texts(params, job, folder, watch, stopped):
        return None
    shards = list(read_shards(folder))
    counts = token_counts((shard.tokens for shard in shards), params.model.vocab_size)
    plan, draft_ids = _planned(params, job, counts)
    features = () if job.online else plan.recipe.features
    windows, held = _split(job, open_windows(folder, job.window, features))
    weights, draft_ids = _begun(job, params, plan, draft_ids, windows)
    training = batch_plan(job, len(windows.places))
    frequent = np.argsort(-counts[draft_ids], kind="stable")[:_FREQUENT]

    def report(progress: Progress) -> None:
        watch(Stage("training", progress.step, training.steps, progress))

    weights, finished = train(
        plan.recipe,
        frozen(params, draft_ids),
        weights,
        windows,
        held,
        training,
        job.out / "training",
        frequent=frequent,
        model=params.model if job.online else None,
        mesh=job.mesh,
        report=report,
    )
    if not finished:
        return None
    plan.recipe.save(made, weights, draft_ids)
    return made


def held_out_prompts(job: Job, most: int = 8) -> dict[str, list[list[int]]]:
    """Prompts by kind from the texts that were not trained on.

    Args:
      job: what was trained.
      most: of a kind.
    """
    folder = job.out / "texts" if job.texts is None else job.texts
    _, held = _split(job, open_windows(folder, job.window, ()))
    found: dict[str, list[list[int]]] = {}
    for number in sorted(set(held.places[:, 0].tolist())):
        shard = held.shards[number]
        starts = np.cumsum(shard.lengths) - shard.lengths
        group = found.setdefault(shard.kind, [])
        for start, prompt in zip(starts, shard.prompts, strict=True):
            group.append(shard.tokens[start : start + prompt].tolist())
    pick = lambda x: [x[i] for i in np.linspace(0, len(x) - 1, min(most, len(x))).astype(int)]
    return {kind: pick(prompts) for kind, prompts in found.items()}


def _split(job: Job, windows: Windows) -> tuple[Windows, Windows]:
    """To train on, and to measure on."""
    return held_out(windows, _HELD, seed=job.writing.get("seed", 0))


def _planned(params: Params, job: Job, counts: np.ndarray) -> tuple[Plan, np.ndarray]:
    """The plan, and the draft's tokens as target ids."""
    planner, options, size = PLANNERS[job.drafter], dict(job.options), params.model.vocab_size
    reduced = None
    if planner.own_vocabulary and job.draft_vocab is not None and job.draft_vocab < size:
        reduced = options["draft_vocab"] = job.draft_vocab
    if planner.mask:
        options.setdefault("mask_token_id", int(np.argmin(counts)))
    known = inspect.signature(planner.plan).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if not open_ended and set(options) - set(known):
        raise ValueError(f"{job.drafter} has no option {sorted(set(options) - set(known))[0]!r}")
    plan = planner.plan(params, **options)
    if reduced is None:
        return plan, np.arange(size, dtype=np.int32)
    return plan, draft_vocabulary(counts, reduced, params.eos_ids)


def _begun(
    job: Job, params: Params, plan: Plan, draft_ids: np.ndarray, windows: Windows
) -> tuple[PyTree, np.ndarray]:
    """The weights that training starts from, and the draft's tokens.

    Raises:
      ValueError: `job.start` is no drafter of this kind and of these sizes.
    """
    fresh = plan.start(jax.random.key(job.training.get("seed", Training(steps=1).seed)))
    if job.start is not None:
        return _stored(job.start, job.drafter, params, plan, fresh, draft_ids)
    if plan.fit is None or has_checkpoint(job.out / "training"):
        return fresh, draft_ids  # what is restored replaces it
    count = min(len(windows.places), _FITTED // job.window) // _FIT_ROWS
    complete = jax.jit(functools.partial(with_states, params.model), static_argnums=2)

    def batches() -> Iterator[Batch]:
        for i in range(max(1, count)):
            batch = batch_at(windows, i, _FIT_ROWS)
            yield complete(params.target, batch, plan.recipe.features) if job.online else batch

    return plan.fit(fresh, batches), draft_ids


def _stored(
    start: Path, method: str, params: Params, plan: Plan, fresh: PyTree, draft_ids: np.ndarray
) -> tuple[PyTree, np.ndarray]:
    found = checkpoints.read_draft(Path(start), params.model.config, method)
    how = How(jnp.dtype("float32"), None)
    weights = read_weights(found.weights, plan.recipe.logical_axes, {}, how)
    sizes = lambda tree: {jax.tree_util.keystr(k): x.shape for k, x in _leaves(tree)}
    have, want = sizes(weights), sizes(fresh)
    if have != want:
        name = sorted(k for k in have | want if have.get(k) != want.get(k))[0]
        raise ValueError(
            f"start {str(start)!r} has other sizes: {name} is {have.get(name)}, the options say "
            f"{want.get(name)}; give the options it was trained with"
        )
    if found.offsets is not None:
        ids = (np.arange(found.offsets.size) + found.offsets).astype(np.int32)
        if ids.size != draft_ids.size:
            raise ValueError(
                f"start {str(start)!r} has {ids.size} tokens, wanted draft_vocab={draft_ids.size}"
            )
        draft_ids = ids
    return jax.tree.map(lambda x: x.astype(jnp.float32), weights), draft_ids


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree)


def batch_plan(job: Job, windows: int) -> Training:
    """The settings of training, for so many windows."""
    rows = int(job.training.get("rows", Training(steps=1).rows))
    steps = max(1, math.ceil(job.epochs * windows / rows))
    return Training(**{"steps": steps, **job.training})
