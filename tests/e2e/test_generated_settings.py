"""Generated command lines through ``train.py``: exit code 0, or 2 with one line, and nothing is written or imported.

Keys come from the dataclasses, values from every kind that a shell can pass. 0 may only come out where the value is of
the setting's kind.
"""

import ast
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distill.config import SETTINGS
from distill.config.errors import CONFIGS
from tests.e2e import mistakes
from train import main

SECONDS = 30
SETUP = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
KEYS = sorted(SETTINGS)
GROUPS = {group: sorted(p.stem for p in (CONFIGS / group).glob("*.yaml")) for group in ("experiment", "method", "data")}
SPY = "tests.e2e.imported_by_a_setting"
"""A module that is imported by whoever takes ``_target_`` for more than text."""

numbers = st.one_of(
    st.integers(-(10**25), 10**25),
    st.integers(-3, 20),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.sampled_from(["nan", "-inf", "1e400", "-0.0", "0x10", "1_000", "1e-320", "٣", "1e", "--5"]),
).map(str)
words = st.one_of(
    st.sampled_from(
        [
            "null",
            "true",
            "False",
            "yes",
            "off",
            "auto",
            "???",
            "never",
            "fp32",
            "bf16",
            "none",
            "full",
            "a b",
            "~",
            "..",
        ]
    ),
    st.text(max_size=12),
    st.text(st.sampled_from("'\"\\{}[]()$,:=#&;~ ?*"), min_size=1, max_size=8),
    st.text(st.characters(categories=["Cc", "Zl", "Zp", "Cf", "So", "Lo"]), min_size=1, max_size=4),
    st.integers(1, 6).map(lambda n: "x" * 10**n if n < 5 else "y/" * 10**4),
)
injections = st.sampled_from(
    [
        f"{{_target_:{SPY}.run}}",
        f"{{_target_: {SPY}.run, _args_: [1]}}",
        f"{{_target_: builtins.__import__, name: {SPY}}}",
        f"{{a: {{_target_: {SPY}.run}}}}",
        f"[{{_target_: {SPY}.run}}]",
        f"${{{SPY}}}",
        "${oc.env:HOME}",
        "${oc.env:NOT_SET_ANYWHERE}",
        "${oc.decode:'[1,2]'}",
        "${hydra:runtime.cwd}",
        "${steps}",
        "${method.name}",
        "${.lr}",
        "${",
        "!!python/object/apply:os.getcwd []",
        "{}",
        "[]",
        "{a: 1, b: [2, {c: 3}]}",
        "[[1], [2]]",
        "[null]",
        "(1, 2)",
        "choice(1,2)",
        "glob(*)",
        "extend_list(1)",
        "int(3.0)",
        "str(5)",
    ]
)
lists = st.lists(st.one_of(numbers, st.sampled_from(["a", "null", "true", "'q, r'", "[1]"])), max_size=4).map(
    lambda items: f"[{','.join(items)}]"
)


def weighted(**weights):
    """One of the strategies of that name in this module, as often as its weight says; ``one_of`` takes sides."""
    names = [name for name, weight in weights.items() for _ in range(weight)]
    return st.sampled_from(names).flatmap(lambda name: globals()[name])


