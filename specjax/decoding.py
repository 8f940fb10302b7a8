"""Decoding: rounds of draft -> verify -> accept -> commit in one `lax.while_loop`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax import logprobs as logprobs_lib
from specjax import sharding
from specjax.accept import Acceptance, recursive_rejection, speculative_sampling
from specjax.accept.names import rule
from specjax.constraints import Constraint
from specjax.inputs import Request, bounded, positive, prepare
from specjax.rounds import Account, DecodeState, Plan, decode_round, start
from specjax.sampling import Sampling, row_keys
from specjax.types import DecodeResult, Params, PyTree, Status

__all__ = ["decode", "decode_recorded", "default_rule", "stream_tokens"]

_INT = jnp.int32


def _run(
    params: Params,
    request: Request,
    state: DecodeState,
    account: Account,
    rounds: Array | None,
    plan: Plan,
) -> tuple[DecodeState, Account]:
    """Rounds until every row has ended, or at most `rounds` of them."""

    def unfinished(carry) -> Array:
        i, state, _ = carry
        running = jnp.any(state.status == Status.RUNNING)
        return running if rounds is None else running & (i < rounds)

    def body(carry):
        i, state, account = carry
        return i + 1, *decode_round(params, request, state, account, plan)

    _, state, account = jax.lax.while_loop(unfinished, body, (_INT(0), state, account))
    return state, account


def _result(
    params: Params, request: Request, state: DecodeState, account: Account, width: int
) -> DecodeResult:
    """The output tokens, cut out of the token buffer."""
    lengths = state.lengths - request.prompt_lengths
    offset = jnp.arange(width)[None, :]
    index = jnp.minimum(request.prompt_lengths[:, None] + offset, state.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(state.tokens, index, axis=1)
    real = offset < lengths[:, None]
    kept = account.logprobs
    return DecodeResult(
        tokens=jnp.where(real, tokens, params.pad_id),
        lengths=lengths,
        status=state.status,
        stats=account.stats,
        logprobs=None if kept is None else logprobs_lib.trimmed(kept, width, real),
        prompt_logprobs=account.prompt_logprobs,
    )


def _with_row_keys(request: Request) -> Request:
    if request.keys.ndim:
        return request
    keys = row_keys(request.keys, request.prompt_lengths.shape[0])
    return dataclasses.replace(request, keys=keys)


@functools.partial(jax.jit, static_argnames=("plan",))
def _decode_program(params: Params, request: Request, prompt: Array, *, plan: Plan) -> DecodeResult:
    """The whole generation: prefill, rounds, output."""
    request = _with_row_keys(request)
    state, account = start(params, request, prompt, plan)
    state, account = _run(params, request, state, account, None, plan)
    return _result(params, request, state, account, plan.width)


@functools.partial(jax.jit, static_argnames=("plan",))
def _recorded_program(
    params: Params, request: Request, prompt: Array, *, plan: Plan
) -> tuple[DecodeResult, PyTree]:
    """As `_decode_program`, and what the drafter knows at the end."""
    request = _with_row_keys(request)
    state, account = start(params, request, prompt, plan)
    state, account = _run(params, request, state, account, None, plan)
    return _result(params, request, state, account, plan.width), state.draft


@functools.partial(jax.jit, static_argnames=("plan",))
def _start_program(
    params: Params, request: Request, prompt: Array, *, plan: Plan
) -> tuple[DecodeState, Account]:
    return start(params, _with_row_keys(request), prompt, plan)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state", "account"))
def _advance_program(
    params: Params,
    request: Request,
    state: DecodeState,
    account: Account,
    rounds: Array,
    *,
    plan: Plan,
) -> tuple[DecodeState, Account, DecodeResult]:
    request = _with_row_keys(request)
    state, account = _run(params, request, state, account, rounds, plan)
    return state, account, _result(params, request, state, account, plan.width)


class _Job(NamedTuple):
    """A call of `decode`, ready to run."""

    params: Params
    request: Request
    prompt: Any
    plan: Plan
    rows: int
    longest: int  # prompt


def _job(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    key: Array | None = None,
    seed: Any = None,
    eos_ids: Any = None,
    stop: Any = None,
    logprobs: int | None = None,
    logprobs_of: str = "raw",
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    max_len: int | None = None,
    prompt_lengths: Any = None,
    acceptance: Acceptance | str | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> _Job:
    if not isinstance(params, Params):
        raise ValueError(f"params must come from specjax.load, got {type(params)}")
    chosen = default_rule(params) if acceptance is None else rule(acceptance)
    if chosen.common and params.drafter.mixed:
        raise ValueError(
            f"acceptance {chosen.name} keeps the target's law only where all drafts that follow a "
            f"text have one law, and those of the drafter {params.drafter.name} may differ; use "
            '"recursive_rejection" or "traversal_verification"'
        )
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh must come from jax.make_mesh, got {mesh!r}")
    mesh = sharding.mesh_of(params.target) if mesh is None else mesh
    prepared = prepare(
        params,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling() if sampling is None else sampling,
        key=key,
        seed=seed,
        eos_ids=eos_ids,
        stop=stop,
        constraint=constraint,
        max_len=max_len,
        prompt_lengths=prompt_lengths,
        mesh=mesh,
    )
    wanted = _wanted(params, logprobs, logprobs_of, prompt_logprobs)
    if mesh is not None:
        mesh = sharding.auto(mesh)
        params = params.replace(
            target=sharding.place(params.model, params.target, mesh),
            draft=sharding.onto(params.draft, mesh),
        )
    plan = Plan(
        acceptance=chosen,
        slots=prepared.slots,
        chunk=prepared.chunk,
        width=prepared.width,
        logprobs=wanted,
        mesh=mesh,
    )
    # What only the host needs must not make a compiled program specific to it.
    params = params.replace(tokenizer=None, eos_ids=(), name="")
    return _Job(params, prepared.request, prepared.prompt, plan, prepared.rows, prepared.longest)


def default_rule(params: Params) -> Acceptance:
    """The rule of `decode` where none is given: of trees, if the drafter's drafts may branch."""
    drafter = params.drafter
    branches = drafter.tree or drafter.nodes > drafter.depth
    return recursive_rejection() if branches else speculative_sampling()


