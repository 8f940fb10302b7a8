"""The target's own generations: conversations as token ids, in shards on disk.

A shard is a function of the settings and its number alone. So several processes may share the
work, and a run that was stopped goes on where it was: what is there is not made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.sampling import Sampling
from specjax.train.prompts import KINDS, Kind, self_instruction
from specjax.train.recording import decode_with_states
from specjax.train.settings import agree
from specjax.types import Params

__all__ = [
    "Conversation",
    "Shard",
    "Writing",
    "answers",
    "read_shards",
    "read_texts",
    "write_texts",
]


class Conversation(NamedTuple):
    """One prompt and what the target answered."""

    tokens: np.ndarray  # [T] int32, prompt and answer
    prompt: int  # tokens of the prompt
    kind: str = ""
    states: tuple[np.ndarray, ...] = ()  # of the target: one [T - 1, E] bfloat16 a feature


class Shard(NamedTuple):
    """Conversations, one behind another."""

    tokens: np.ndarray  # [N] int32
    lengths: np.ndarray  # [C] int32: tokens of each conversation
    prompts: np.ndarray  # [C] int32: tokens of its prompt
    kind: str
    states: tuple[np.ndarray, ...]  # [N, E] bfloat16 a feature; zeros at a text's last token


class Writing(NamedTuple):
    """What a folder of texts is made of."""

    features: tuple[int, ...] = ()  # states of the target that are kept beside the tokens
    seed: int = 0
    rows: int = 128  # conversations a shard, decoded as one batch
    prompt_temperature: float = 0.8
    answer_tokens: int = 112  # most tokens of an answer
    temperatures: tuple[float, ...] = (0.0, 1.0, 0.0)  # of the answers, taken in turn
    kinds: tuple[Kind, ...] = KINDS  # taken in turn
    data: str = ""  # a name for prompts of the user's own, which `write_texts` is given


def answers(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    features: Sequence[int] = (),
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    kind: str = "",
) -> list[Conversation]:
    """The target's answers to a batch of prompts, with its states.

    Args:
      params: from `specjax.load`; its drafter does not matter.
      prompts: token ids.
      features: which states are kept: i is what layer i reads, L that after the final norm.
      temperature: 0 is greedy.
      max_new_tokens: most tokens of an answer; with 1 the prompts are all that matters.
      seed: of the sampling.
      kind: a name for what these prompts are.
    """
    found = decode_with_states(
        params,
        prompts,
        features,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature),
        seed=seed,
    )
    return [
        Conversation(tokens, len(prompt), kind, tuple(states))
        for prompt, (tokens, states) in zip(prompts, found, strict=True)
    ]


def write_texts(
    folder: str | os.PathLike[str],
    params: Params,
    writing: Writing,
    *,
    shards: Iterable[int],
    prompts: Sequence[Sequence[int]] | None = None,
) -> Iterator[tuple[int, int]]:
    """Writes the shards that are not there yet.

    Args:
      folder: made if missing; one that holds texts of other settings is refused.
      params: from `specjax.load`.
      writing: the settings.
      shards: numbers of the shards.
      prompts: of the user's own, a batch of them to a shard; None: the target's.

    Yields:
      Number and tokens of each shard, once it is on disk.

    Raises:
      ValueError: the folder holds texts of other settings.
    """
    folder = Path(folder)
    agree(folder / "texts.json", {"target": params.name, **_settings(writing)}, "texts")
    for shard in shards:
        path = folder / f"text-{shard:05d}.npz"
        if not path.exists():
            found = _conversations(params, writing, shard, prompts)
            _write_states(folder, shard, found)
            with open(path.with_suffix(".part"), "wb") as file:
                np.savez(
                    file,
                    tokens=np.concatenate([one.tokens for one in found]),
                    lengths=np.asarray([len(one.tokens) for one in found], np.int32),
                    prompts=np.asarray([one.prompt for one in found], np.int32),
                    kind=np.asarray(found[0].kind),
                )
            os.replace(path.with_suffix(".part"), path)
        with np.load(path) as held:
            yield shard, int(held["lengths"].sum())


def read_shards(folder: str | os.PathLike[str]) -> Iterator[Shard]:
    """The shards of a folder in their order. States are read from disk when touched.

    Raises:
      ValueError: the folder has no texts.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("text-*.npz"))
    if not paths:
        raise ValueError(f"{str(folder)!r} has no texts (text-*.npz)")
    for path in paths:
        states = path.with_name(path.name.replace("text-", "states-")).with_suffix(".npy")
        with np.load(path) as held:
            yield Shard(
                tokens=held["tokens"],
                lengths=held["lengths"],
                prompts=held["prompts"],
                kind=str(held["kind"]),
                states=tuple(np.load(states, mmap_mode="r").view(jnp.bfloat16))
                if states.exists()
                else (),
            )


def read_texts(folder: str | os.PathLike[str]) -> Iterator[Conversation]:
    """The conversations of a folder, in the order of its shards."""
    for shard in read_shards(folder):
        ends = np.cumsum(shard.lengths)
        for end, length, prompt in zip(ends, shard.lengths, shard.prompts, strict=True):
            states = tuple(x[end - length : end - 1] for x in shard.states)
            yield Conversation(shard.tokens[end - length : end], int(prompt), shard.kind, states)


def _settings(writing: Writing) -> dict[str, Any]:
    return writing._replace(kinds=tuple(kind._asdict() for kind in writing.kinds))._asdict()


def _conversations(
    params: Params, writing: Writing, shard: int, prompts: Sequence[Sequence[int]] | None
) -> list[Conversation]:
    seed = int(np.random.default_rng([writing.seed, shard]).integers(2**31))
    if prompts is None:
        kind = writing.kinds[shard % len(writing.kinds)]
        turn, name = shard // len(writing.kinds), kind.name
        batch = self_instruction(
            params, kind, writing.rows, seed=seed, temperature=writing.prompt_temperature
        )
    else:
        turn, name = shard, writing.data
        # Round and round: another pass over the prompts has other temperatures or other draws.
        at = shard * writing.rows + np.arange(min(writing.rows, len(prompts)))
        batch = [prompts[i % len(prompts)] for i in at]
    return answers(
        params,
        batch,
        features=writing.features,
        temperature=writing.temperatures[turn % len(writing.temperatures)],
        max_new_tokens=writing.answer_tokens,
        seed=seed + 1,
        kind=name,
    )


def _write_states(folder: Path, shard: int, found: Sequence[Conversation]) -> None:
    """One file a shard, `[features, tokens, E]`, a bfloat16 as its two bytes."""
    if not found[0].states:
        return
    one = found[0].states
    total = sum(len(x.tokens) for x in found)
    path = folder / f"states-{shard:05d}.npy"
    part = path.with_suffix(".part")
    shape = (len(one), total, one[0].shape[1])
    held = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint16, shape=shape)
    at = 0
    for conversation in found:
        for i, states in enumerate(conversation.states):
            held[i, at : at + len(states)] = states.view(np.uint16)
        at += len(conversation.tokens)
    held.flush()
    os.replace(part, path)
