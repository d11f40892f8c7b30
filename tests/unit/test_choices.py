"""Settings whose type is a ``Literal``: which words they refuse, and how OmegaConf sees them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_origin

import pytest
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ValidationError

from distill.config.schema import Config
from distill.config.without_literals import without_literals
from distill.data import DATA
from distill.methods import METHODS
from fsdp_cp.choices import check_choices
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
    with pytest.raises(UserError, match=f"^a.{next(iter(settings))}="):
        check_choices(Inner(**settings), "a.")


def test_listed_words_pass_and_numbers_are_left_to_others():
    for settings in ({}, {"word": "two", "perhaps": "first", "switch": "maybe"}, {"switch": True}, {"degree": "many"}):
        check_choices(Inner(**settings))


def test_omegaconf_makes_objects_of_the_class_itself():
    shown = OmegaConf.structured(without_literals(Outer))
    assert OmegaConf.to_object(OmegaConf.merge(shown, {"number": 1})) == Outer(number=1)
    made = OmegaConf.to_object(
        OmegaConf.merge(
            shown, {"number": 3, "numbers": "all", "inner": {"word": "two", "degree": 4, "switch": "maybe"}}
        )
    )
    assert made == Outer(number=3, numbers="all", inner=Inner(word="two", degree=4, switch="maybe"))
    assert type(made) is Outer and type(made.inner) is Inner, "or == would tell two equal ones apart"
    for wrong in ({"number": "x"}, {"inner": {"word": None}}, {"inner": {"word": [1]}}):
        with pytest.raises(ValidationError):
            OmegaConf.merge(shown, wrong)


def test_omegaconf_is_shown_every_field():
    for owner in (Config, *(settings for _, settings in METHODS.values()), *DATA.values()):
        shown = dataclasses.fields(without_literals(owner))
        assert [f.name for f in shown] == [f.name for f in dataclasses.fields(owner)]
        assert all(get_origin(f.type) is not Literal for f in shown)
