"""Intervals cover the true mean as often as they say: of skewed measures, shares, tied values and differences."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import KINDS, simulate
from distill.evaluate.comparison import mean_over_prompts, summarize, verdict
from distill.evaluate.intervals import mean_interval, share_interval

KIND = {kind.name: kind for kind in KINDS}
REPEATS = 1000


@pytest.mark.parametrize(
    ("name", "prompts", "least"),
    [
        ("normal", 8, 0.93),
        ("normal", 100, 0.93),
        ("lognormal 1", 20, 0.91),
        ("share 0.5", 8, 0.9),
        ("share 0.97", 20, 0.91),
        ("share 0.99", 100, 0.9),
    ],
)
def test_coverage(name, prompts, least):
    for seeds in (1, 5):
        found = simulate(KIND[name], prompts, seeds, REPEATS, is_difference=False)
        assert least <= 1 - found.above - found.below <= 0.99, (name, found)


@pytest.mark.parametrize("name", ["normal", "lognormal 1", "share 0.97", "90 % ties"])
def test_a_difference_of_nothing_is_seldom_called_one(name):
    for prompts in (8, 20):
        found = simulate(KIND[name], prompts, 1, REPEATS, is_difference=True)
        assert max(found.above, found.below) <= 0.035 or found.without_spread > 0.025, found


def test_an_interval_over_clips_would_cover_too_little():
    rng = np.random.default_rng(0)
    clips = (rng.standard_normal((64, 1, 200)) + 0.3 * rng.standard_normal((64, 5, 200))).reshape(-1, 200)
    interval = mean_interval(clips)
    assert ((interval["low"] <= 0) & (interval["high"] >= 0)).mean() < 0.8


def test_tied_values_do_not_break_bounds_and_make_no_difference():
    """Bootstrap-t alone gave [-4.9e6, 1.005] for the first, and called the last two ``higher``."""
    right = share_interval(np.array([1.0] * 99 + [0.0]), 100)
    assert (right["low"], right["high"]) == (pytest.approx(0.9455, abs=1e-4), pytest.approx(0.9982, abs=1e-4)), "Wilson"
    as_mean = mean_over_prompts(np.array([1.0] * 99 + [0.0]))
    assert as_mean["low"] == pytest.approx(0.97, abs=1e-3) and as_mean["high"] == pytest.approx(1.01, abs=1e-3), "t"
    for values in ([0.0] * 50 + [0.2] * 2, [0.1] * 7 + [-0.5]):
        assert verdict(mean_over_prompts(np.array(values))) == "no difference shown"


def test_a_bound_is_at_least_as_wide_as_students():
    rng = np.random.default_rng(0)
    tied = np.zeros((60, 200))
    tied[:2] = rng.random((2, 200))
    for values in (rng.standard_normal((20, 200)), rng.lognormal(size=(8, 200)), tied):
        found = mean_interval(values)
        low, high = stats.t.interval(0.95, len(values) - 1, values.mean(axis=0), stats.sem(values))
        assert (found["low"] <= low + 1e-9).all() and (found["high"] >= high - 1e-9).all()
        is_t = np.isclose(found["low"], low) & np.isclose(found["high"], high)
        assert is_t.all() if values is tied else is_t.mean() < 0.5, "ties have t alone"


def test_the_clips_of_a_share_count_for_as_many_as_they_are_worth():
    rng = np.random.default_rng(0)
    one = rng.random(40) < 0.7
    alike = share_interval(one.astype(float), 200)
    single = share_interval(one.astype(float), 40)
    assert alike == pytest.approx(single, abs=1e-3), "five equal clips of a prompt are one"
    apart = (rng.random((40, 5)) < 0.7).mean(axis=1)
    assert share_interval(apart, 200)["standard_error"] < 0.6 * single["standard_error"]
    width = {count: share_interval(np.full(40, 0.8), count) for count in (40, 200)}
    assert width[40]["low"] == width[200]["low"], "shares without variance count by prompts"
    for p in (0.0, 1.0):
        edge = share_interval(np.full(8, p), 40)
        assert 0 <= edge["low"] < edge["high"] <= 1 and edge["high"] - edge["low"] > 0.3


def test_a_measure_that_is_a_share_gets_its_interval_from_all_of_its_clips():
    clips = (np.random.default_rng(0).random((40, 5)) < 0.3).astype(float)
    found = summarize({"one": {"static": clips.tolist()}}, None)["one"]["static"]
    right = share_interval(clips.mean(axis=1), 200)
    assert (found["low"], found["high"]) == (right["low"], right["high"])
    assert found["high"] - found["low"] < 0.9 * np.subtract(
        *[share_interval(clips[:, 0], 40)[k] for k in ("high", "low")]
    )


def test_intervals_follow_scale_and_shift_and_a_constant_has_none():
    values = np.random.default_rng(1).lognormal(size=40)
    plain, moved = mean_interval(values), mean_interval(1e6 + 3 * values)
    assert np.allclose([moved["low"] - 1e6, moved["high"] - 1e6], [3 * plain["low"], 3 * plain["high"]], rtol=1e-6)
    below, above = plain["value"] - plain["low"], plain["high"] - plain["value"]
    assert 0 < below < above, "skewed"
    constant = mean_interval(np.full(8, 0.3))
    assert constant["low"] == constant["value"] == constant["high"] and constant["standard_error"] == 0
    several = mean_interval(np.stack([values, np.full(40, 2.0)], axis=1))
    assert np.isclose(several["low"][0], plain["low"]), "measures share the draws"
    assert several["low"][1] == several["high"][1] == 2
