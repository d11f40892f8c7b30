"""Output of ``train.py --help`` and ``--help all``."""

import re

from distill.config import compose_config
from distill.config.errors import CONFIGS, choices
from distill.config.schema import SETTINGS
from distill.config.usage import information, usage
from distill.data.settings import DATA
from distill.methods import METHODS
from tests.tiers import slow
from tests.unit.refused import refused

LINES, COLUMNS = 180, 120


def test_the_help_of_a_method_fits_three_screens():
    lines = information(["--help", "method=dmd2"]).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    own = [line.split("=")[0].strip() for line in lines if line.startswith("  method.")]
    assert own == [f"method.{name}" for name in vars(METHODS["dmd2"][1]()) if name != "name"], "each once, no other's"


@slow
def test_every_setting_is_in_the_short_help_of_its_run_too():
    config = compose_config([])
    text = "\n".join(usage(config))
    names = set(re.findall(r"(\w+)=", text))
    chosen = {type(config.method), type(config.data)}
    for key, settings in SETTINGS.items():
        last = key.rpartition(".")[2]
        other = key.startswith(("method.", "data.")) and all(s.owner not in chosen for s in settings)
        if not settings[0].group and last not in ("name", "method", "data") and not other:
            assert last in names, key


@slow
def test_the_long_help_has_every_choice_and_every_setting_with_its_meaning():
    in_full = information(["--help", "all"])
    sections = dict(re.findall(r"^(\w+Settings|Config)[^\n]*:\n((?:  [^\n]*\n?)+)", in_full, re.M))
    owners = [settings for _, settings in METHODS.values()] + list(DATA.values())
    for key, settings in SETTINGS.items():
        for setting in settings:
            if setting.group or key in ("method", "data") or key.endswith(".name"):
                continue
            section = sections[setting.owner.__name__ if setting.owner in owners else "Config"]
            assert re.search(rf"^  {re.escape(key)}(=.*)?  +\S", section, re.M), f"{key} has no meaning"
    for text in (in_full, information(["--help"])):
        flat = " ".join(text.split())
        for group in ("experiment", "model", "method", "recipe", "data", "cluster"):
            assert f"{group}= {' | '.join(choices(group))}" in flat
        for name in (*METHODS, *DATA, *(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))):
            assert f" {name} " in flat


def test_a_mistake_beside_help_is_a_line():
    with refused("method=foo"):
        information(["--help", "method=foo"])
    with refused("all"):
        information(["all", "--help"])
