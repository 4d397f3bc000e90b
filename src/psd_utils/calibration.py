"""Confidence and correctness -> a reliability diagram and the expected calibration error."""

from dataclasses import dataclass

import numpy as np

from .errors import PsdError

N_BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Tokens by how sure the model was of its most probable token, in equal bins of [0, 1].

    `counts` int64 [bins]; `confidence` and `accuracy` float64 [bins], means within a bin, NaN where it is empty;
    `error` is the expected calibration error, Σ (count/N)·|accuracy − confidence|, from 0 to 1.
    """

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    error: float


def reliability(confidence: np.ndarray, correct: np.ndarray, n_bins: int = N_BINS) -> Reliability:
    """Return the reliability of top-one predictions: `confidence` [N] in [0, 1], `correct` [N] bool.

    Raises:
        PsdError: no tokens, shapes that differ, or a confidence outside [0, 1].
    """
    if confidence.shape != correct.shape or confidence.ndim != 1 or confidence.size == 0:
        raise PsdError(
            f"confidence and correctness of shapes {confidence.shape} and {correct.shape}: expected [N], N ≥ 1"
        )
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise PsdError("a confidence must lie between 0 and 1")
    place = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    counts = np.bincount(place, minlength=n_bins)
    sums = [np.bincount(place, weights=x, minlength=n_bins) for x in (confidence, correct.astype(float))]
    error = float(np.abs(sums[1] - sums[0]).sum() / len(confidence))
    with np.errstate(invalid="ignore"):
        mean_confidence, accuracy = (x / counts for x in sums)
    return Reliability(counts, mean_confidence, accuracy, error)
