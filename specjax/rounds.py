"""The round: draft -> verify -> accept -> commit, and the state before the first one."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from specjax import automaton, cache, logprobs, sharding, tree
from specjax import seen as seen_lib
from specjax.accept import Acceptance, TargetLaw, logits_law
from specjax.draft import draft_step
from specjax.inputs import Request, round_up
from specjax.sampling import Purpose, at_positions
from specjax.seen import Seen
from specjax.types import (
    Cache,
    Context,
    Forward,
    Logprobs,
    Outcome,
    Params,
    Prefill,
    Proposal,
    PyTree,
    Scores,
    Stats,
    Status,
    Verdict,
    check_verdict,
    record,
)
from specjax.verify import verify_step

__all__ = ["Account", "DecodeState", "Plan", "decode_round", "start"]

_INT = jnp.int32


class Plan(NamedTuple):
    """What is fixed when a decoding program is compiled."""

    acceptance: Acceptance
    slots: int  # S: cache slots and token buffer of a row
    chunk: int  # C: prompt tokens a prefill pass
    width: int  # tokens of the output buffer
    logprobs: logprobs.Wanted
    mesh: Mesh | None


@record
class DecodeState:
    """What the next round needs."""

    tokens: Array  # [B, S] int32: prompt and output; meaningless at or beyond lengths
    lengths: Array  # [B] int32: committed tokens, the root included
    status: Array  # [B] int32
    cache: Cache  # of the target: all committed tokens but the root
    draft: PyTree
    stop: Array | None  # [B] int32: how far a stop sequence has come, as a state of request.stop
    grammar: PyTree  # [B, ...]: states of request.constraint after the committed tokens


@record
class Account:
    """What is told about a batch beside its tokens; the next round needs none of it."""

    stats: Stats
    logprobs: Logprobs | None  # T = width + K + 1
    prompt_logprobs: Logprobs | None  # T = P


def start(
    params: Params, request: Request, prompt: Array, plan: Plan
) -> tuple[DecodeState, Account]:
    """Reads the prompts: everything but each row's last token, which is the first root.

    Args:
      prompt: `[B, P]` int32.

    Returns:
      The state before the first round, and an account of nothing yet.
    """
    batch = prompt.shape[0]
    tokens = jnp.zeros((batch, plan.slots), _INT)
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, prompt.astype(_INT), 0, axis=1)
    tokens = sharding.constrain_rows(tokens, plan.mesh)
    padded = round_up(prompt.shape[1], plan.chunk)
    constrain = functools.partial(sharding.constrain_cache, mesh=plan.mesh)
    model, wanted = params.model, plan.logprobs
    following = jnp.roll(tokens[:, :padded], -1, axis=1)

    def prompt_logprobs(at: Array, out: Forward) -> tuple[Array, ...]:
        if wanted.prompt_top is None:
            return ()
        top = wanted.prompt_top
        return logprobs.of_prompt(model, params.target, following, at, out, top)

    held, kept = cache.prefill(
        model,
        params.target,
        constrain(model.init_cache(params.target, batch, plan.slots)),
        tokens[:, :padded],
        request.prompt_lengths - 1,
        chunk=plan.chunk,
        features=params.drafter.features,
        constrain=constrain,
        also=prompt_logprobs,
    )
    features = kept[: len(params.drafter.features)]
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
        stop=None if request.stop is None else jnp.zeros(batch, _INT),
        grammar=None if request.constraint is None else request.constraint.start,
    )
    return state, _no_account(params, request, plan, kept[len(features) :])


def _no_account(
    params: Params, request: Request, plan: Plan, prompt_logprobs: tuple[Array, ...]
) -> Account:
    """Nothing counted yet; of the prompt, what prefill found."""
    depth, batch = params.drafter.depth, request.prompt_lengths.shape[0]
    stats = Stats(
        rounds=jnp.zeros(batch, _INT),
        histogram=jnp.zeros((batch, depth + 1), _INT),
        proposed=jnp.zeros((batch, depth), _INT),
        accepted=jnp.zeros((batch, depth), _INT),
        hits=jnp.zeros((batch, params.drafter.nodes), _INT),
        rule=plan.acceptance.name,
        lossless=plan.acceptance.lossless,
    )
    wanted, of_prompt = plan.logprobs, None
    if prompt_logprobs:
        # Found before the token that they belong to: one to the right.
        tokens, top_ids, top = (jnp.roll(x, 1, axis=1) for x in prompt_logprobs)
        place = jnp.arange(tokens.shape[1])[None, :]
        real = (place > 0) & (place < request.prompt_lengths[:, None])
        of_prompt = Logprobs(tokens=tokens, top_ids=top_ids, top=top)
        of_prompt = logprobs.trimmed(of_prompt, tokens.shape[1], real)
    new = None
    if wanted.top is not None:
        new = logprobs.empty(batch, plan.width + depth + 1, wanted.top)
    return Account(stats=stats, logprobs=new, prompt_logprobs=of_prompt)


def decode_round(
    params: Params, request: Request, state: DecodeState, account: Account, plan: Plan
) -> tuple[DecodeState, Account]:
    """One round: draft, verify, accept, commit. Rows that have ended are left as they are."""
    active = state.status == Status.RUNNING
    seen = seen_lib.at_root(
        state.tokens,
        state.lengths,
        request.prompt_lengths,
        vocab=params.model.vocab_size,
        penalised=request.sampling.repetition_penalty is not None,
        held=request.held,
        constraint=request.constraint,
        states=state.grammar,
    )
    context = Context(
        tokens=state.tokens,
        lengths=state.lengths,
        sampling=request.sampling,
        active=active,
        seen=seen,
    )
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]

    # Drafts are drawn anew in every round: some rules judge them as a whole, so that those which
    # fell have had a say in where the round ended.
    keys = at_positions(request.keys, Purpose.DRAFT, state.lengths)
    proposal, draft = draft_step(params, keys, state.draft, context)
    # Rows that have ended do not make the pass larger.
    proposal = dataclasses.replace(proposal, valid=proposal.valid & active[:, None])
    scores = verify_step(params, state.cache, root, proposal)
    depth = params.drafter.depth
    seen = seen_lib.in_tree(seen, proposal)
    law = logits_law(scores.logits, request.sampling, seen)
    verdict = plan.acceptance.judge(request.keys, proposal, law, state.lengths, depth)
    check_verdict(verdict, {"B": root.shape[0], "P": depth + 1})

    count, status, stop = _emitted(
        request, state, verdict, _sound(law, verdict, scores.logits.shape[1])
    )
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
    account = Account(
        stats=_count(account.stats, proposal, verdict, count, active),
        logprobs=_with_logprobs(account.logprobs, request, state, scores, verdict, seen, plan),
        prompt_logprobs=account.prompt_logprobs,
    )
    state = DecodeState(
        tokens=tokens,
        lengths=lengths,
        status=status,
        cache=held,
        draft=draft,
        stop=stop,
        grammar=_next_states(seen, verdict),
    )
    return state, account


def _with_logprobs(
    kept: Logprobs | None,
    request: Request,
    state: DecodeState,
    scores: Scores,
    verdict: Verdict,
    seen: Seen,
    plan: Plan,
) -> Logprobs | None:
    if kept is None:
        return None
    new = logprobs.of_verdict(scores.logits, verdict, request.sampling, seen, plan.logprobs)
    return logprobs.written(kept, new, state.lengths - request.prompt_lengths)


def _next_states(seen: Seen, verdict: Verdict) -> PyTree:
    """The grammar's state after all tokens of the verdict (a row that cut them has ended)."""
    if seen.constraint is None:
        return None
    accepted = verdict.accepted[:, None]
    last = jnp.take_along_axis(verdict.path, accepted, axis=1)[:, 0]
    token = jnp.take_along_axis(verdict.tokens, accepted, axis=1)[:, 0]
    return seen_lib.after(seen_lib.at_nodes(seen, last), token).states


