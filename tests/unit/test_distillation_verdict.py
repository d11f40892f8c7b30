"""What the benchmark of the methods demands of its students, on rows made up to lie on either side of each demand."""

import pytest

from benchmarks.distillation import Row, judge, judge_evaluations, over_seeds, table
from distill.report.measures import HIGHER_IS_BETTER, Measure

GOOD = {key: 1.0 if higher else 0.1 for key, higher in HIGHER_IS_BETTER.items()}
EDGES = "distance/edge_sharpness"


def row(steps, error=0.01, **changes):
    values = GOOD | changes
    return Row(name="network", steps=steps, measures={key: Measure(value, error) for key, value in values.items()})


def verdict(student, lost=None):
    """Of a student whose one-step values are ``student``; the teacher's in one step are worse by ``lost``."""
    teachers = {1: row(1, **(lost or {})), 2: row(2), 4: row(4), 50: row(50)}
    return judge("dmd2", teachers, {1: row(1, **student), 2: row(2), 4: row(4)})


def test_a_student_that_wins_back_enough():
    good, lines = verdict({EDGES: 0.29}, {EDGES: 1.1})
    assert good and lines[0] == "| dmd2, 1 step | distance/edge sharpness | 70.7 | 81% | yes |"
    assert len(lines) == 3, "the other two are the accuracies in four steps"


@pytest.mark.parametrize(
    ("key", "lost", "student"), [(EDGES, 1.1, 0.31), ("colour_accuracy", 0.5, 0.89), ("motion_accuracy", 0.0, 0.79)]
)
def test_a_student_that_does_not(key, lost, student):
    good, lines = verdict({key: student}, {key: lost})
    assert not good and lines[0].endswith("| **no** |")


def test_what_the_teacher_does_not_lose_is_not_demanded():
    """Less than three standard errors: .042 with .01 * sqrt(2) of error."""
    assert verdict({EDGES: 5.0}, {EDGES: 0.142})[0]
    assert not verdict({EDGES: 5.0}, {EDGES: 0.143})[0]


@pytest.mark.parametrize(("accuracy", "good"), [(0.951, True), (0.949, False)])
@pytest.mark.parametrize("key", ["colour_accuracy", "motion_accuracy"])
def test_accuracy_in_four_steps(key, accuracy, good):
    teachers = {n: row(n) for n in (1, 2, 4, 50)}
    assert judge("rcm", teachers, {1: row(1), 2: row(2), 4: row(4, **{key: accuracy})})[0] == good


def test_a_mean_over_seeds_has_the_error_of_their_difference():
    mean = over_seeds([row(1, **{EDGES: value}) for value in (0.1, 0.2, 0.6)], "dmd2").measures
    assert mean[EDGES].value == pytest.approx(0.3)
    assert mean[EDGES].standard_error == pytest.approx((0.07 / 3) ** 0.5)
    assert mean["colour_accuracy"].standard_error == pytest.approx(0.01 / 3**0.5), "of seeds that agree by chance"


@pytest.mark.parametrize(("most", "even"), [(100.9, True), (101.1, False)])
def test_equal_numbers_of_evaluations(most, even):
    good, lines = judge_evaluations({"dmd2": [100e3, 100.4e3], "scm": [most * 1e3]}, {"dmd2": 7, "scm": 9})
    assert good == even and f"| scm | {most} | 9 |" in lines
    assert lines[-1] == f"The largest number is {most / 100:.4f} times the smallest."


def test_a_row_of_the_table():
    line = table([row(1, **{"colour_accuracy": float("nan")})]).splitlines()[-1]
    assert line.startswith("| network, 1 step | none | 1.000 ± 0.010 | 0.100 ± 0.010 |")
