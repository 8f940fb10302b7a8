"""How many tokens a pass a drafter is worth, by category of prompts.

tau is tokens a round; the macro average weighs all groups alike. At a temperature, acceptance has
a second measure: sum_x min(p(x), q(x)) at every place where a draft was judged is the chance that
it stood, and its mean must agree with the share that did.

Reference: Leviathan et al. 2023 (arXiv:2211.17192), section 3; Xia et al. 2024 (arXiv:2401.07851),
Spec-Bench.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.decoding import decode_recorded
from specjax.sampling import Sampling
from specjax.text import Prompt, encode_prompt
from specjax.train.prompts import read_lines
from specjax.types import Context, DecodeResult, Drafter, Outcome, Params, PyTree, record

__all__ = ["Group", "Report", "decoded", "evaluate_prompts", "judged", "packed", "read_groups"]

# Spec-Bench reports its eight categories of MT-bench as one group.
_GROUPS = dict.fromkeys(
    "writing roleplay reasoning math coding extraction stem humanities".split(), "mt_bench"
)


_WIDTH = 256  # tokens: prompts up to here share a program


class Group(NamedTuple):
    """What became of one group of prompts."""

    prompts: int
    tokens: int
    rounds: int
    accepted: list[int]  # [K]: rounds that accepted depth 1..K
    proposed: list[int]  # [K]: rounds whose draft reached depth 1..K
    chance: list[float] | None  # [K]: mean of sum_x min(p, q) where depth 1..K was judged
    judged: list[int] | None  # [K]: in how many rounds that was

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return self.tokens / max(self.rounds, 1)


class Report(NamedTuple):
    """All groups of a file."""

    groups: Mapping[str, Group]

    @property
    def tau(self) -> float:
        """The macro average over groups."""
        return float(np.mean([group.tau for group in self.groups.values()]))

    def as_json(self) -> dict[str, Any]:
        """Figures for a file or a card."""
        groups = {
            name: {"tau": round(group.tau, 4), **group._asdict()}
            for name, group in self.groups.items()
        }
        return {"tau": round(self.tau, 4), "groups": groups}


def read_groups(path: str | os.PathLike[str], limit: int | None = None) -> dict[str, list[Prompt]]:
    """First prompts of the lines of a file, as `read_prompts` takes it, by their "category".

    Spec-Bench's categories of MT-bench are one group; lines without one are the group "all".

    Args:
      path: the file.
      limit: most prompts of a group, spread evenly over it; None: all.

    Raises:
      ValueError: no such file, no prompts, or a line of another form.
    """
    groups: dict[str, list[Prompt]] = {}
    for found, category in read_lines(path):
        groups.setdefault(_GROUPS.get(category, category), []).append(found[0])
    if limit is None:
        return groups
    pick = lambda x: [x[i] for i in np.linspace(0, len(x) - 1, min(limit, len(x))).astype(int)]
    return {name: pick(texts) for name, texts in groups.items()}


@record
class _Judging:
    """A drafter's state, and how likely its drafts were to stand."""

    inner: PyTree
    draft: Array  # [B, K, V]: the law q of this round's chain
    valid: Array  # [B, K]
    temperature: Array  # [B]
    chance: Array  # [B, K] float32: sums of sum_x min(p, q)
    judged: Array  # [B, K] int32


@functools.cache
def judged(drafter: Drafter) -> Drafter:
    """The same drafter, which also adds up sum_x min(p, q) wherever a draft was judged.

    Args:
      drafter: of chains that keep their law q.
    """
    depth = drafter.depth

    def init(params: Params, prefill: Any) -> _Judging:
        batch = prefill.tokens.shape[0]
        return _Judging(
            inner=drafter.init(params, prefill),
            draft=jnp.zeros((batch, depth, params.model.vocab_size), jnp.float32),
            valid=jnp.zeros((batch, depth), bool),
            temperature=jnp.ones(batch, jnp.float32),
            chance=jnp.zeros((batch, depth), jnp.float32),
            judged=jnp.zeros((batch, depth), jnp.int32),
        )

    def draft(params: Params, key: Array, state: _Judging, context: Context):
        proposal, inner = drafter.draft(params, key, state.inner, context)
        if proposal.probs is None or drafter.nodes != depth:
            raise ValueError(
                f"the drafter {drafter.name} has no law of its own for a chain; measure one that "
                "draws its drafts"
            )
        return proposal, _Judging(
            inner=inner,
            draft=proposal.probs,
            valid=proposal.valid & context.active[:, None],
            temperature=jnp.broadcast_to(
                jnp.asarray(context.sampling.temperature, jnp.float32), context.lengths.shape
            ),
            chance=state.chance,
            judged=state.judged,
        )

    def update(params: Params, state: _Judging, outcome: Outcome) -> _Judging:
        p = jax.nn.softmax(outcome.scores.logits[:, :-1] / state.temperature[:, None, None])
        chance = jnp.sum(jnp.minimum(p, state.draft), axis=-1)
        tried = state.valid & (jnp.arange(depth)[None, :] <= outcome.accepted[:, None])
        return _Judging(
            inner=drafter.update(params, state.inner, outcome),
            draft=state.draft,
            valid=state.valid,
            temperature=state.temperature,
            chance=state.chance + jnp.where(tried, chance, 0.0),
            judged=state.judged + tried,
        )

    return drafter._replace(init=init, draft=draft, update=update)


