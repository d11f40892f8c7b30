"""95 % confidence intervals over prompts, of means and of shares.

Prompts are resampled, never clips: average the seeds of a prompt first. ``python -m benchmarks.intervals`` prints how
often the bounds miss.
"""

import numpy as np
from scipy.special import ndtri, stdtrit

DRAWS = 2000
_SEED = 20240917
_LEVEL = 0.95
_TAIL = (1 - _LEVEL) / 2
_MOST_WITHOUT_SPREAD = 0.025
"""Share of draws of equal values above which the draws have no quantiles to go by: too many values are tied."""

Interval = dict[str, np.ndarray]


def mean_interval(values: np.ndarray) -> Interval:
    """Return ``value``, ``low``, ``high`` and ``standard_error`` of the means over prompts.

    Each bound is the wider one of Student's t and bootstrap-t. Bootstrap-t resamples the studentized mean, so its
    interval follows the skewness (Efron and Tibshirani, An Introduction to the Bootstrap, section 12.5), but it fails
    on few or tied values, where t alone holds.

    Args:
        values: finite, ``(n,)`` or ``(n, m)`` for m measures, which share the draws; n >= 2.
    """
    count, mean = len(values), values.mean(axis=0)
    centered = values - mean  # so that the variances below do not cancel
    error = centered.std(axis=0, ddof=1) / np.sqrt(count)
    weights = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), DRAWS) / count
    means = weights @ centered
    variances = weights @ centered**2 - means**2
    errors = np.sqrt(np.maximum(variances, 0) / (count - 1))
    has_spread = errors > 1e-4 * error  # rounding must not give a draw of equal values one
    ratios = np.where(has_spread, means / np.where(has_spread, errors, 1), 0)
    lower, upper = np.quantile(ratios, [_TAIL, 1 - _TAIL], axis=0)
    of_t = stdtrit(count - 1, 1 - _TAIL)
    is_told = (~has_spread).mean(axis=0) <= _MOST_WITHOUT_SPREAD
    below = np.where(is_told, np.maximum(upper, of_t), of_t)
    above = np.where(is_told, np.maximum(-lower, of_t), of_t)
    return {"value": mean, "low": mean - below * error, "high": mean + above * error, "standard_error": error}


def share_interval(shares: np.ndarray, clips: int) -> Interval:
    """Return the same for shares of ``clips`` in all, by prompt in ``(n,)`` or ``(n, m)``: Wilson's interval.

    Clips of a prompt are alike, so they count for fewer: for as many independent ones as would give the mean the
    variance that prompts show, within n and ``clips``.
    """
    count, p = len(shares), shares.mean(axis=0)
    error = shares.std(axis=0, ddof=1) / np.sqrt(count)
    variance = p * (1 - p)
    effective = np.divide(variance, error**2, out=np.full_like(p, count), where=error > 0)
    n, z = np.clip(effective, count, clips), ndtri(1 - _TAIL)
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(variance / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    low, high = np.maximum(center - half, 0), np.minimum(center + half, 1)
    return {"value": p, "low": low, "high": high, "standard_error": error}
