"""Every recipe judges its drafter by the very guesses that the drafter makes when it drafts.

A drafter drafts behind a prompt, and a rule that accepts everything makes the drafts the text. A
recipe that is shown this text must guess the same tokens at the same places: so inputs, positions,
masks and vocabularies are those of drafting, and so is what is saved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.accept import synthetic_acceptance
from specjax.train.choosing import choose
from specjax.train.recipe import frozen
from specjax.train.recipes import PLANNERS
from specjax.train.windows import Batch
from tests.train import toy

V, DV = toy.CONFIG.vocab_size, 40
VOCABULARY = np.sort(np.random.default_rng(5).permutation(V)[:DV]).astype(np.int32)
PROMPT = np.random.default_rng(6).integers(0, V, 9)
BLOCK = {"mask_token_id": 1, "block_size": 4, "num_layers": 2, "anchors": 11}

# name -> method, options of the plan, reduced vocabulary, drafts of a round
CASES = {
    "eagle": ("eagle", {"steps": 3}, False, 3),
    "eagle3": ("eagle3", {"steps": 3}, False, 3),
    "eagle3 as published": ("eagle3", {"steps": 2, "mixed": False}, False, 2),
    "eagle3 of fewer tokens": ("eagle3", {"steps": 3, "draft_vocab": DV}, True, 3),
    "eagle3 with a head": ("eagle3", {"steps": 2, "draft_vocab": DV, "own_head": True}, True, 2),
    "mtp": ("mtp", {"modules": 2}, False, 2),
    "medusa": ("medusa", {"num_heads": 3, "num_layers": 2}, False, 3),
    "dflash": ("dflash", BLOCK, False, 3),
    "medusa as published": ("medusa", {"num_heads": 2, "mixed": False}, False, 2),
    "dflash as published": ("dflash", {**BLOCK, "mixed": 0}, False, 3),
    "dflash of fewer tokens": ("dflash", {**BLOCK, "draft_vocab": DV}, True, 3),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 4}, False, 4),
    "dspark of fewer tokens": ("dspark", {**BLOCK, "markov_rank": 4, "draft_vocab": DV}, True, 4),
    "draft_model": ("draft_model", {}, False, 3),
    "narrow draft_model": ("draft_model", {"intermediate_size": 24}, False, 3),
    "early_exit": ("early_exit", {"num_layers": 2}, False, 3),
    "early_exit after a layer": ("early_exit", {"num_layers": 2}, False, 3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy.saved_target(tmp_path_factory.mktemp("toy"))


def _noisy(weights, seed: int = 0):
    """Weights that guess something: some recipes start from zeros."""
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = lambda x, k: x + 0.4 * jax.random.normal(k, x.shape) * (x.ndim > 1)
    return jax.tree.unflatten(tree, [noise(x, k) for x, k in zip(leaves, keys, strict=True)])


def _drafted(params, depth: int) -> list[int]:
    """What a drafter drafts behind the prompt, when all of it is accepted."""
    rule = synthetic_acceptance([1.0] * depth)
    result = specjax.decode(params, [PROMPT.tolist()], max_new_tokens=depth, acceptance=rule)
    assert int(result.stats.rounds[0]) == 1
    return np.asarray(result.tokens[0]).tolist()


def _shown(params, tokens: np.ndarray, features) -> Batch:
    """The batch whose only window is this text."""
    known = np.arange(tokens.size) < tokens.size - 1
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32)[None],
        texts=jnp.zeros((1, tokens.size), jnp.int32),
        known=jnp.asarray(known)[None],
        answer=jnp.asarray(np.arange(tokens.size) >= PROMPT.size)[None],
        states=toy.states_of(params, tokens[None], features),
        features=tuple(features),
    )


def _place(method: str, step: int, batch: Batch, key) -> tuple[int, ...]:
    """Where a recipe guesses the token that stands `step` places behind the prompt."""
    n = PROMPT.size
    if method in ("eagle", "eagle3"):
        return 0, n - 2 + step
    if method in ("medusa", "mtp"):
        return 0, n - 2
    if method in ("draft_model", "early_exit"):
        return 0, n - 1 + step
    from specjax.train.recipes.blocks import _anchors

    anchors = np.asarray(_anchors(key, batch, BLOCK["anchors"]))[0]
    return (int(np.flatnonzero(anchors == n - 1)[0]),)


@pytest.mark.parametrize("name", CASES)
def test_guesses_in_training_are_those_of_drafting(name, target, tmp_path):
    method, options, reduced, depth = CASES[name]
    loaded = specjax.load(target)
    plan = PLANNERS[method].plan(loaded, **options)
    weights = _noisy(plan.start(jax.random.key(0)))
    ids = VOCABULARY if reduced else np.arange(V, dtype=np.int32)
    plan.recipe.save(tmp_path / "drafter", weights, ids)
    how = "choices" if method == "medusa" else "num_speculative_tokens"  # a chain
    chosen = {"method": method, "model": tmp_path / "drafter", how: depth}
    if method == "early_exit":
        chosen["method"] = "draft_model"
    if name == "early_exit after a layer":
        chosen["draft_layers"] = 1
    params = specjax.load(target, drafter=chosen)

    drafted = _drafted(params, depth)
    assert set(drafted) <= set(ids.tolist())
    tokens = np.concatenate([PROMPT, drafted, [0, 0]])
    batch = _shown(loaded, tokens, plan.recipe.features)
    key = jax.random.key(3)
    choice = choose(tokens, ids, np.zeros(0, int), ids.size, [0])
    found = plan.recipe.guesses(_stored(weights), frozen(loaded, ids), batch, choice, key)
    guessed, known = [], []
    exits = {
        "draft_model": 0,
        "narrow draft_model": 0,
        "early_exit": 1,
        "early_exit after a layer": 0,
    }
    for step in range(depth):
        guess = found[exits.get(name, step)]
        at = _place(method, step, batch, key)
        guessed.append(int(ids[np.argmax(guess.draft[at])]))
        known.append(float(guess.weights[at]))
    assert guessed == drafted
    assert known == [1.0] * len(known)


def _stored(weights):
    """Matrices as they come back from a file in bfloat16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) if x.ndim > 1 else x, weights
    )


