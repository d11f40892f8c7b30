"""The verdict of the benchmark of methods, on rows made up on either side of each demand."""

import pytest

from benchmarks.distillation import Row, judge, judge_evaluations, over_seeds
from distill.report.measures import HIGHER_IS_BETTER, Measure

GOOD = {key: 1.0 if higher else 0.1 for key, higher in HIGHER_IS_BETTER.items()}
EDGES = "distance/edge_sharpness"


def row(steps, error=0.01, **changes):
    values = GOOD | changes
    return Row(name="network", steps=steps, measures={key: Measure(value, error) for key, value in values.items()})


def verdict(student, lost=None):
    """Judge a student by its one-step values, where the one-step teacher is worse by ``lost``."""
    teachers = {1: row(1, **(lost or {})), 2: row(2), 4: row(4), 50: row(50)}
    return judge("dmd2", teachers, {1: row(1, **student), 2: row(2), 4: row(4)})


@pytest.mark.parametrize(
    ("key", "lost", "enough", "too_little"),
    [(EDGES, 1.1, 0.29, 0.31), ("colour_accuracy", 0.5, 0.91, 0.89), ("motion_accuracy", 0.0, 0.81, 0.79)],
)
def test_a_student_must_win_back_what_the_teacher_loses(key, lost, enough, too_little):
    assert verdict({key: enough}, {key: lost})[0] and not verdict({key: too_little}, {key: lost})[0]


def test_a_loss_below_three_standard_errors_counts_as_none():
    """Three standard errors are .042, since the error of the difference is .01 * sqrt(2)."""
    assert verdict({EDGES: 5.0}, {EDGES: 0.142})[0]
    assert not verdict({EDGES: 5.0}, {EDGES: 0.143})[0]
    teachers = {n: row(n) for n in (1, 2, 4, 50)}
    for key in ("colour_accuracy", "motion_accuracy"):
        for accuracy, good in ((0.951, True), (0.949, False)):
            assert judge("rcm", teachers, {1: row(1), 2: row(2), 4: row(4, **{key: accuracy})})[0] == good, key


def test_a_mean_over_seeds_has_the_error_of_their_difference():
    mean = over_seeds([row(1, **{EDGES: value}) for value in (0.1, 0.2, 0.6)], "dmd2").measures
    assert mean[EDGES].value == pytest.approx(0.3)
    assert mean[EDGES].standard_error == pytest.approx((0.07 / 3) ** 0.5)
    assert mean["colour_accuracy"].standard_error == pytest.approx(0.01 / 3**0.5), "of seeds that agree by chance"


@pytest.mark.parametrize(("most", "even"), [(100.9, True), (101.1, False)])
def test_equal_numbers_of_evaluations(most, even):
    assert judge_evaluations({"dmd2": [100e3, 100.4e3], "scm": [most * 1e3]}, {"dmd2": 7, "scm": 9})[0] == even
