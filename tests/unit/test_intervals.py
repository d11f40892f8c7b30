"""Bootstrap-t intervals cover the true mean as often as they say, with skewed measures too."""

import numpy as np
import pytest

from distill.evaluate.intervals import bootstrap_t

REPEATS, PROMPTS, SEEDS = 1000, 64, 5


def normal(z):
    return z, 0.0


def lognormal(sigma):
    return lambda z: (np.exp(sigma * z), np.exp(sigma**2 / 2))


@pytest.mark.parametrize(
    ("name", "measure", "least", "most"),
    [
        ("normal", normal, 0.93, 0.97),
        ("lognormal .5", lognormal(0.5), 0.93, 0.97),
        ("lognormal 1", lognormal(1.0), 0.91, 0.97),
    ],
)
def test_coverage(name, measure, least, most):
    """Prompts explain most of the variance; seeds are averaged within a prompt."""
    rng = np.random.default_rng(0)
    of_prompt = rng.standard_normal((PROMPTS, 1, REPEATS))
    of_clip = rng.standard_normal((PROMPTS, SEEDS, REPEATS))
    values, truth = measure(0.9**0.5 * of_prompt + 0.1**0.5 * of_clip)
    interval = bootstrap_t(values.mean(axis=1))
    covered = float(((interval["low"] <= truth) & (truth <= interval["high"])).mean())
    assert least <= covered <= most, (name, covered)


def test_an_interval_over_clips_would_cover_too_little():
    rng = np.random.default_rng(0)
    clips = (rng.standard_normal((PROMPTS, 1, 200)) + 0.3 * rng.standard_normal((PROMPTS, SEEDS, 200))).reshape(-1, 200)
    interval = bootstrap_t(clips)
    assert ((interval["low"] <= 0) & (interval["high"] >= 0)).mean() < 0.8


def test_intervals_follow_scale_and_shift_and_a_constant_has_none():
    values = np.random.default_rng(1).lognormal(size=40)
    plain, moved = bootstrap_t(values), bootstrap_t(1e6 + 3 * values)
    assert np.allclose([moved["low"] - 1e6, moved["high"] - 1e6], [3 * plain["low"], 3 * plain["high"]], rtol=1e-6)
    below, above = plain["value"] - plain["low"], plain["high"] - plain["value"]
    assert 0 < below < above, "skewed"
    constant = bootstrap_t(np.full(8, 0.3))
    assert constant["low"] == constant["value"] == constant["high"] and constant["standard_error"] == 0
    several = bootstrap_t(np.stack([values, np.full(40, 2.0)], axis=1))
    assert np.isclose(several["low"][0], plain["low"]), "measures share the draws"
    assert several["low"][1] == several["high"][1] == 2
