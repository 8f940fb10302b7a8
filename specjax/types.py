"""The records that cross the boundaries between drafting, verifying, accepting and committing.

Axes: B rows, K draft depth, N drafted nodes, M = N + 1 verified nodes (node 0 is the root: the last
committed token, whose keys and values are not in the cache yet), T query positions, S cache slots,
L layers, G key/value heads, D head size, E model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, dataclass_transform

import chex
import jax
from jax import Array

__all__ = [
    "Block",
    "BlockNetwork",
    "Cache",
    "Context",
    "DecodeResult",
    "Drafter",
    "FeatureNetwork",
    "Forward",
    "Heads",
    "Logprobs",
    "Model",
    "Outcome",
    "Params",
    "Prefill",
    "Proposal",
    "Scores",
    "Stats",
    "Status",
    "Verdict",
    "check_block",
    "check_proposal",
    "check_scores",
    "check_verdict",
    "record",
    "static",
]

PyTree = Any
_T = TypeVar("_T")


def static(**options: Any) -> Any:
    """A field that is part of the tree's structure, hence hashable and never traced."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(static,)
)
def record(cls: type[_T]) -> type[_T]:
    """Makes a frozen, keyword-only dataclass that is a JAX pytree.

    Example:
      >>> @record
      ... class Point:
      ...     x: int
      ...     label: str = static(default="")
      >>> jax.tree.map(lambda v: v + 1, Point(x=1)).x
      2
    """
    return jax.tree_util.register_dataclass(
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    )


class Status(enum.IntEnum):
    """Why a row stopped (`RUNNING` while it has not)."""

    RUNNING = 0
    EOS = 1  # an end-of-sequence token was emitted
    STOP = 2  # a stop sequence was emitted
    LENGTH = 3  # max_new_tokens were emitted
    CACHE_FULL = 4  # prompt and output reached max_len
    NONFINITE = 5  # the target's logits held NaN or +inf for this row


# --- the target, or any model that can be run over a cache -----------------------------------


@record
class Cache:
    """Keys and values of committed tokens. Slots at or beyond `lengths` hold no meaning.

    G, S and D may differ by layer. In a ring the token at position p lies in slot p mod S, and
    only the last ones are held. What is `[B, G, S, D]` may also be a record with a shape, of arrays
    `[B, G, S, ...]` (rounded elements and their scales); a block then holds the same.
    """

    keys: tuple[Array, ...]  # L x [B, G, S, D]
    values: tuple[Array, ...]  # L x [B, G, S, D]
    lengths: Array  # [B] int32, tokens held
    rings: tuple[bool, ...] = static(default=())  # layers that are rings; (): none is


@record
class Block:
    """Keys and values of the T tokens of one forward pass, not (yet) in the cache."""

    keys: tuple[Array, ...]  # L x [B, G, T, D]
    values: tuple[Array, ...]  # L x [B, G, T, D]


@record
class Forward:
    """What one pass over T tokens gives."""

    hidden: Array  # [B, T, E] after the final norm
    features: tuple[Array, ...]  # one [B, T, E] a requested layer
    block: Block


class ForwardFn(Protocol):
    """`features` i asks for the input of layer i (0: the embedding, L: after the final norm).

    Only drafters that make trees with a model hand on `earlier`; a target need not take it.
    """

    def __call__(
        self,
        weights: PyTree,
        tokens: Array,  # [B, T] int32
        positions: Array,  # [B, T] int32
        cache: Cache,  # read only
        mask: Array,  # [1 or B, T, U + T] bool: query t sees token u of the same block
        features: tuple[int, ...] = (),
        earlier: Block | None = None,  # U tokens of earlier passes that are not in the cache
    ) -> Forward: ...


class UnembedFn(Protocol):
    """Hidden states `[..., E]` to logits `[..., V]` float32."""

    def __call__(self, weights: PyTree, hidden: Array) -> Array: ...


class EmbedFn(Protocol):
    """Tokens `[...]` int32 to what the first layer reads, `[..., E]` float32, without positions."""

    def __call__(self, weights: PyTree, tokens: Array) -> Array: ...


class InitCacheFn(Protocol):
    """An empty cache with `slots` slots a row."""

    def __call__(self, weights: PyTree, batch: int, slots: int) -> Cache: ...


