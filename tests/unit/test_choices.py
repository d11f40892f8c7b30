"""Settings whose hint is a ``Literal``: what they refuse, and how OmegaConf is shown them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Literal, get_origin

import pytest
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ValidationError

from distill.config.schema import SETTINGS, Config
from distill.config.usage import _field_docs
from distill.config.without_literals import without_literals
from distill.data import DATA
from distill.methods import METHODS
from fsdp_cp.choices import check_choices, words
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
    ("settings", "message"),
    [
        ({"word": "three"}, "a.word=three is unknown; use one or two"),
        ({"word": None}, "a.word=null is unknown; use one or two"),
        ({"word": ["one"]}, r"a.word=\[one\] is unknown; use one or two"),
        ({"perhaps": "last"}, "a.perhaps=last is unknown; use first, or null for none"),
        ({"switch": "no"}, "a.switch=no is unknown; use maybe or true or false"),
        ({"switch": 1}, "a.switch=1 is unknown; use maybe or true or false"),
        ({"switch": None}, "a.switch=null is unknown; use maybe or true or false"),
    ],
    ids=str,
)
def test_other_words_are_refused(settings, message):
    with pytest.raises(UserError, match=f"^{message}$"):
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


def test_a_group_whose_default_is_another_is_refused():
    @dataclass(kw_only=True)
    class Odd:
        inner: Inner = field(default_factory=lambda: Inner(word="two"))

    Odd.__init__.__globals__.setdefault("Inner", Inner)
    with pytest.raises(TypeError, match="the default of a group of settings is its class"):
        without_literals(Odd)


FREE = ("attention.backend", "checkpoint.resume", ".family")
"""Whose words are not all known here: kernels that are installed, folders, families of other packages."""


def test_every_setting_of_a_few_words_is_a_literal():
    declared = {key for key, owners in SETTINGS.items() if any(words(kind) for s in owners for kind in s.types)}
    assert {"precision", "student.offload", "method.rollout", "data.image", "mesh.ring"} <= declared
    for key, owners in SETTINGS.items():
        for setting in owners:
            said = _field_docs(setting.owner).get(key.rpartition(".")[2], "")
            if str in setting.types and re.match(r"``\w+``[^.]*\bor ``\w+``", said):
                assert key.endswith(FREE), f"{key} is a choice: {said}"


@pytest.mark.parametrize("owner", [Config, *(settings for _, settings in METHODS.values()), *DATA.values()])
def test_omegaconf_is_shown_every_field(owner):
    assert [f.name for f in dataclasses.fields(without_literals(owner))] == [f.name for f in dataclasses.fields(owner)]
    assert all(get_origin(f.type) is not Literal for f in dataclasses.fields(without_literals(owner)))
