"""Heads over the target's last state draft a tree: head i guesses the token i + 2 further on.

With h the state at the last token whose state is known, at position L - 2 of L committed tokens
(the root is at L - 1),

    node at depth d with rank r  =  the r-th most likely token of head d - 1 at h.

It guesses the token at position L - 1 + d. Nodes of one depth and one rank carry one token,
whatever their parents: the tree is a part of the product of the heads' candidates. A round costs
no pass of a model, only the heads.

Reference: Cai et al. 2024 (arXiv:2401.10774), sections 2.1 and 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax.drafters.choices import StaticTree, named_tree, static_tree
from specjax.drafters.vocabulary import split_draft
from specjax.types import Context, Drafter, Heads, Outcome, Params, Prefill, Proposal, record

__all__ = ["medusa"]


@record
class _State:
    """What the heads read next."""

    hidden: Array  # [B, E] at the position before the root
    known: Array  # [B] bool; a prompt of one token has no such position yet


def medusa(
    heads: Heads,
    choices: str | int | Iterable[Sequence[int]] | None = None,
    num_speculative_tokens: int | None = None,
) -> Drafter:
    """Drafts with `heads`, whose weights are `params.draft`.

    The nodes are the heads' most likely tokens at any temperature, hence without q: a rule for
    trees such as `specjax.accept.recursive_rejection` keeps the target's law all the same. Of the
    sampling controls the heads follow biases and bans; penalties and grammars act on the target
    only.

    Args:
      heads: from `specjax.models.medusa.medusa_heads`.
      choices: the tree, as paths of ranks, e.g. `[(0,), (1,), (0, 0)]`; the name of a published
        one in `specjax.drafters.choices.TREES`; or K for a chain of the most likely tokens.
        Default "mc_sim_7b_63". Paths that are longer than there are heads are cut off.
      num_speculative_tokens: K, the longest path that is kept; default as many as there are heads.

    Raises:
      ValueError: paths that are no tree, K that is not between 1 and the number of heads, or a
        rank that the vocabulary does not have.
    """
    if not isinstance(heads, Heads):
        raise ValueError(f"heads must come from specjax.models.medusa, got {type(heads)}")
    for name, value in (("choices", choices), ("num_speculative_tokens", num_speculative_tokens)):
        if isinstance(value, int) and not 1 <= value <= heads.heads:
            raise ValueError(
                f"{name} must be between 1 and {heads.heads}, the number of heads, got {value}"
            )
    tree = named_tree("mc_sim_7b_63" if choices is None else choices)
    deepest = heads.heads if num_speculative_tokens is None else num_speculative_tokens
    if not isinstance(deepest, int) or isinstance(deepest, bool):
        raise ValueError(f"num_speculative_tokens must be an integer, got {deepest!r}")
    tree = static_tree(path for path in tree.paths if len(path) <= deepest)
    if max(tree.ranks) >= heads.vocab_size:
        raise ValueError(
            f"choices has the rank {max(tree.ranks)}, but there are only {heads.vocab_size} "
            "tokens; leave such paths out"
        )
    return _medusa(heads, tree)


@functools.cache
def _medusa(heads: Heads, tree: StaticTree) -> Drafter:
    depth, best = tree.levels, max(tree.ranks) + 1
    level = np.array(tree.depths) - 1
    ranks, parents = np.array(tree.ranks), np.array(tree.parents, np.int32)

    def init(params: Params, prefill: Prefill) -> _State:
        split_draft(params, "medusa", mapped=False)
        if heads.vocab_size != params.model.vocab_size:
            raise ValueError(
                f"the drafter medusa has heads for {heads.vocab_size} tokens, but the target has "
                f"{params.model.vocab_size}; take heads that were trained for this target"
            )
        return _state(prefill.features[0], prefill.lengths - 2, prefill.lengths >= 2)

    def draft(params: Params, key: Array, state: _State, context: Context):
        weights, _ = split_draft(params, "medusa", mapped=False)
        unembed = functools.partial(params.model.unembed, params.target)
        logits = heads.logits(weights, unembed, state.hidden)[:, :depth]
        logits = sampling.adjusted(logits, context.sampling)
        # A draft without a law (NaN or +inf in its logits) ends there.
        sound = jnp.isfinite(jnp.max(logits, axis=-1)) & state.known[:, None]
        sound = jnp.cumprod(sound, axis=1, dtype=jnp.int32).astype(bool)
        _, tokens = jax.lax.top_k(logits, best)  # [B, K, best]
        tokens = tokens[:, level, ranks].astype(jnp.int32)
        proposal = Proposal(
            tokens=tokens,
            parents=jnp.asarray(parents),
            probs=None,
            valid=sound[:, level],
            candidate=jnp.ones(tokens.shape, bool),
        )
        return proposal, state

    def update(params: Params, state: _State, outcome: Outcome) -> _State:
        last = jnp.take_along_axis(outcome.path, outcome.accepted[:, None], axis=1)[:, 0]
        return _state(outcome.scores.hidden, last, jnp.ones_like(state.known))

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="medusa",
        depth=depth,
        nodes=len(tree.paths),
        features=(heads.feature,),
        tree=True,
    )


def _state(hidden: Array, at: Array, known: Array) -> _State:
    """The state at position or node `at [B]` of `hidden [B, T, E]`, float32."""
    index = jnp.maximum(at, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, index, axis=1)[:, 0]
    return _State(hidden=hidden.astype(jnp.float32), known=known)