values = weighted(numbers=3, words=3, injections=3, lists=1)
real_keys = st.sampled_from(KEYS)
free_keys = st.sampled_from(["student.architecture", "optim.student.lr_scale", "sample.captions", "method.step_list"])
broken_keys = st.one_of(
    st.sampled_from(KEYS).flatmap(lambda key: st.integers(0, len(key) - 1).map(lambda i: key[:i] + key[i + 1 :])),
    st.tuples(st.sampled_from(KEYS), st.sampled_from(["x", "0", "_target_", "lr"])).map(".".join),
    st.text(st.sampled_from("abcxyz._@/:+~ -=0"), min_size=1, max_size=10),
)
keys = weighted(real_keys=12, free_keys=3, broken_keys=2)
prefixes = st.sampled_from([*[""] * 20, "+", "+", "++", "++", "~", "-", "--"])
assignments = st.tuples(prefixes, keys, values).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}")
choices = st.sampled_from(sorted(GROUPS)).flatmap(
    lambda group: st.sampled_from(GROUPS[group]).map(f"{group}={{}}".format)
)
rest = st.one_of(words, st.sampled_from(["--help", "-m", "--cfg", "job", "-c", "--", "-", "=", "hydra.run.dir=x"]))
lines = st.lists(weighted(assignments=14, choices=3, rest=1), min_size=1, max_size=3)
modes = st.sampled_from([["dry_run=true"], ["dry_run=true"], ["dry_run=true"], ["--cfg", "job"], ["--help"]])


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """The working directory and the home folder of every example; empty for good."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder / "home"))
        yield folder


def end_of(line, room):
    """Exit code and stderr of ``train.py`` with ``line``; whatever it may not do fails here."""
    before = mistakes.outside()
    outcome = mistakes.called(main, line, SECONDS)
    assert outcome.code in (0, 2), (line, outcome)
    assert "Traceback" not in outcome.error, (line, outcome)
    if outcome.code == 2:
        (only,) = outcome.error.splitlines()
        assert only.startswith("error: ") and len(only) > 20, (line, only)
        assert not any(word in only for word in ("full_key", "object at 0x", "hydra.cc", "<class")), (line, only)
    assert SPY not in sys.modules
    assert mistakes.listing(room, deep=False) == {"home": "folder"} and mistakes.outside() == before, line
    return outcome


@pytest.mark.slow
@settings(max_examples=36, **SETUP)
@given(line=lines, mode=modes)
@example(line=["optim.student.betas=[[0.9],[0.99]]"], mode=["dry_run=true"])
@example(line=["student.compile=2"], mode=["dry_run=true"])
@example(line=["mesh.ulysses=true"], mode=["dry_run=true"])
@example(line=["mesh.cp.x=1"], mode=["dry_run=true"])
@example(line=["student.architecture=tiny", "student.checkpoint=null"], mode=["dry_run=true"])
def test_any_command_line(room, line, mode):
    end_of([*line, *mode, "device=cpu", "mesh.cp=1"], room)


def kind_of(value):
    """The Python value that a user meant, where it is one."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def typed_settings():
    """(key, kind) of every setting of the quickstart that is a number or a switch."""
    for key, owners in SETTINGS.items():
        kind, *others = owners[0].types
        chosen = {"method": "dmd2", "data": "moving_shapes"}.get(key.partition(".")[0])
        if others or kind not in (int, float, bool):
            continue
        if chosen is None or any(owner.owner.name == chosen for owner in owners):
            yield key, kind, owners[0].optional


@pytest.mark.slow
@settings(max_examples=20, **SETUP)
@given(chosen=st.sampled_from(sorted(typed_settings(), key=str)), value=st.one_of(numbers, words.filter(bool), lists))
def test_no_value_of_another_kind_is_taken(room, chosen, value):
    """What ends with 0 is a number for a number, a switch for a switch, null where it may be."""
    key, kind, optional = chosen
    outcome = end_of(
        [f"{key}={value}", "device=cpu", *(["mesh.cp=1"] if key != "mesh.cp" else []), "--cfg", "job"], room
    )
    meant = kind_of(value.strip())
    if outcome.code == 0:
        if meant is None:
            assert optional, (key, value)
        elif kind is bool:
            assert value.strip().lower() in "true false yes no on off y n 0 1".split(), (key, value)
        else:
            assert isinstance(meant, int | float) and not isinstance(meant, bool), (key, value)
            assert kind is float or isinstance(meant, int), (key, value)
            assert abs(meant) < 4e38, (key, value)


@settings(max_examples=10, **SETUP)
@given(line=lines, mode=modes)
def test_some_of_each(room, line, mode):
    """A few of them at once; the others are with the slow tests."""
    end_of([*line, *mode, "device=cpu", "mesh.cp=1"], room)
