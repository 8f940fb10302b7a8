"""How well confidences tell which drafts stand, and temperatures that make them tell it better.

The confidence of slot k is the chance that its draft stands if those before it do; the product of
the first k is the chance that all of them stand, and that is what is compared with what happened.

Reference: DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec); Guo et al. 2017
(arXiv:1706.04599) on calibration error and temperature scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "auroc",
    "brier",
    "expected_calibration_error",
    "sequential_temperature_scaling",
    "survival",
]

_EPS = 1e-8
_GRID = tuple(np.geomspace(0.1, 10.0, 201).tolist())


def survival(confidence: Any) -> np.ndarray:
    """The chance that the drafts up to each slot all stand: a cumulative product.

    Args:
      confidence: `[..., K]`, of each slot.

    Returns:
      `[..., K]` float32.

    Example:
      >>> survival([[0.5, 0.5, 0.0]]).tolist()
      [[0.5, 0.25, 0.0]]
    """
    return np.cumprod(np.asarray(confidence, np.float32), axis=-1, dtype=np.float32)


def expected_calibration_error(predicted: Any, happened: Any, *, bins: int = 20) -> np.ndarray:
    """The mean distance of prediction and frequency in each of some bins, weighted by their sizes.

    Args:
      predicted: `[N, K]` chances.
      happened: `[N, K]`, 0 or 1.
      bins: of equal width, over 0 to 1.

    Returns:
      `[K]` float64, one error a slot.

    Raises:
      ValueError: shapes that do not fit, or no rows.

    Example:
      >>> expected_calibration_error([[0.75], [0.75]], [[1], [0]]).tolist()
      [0.25]
    """
    predicted, happened = _pairs(predicted, happened)
    pairs = zip(predicted.T, happened.T, strict=True)
    return np.array([_calibration_error(p[None], h, bins)[0] for p, h in pairs])


def auroc(predicted: Any, happened: Any, *, bins: int = 1000) -> np.ndarray:
    """The chance that a draft that stood was given a higher prediction than one that fell.

    Predictions in one bin count as equal, and equal ones as half.

    Args:
      predicted: `[N, K]` chances.
      happened: `[N, K]`, 0 or 1.
      bins: of equal width, over 0 to 1.

    Returns:
      `[K]` float64; NaN where all stood or all fell.

    Raises:
      ValueError: shapes that do not fit, or no rows.

    Example:
      >>> auroc([[0.9], [0.2], [0.4]], [[1], [0], [0]]).tolist()
      [1.0]
    """
    predicted, happened = _pairs(predicted, happened)
    areas = []
    for p, h in zip(predicted.T, happened.T, strict=True):
        index = _bin(p, bins)
        stood = np.bincount(index, h, bins)
        fell = np.bincount(index, 1.0 - h, bins)
        below = np.cumsum(fell) - fell
        pairs = stood.sum() * fell.sum()
        area = (stood * below).sum() + 0.5 * (stood * fell).sum()
        areas.append(area / pairs if pairs else np.nan)
    return np.array(areas)


def brier(predicted: Any, happened: Any) -> np.ndarray:
    """The mean squared distance of prediction and outcome (Brier 1950).

    Args:
      predicted: `[N, K]` chances.
      happened: `[N, K]`, 0 or 1.

    Returns:
      `[K]` float64, one score a slot.

    Raises:
      ValueError: shapes that do not fit, or no rows.

    Example:
      >>> brier([[0.5], [1.0]], [[1], [1]]).tolist()
      [0.125]
    """
    predicted, happened = _pairs(predicted, happened)
    return np.mean((predicted.astype(np.float64) - happened) ** 2, axis=0)


def sequential_temperature_scaling(
    confidence_logits: Any, accepted: Any, *, grid: Sequence[float] = _GRID, bins: int = 20
) -> np.ndarray:
    """A temperature for each slot's confidence, sigmoid(logit / T), from left to right.

    Each is the one of the grid with the smallest calibration error of the cumulative product, the
    temperatures of the slots before it being fixed; of equal ones, the closest to 1.

    Args:
      confidence_logits: `[N, K]`, of all slots of N drafts.
      accepted: `[N, K]`, 0 or 1: the drafts up to this slot all stood.
      grid: temperatures to try.
      bins: of the calibration error.

    Returns:
      `[K]` float64.

    Raises:
      ValueError: shapes that do not fit, no rows, no prefixes, or a temperature that is not
        positive.
    """
    logits, accepted = _pairs(confidence_logits, accepted)
    if np.any(np.diff(accepted, axis=1) > 0):
        raise ValueError(
            "accepted must be 1 up to some slot of each row and 0 from there on: a draft stands "
            "only if those before it do"
        )
    tried = np.asarray(grid, np.float64)
    if tried.ndim != 1 or not tried.size or not np.all(np.isfinite(tried) & (tried > 0)):
        raise ValueError(f"grid must be positive temperatures, got {grid!r}")
    tried = tried[np.argsort(np.abs(np.log(tried)), kind="stable")]
    before = np.ones(len(logits))
    found = []
    for logit, happened in zip(logits.T.astype(np.float64), accepted.T, strict=True):
        each = before[None] * _sigmoid(logit[None] / tried[:, None])  # [grid, N]
        best = int(np.argmin(_calibration_error(each, happened, bins)))
        before = each[best]
        found.append(tried[best])
    return np.array(found)


def _pairs(predicted: Any, happened: Any) -> tuple[np.ndarray, np.ndarray]:
    predicted, happened = np.asarray(predicted, np.float32), np.asarray(happened, np.float64)
    if predicted.ndim != 2 or predicted.shape != happened.shape or not len(predicted):
        raise ValueError(
            "predictions and outcomes must both be [N, K] with at least one row, got shapes "
            f"{predicted.shape} and {happened.shape}"
        )
    if not np.isin(happened, (0, 1)).all():
        raise ValueError("outcomes must be 0 or 1")
    return predicted, happened


def _bin(predicted: np.ndarray, bins: int) -> np.ndarray:
    clipped = np.clip(predicted, np.float32(_EPS), np.float32(1.0 - _EPS))
    return np.minimum((clipped * np.float32(bins)).astype(np.int64), bins - 1)


def _calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int) -> np.ndarray:
    """Of several predictions `[G, N]` of the same outcomes `[N]`: `[G]`."""
    tried, rows = predicted.shape
    index = _bin(predicted.astype(np.float32), bins) + bins * np.arange(tried)[:, None]
    gap = np.bincount(index.ravel(), (predicted - happened[None]).ravel(), bins * tried)
    return np.abs(gap).reshape(tried, bins).sum(axis=1) / rows


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