@pytest.mark.parametrize("name", ["eagle3 of fewer tokens", "medusa", "dspark", "draft_model"])
def test_the_target_s_law_is_that_of_the_target(name, target):
    """The logits that a recipe compares with are the target's own, at the same place."""
    method, options, reduced, _ = CASES[name]
    params = specjax.load(target)
    plan = PLANNERS[method].plan(params, **options)
    ids = VOCABULARY if reduced else np.arange(V, dtype=np.int32)
    tokens = np.random.default_rng(1).integers(0, V, 16)
    batch = _shown(params, tokens, plan.recipe.features)
    (hidden,) = toy.states_of(params, tokens[None], (toy.CONFIG.num_layers,))
    expected = np.asarray(params.model.unembed(params.target, hidden))[0][:, ids]
    choice = choose(tokens, ids, np.zeros(0, int), ids.size, [0])
    key = jax.random.key(3)
    start = plan.start(jax.random.key(0))
    found = plan.recipe.guesses(start, frozen(params, ids), batch, choice, key)
    for step in range(plan.recipe.steps):
        at = _place(method, step, batch, key)
        behind = PROMPT.size - 1 + step  # the state that gives the law of the guessed token
        np.testing.assert_allclose(found[step].target[at], expected[behind], atol=1e-4)


def test_texts_are_not_mixed(target):
    """A guess across the end of a text, or where the target's state is not known, has no weight."""
    params = specjax.load(target)
    plan = PLANNERS["eagle3"].plan(params, steps=3)
    tokens = np.random.default_rng(1).integers(0, V, 16)
    batch = _shown(params, tokens, plan.recipe.features)
    texts, place = np.arange(16) // 8, np.arange(16)
    batch = batch.__class__(
        tokens=batch.tokens,
        texts=jnp.asarray(texts, jnp.int32)[None],
        known=jnp.asarray(place % 8 != 7)[None],
        answer=jnp.ones((1, 16), bool),
        states=batch.states,
        features=batch.features,
    )
    ids = np.arange(V, dtype=np.int32)
    choice = choose(tokens, ids, np.zeros(0, int), V, [0])
    found = plan.recipe.guesses(
        plan.start(jax.random.key(0)), frozen(params, ids), batch, choice, jax.random.key(0)
    )
    for step, guess in enumerate(found):
        # From s - step to s + 2 in one text of 8.
        inside = (place % 8 >= step) & (place % 8 <= 5)
        np.testing.assert_array_equal(np.asarray(guess.weights[0]) > 0, inside)


def test_later_steps_see_their_own_past_only():
    from specjax.train.recipes.eagle import unrolled_mask

    mask = np.asarray(unrolled_mask(4, 2)[0]).astype(int)
    target, first, second = mask[:, :4], mask[:, 4:8], mask[:, 8:]
    np.testing.assert_array_equal(target, np.tril(np.ones((4, 4)), -2))
    np.testing.assert_array_equal(first, np.eye(4, k=-1))
    np.testing.assert_array_equal(second, np.eye(4))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("draft_model", {"divergence": "hellinger"}, "'hellinger' is not known; known: kl"),
        ("draft_model", {"layers": (0, 9)}, r"layers must be 2 of 0..2, got \(0, 9\)"),
        ("early_exit", {"num_layers": 3}, "num_layers must be from 1 to 2, got 3"),
        ("early_exit", {"num_layers": 2, "exits": (2, 1)}, r"in 1..2, got \(2, 1\)"),
        ("early_exit", {"num_layers": 2, "dropout": 1.0}, "dropout must be from 0 to below 1"),
        ("dflash", {"mask_token_id": 0, "confidence": 1.0}, "needs a network with a confidence"),
    ],
)
def test_options_that_cannot_be(method, options, message):
    with pytest.raises(ValueError, match=message):
        PLANNERS[method].plan(toy.toy_target(), **options)


def test_a_window_has_places_for_so_many_anchors(target):
    params = specjax.load(target)
    plan = PLANNERS["dflash"].plan(params, **{**BLOCK, "anchors": 15})
    tokens = np.random.default_rng(1).integers(0, V, 16)
    batch, ids = _shown(params, tokens, plan.recipe.features), np.arange(V, dtype=np.int32)
    choice = choose(tokens, ids, np.zeros(0, int), V, [0])
    weights = plan.start(jax.random.key(0))
    with pytest.raises(ValueError, match=r"anchors=15 .* window of 16 tokens: at most 14"):
        plan.recipe.guesses(weights, frozen(params, ids), batch, choice, jax.random.key(0))


def test_a_dropped_layer_adds_nothing(target):
    from specjax.train.recipes.early_exit import _without

    params = specjax.load(target)
    plan = PLANNERS["early_exit"].plan(params, num_layers=2, exits=(1, 2))
    tokens = np.random.default_rng(1).integers(0, V, 16)
    batch, ids = _shown(params, tokens, plan.recipe.features), np.arange(V, dtype=np.int32)
    choice = choose(tokens, ids, np.zeros(0, int), V, [0])
    weights = _without(plan.start(jax.random.key(0)), jnp.array([True, False]))
    first, second = plan.recipe.guesses(
        weights, frozen(params, ids), batch, choice, jax.random.key(0)
    )
    np.testing.assert_allclose(first.draft, second.draft, atol=1e-5)
