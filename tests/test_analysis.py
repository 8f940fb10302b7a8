"""Calibration of confidences, and the lengths that a scheduler verifies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, analysis
from specjax.types import Proposal

# --- calibration -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(shared):
    return np.load(shared / "parity" / "dspark-confidence-metrics" / "expected.npz")


def test_metrics_of_the_reference(expected):
    predicted = analysis.survival(expected["step_confidence"])
    happened = expected["prefix_accepted"]
    ours = {
        "ece": analysis.expected_calibration_error(predicted, happened),
        "auc": analysis.auroc(predicted, happened),
        "brier": analysis.brier(predicted, happened),
        "pred_mean": predicted.mean(axis=0),
        "target_mean": happened.mean(axis=0),
    }
    for name, values in ours.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-5)
    for column, threshold in enumerate(expected["thresholds"]):
        good = np.cumprod(expected["step_confidence"] >= threshold, axis=1)
        np.testing.assert_array_equal(good.sum(1), expected["prefix_len_by_threshold"][:, column])


def test_auroc_without_one_of_the_outcomes():
    assert np.isnan(analysis.auroc([[0.3], [0.6]], [[1], [1]])).all()
    assert analysis.auroc([[0.5], [0.5]], [[1], [0]]) == 0.5


@pytest.mark.parametrize("truth", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.5)])
def test_temperatures_that_were_put_in_are_found(truth):
    """Drafts stand with the chance of their logit; the logits are given times a temperature."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 1.5, size=(100_000, 3))
    stands = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(stands, axis=1)
    given = logits * np.array(truth)
    found = analysis.sequential_temperature_scaling(given, accepted)
    np.testing.assert_allclose(found, truth, rtol=0.12)
    error = lambda x: analysis.expected_calibration_error(
        analysis.survival(1 / (1 + np.exp(-x))), accepted
    )
    assert (error(given / found) <= error(given) + 1e-6).all()
    assert (error(given / found) < 0.01).all()


