"""Decoding: rounds of draft -> verify -> accept -> commit in one `lax.while_loop`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax import cache, sharding, tree
from specjax.accept import Acceptance, logits_law, speculative_sampling
from specjax.draft import draft_step
from specjax.inputs import Request, positive, prepare, round_up
from specjax.sampling import Sampling, row_keys
from specjax.types import (
    Cache,
    Context,
    DecodeResult,
    Outcome,
    Params,
    Prefill,
    Proposal,
    PyTree,
    Stats,
    Status,
    Verdict,
    check_verdict,
    record,
)
from specjax.verify import verify_step

__all__ = ["DecodeState", "Plan", "decode", "decode_round", "start", "stream_tokens"]

_INT = jnp.int32


class Plan(NamedTuple):
    """What is fixed when a decoding program is compiled."""

    acceptance: Acceptance
    slots: int  # S: cache slots and token buffer of a row
    chunk: int  # C: prompt tokens a prefill pass
    mesh: Mesh | None


@record
class DecodeState:
    """What the next round needs."""

    tokens: Array  # [B, S] int32: prompt and output; meaningless at or beyond lengths
    lengths: Array  # [B] int32: committed tokens, the root included
    status: Array  # [B] int32
    cache: Cache  # of the target: all committed tokens but the root
    draft: PyTree


def start(params: Params, request: Request, prompt: Array, plan: Plan) -> tuple[DecodeState, Stats]:
    """Reads the prompts: everything but each row's last token, which is the first root.

    Args:
      prompt: `[B, P]` int32.

    Returns:
      The state before the first round, and empty statistics.
    """
    batch = prompt.shape[0]
    tokens = jnp.zeros((batch, plan.slots), _INT)
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, prompt.astype(_INT), 0, axis=1)
    tokens = sharding.constrain_rows(tokens, plan.mesh)
    padded = round_up(prompt.shape[1], plan.chunk)
    constrain = functools.partial(sharding.constrain_cache, mesh=plan.mesh)
    model = params.model
    held, features = cache.prefill(
        model,
        params.target,
        constrain(model.init_cache(params.target, batch, plan.slots)),
        tokens[:, :padded],
        request.prompt_lengths - 1,
        chunk=plan.chunk,
        features=params.drafter.features,
        constrain=constrain,
    )
    prefill = Prefill(
        tokens=tokens[:, :padded],
        lengths=request.prompt_lengths,
        features=features,
        slots=plan.slots,
        chunk=plan.chunk,
    )
    status = jnp.where(
        request.limits > request.prompt_lengths,
        Status.RUNNING,
        jnp.where(request.active, Status.CACHE_FULL, Status.LENGTH),
    )
    state = DecodeState(
        tokens=tokens,
        lengths=request.prompt_lengths,
        status=status.astype(_INT),
        cache=held,
        draft=params.drafter.init(params, prefill),
    )
    depth = params.drafter.depth
    stats = Stats(
        rounds=jnp.zeros(batch, _INT),
        histogram=jnp.zeros((batch, depth + 1), _INT),
        proposed=jnp.zeros((batch, depth), _INT),
        accepted=jnp.zeros((batch, depth), _INT),
    )
    return state, stats


def decode_round(
    params: Params, request: Request, state: DecodeState, stats: Stats, plan: Plan
) -> tuple[DecodeState, Stats]:
    """One round: draft, verify, accept, commit. Rows that have ended are left as they are."""
    active = state.status == Status.RUNNING
    context = Context(
        tokens=state.tokens, lengths=state.lengths, sampling=request.sampling, active=active
    )
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]

    proposal, draft = draft_step(params, request.keys, state.draft, context)
    scores = verify_step(params, state.cache, root, proposal)
    depth = params.drafter.depth
    verdict = plan.acceptance.judge(
        request.keys, proposal, logits_law(scores.logits, request.sampling), state.lengths, depth
    )
    check_verdict(verdict, {"B": root.shape[0], "P": depth + 1})

    count, status = _emitted(request, state, verdict)
    lengths = state.lengths + count
    tokens = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
        state.tokens, verdict.tokens, state.lengths, 0
    )
    block = scores.block
    if not plan.acceptance.chain:
        block = tree.compact(block, verdict.path)
    held = sharding.constrain_cache(cache.append(state.cache, block, lengths - 1), plan.mesh)
    outcome = Outcome(
        tokens=tokens,
        lengths=lengths,
        path=verdict.path,
        accepted=jnp.minimum(verdict.accepted, count),
        scores=scores,
    )
    draft = params.drafter.update(params, draft, outcome)
    state = DecodeState(tokens=tokens, lengths=lengths, status=status, cache=held, draft=draft)
    return state, _count(stats, proposal, verdict, count, active)


def _emitted(request: Request, state: DecodeState, verdict: Verdict) -> tuple[Array, Array]:
    """How many of the verdict's tokens each row emits, `[B]`, and its status afterwards.

    The first end token, the tokens still allowed and the room left each cut the block; an end token
    that lies beyond the limit is not seen.
    """
    offset = jnp.arange(verdict.tokens.shape[1])[None, :]
    is_eos = jnp.any(verdict.tokens[:, :, None] == request.eos_ids[None, None, :], axis=-1)
    is_eos = is_eos & ~jnp.reshape(request.sampling.ignore_eos, (-1, 1))
    available = jnp.minimum(verdict.accepted + 1, request.limits - state.lengths)
    is_eos = is_eos & (offset < available[:, None])
    ended = jnp.any(is_eos, axis=1)
    count = jnp.where(ended, jnp.argmax(is_eos, axis=1) + 1, available)

    running = state.status == Status.RUNNING
    count = jnp.where(running & verdict.finite, count, 0).astype(_INT)
    lengths = state.lengths + count
    limit = jnp.where(
        request.limits < request.prompt_lengths + request.max_new_tokens,
        Status.CACHE_FULL,
        Status.LENGTH,
    )
    status = jnp.where(lengths >= request.limits, limit, Status.RUNNING)
    status = jnp.where(ended, Status.EOS, status)
    status = jnp.where(verdict.finite, status, Status.NONFINITE)
    return count, jnp.where(running, status, state.status).astype(_INT)


def _count(
    stats: Stats, proposal: Proposal, verdict: Verdict, count: Array, active: Array
) -> Stats:
    """Adds a round. What lies beyond the end of a row counts as neither proposed nor accepted."""
    depth = stats.proposed.shape[1]
    accepted = jnp.minimum(verdict.accepted, count)
    judged = jnp.where(count <= verdict.accepted, count, depth)  # depths before the row's end
    level = jnp.arange(1, depth + 1)[None, :]
    node_depth = tree.depths(tree.ancestors(proposal.parents))[:, 1:]  # [1 or B, N]
    drafted = (proposal.valid & proposal.candidate)[:, :, None]
    reached = jnp.any(drafted & (node_depth[:, :, None] == level[:, None, :]), axis=1)
    ran = (active & (count > 0))[:, None]
    return Stats(
        rounds=stats.rounds + ran[:, 0],
        histogram=stats.histogram + (ran & (jnp.arange(depth + 1)[None, :] == accepted[:, None])),
        proposed=stats.proposed + (ran & reached & (level <= judged[:, None])),
        accepted=stats.accepted + (ran & (level <= accepted[:, None])),
    )


def _run(
    params: Params,
    request: Request,
    state: DecodeState,
    stats: Stats,
    rounds: Array | None,
    plan: Plan,
) -> tuple[DecodeState, Stats]:
    """Rounds until every row has ended, or at most `rounds` of them."""

    def unfinished(carry) -> Array:
        i, state, _ = carry
        running = jnp.any(state.status == Status.RUNNING)
        return running if rounds is None else running & (i < rounds)

    def body(carry):
        i, state, stats = carry
        return i + 1, *decode_round(params, request, state, stats, plan)

    _, state, stats = jax.lax.while_loop(unfinished, body, (_INT(0), state, stats))
    return state, stats


def _result(
    params: Params, request: Request, state: DecodeState, stats: Stats, width: int
) -> DecodeResult:
    """The output tokens, cut out of the token buffer."""
    lengths = state.lengths - request.prompt_lengths
    offset = jnp.arange(width)[None, :]
    index = jnp.minimum(request.prompt_lengths[:, None] + offset, state.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(state.tokens, index, axis=1)
    tokens = jnp.where(offset < lengths[:, None], tokens, params.pad_id)
    return DecodeResult(tokens=tokens, lengths=lengths, status=state.status, stats=stats)


def _with_row_keys(request: Request) -> Request:
    if request.keys.ndim:
        return request
    keys = row_keys(request.keys, request.prompt_lengths.shape[0])
    return dataclasses.replace(request, keys=keys)


@functools.partial(jax.jit, static_argnames=("plan", "width"))
def _decode_program(
    params: Params, request: Request, prompt: Array, *, plan: Plan, width: int
) -> DecodeResult:
    """The whole generation: prefill, rounds, output."""
    request = _with_row_keys(request)
    state, stats = start(params, request, prompt, plan)
    state, stats = _run(params, request, state, stats, None, plan)
    return _result(params, request, state, stats, width)


@functools.partial(jax.jit, static_argnames=("plan",))
def _start_program(
    params: Params, request: Request, prompt: Array, *, plan: Plan
) -> tuple[DecodeState, Stats]:
    return start(params, _with_row_keys(request), prompt, plan)


@functools.partial(jax.jit, static_argnames=("plan", "width"), donate_argnames=("state", "stats"))
def _advance_program(
    params: Params,
    request: Request,
    state: DecodeState,
    stats: Stats,
    rounds: Array,
    *,
    plan: Plan,
    width: int,
) -> tuple[DecodeState, Stats, DecodeResult]:
    request = _with_row_keys(request)
    state, stats = _run(params, request, state, stats, rounds, plan)
    return state, stats, _result(params, request, state, stats, width)


class _Job(NamedTuple):
    """A call of `decode`, ready to run."""

    params: Params
    request: Request
    prompt: Any
    plan: Plan
    rows: int
    width: int


def _job(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    key: Array | None = None,
    eos_ids: Any = None,
    max_len: int | None = None,
    prompt_lengths: Any = None,
    acceptance: Acceptance | None = None,
    mesh: Mesh | None = None,
) -> _Job:
    if not isinstance(params, Params):
        raise ValueError(f"params must come from specjax.load, got {type(params)}")
    if not isinstance(acceptance, Acceptance | None):
        raise ValueError(
            f"acceptance must be a rule such as specjax.accept.speculative_sampling(), "
            f"got {acceptance!r}"
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
        eos_ids=eos_ids,
        max_len=max_len,
        prompt_lengths=prompt_lengths,
        mesh=mesh,
    )
    if mesh is not None:
        mesh = sharding.auto(mesh)
        params = params.replace(
            target=sharding.place(params.model, params.target, mesh),
            draft=sharding.onto(params.draft, mesh),
        )
    plan = Plan(
        acceptance=speculative_sampling() if acceptance is None else acceptance,
        slots=prepared.slots,
        chunk=prepared.chunk,
        mesh=mesh,
    )
    # What only the host needs must not make a compiled program specific to it.
    params = params.replace(tokenizer=None, eos_ids=(), name="")
    return _Job(params, prepared.request, prepared.prompt, plan, prepared.rows, prepared.width)


def _trim(result: DecodeResult, rows: int, max_new_tokens: int) -> DecodeResult:
    """Cuts padding rows and columns off."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)):
        result = jax.tree.map(np.asarray, result)  # a slice on the device would be compiled
    result = jax.tree.map(lambda x: x[:rows], result)
    result = dataclasses.replace(result, tokens=result.tokens[:, :max_new_tokens])
    return jax.tree.map(jnp.asarray, result)


