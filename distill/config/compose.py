"""Composition of Hydra's groups in ``configs/`` and a command line into a checked configuration."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from distill.config.checks import check
from distill.config.errors import (
    CONFIGS,
    GROUPS,
    check_choice,
    no_recipe,
    no_such_setting,
    recipes_of,
    search_path,
    sized_data,
)
from distill.config.kinds import REMOVED, RENAMED, NoSuchSetting, Setting, make, short
from distill.config.schema import SETTINGS, Config
from distill.data.settings import DATA
from distill.methods import METHODS
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, one_line
from fsdp_cp.progress import first_rank_log

log = first_rank_log(__name__)

PATHS = ("run_dir", "checkpoint", "training_adapter", "path", "encoders", "cache", "resume")
"""Last parts of the keys of settings that take a path."""


def wanted_information(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the option in ``arguments`` (``"help"``, ``"help all"``, ``"cfg"`` or ``None``) and the other words."""
    wanted, words = None, []
    rest = iter(arguments)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in ("-h", "--help") and value in ("", "all"):
            wanted = f"help {value}".strip()
        elif word == "all" and wanted == "help":
            wanted = "help all"
        elif flag in ("-c", "--cfg"):
            if (value := value or next(rest, "")) != "job":
                raise UserError(f"{flag} {value}: train.py shows only the run's own configuration; use --cfg job")
            wanted = wanted or "cfg"
        elif word.startswith("-"):
            key = flag.lstrip("-").replace("-", "_") or "steps"
            raise UserError(f"unknown option {flag}; write settings as key=value, for example {key}=VALUE (see --help)")
        else:
            words.append(word)
    return wanted, words


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of a word, without Hydra's ``+`` or ``++``."""
    key, equals, value = word.partition("=")
    wrong = next((c for c in word if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if wrong is not None:
        raise UserError(f"{key.strip()[:60]!r} contains the character {wrong!r}; give it as plain text on one line")
    if key.startswith("~"):
        raise UserError(f"{word}: a setting cannot be deleted; use {key[1:]}=VALUE")
    if not equals:
        raise UserError(f"{word!r} is not key=value; leave no spaces around the =, and quote a value that has some")
    key = key.lstrip("+")
    if value == "" and not key.endswith(".negative_prompt"):
        raise UserError(f"{key}= is empty (a shell variable that is not set?); give a value, or leave it out")
    return key, value


def parsed_value(key: str, value: str, setting: Setting) -> Any:
    """Return a typed value, which is in Hydra's grammar. Text needs no quotes, and a path may begin with ``~``."""
    is_quoted = re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", value)
    if setting.is_text and value != "null" and not is_quoted:
        if key.rpartition(".")[2] not in PATHS:
            return value
        path = user_path(value, key)
        return str(path) if value.startswith("~") else value
    word = f"{key}={value}"
    override = OverridesParser.create().parse_override(word)
    if override.is_sweep_override():
        raise UserError(f"{short(word)} has several values; use python -m distill.sweep to run each of them")
    return override.value()


@cache
def _register() -> None:
    """Store the defaults of every dataclass for Hydra: ``schema``, ``method/NAME``, ``data/NAME``."""
    store = ConfigStore.instance()
    store.store(name="schema", node=asdict(Config()))
    for name, (_, settings) in METHODS.items():
        store.store(group="method", name=name, node=asdict(settings()))
    for name, settings in DATA.items():
        store.store(group="data", name=name, node=asdict(settings()))
    for name, parts in sized_data().items():
        store.store(group="data", name=name, node={"defaults": parts})


@cache
def _composed(overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that Hydra composes for these choices, and the choice of each group."""
    _register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose("config", overrides=list(overrides), return_hydra_config=True)
    OmegaConf.set_struct(composed, False)
    chosen = dict(composed.pop("hydra").runtime.choices)
    return OmegaConf.to_container(composed), chosen


def compose_config(words: list[str]) -> Config:
    """Compose the YAML groups by Hydra, then set single settings one by one, so that errors name the wrong word."""
    groups, settings = {}, []
    for word in words:
        key, value = split_word(word)
        if key in GROUPS:
            check_choice(key, value)
            groups[key] = value
        else:
            settings.append((key, value))
    try:
        values, chosen = _composed((*(f"{group}={name}" for group, name in groups.items()), *search_path()))
    except (HydraException, OmegaConfBaseException) as error:
        recipe = re.search(r"Could not find 'recipe/([^']+)'", str(error))
        raise UserError(no_recipe(recipe[1]) if recipe else " ".join(str(error).split())) from error
    composed, experiment = OmegaConf.create(values), chosen["experiment"]
    _check_recipe(groups, chosen)
    owners = {"method": METHODS[composed.method.name][1], "data": DATA[composed.data.name]}
    known = {
        key: setting
        for key, several in SETTINGS.items()
        for setting in several
        if owners.get(key.partition(".")[0]) in (None, setting.owner) or "." not in key
    }
    for key, value in settings:
        _set(composed, key, value, known)
    if composed.run_dir is None:
        composed.run_dir = f"runs/{experiment}"
    try:
        config = _typed(OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {short(str(error).splitlines()[0])}; give the value itself") from error
    except NoSuchSetting as error:
        key = str(error)
        group = key.partition(".")[0]
        recipes = recipes_of(group, getattr(owners.get(group), "name", ""))
        hint = f"; for {group}={owners[group].name} use experiment={' or '.join(recipes[:3])}" if recipes else ""
        raise UserError(f"experiment={experiment} sets {key}: {no_such_setting(key, known)}{hint}") from error
    check(config)
    return config


def _check_recipe(groups: Mapping[str, str], chosen: Mapping[str, str]) -> None:
    """Refuse another model under the recipe of an experiment, which may hold the rates of a tiny network."""
    pair = f"{chosen['model']}_{chosen['method']}"
    if "model" in groups and "recipe" not in groups and chosen["recipe"] != pair:
        own = f"experiment={chosen['experiment']} has a recipe of its own, not for model={chosen['model']}"
        raise UserError(f"{own}; add recipe={pair}, or start from another experiment")


def _set(composed: DictConfig, key: str, value: str, known: dict[str, Setting]) -> None:
    """Set one of the ``known`` settings of the composed configuration to a value in Hydra's grammar."""
    mapping = next((name for name, setting in known.items() if setting.is_mapping and key.startswith(f"{name}.")), key)
    if mapping not in known:
        raise UserError(no_such_setting(key, known))
    if key in ("method.name", "data.name"):
        raise UserError(f"{key}={value}: use {key.partition('.')[0]}={value}")
    setting = known[mapping]
    # An architecture replaces the recipe's instead of merging: keys of another network would be wrong.
    merge = not key.endswith(".architecture")
    try:
        OmegaConf.update(composed, key, parsed_value(key, value, setting), merge=merge, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{short(f'{key}={value}')} must be {setting.words(mapping)}") from error


def _typed(values: dict[str, Any]) -> Config:
    values["method"] = make(METHODS[values["method"]["name"]][1], values["method"], "method.")
    values["data"] = make(DATA[values["data"]["name"]], values["data"], "data.")
    return make(Config, values)


def method_settings(values: dict[str, Any]) -> Any:
    """Build the settings ``method.*`` from plain values; settings that this version does not have are left out."""
    return make(METHODS[values["name"]][1], _known(values, [], "method."), "method.")


def load_config(path: Path) -> Config:
    """Load a run's ``config.yaml``. Settings that this version does not have are left out, with a line."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a run")
    try:
        left_out: list[str] = []
        config = _typed(_known(OmegaConf.to_container(OmegaConf.load(path), resolve=True), left_out))
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, LookupError, AttributeError,
            RecursionError) as error:  # fmt: skip
        reason = one_line(str(error).split("\n    full_key")[0])
        raise UserError(f"{path} is not a configuration of this version ({reason}); give another run") from error
    if left_out:
        log.warning("%s has settings that this version does not have, left out: %s", path, ", ".join(left_out))
    return config


def _known(values: dict[str, Any], left_out: list[str], prefix: str = "") -> dict[str, Any]:
    """Return ``values`` without settings that this version does not have, whose names ``left_out`` receives."""
    known = {}
    for former, value in values.items():
        key = RENAMED.get(f"{prefix}{former}", f"{prefix}{former}")
        name = key.removeprefix(prefix)
        if key not in SETTINGS:
            left_out.append(key)
        elif (name, str(value)) in REMOVED:
            left_out.append(f"{key}={value}")
        elif isinstance(value, dict) and not SETTINGS[key][0].is_mapping:
            known[name] = _known(value, left_out, f"{key}.")
        else:
            known[name] = value
    return known