def test_temperatures_of_the_reference_data(expected):
    """The error of each slot becomes no larger than without, given the slots before it."""
    logits, accepted = expected["confidence_logits"], expected["prefix_accepted"]
    found = analysis.sequential_temperature_scaling(logits, accepted)
    for slot in range(logits.shape[1]):
        scaled = logits / np.where(np.arange(len(found)) < slot, found, 1.0)
        best = scaled / np.where(np.arange(len(found)) == slot, found, 1.0)
        errors = [
            analysis.expected_calibration_error(
                analysis.survival(1 / (1 + np.exp(-x.astype(np.float64)))), accepted
            )[slot]
            for x in (best, scaled)
        ]
        assert errors[0] <= errors[1] + 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analysis.brier([0.5], [1]), "must both be"),
        (lambda: analysis.brier([[0.5]], [[2]]), "0 or 1"),
        (lambda: analysis.auroc(np.zeros((0, 2)), np.zeros((0, 2))), "at least one row"),
        (lambda: analysis.sequential_temperature_scaling([[0.0, 0.0]], [[0, 1]]), "only if those"),
        (lambda: analysis.sequential_temperature_scaling([[0.0]], [[1]], grid=(0.0,)), "positive"),
    ],
)
def test_bad_calibration_data(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- scheduling ------------------------------------------------------------------------------


def by_definition(confidence: np.ndarray, speeds, running) -> list[int]:
    """The search, one candidate at a time."""
    chance = np.cumprod(confidence, axis=1, dtype=np.float32)
    rows, depth = confidence.shape
    order = sorted(
        ((r, j) for r in range(rows) for j in range(depth) if running[r]),
        key=lambda at: (-chance[at], at),
    )
    lengths, size = [0] * rows, int(sum(running))
    speed = lambda b: np.float32(speeds[b - 1] if 1 <= b <= len(speeds) else 0.0)
    tau, best = np.float32(size), size * speed(size)
    for r, j in order:
        size, tau = size + 1, np.float32(tau + chance[r, j])
        if not tau * speed(size) > best:
            break
        best = tau * speed(size)
        lengths[r] = j + 1
    return lengths


def test_lengths_by_definition():
    rng = np.random.default_rng(0)
    lengths = jax.jit(analysis.verify_lengths)
    seen = set()
    for _ in range(200):
        # Few distinct values: many products are equal.
        confidence = rng.choice([0.0, 0.25, 0.5, 1.0], size=(4, 3)).astype(np.float32)
        running = rng.random(4) < 0.8
        speeds = 1.0 / (rng.choice([0.0, 2.0, 8.0, 32.0]) + np.arange(1, 13))
        speeds = speeds.astype(np.float32)
        ours = lengths(confidence, speeds, running).tolist()
        assert ours == by_definition(confidence, speeds, running)
        assert not any(length for length, on in zip(ours, running, strict=True) if not on)
        seen |= set(ours)
    assert seen == {0, 1, 2, 3}


def test_lengths_when_speed_does_not_depend_on_size():
    confidence = jnp.array([[0.9, 0.5], [0.2, 0.0]])
    assert analysis.verify_lengths(confidence, (1.0,) * 6).tolist() == [2, 1]
    # Sizes that are not in the table are not run.
    assert analysis.verify_lengths(confidence, (1.0,) * 4).tolist() == [2, 0]
    assert analysis.verify_lengths(confidence, (1.0,)).tolist() == [0, 0]
    assert analysis.verify_lengths(confidence, (1.0,) * 6, jnp.zeros(2, bool)).tolist() == [0, 0]


P, Q, SPEEDS = np.array([0.7, 0.3]), np.array([0.5, 0.5]), (1.0, 0.5, 0.45)


def confidence_after(first: int) -> np.ndarray:
    """Slot 1: 1 - total variation of p and q. Slot 2 knows the token of slot 1."""
    return np.array([[1 - 0.5 * np.abs(P - Q).sum(), 0.9 if first == 0 else 0.0]])


def looking_back(confidence, speeds) -> list[int]:
    """The length with the highest throughput of all: it may depend on what was drafted later."""
    chance = np.cumprod(confidence[0])
    each = [(1 + chance[:n].sum()) * speeds[n] for n in range(len(chance) + 1)]
    return [int(np.argmax(each))]


def law_of_first_token(scheduler) -> np.ndarray:
    """Over all drafts of two tokens and all coins of verification."""
    law = np.zeros(2)
    for drafted in itertools.product(range(2), repeat=2):
        (length,) = np.asarray(scheduler(confidence_after(drafted[0]), SPEEDS)).tolist()
        proposal = Proposal(
            tokens=jnp.array([drafted], jnp.int32),
            parents=jnp.array([0, 1], jnp.int32),
            probs=jnp.broadcast_to(jnp.asarray(Q, jnp.float32), (1, 2, 2)),
            valid=jnp.arange(2)[None, :] < length,
            candidate=jnp.ones((1, 2), bool),
        )
        target = accept.dense_law(jnp.broadcast_to(jnp.asarray(P, jnp.float32), (1, 3, 2)))
        keep = float(accept.chain_keep(proposal, target, 2)[0, 0])
        fall = accept.chain_following(proposal, target, jnp.zeros(1, jnp.int32), 2)[0]
        first = keep * np.eye(2)[drafted[0]] + (1 - keep) * np.asarray(fall)
        law += Q[drafted[0]] * Q[drafted[1]] * first
    return law


def test_a_search_that_stops_at_once_keeps_the_law():
    for first in range(2):
        assert analysis.verify_lengths(jnp.asarray(confidence_after(first)), SPEEDS).tolist() == [0]
    law = law_of_first_token(lambda c, speeds: analysis.verify_lengths(jnp.asarray(c), speeds))
    np.testing.assert_allclose(law, P, atol=1e-6)


def test_a_search_that_looks_back_does_not():
    assert looking_back(confidence_after(0), SPEEDS) == [2]
    assert looking_back(confidence_after(1), SPEEDS) == [0]
    np.testing.assert_allclose(law_of_first_token(looking_back), [0.85, 0.15], atol=1e-6)