class Model(NamedTuple):
    """A causal language model as pure functions over its weights."""

    forward: ForwardFn
    unembed: UnembedFn
    init_cache: InitCacheFn
    vocab_size: int
    max_position: int
    logical_axes: Hashable  # ((path, (axis name, ...)), ...) of every weight
    config: Hashable = None
    embed: EmbedFn | None = None  # drafters that read the target's embedding need it


# --- drafts ----------------------------------------------------------------------------------


@record
class Proposal:
    """A drafted tree of N nodes. Children come after their parents; a chain is a tree."""

    tokens: Array  # [B, N] int32
    parents: Array  # [N] or [B, N] int32; 0 is the root, j the j-th drafted node
    probs: Array | None  # [B, N, V] float32: the law q each token was drawn from; None: one-hot
    valid: Array  # [B, N] bool; a draft shorter than N is a mask, not a shape
    candidate: Array  # [B, N] bool; False: verified for its scores, never accepted
    confidence: Array | None = None  # [B, N] float32


@record
class Context:
    """What a drafter may see of the rows it drafts for."""

    tokens: Array  # [B, S] int32: prompt and output; meaningless at or beyond lengths
    lengths: Array  # [B] int32: committed tokens, the root included
    sampling: Any  # specjax.Sampling
    active: Array  # [B] bool: rows that still run
    seen: Any = None  # specjax.seen.Seen: what the controls know of the text before the next token


@record
class Prefill:
    """The prompt, as the target has read it (all but the last token of each row)."""

    tokens: Array  # [B, P] int32, P a multiple of `chunk`
    lengths: Array  # [B] int32, the last token included
    features: tuple[Array, ...]  # [B, P, E] for each layer that the drafter asks for
    slots: int = static()  # cache slots that a drafter with a cache of its own should have
    chunk: int = static()  # tokens to read in one pass


@record
class Outcome:
    """What became of a proposal, for the drafter to learn from."""

    tokens: Array  # [B, S] int32: as in Context, the new tokens included
    lengths: Array  # [B] int32: committed tokens after the round
    path: Array  # [B, K + 1] int32: accepted nodes, root first; meaningless beyond `accepted`
    accepted: Array  # [B] int32: drafted nodes accepted
    scores: Scores


class InitFn(Protocol):
    """State of a drafter, once the target has read the prompt."""

    def __call__(self, params: Params, prefill: Prefill) -> PyTree: ...


class DraftFn(Protocol):
    """Guesses up to N nodes.

    `key` is one key a row, another one in each round: draws are a function of (key, position).
    """

    def __call__(
        self, params: Params, key: Array, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]: ...