def decode(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    key: Array | None = None,
    eos_ids: Any = None,
    max_len: int | None = None,
    prompt_lengths: Any = None,
    acceptance: Acceptance | None = None,
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
      eos_ids: tokens that end a row; default those of the checkpoint.
      max_len: prompt and output together, at most; default what is needed, within the model's
        context length. A row that reaches it ends with `Status.CACHE_FULL`.
      prompt_lengths: `[B]`, for a `[B, T]` prompt whose rows are padded on the right.
      acceptance: the verification rule, default `specjax.accept.speculative_sampling()`.
      mesh: devices, with axes "data" and "model"; default the one that the weights lie on.

    Returns:
      Tokens `[B, max_new_tokens]` (int32, padded with `params.pad_id`), lengths, status and
      statistics.

    Raises:
      ValueError: a bad argument, before anything is compiled.
    """
    job = _job(
        params,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        eos_ids=eos_ids,
        max_len=max_len,
        prompt_lengths=prompt_lengths,
        acceptance=acceptance,
        mesh=mesh,
    )
    result = _decode_program(job.params, job.request, job.prompt, plan=job.plan, width=job.width)
    return _trim(result, job.rows, max_new_tokens)


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
    state, stats = _start_program(job.params, job.request, job.prompt, plan=job.plan)
    running = True
    while running:
        state, stats, result = _advance_program(
            job.params,
            job.request,
            state,
            stats,
            np.int32(rounds),
            plan=job.plan,
            width=job.width,
        )
        result = _trim(result, job.rows, max_new_tokens)
        running = bool(np.any(np.asarray(result.status) == Status.RUNNING))
        yield result
