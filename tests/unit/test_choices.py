"""Values that settings take: words, ranges, and composed values as typed objects."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from omegaconf import MISSING

from distill.config.kinds import make
from fsdp_cp.choices import Bounds, Checked, check_choices
from fsdp_cp.errors import UserError


@dataclass(kw_only=True)
class Inner:
    word: Literal["one", "two"] = "one"
    perhaps: Literal["first"] | None = None
    switch: bool | Literal["maybe"] = False
    degree: int | Literal["auto"] = "auto"
    free: str = "x"


@dataclass(kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    number: int = MISSING
    numbers: list[int] | Literal["all"] = field(default_factory=lambda: [0])


@pytest.mark.parametrize(
    "settings", [{"word": "three"}, {"word": None}, {"word": ["one"]}, {"perhaps": "last"}, {"switch": 1}], ids=str
)
def test_other_words_are_refused(settings):
    with pytest.raises(UserError, match=f"^a.{next(iter(settings))}\\b"):
        check_choices(Inner(**settings), "a.")


def test_listed_words_pass_and_numbers_are_left_to_others():
    for settings in ({}, {"word": "two", "perhaps": "first", "switch": "maybe"}, {"switch": True}, {"degree": "many"}):
        check_choices(Inner(**settings))


def test_composed_values_become_objects_of_the_class():
    values = {"number": 3, "numbers": "all", "inner": {"word": "two", "degree": 4, "switch": "maybe"}}
    assert make(Outer, values) == Outer(number=3, numbers="all", inner=Inner(word="two", degree=4, switch="maybe"))
    assert make(Outer, {"number": "1", "numbers": [2]}) == Outer(number=1, numbers=[2])
    assert make(Inner, {"switch": "yes"}).switch is True


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"number": "x"}, "number"),
        ({"number": True}, "number"),
        ({"number": 2**63}, "number"),
        ({"number": MISSING}, "number"),
        ({"number": 1, "numbers": [1.5]}, "numbers"),
        ({"number": 1, "inner": 3}, "inner"),
        ({"number": 1, "inner": {"word": None}}, "inner.word"),
        ({"number": 1, "inner": {"word": [1]}}, "inner.word"),
        ({"number": 1, "inner": {"switch": 7}}, "inner.switch"),
        ({"number": 1, "inner": {"wrod": "one"}}, "inner.wrod"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused_by_key(values, named):
    with pytest.raises(UserError, match=f"^{named}"):
        make(Outer, values)


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [({"least": 1}, 1, 0), ({"above": 3}, 4, 3), ({"most": 2}, 2, 3), ({"below": 3}, 2, 3)],
)
def test_numbers_outside_of_a_range_are_refused(bounds, right, wrong):
    number = Annotated[float, Bounds(**bounds)]
    fields = [("number", number | None, None), ("numbers", list[number] | Literal["all"], "all")]
    kind = dataclasses.make_dataclass("Kind", fields, bases=(Checked,), namespace={"prefix": "a."})
    for value in (wrong, float("nan")):
        with pytest.raises(UserError, match=r"^a\.number\b"):
            kind(number=value)
    with pytest.raises(UserError, match=r"^a\.numbers\b"):
        kind(numbers=[right, wrong])
    assert kind(numbers=[right]).number is None