class UpdateFn(Protocol):
    """Learns what was accepted and rolls back the rest."""

    def __call__(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree: ...


class Drafter(NamedTuple):
    """A way of guessing, as a record of pure functions. Made by a cached factory.

    The functions get the params that decode: where `params.drafter` is another record, they are a
    part of it, and a round may accept up to `params.drafter.depth` tokens that others guessed.
    """

    init: InitFn
    draft: DraftFn
    update: UpdateFn
    name: str
    depth: int  # K: the longest path that a round can accept
    nodes: int  # N
    features: tuple[int, ...] = ()  # target layers whose states `init` and `update` want
    tree: bool = False  # drafts may branch; where N > K they do
    mixed: bool = False  # drafts that follow one text may come from different laws q
    # Numbers of nodes, beside N, for which a verifying pass is compiled: a round takes the smallest
    # that holds all valid nodes of all rows.
    sizes: tuple[int, ...] = ()


class FuseFn(Protocol):
    """The target's states at T tokens, `[B, T, E]` each, as what the network reads, `[B, T, W]`."""

    def __call__(self, weights: PyTree, features: tuple[Array, ...]) -> Array: ...


class PairsFn(Protocol):
    """Reads pairs of a token and a state. Of the result, `hidden` is for the head, and the one
    entry of `features` is the state that the next guess is made from."""

    def __call__(
        self,
        weights: PyTree,
        embedded: Array,  # [B, T, E] of each pair's token
        hidden: Array,  # [B, T, W] of each pair's state
        positions: Array,  # [B, T] int32
        cache: Cache,  # read only
        mask: Array,  # [1 or B, T, U + T] bool
        earlier: Block | None = None,  # U pairs of earlier passes that are not in the cache
    ) -> Forward: ...


class DraftEmbedFn(Protocol):
    """Tokens (the target's ids) to `[..., E]`; `embed` is the target's embedding."""

    def __call__(
        self, weights: PyTree, embed: Callable[[Array], Array], tokens: Array
    ) -> Array: ...


class DraftHeadFn(Protocol):
    """Hidden states to logits `[..., DV]` float32; `unembed` is the target's head."""

    def __call__(
        self, weights: PyTree, unembed: Callable[[Array], Array], hidden: Array
    ) -> Array: ...


class FeatureNetwork(NamedTuple):
    """A small network that guesses from a target's states: EAGLE, multi-token prediction."""

    fuse: FuseFn
    forward: PairsFn
    embed: DraftEmbedFn
    unembed: DraftHeadFn
    init_cache: InitCacheFn
    features: tuple[int, ...]  # which states of the target
    target_size: int  # E
    target_vocab: int  # V
    vocab_size: int  # DV
    logical_axes: Hashable
    config: Hashable = None


class HeadsFn(Protocol):
    """States `[..., E]` to logits `[..., heads, V]` float32; `unembed` is the target's head."""

    def __call__(
        self, weights: PyTree, unembed: Callable[[Array], Array], hidden: Array
    ) -> Array: ...


class Heads(NamedTuple):
    """Heads over one state of a target, each for a token further ahead: Medusa.

    From the state at position t, head i guesses the token at position t + 2 + i.
    """

    logits: HeadsFn
    heads: int
    vocab_size: int  # V
    feature: int  # which state of the target: L, after the final norm
    logical_axes: Hashable
    config: Hashable = None


class ProjectFn(Protocol):
    """Keys and values of the T tokens behind the cache, from what `fuse` makes of their states."""

    def __call__(
        self,
        weights: PyTree,
        fused: Array,  # [B, T, W]
        cache: Cache,  # read for its lengths and its form only
    ) -> Block: ...


class BlockFn(Protocol):
    """Hidden states `[B, T, W]` of a block of T tokens that stands right behind the cache's.

    All of the block sees the cache and the block.
    """

    def __call__(self, weights: PyTree, embedded: Array, cache: Cache) -> Array: ...


class CorrectFn(Protocol):
    """What the token before a slot adds to the slot's logits, `[B, DV]` float32, and a new state.

    The state `[B, R]` float32 is zero at the start of a block; slots are asked from left to right.
    """

    def __call__(
        self,
        weights: PyTree,
        state: Array,
        tokens: Array,  # [B] int32, the target's ids
        hidden: Array,  # [B, W] of the slot
    ) -> tuple[Array, Array]: ...


class ConfidenceFn(Protocol):
    """Logit `[B]` of the chance that a slot's draft stands if those before it do."""

    def __call__(
        self,
        weights: PyTree,
        hidden: Array,  # [B, W] of the slot
        tokens: Array,  # [B] int32, before the slot
    ) -> Array: ...


class BlockNetwork(NamedTuple):
    """A network that guesses a block of tokens in one pass over a target's states: DFlash, DSpark.

    Its cache holds keys and values of verified tokens, made from the target's states alone. A block
    is the last committed token and masks in place of those that follow.
    """

    fuse: FuseFn
    project: ProjectFn
    forward: BlockFn
    embed: DraftEmbedFn
    unembed: DraftHeadFn
    init_cache: InitCacheFn
    features: tuple[int, ...]  # which states of the target
    block_size: int
    mask_token_id: int
    from_anchor: bool  # slot k guesses the token behind its own position; else that at it
    target_size: int  # E
    target_vocab: int  # V
    vocab_size: int  # DV
    logical_axes: Hashable
    correct: CorrectFn | None = None
    markov_rank: int = 0  # R
    confidence: ConfidenceFn | None = None
    config: Hashable = None


# --- verification ----------------------------------------------------------------------------


@record
class Scores:
    """The target's view of the root and of every drafted node."""

    logits: Array  # [B, M, V] float32: what follows node m
    hidden: Array  # [B, M, E]
    features: tuple[Array, ...]  # [B, M, E] for each layer that the drafter asks for
    block: Block  # T = M


@record
class Verdict:
    """Which path was accepted and what follows it."""

    accepted: Array  # [B] int32, 0..K drafted nodes
    path: Array  # [B, K + 1] int32 nodes, root first; meaningless beyond `accepted`
    tokens: Array  # [B, K + 1] int32: accepted drafts, then the resampled or bonus token
    finite: Array  # [B] bool: False where the target's law was not a distribution


@record
class Stats:
    """Counters, kept beside the state that decoding needs."""

    rounds: Array  # [B] int32
    histogram: Array  # [B, K + 1] int32: rounds that accepted 0..K drafts
    proposed: Array  # [B, K] int32: rounds whose draft reached depth 1..K
    accepted: Array  # [B, K] int32: rounds that accepted depth 1..K
    hits: Array  # [B, N] int32: rounds that accepted node 1..N of the proposal
    rule: str = static(default="")  # name of the verification rule
    lossless: bool = static(default=True)  # whether that rule keeps the target's law


@record
class Logprobs:
    """Natural logarithms of the probabilities of T tokens, and of the n most likely ones there.

    0 where there is no token: beyond a row's end, and at the first token of a prompt.
    """

    tokens: Array  # [B, T] float32
    top_ids: Array  # [B, T, n] int32, the most likely first
    top: Array  # [B, T, n] float32


@record
class DecodeResult:
    """What `specjax.decode` returns."""

    tokens: Array  # [B, max_new_tokens] int32, padded with pad_id after the end
    lengths: Array  # [B] int32: tokens emitted, an end token included
    status: Array  # [B] int32, a `Status`
    stats: Stats
    logprobs: Logprobs | None = None  # T = max_new_tokens
    prompt_logprobs: Logprobs | None = None  # T = the longest prompt


@record
class Params:
    """Weights and the functions that use them: what `specjax.load` returns."""

    target: PyTree  # weights of the target model
    draft: PyTree = None  # weights of the drafter, if it has any
    model: Model = static()
    drafter: Drafter = static()
    tokenizer: Hashable = static(default=None)
    eos_ids: tuple[int, ...] = static(default=())
    pad_id: int = static(default=0)
    name: str = static(default="")

    def replace(self, **changes: Any) -> Params:
        """A copy with some fields changed, e.g. another `drafter`."""
        return dataclasses.replace(self, **changes)


# --- checks: run at trace time, free at run time -----------------------------------------------


def _shape(array: Array, names: str, dims: Mapping[str, int]) -> None:
    chex.assert_shape(array, tuple(dims[name] for name in names))


def check_block(x: Block, cache: Cache, tokens: int) -> None:
    """Asserts that a `Block` of so many tokens a row fits a cache."""
    for layers, slots in ((x.keys, cache.keys), (x.values, cache.values)):
        chex.assert_equal(len(layers), len(slots))
        for new, held in zip(layers, slots, strict=True):
            chex.assert_trees_all_equal_structs(new, held)
            for array, into in zip(jax.tree.leaves(new), jax.tree.leaves(held), strict=True):
                batch, groups, _, size = into.shape
                chex.assert_shape(array, (batch, groups, tokens, size))


def check_proposal(x: Proposal, dims: Mapping[str, int]) -> None:
    """Asserts shapes and dtypes of a `Proposal`; `dims` needs B, N, V."""
    for array in (x.tokens, x.valid, x.candidate):
        _shape(array, "BN", dims)
    _shape(x.parents, "N" if x.parents.ndim == 1 else "BN", dims)
    chex.assert_type([x.tokens, x.parents, x.valid, x.candidate], ["int32", "int32", bool, bool])
    if x.probs is not None:
        _shape(x.probs, "BNV", dims)
        chex.assert_type(x.probs, "float32")
    if x.confidence is not None:
        _shape(x.confidence, "BN", dims)


def check_scores(x: Scores, dims: Mapping[str, int]) -> None:
    """Asserts shapes and dtypes of `Scores`; `dims` needs B, M, V."""
    _shape(x.logits, "BMV", dims)
    chex.assert_type(x.logits, "float32")
    chex.assert_equal(x.hidden.shape[:2], (dims["B"], dims["M"]))


def check_verdict(x: Verdict, dims: Mapping[str, int]) -> None:
    """Asserts shapes and dtypes of a `Verdict`; `dims` needs B and P = K + 1."""
    _shape(x.accepted, "B", dims)
    for array in (x.path, x.tokens):
        _shape(array, "BP", dims)
    chex.assert_type([x.accepted, x.path, x.tokens, x.finite], ["int32", "int32", "int32", bool])