def _sound(law: TargetLaw, verdict: Verdict, nodes: int) -> Array:
    """How many of the verdict's tokens come from laws that are laws, up to the first, `[B]`."""
    each = []
    for i in range(verdict.path.shape[1]):
        only = verdict.path[:, i, None] == jnp.arange(nodes)[None, :]
        each.append(law.finite(only))
    return jnp.sum(jnp.cumprod(jnp.stack(each, axis=1), axis=1, dtype=_INT), axis=1)


def _emitted(
    request: Request, state: DecodeState, verdict: Verdict, sound: Array
) -> tuple[Array, Array, Array | None]:
    """How many of the verdict's tokens each row emits, `[B]`; its status and stop state then.

    The first end token or completed stop sequence, the tokens still allowed and the room left each
    cut the block; an end that lies beyond the limit is not seen. So does the first token whose law
    was none, of which `sound [B]` tokens are before.
    """
    offset = jnp.arange(verdict.tokens.shape[1])[None, :]
    is_eos = jnp.any(verdict.tokens[:, :, None] == request.eos_ids[None, None, :], axis=-1)
    is_eos = is_eos & ~jnp.reshape(request.sampling.ignore_eos, (-1, 1))
    available = jnp.minimum(verdict.accepted + 1, request.limits - state.lengths)
    is_stop, states = _stops(request, state, verdict)
    broken = sound < available
    available = jnp.minimum(available, sound)
    ends = (is_eos | is_stop) & (offset < available[:, None])
    ended, end = jnp.any(ends, axis=1), jnp.argmax(ends, axis=1)
    count = jnp.where(ended, end + 1, available)
    by_eos = jnp.take_along_axis(is_eos, end[:, None], axis=1)[:, 0]

    running = state.status == Status.RUNNING
    count = jnp.where(running, count, 0).astype(_INT)
    lengths = state.lengths + count
    limit = jnp.where(
        request.limits < request.prompt_lengths + request.max_new_tokens,
        Status.CACHE_FULL,
        Status.LENGTH,
    )
    status = jnp.where(lengths >= request.limits, limit, Status.RUNNING)
    status = jnp.where(broken, Status.NONFINITE, status)
    status = jnp.where(ended, jnp.where(by_eos, Status.EOS, Status.STOP), status)
    if states is not None:
        states = jnp.take_along_axis(states, count[:, None], axis=1)[:, 0]
    return count, jnp.where(running, status, state.status).astype(_INT), states