def _wanted(
    params: Params, logprobs: Any, logprobs_of: Any, prompt_logprobs: Any
) -> logprobs_lib.Wanted:
    """Checks which log-probabilities are asked for."""
    for name, top in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if top is not None:
            bounded(name, top, 0, params.model.vocab_size)
    if logprobs_of not in ("raw", "processed"):
        raise ValueError(
            f'logprobs_of must be "raw" (the model) or "processed" (after the sampling controls), '
            f"got {logprobs_of!r}"
        )
    return logprobs_lib.Wanted(
        top=logprobs, processed=logprobs_of == "processed", prompt_top=prompt_logprobs
    )


def _trim(result: DecodeResult, job: _Job, max_new_tokens: int) -> DecodeResult:
    """Cuts padding rows and columns off."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)):
        result = jax.tree.map(np.asarray, result)  # a slice on the device would be compiled
    result = jax.tree.map(lambda x: x[: job.rows], result)
    columns = lambda tree, n: jax.tree.map(lambda x: x[:, :n], tree)
    result = dataclasses.replace(
        result,
        tokens=columns(result.tokens, max_new_tokens),
        logprobs=columns(result.logprobs, max_new_tokens),
        prompt_logprobs=columns(result.prompt_logprobs, job.longest),
    )
    return jax.tree.map(jnp.asarray, result)


def decode(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    key: Array | None = None,
    seed: Any = None,
    eos_ids: Any = None,
    stop: Any = None,
    logprobs: int | None = None,
    logprobs_of: str = "raw",
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    max_len: int | None = None,
    prompt_lengths: Any = None,
    acceptance: Acceptance | str | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> DecodeResult:
    """Generates tokens, speculatively, with the law of plain decoding.

    One XLA program runs prefill and every round. Batch, prompt and output length are bucketed, so
    that calls of similar size share a program. May be called inside `jax.jit`.

    Args:
      params: from `specjax.load`; `params.drafter` guesses.
      prompt: token ids: `[T]`, `[B, T]`, or lists of different lengths.
      max_new_tokens: at most so many tokens a row.
      sampling: default greedy.
      key: one `jax.random.key`, or one a row. A row's tokens depend on its own key and prompt
        only; with one key, row 0 has that key and every other row one derived from it.
        Default: fresh entropy.
      seed: instead of `key`, an integer in 0..2^32-1, or one (or None: fresh entropy) a row; s
        stands for `jax.random.key(s)`.
      eos_ids: tokens that end a row; default those of the checkpoint.
      stop: what else ends a row, with `Status.STOP`: a string, a token id, or a list of strings,
        token ids and sequences of token ids, e.g. `["END", 7, (13, 7)]`; strings need
        `params.tokenizer`. The row ends with the token that completes one, which is emitted. They
        are looked for in the new tokens only; a token that is an end token too counts as one.
      logprobs: None, or how many of the most likely tokens to report beside each new token, with
        their log-probabilities and its own (0: only its own).
      logprobs_of: "raw" for the model's own law, softmax(logits); "processed" for the law that the
        token was drawn from, after all controls (a greedy row gives its tokens 0).
      prompt_logprobs: as `logprobs`, for the prompt; always of the model's own law.
      constraint: a grammar, from `specjax.constraints`: tokens that it refuses have probability 0.
      max_len: prompt and output together, at most; default what is needed, within the model's
        context length. A row that reaches it ends with `Status.CACHE_FULL`.
      prompt_lengths: `[B]`, for a `[B, T]` prompt whose rows are padded on the right.
      acceptance: the verification rule: one of `specjax.accept`, its name, or a mapping such as
        {"rule": "typical_acceptance", "epsilon": 0.1}. Default `speculative_sampling()`, or
        `recursive_rejection()` where the drafter makes trees. Whether it keeps the target's law
        is told by `stats.lossless`.
      mesh: devices, with axes "data" and "model"; default the one that the weights lie on.

    Returns:
      Tokens `[B, max_new_tokens]` (int32, padded with `params.pad_id`), lengths, status,
      statistics, and the log-probabilities that were asked for.

    Raises:
      ValueError: a bad argument, before anything is compiled.
    """
    job = _job(
        params,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        seed=seed,
        eos_ids=eos_ids,
        stop=stop,
        logprobs=logprobs,
        logprobs_of=logprobs_of,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        max_len=max_len,
        prompt_lengths=prompt_lengths,
        acceptance=acceptance,
        mesh=mesh,
    )
    result = _decode_program(job.params, job.request, job.prompt, plan=job.plan)
    return _trim(result, job, max_new_tokens)


def decode_recorded(
    params: Params, prompt: Any, *, max_new_tokens: int = 128, **options: Any
) -> tuple[DecodeResult, PyTree]:
    """As `decode`; also returns the drafter's state at the end, for drafters that keep records.

    Its leaves may have more rows than there are prompts.

    Args:
      params: from `specjax.load`.
      prompt: as for `decode`.
      max_new_tokens: as for `decode`.
      **options: as for `decode`.
    """
    job = _job(params, prompt, max_new_tokens=max_new_tokens, **options)
    result, state = _recorded_program(job.params, job.request, job.prompt, plan=job.plan)
    return _trim(result, job, max_new_tokens), state


def stream_tokens(
    params: Params, prompt: Any, *, rounds: int = 1, max_new_tokens: int = 128, **options: Any
) -> Iterator[DecodeResult]:
    """Decodes in groups of rounds, and yields the result so far after each.

    The rounds are those of `decode`: the tokens are the same.

    Args:
      rounds: rounds between two results.
      **options: as for `decode`.

    Yields:
      The growing `DecodeResult`; the last one has no row with `Status.RUNNING`.
    """
    rounds = positive("rounds", rounds)
    job = _job(params, prompt, max_new_tokens=max_new_tokens, **options)
    state, account = _start_program(job.params, job.request, job.prompt, plan=job.plan)
    running = True
    while running:
        state, account, result = _advance_program(
            job.params, job.request, state, account, np.int32(rounds), plan=job.plan
        )
        result = _trim(result, job, max_new_tokens)
        running = bool(np.any(np.asarray(result.status) == Status.RUNNING))
        yield result
