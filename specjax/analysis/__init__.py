"""What can be told about drafting from numbers: calibration of confidences, lengths to verify."""

from specjax.analysis.acceptance import AcceptanceSummary, summary
from specjax.analysis.calibration import (
    auroc,
    brier,
    expected_calibration_error,
    sequential_temperature_scaling,
    survival,
)
from specjax.analysis.scheduling import verify_lengths

__all__ = [
    "AcceptanceSummary",
    "auroc",
    "brier",
    "expected_calibration_error",
    "sequential_temperature_scaling",
    "summary",
    "survival",
    "verify_lengths",
]
