"""Confidences are kept beside what became of the drafts, and temperatures make them agree."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.models.block_decoder import BlockConfig, random_block
from specjax.train.confidence import (
    Confidences,
    calibrate,
    calibration_error,
    confidences,
    write_temperatures,
)
from tests.train import toy


def _with_confidence(depth: int = 3):
    """Drafts of which some fall; slot k has confidence (n mod 7 + k) / 10 behind n tokens."""
    params = toy.toy_target()
    weak = params.target | {"head": {"weight": 0.7 * params.target["head"]["weight"]}}
    inner = drafters.draft_model(params.model, depth)

    def draft(params, key, state, context):
        proposal, state = inner.draft(params, key, state, context)
        said = (context.lengths[:, None] % 7 + jnp.arange(depth)[None, :] + 1) / 10
        return dataclasses.replace(proposal, confidence=said), state

    return params.replace(drafter=inner._replace(draft=draft, name="sure"), draft=weak)


def test_what_is_kept_is_what_happened():
    params, prompts = _with_confidence(), toy.prompts(3)
    options = {"max_new_tokens": 20, "seed": 5}
    found = confidences(params, prompts, temperature=1.0, rows=4, **options)
    seen, stood, left = [], [], []
    sampling = specjax.Sampling(temperature=1.0)
    *groups, last = specjax.stream_tokens(params, prompts, sampling=sampling, **options)
    lengths = [np.zeros(3, int), *(np.asarray(g.lengths) for g in groups)]
    for row in range(3):
        for before, after in itertools.pairwise(lengths):
            if after[row] > before[row] and after[row] < 20:
                seen.append([(8 + before[row]) % 7 + k + 1 for k in range(3)])
                stood.append([k < after[row] - before[row] - 1 for k in range(3)])
        left.append(int(last.stats.rounds[row]) - 1)
    assert len(found.logits) == sum(left)
    np.testing.assert_allclose(10 / (1 + np.exp(-found.logits)), seen, rtol=1e-4)
    np.testing.assert_array_equal(found.stood, stood)
    assert 0 < found.stood.mean() < 1


def test_temperatures_undo_what_was_wrong(tmp_path):
    """Confidences that are too sure by a factor of two, and an error that halves of them show."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(40000, 3))
    chance = 1 / (1 + np.exp(-logits))
    stood = np.cumprod(draw.random(chance.shape) < chance, axis=1)
    made = [
        Confidences((2 * x).astype(np.float32), y)
        for x, y in zip(np.split(logits, 2), np.split(stood, 2), strict=True)
    ]
    temperatures = calibrate(made[0])
    np.testing.assert_allclose(temperatures, 2.0, rtol=0.2)  # the error is flat around its minimum
    assert calibration_error(made[1]).max() > 0.05
    assert calibration_error(made[1], temperatures).max() < 0.02


def test_slots_that_hardly_a_draft_reaches_keep_their_temperature():
    draw = np.random.default_rng(1)
    logits = np.stack([draw.normal(size=4000) - 3, draw.normal(size=4000)], axis=1)
    stood = np.cumprod(draw.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1)
    assert 100 < stood[:, 0].sum() < 1000
    found = Confidences((2 * logits).astype(np.float32), stood)
    reached = int(stood[:, 0].sum())
    first, second = calibrate(found, least=reached + 1)
    assert second == 1.0
    assert calibrate(found, least=reached)[0] == first
    assert calibrate(found, least=reached)[1] > 1.5
    assert calibrate(found, least=4001) == (1.0, 1.0)


def test_a_folder_takes_its_temperatures(tmp_path):
    target = toy.saved_target(tmp_path)
    layer = dataclasses.replace(toy.CONFIG, num_layers=1)
    config = BlockConfig(
        decoder=layer,
        features=(1, 3),
        target_size=toy.CONFIG.hidden_size,
        draft_vocab=toy.CONFIG.vocab_size,
        block_size=3,
        mask_token_id=1,
        from_anchor=True,
        markov_rank=4,
        confidence=True,
    )
    folder = tmp_path / "dspark"
    weights = random_block(config, jax.random.key(0))
    specjax.checkpoints.save_draft(folder, "dspark", config, weights, toy.CONFIG)
    plain = specjax.load(target, drafter=folder)
    found = confidences(plain, toy.prompts(2), max_new_tokens=12)
    assert found.logits.shape[1] == 3
    write_temperatures(folder, [2.0, 1.0, 0.5])
    assert json.loads((folder / "config.json").read_text())["options"] == {
        "confidence_temperatures": [2.0, 1.0, 0.5]
    }
    cooled = specjax.load(target, drafter=folder)
    again = confidences(cooled, toy.prompts(2), max_new_tokens=12)
    np.testing.assert_array_equal(again.stood, found.stood)
    np.testing.assert_allclose(again.logits * [[2.0, 1.0, 0.5]], found.logits, rtol=2e-3, atol=2e-3)


def test_drafters_without_confidence():
    params = toy.toy_target().replace(drafter=drafters.ngram(2))
    with pytest.raises(ValueError, match="ngram has no confidence"):
        confidences(params, toy.prompts(1), max_new_tokens=4)
