"""Rules for chains: each draft is tried in turn, until one fails."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax.accept.laws import TargetLaw
from specjax.accept.rule import Acceptance, JudgeFn, eligible, keep_probability, residual
from specjax.sampling import Purpose
from specjax.types import Proposal, Verdict

__all__ = [
    "chain_following",
    "chain_keep",
    "chain_probabilities",
    "chain_tried",
    "chain_verdict",
    "judge_by_depth",
    "lenient_sampling",
    "next_draft_law",
    "speculative_sampling",
]

KeepFn = Callable[[Proposal, TargetLaw, int], Array]  # proposal, law, depth -> [B, K]
FollowingFn = Callable[[Proposal, TargetLaw, Array, int], Array]  # ..., accepted [B] -> [B, V]


def chain_tried(proposal: Proposal, depth: int) -> Array:
    """`[B, K]` bool: nodes 1, 2, ... while each is eligible and on the chain."""
    chain = jnp.arange(depth, dtype=jnp.int32)[None, :]
    on_chain = jnp.atleast_2d(proposal.parents)[:, :depth] == chain
    tried = eligible(proposal)[:, :depth] & on_chain
    return jnp.cumprod(tried, axis=1, dtype=jnp.int32).astype(bool)


def chain_probabilities(proposal: Proposal, law: TargetLaw, depth: int) -> tuple[Array, Array]:
    """p and q of each drafted token of the chain, `[B, K]` each."""
    tokens = proposal.tokens[:, :depth]
    nodes = jnp.broadcast_to(jnp.arange(depth, dtype=jnp.int32)[None, :], tokens.shape)
    p = law.at(nodes, tokens)
    if proposal.probs is None:
        return p, jnp.ones_like(p)
    q = jnp.take_along_axis(proposal.probs[:, :depth], tokens[..., None], axis=-1)[..., 0]
    return p, q


def next_draft_law(proposal: Proposal, after: Array, vocab: int) -> Array:
    """q of the draft that follows `after [B]` drafts on a chain, `[B, V]`; N must not be 0."""
    slot = jnp.minimum(after, proposal.tokens.shape[1] - 1)[:, None]
    if proposal.probs is None:
        return jax.nn.one_hot(jnp.take_along_axis(proposal.tokens, slot, axis=1)[:, 0], vocab)
    return jnp.take_along_axis(proposal.probs, slot[..., None], axis=1)[:, 0]


def chain_keep(proposal: Proposal, law: TargetLaw, depth: int, lenience: float = 1.0) -> Array:
    """How likely each draft of the chain 1, 2, ..., depth stands, given that those before it do.

    Returns:
      `[B, K]`; 0 at and beyond the first node that is invalid, a rider, or off the chain.
    """
    p, q = chain_probabilities(proposal, law, depth)
    return jnp.where(chain_tried(proposal, depth), keep_probability(p, lenience * q), 0.0)


def chain_following(
    proposal: Proposal, law: TargetLaw, accepted: Array, depth: int, lenience: float = 1.0
) -> Array:
    """The law of the token after `accepted` drafts: the residual if the next one was tried, else p.

    Args:
      accepted: `[B]` int32.

    Returns:
      `[B, V]`.
    """
    p = law.row(accepted)
    if depth == 0:
        return p
    slot = jnp.minimum(accepted, depth - 1)[:, None]
    tried = jnp.take_along_axis(chain_tried(proposal, depth), slot, axis=1)
    failed = (accepted[:, None] < depth) & tried
    q = next_draft_law(proposal, accepted, p.shape[-1]).astype(p.dtype)
    return jnp.where(failed, residual(p, lenience * q), p)


def chain_verdict(
    key: Array,
    proposal: Proposal,
    law: TargetLaw,
    positions: Array,
    depth: int,
    accepted: Array,
    following: Array,
) -> Verdict:
    """The verdict that the first `accepted [B]` drafts of a chain stand.

    Args:
      following: `[B, V]`, the law of the token after them.
    """
    batch, nodes = proposal.tokens.shape
    keys = sampling.at_positions(key, Purpose.RESAMPLE, positions + accepted)
    token = sampling.draw(keys, following)
    step = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]
    path = jnp.broadcast_to(step, (batch, depth + 1))
    padded = jnp.concatenate([proposal.tokens[:, :depth], token[:, None]], axis=1)
    asked = jnp.arange(nodes + 1)[None, :] <= accepted[:, None]
    return Verdict(
        accepted=accepted,
        path=path,
        tokens=jnp.where(path == accepted[:, None], token[:, None], padded),
        finite=law.finite(asked),
    )


def judge_by_depth(keep_fn: KeepFn, following_fn: FollowingFn) -> JudgeFn:
    """A judge that tosses one coin a depth and stops at the first that fails."""

    def judge(
        key: Array, proposal: Proposal, law: TargetLaw, positions: Array, depth: int
    ) -> Verdict:
        steps = positions[:, None] + jnp.arange(depth, dtype=jnp.int32)[None, :]
        keys = sampling.at_positions(key, Purpose.ACCEPT, steps)
        kept = jax.vmap(jax.vmap(jax.random.uniform))(keys) < keep_fn(proposal, law, depth)
        accepted = jnp.sum(jnp.cumprod(kept, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
        following = following_fn(proposal, law, accepted, depth)
        return chain_verdict(key, proposal, law, positions, depth, accepted, following)

    return judge


@functools.cache
def speculative_sampling() -> Acceptance:
    """The exact rule for chains: keep with min(1, p / q), else resample from the residual.

    Where q is one-hot (deterministic drafts) a token is kept with probability p(x); where p is
    one-hot too (greedy rows) that is equality with the target's choice. Of a tree, only the chain
    of nodes 1, 2, ... is tried. Lossless for any q.

    Reference: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1.
    """
    judge = judge_by_depth(chain_keep, chain_following)
    return Acceptance(judge=judge, name="speculative_sampling", lossless=True, chain=True)


def lenient_sampling(lenience: float) -> Acceptance:
    """Speculative sampling that forgives the draft: q is multiplied by a lenience l first.

    Keep with min(1, p / (l q)), else resample from norm(max(p - l q, 0)). Lossy for l < 1: no
    token's probability exceeds that of the target by more than a factor of 1 / l. Lossless for
    l = 1. Greedy rows stay exact for any l, since their law is one-hot: p is 0 at every other
    token, and what is 0 is never kept. For chains, like `speculative_sampling`.

    Args:
      lenience: l, in (0, 1].

    Raises:
      ValueError: l outside (0, 1].

    Reference: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.5 on lenience.
    """
    number = isinstance(lenience, int | float | np.floating) and not isinstance(lenience, bool)
    if not (number and 0 < lenience <= 1):
        raise ValueError(
            f"lenience must be a number above 0 and at most 1 (1 is lossless), got {lenience!r}"
        )
    return _lenient(float(lenience))


@functools.cache
def _lenient(lenience: float) -> Acceptance:
    judge = judge_by_depth(
        functools.partial(chain_keep, lenience=lenience),
        functools.partial(chain_following, lenience=lenience),
    )
    return Acceptance(judge=judge, name="lenient_sampling", lossless=lenience == 1, chain=True)
