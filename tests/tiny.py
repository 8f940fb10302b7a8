"""Small models and drafters for tests: a real transformer, a Markov chain, an oracle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import specjax
from specjax import drafters, tree
from specjax.checkpoints.tokenizer import SpecialIds, Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, first_layers, random_weights
from specjax.types import Block, Cache, Drafter, Forward, Model, Params, Proposal

CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=2048,
)


@functools.cache
def params(drafter: str = "plain", depth: int = 4) -> Params:
    """A tiny random transformer with a drafter."""
    weights = random_weights(CONFIG, jax.random.key(0))
    base = Params(target=weights, model=decoder_model(CONFIG), drafter=drafters.plain(), pad_id=60)
    if drafter == "plain":
        return base
    if drafter == "ngram":
        return base.replace(drafter=drafters.ngram(depth))
    config, draft = first_layers(CONFIG, weights, 1)
    return base.replace(drafter=drafters.draft_model(decoder_model(config), depth), draft=draft)


def markov_model(vocab: int) -> Model:
    """A model whose next-token law depends on the last token only: weights are `[V, V]` logits."""

    def forward(weights, tokens, positions, cache, mask, features=()):
        batch, steps = tokens.shape
        kv = (jnp.zeros((batch, 1, steps, 1)),)
        hidden = jax.nn.one_hot(tokens, vocab)
        return Forward(
            hidden=hidden, features=(hidden,) * len(features), block=Block(keys=kv, values=kv)
        )

    def unembed(weights, hidden):
        return weights[jnp.argmax(hidden, axis=-1)]

    def init_cache(weights, batch, slots):
        kv = (jnp.zeros((batch, 1, slots, 1)),)
        return Cache(keys=kv, values=kv, lengths=jnp.zeros(batch, jnp.int32))

    return _markov_record(vocab, forward, unembed, init_cache)


def _markov_record(vocab, forward, unembed, init_cache) -> Model:
    return Model(
        forward=forward,
        unembed=unembed,
        init_cache=init_cache,
        vocab_size=vocab,
        max_position=1 << 20,
        logical_axes=(),
    )


markov_model = functools.cache(markov_model)


@functools.cache
def oracle(text: tuple[int, ...], depth: int, shift: int = 0) -> Drafter:
    """Drafts what follows in `text` (prompt and output); with `shift`, always something else."""

    def init(params, prefill):
        return ()

    def draft(params, key, state, context):
        known = jnp.asarray(np.array(text + (0,) * depth, np.int32))
        index = context.lengths[:, None] + jnp.arange(depth)[None, :]
        tokens = (known[jnp.minimum(index, known.size - 1)] + shift) % params.model.vocab_size
        return tree.chain_proposal(tokens, index < len(text)), state

    def update(params, state, outcome):
        return state

    return Drafter(init=init, draft=draft, update=update, name="oracle", depth=depth, nodes=depth)


@functools.cache
def tree_oracle(text: tuple[int, ...], parents: tuple[int, ...], right: tuple[int, ...]) -> Drafter:
    """Drafts a tree whose nodes `right` (a path) say what follows in `text`, the others do not."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)

    def init(params, prefill):
        return ()

    def draft(params, key, state, context):
        known = jnp.asarray(np.array(text + (0,) * max(depth), np.int32))
        index = context.lengths[:, None] + jnp.array(depth[1:])[None, :] - 1
        wrong = [0 if j + 1 in right else j + 1 for j in range(len(parents))]
        tokens = known[jnp.minimum(index, known.size - 1)] + jnp.array(wrong, jnp.int32)[None, :]
        tokens = tokens % params.model.vocab_size
        proposal = Proposal(
            tokens=tokens,
            parents=jnp.array(parents, jnp.int32),
            probs=None,
            valid=jnp.ones(tokens.shape, bool),
            candidate=jnp.ones(tokens.shape, bool),
        )
        return proposal, state

    def update(params, state, outcome):
        return state

    return Drafter(
        init=init,
        draft=draft,
        update=update,
        name="tree_oracle",
        depth=max(depth),
        nodes=len(parents),
    )


def script(text: Sequence[int], vocab: int = 32) -> np.ndarray:
    """Weights of a `markov_model` that greedily writes `text` after its first token.

    A token that stands twice in the text is followed by what follows it last. After the end, and
    after all other tokens, comes the next higher id.
    """
    logits = np.zeros((vocab, vocab), np.float32)
    logits[np.arange(vocab), (np.arange(vocab) + 1) % vocab] = 4.0
    for token, following in itertools.pairwise(text):
        logits[token] = 0
        logits[token, following] = 4.0
    return logits


def scripted(text: Sequence[int], depth: int = 5, vocab: int = 32) -> Params:
    """A target that greedily writes `text[1:]` after `text[0]`, and a drafter that knows it."""
    return Params(
        target=jnp.asarray(script(text, vocab)),
        model=markov_model(vocab),
        drafter=oracle(tuple(text), depth),
    )


# Tokens of one byte and of more: stop strings begin, end and lie inside them.
WORDS = [*'abcdefghijklmnopqrstuvwxyz .,;:!?0123456789{}"\n', *"ab abc .. !! ;; 12".split()]
WORDS += ["x. y", "\n\n"]


@functools.cache
def tokenizer() -> Tokenizer:
    """Texts for the ids of `CONFIG`'s vocabulary; it has no end token and no chat template."""
    alphabet = {" ": "Ġ", "\n": "Ċ"}
    words = WORDS + [f"<{i}>" for i in range(len(WORDS), CONFIG.vocab_size)]
    vocab = {"".join(alphabet.get(c, c) for c in word): i for i, word in enumerate(words)}
    assert len(vocab) == CONFIG.vocab_size
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    ids = SpecialIds(bos=None, eos=(), pad=0)
    return Tokenizer(backend=backend, ids=ids, named_tokens=(), chat_template=None)


def emitted(result: specjax.DecodeResult, row: int = 0) -> list[int]:
    """The tokens of a row, without padding."""
    return np.asarray(result.tokens)[row, : int(result.lengths[row])].tolist()