def evaluate_prompts(
    params: Params,
    groups: Mapping[str, Sequence[Prompt | Sequence[int]]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    rows: int = 8,
    seed: int = 0,
    chances: bool = False,
) -> Iterator[tuple[str, Group]]:
    """Decodes the prompts of each group in batches.

    Args:
      params: from `specjax.load`, with a drafter.
      groups: prompts by name: users' messages, conversations, or token ids.
      max_new_tokens: of each answer.
      temperature: of target and drafts; 0 is greedy.
      rows: prompts decoded at a time. They do not change tau.
      seed: of the sampling.
      chances: also measure sum_x min(p, q), at a temperature, for a drafter that keeps q.

    Yields:
      Each group's name and figures.

    Raises:
      ValueError: chances without a temperature.
    """
    if chances and temperature <= 0:
        raise ValueError("chances=True needs a temperature above 0, where drafts have a law")
    if chances:
        params = params.replace(drafter=judged(params.drafter))
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    for name, texts in groups.items():
        # Prompts of like length share a batch, so that less of it is padding.
        ids = sorted((_ids(params, text) for text in texts), key=len)
        parts = []
        for count, result, state in decoded(params, ids, rows=rows, seed=seed, **options):
            add = lambda x: np.asarray(x)[:count].sum(axis=0)  # noqa: B023
            stats = result.stats
            sums = [add(result.lengths), add(stats.rounds), add(stats.accepted)]
            sums += [add(stats.proposed)]
            sums += [add(state.chance), add(state.judged)] if chances else []
            parts.append(sums)
        emitted, rounds, accepted, proposed, *more = (
            sum(column) for column in zip(*parts, strict=True)
        )
        yield (
            name,
            Group(
                prompts=len(ids),
                tokens=int(emitted),
                rounds=int(rounds),
                accepted=accepted.tolist(),
                proposed=proposed.tolist(),
                chance=(more[0] / np.maximum(more[1], 1)).tolist() if chances else None,
                judged=more[1].tolist() if chances else None,
            ),
        )


def decoded(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    rows: int,
    seed: int,
) -> Iterator[tuple[int, DecodeResult, PyTree]]:
    """Decodes prompts in batches of few widths, so that few programs are compiled.

    Args:
      params: from `specjax.load`, with a drafter.
      prompts: token ids.
      max_new_tokens: of each answer.
      temperature: of target and drafts; 0 is greedy.
      rows: prompts decoded at a time.
      seed: of the sampling.

    Yields:
      Prompts of the batch, its result, and the drafter's last state.
    """
    run = _program(max_new_tokens, temperature)
    room = max(1, params.model.max_position - max_new_tokens)
    for at in range(0, len(prompts), rows):
        part = prompts[at : at + rows]
        tokens, lengths = packed(part, _WIDTH, room)
        key = jax.random.key(seed + at)
        yield len(part), *run(params, tokens, prompt_lengths=lengths, key=key)


@functools.lru_cache(maxsize=8)
def _program(max_new_tokens: int, temperature: float) -> Callable[..., Any]:
    """Inside a program of the caller's, prompts keep the width that they are given."""
    sampling = Sampling(temperature=temperature)
    return jax.jit(
        functools.partial(decode_recorded, max_new_tokens=max_new_tokens, sampling=sampling)
    )


def packed(
    prompts: Sequence[Sequence[int]], least: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts side by side, padded to few widths, so that few programs are compiled.

    Args:
      prompts: token ids.
      least: the smallest width; others are powers of two times it. What is beyond a prompt's end
        is not read.
      most: the largest width, unless a prompt is longer.

    Returns:
      Tokens `[B, T]` int32 and lengths `[B]` int32.
    """
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    width = least << max(0, math.ceil(math.log2(lengths.max() / least)))
    tokens = np.zeros((len(prompts), max(min(width, most), int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _ids(params: Params, prompt: Prompt | Sequence[int]) -> list[int]:
    if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
        return encode_prompt(params, prompt)
    return list(prompt)