def _stops(
    request: Request, state: DecodeState, verdict: Verdict
) -> tuple[Array | bool, Array | None]:
    """Where a stop sequence is complete, `[B, K + 1]` bool; and its states after 0, 1, ... tokens.

    None counts that is complete before min_new_tokens.
    """
    if request.stop is None:
        return False, None

    def move(states: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
        after = automaton.advance(request.stop, states, tokens)
        return after, (after, automaton.hit(request.stop, states, tokens))

    _, (after, hits) = jax.lax.scan(move, state.stop, verdict.tokens.T)
    hits = hits.T
    if request.sampling.min_new_tokens is not None:
        emitted = (state.lengths - request.prompt_lengths)[:, None] + 1
        emitted = emitted + jnp.arange(hits.shape[1])[None, :]
        hits = hits & (emitted >= request.sampling.min_new_tokens[:, None])
    return hits, jnp.concatenate([state.stop[:, None], after.T], axis=1)


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
    node = jnp.arange(1, stats.hits.shape[1] + 1)[None, None, :]
    stands = (verdict.path[:, 1:] * (level <= accepted[:, None]))[..., None]  # 0: not accepted
    return dataclasses.replace(
        stats,
        rounds=stats.rounds + ran[:, 0],
        histogram=stats.histogram + (ran & (jnp.arange(depth + 1)[None, :] == accepted[:, None])),
        proposed=stats.proposed + (ran & reached & (level <= judged[:, None])),
        accepted=stats.accepted + (ran & (level <= accepted[:, None])),
        hits=stats.hits + (ran & jnp.any(stands == node, axis=1)),
    )
