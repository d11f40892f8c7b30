"""95 % confidence intervals of a mean over prompts: bootstrap-t.

Percentile intervals cover too little with skewed measures and few prompts. Bootstrap-t resamples the studentized mean
instead, so the interval takes the skewness into account (Efron and Tibshirani, An Introduction to the Bootstrap,
section 12.5). Prompts are resampled, never clips: average the seeds of a prompt first.
"""

import numpy as np

DRAWS = 2000
_SEED = 20240917
_LEVEL = 0.95


def bootstrap_t(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``value``, ``low``, ``high`` and ``standard_error`` of the means over prompts, the first axis of finite
    ``values``, ``(n,)`` or ``(n, m)`` for m measures, which share the draws; n >= 2."""
    count = len(values)
    x = values - values.mean(axis=0)  # centered, so that the variances below do not cancel
    error = x.std(axis=0, ddof=1) / np.sqrt(count)
    weights = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), DRAWS) / count
    means = weights @ x
    errors = np.sqrt(np.maximum(weights @ x**2 - means**2, 0) / (count - 1))
    # A draw of equal values has no studentized mean. Rounding must not give it one.
    told = errors > 1e-9 * error
    ratios = np.where(told, means / np.where(told, errors, 1), np.nan)
    ratios = np.where(told.any(axis=0), ratios, 0)  # the values of all prompts are equal
    tails = (1 - _LEVEL) / 2
    upper, lower = np.nanquantile(ratios, [1 - tails, tails], axis=0)
    mean = values.mean(axis=0)
    return {"value": mean, "low": mean - upper * error, "high": mean - lower * error, "standard_error": error}
