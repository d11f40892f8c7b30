"""Hydra's groups in ``configs/`` and the words of a command line, composed into a checked configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from distill.config.checks import check
from distill.config.command_line import hydra_overrides
from distill.config.errors import CONFIGS, GROUPS, choices, explain, no_such_setting, search_path
from distill.config.schema import SETTINGS, Config
from distill.config.without_literals import without_literals
from distill.data import DATA
from distill.methods import BROKEN, METHODS
from fsdp_cp.errors import UserError


@cache
def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=without_literals(Config))
    for name, (_, settings) in METHODS.items():
        store.store(group="method", name=f"{name}_schema", node=without_literals(settings))
    for name, settings in DATA.items():
        store.store(group="data", name=f"{name}_schema", node=without_literals(settings))


def compose_config(words: list[str]) -> Config:
    """Compose the YAML groups with command-line overrides into a checked :class:`Config`.

    The words are in Hydra's grammar, but strings need no quotes (distill/config/command_line.py).

    Raises:
        UserError: an unknown key (with the nearest known one), a value of another type, a bad combination.
    """
    _register()
    for word in words:
        key, equals, value = word.partition("=")
        group = key.lstrip("+~")
        if equals and group and (CONFIGS / group).is_dir():
            if group not in GROUPS:  # published=NAME would take what is published away, whatever the name
                raise UserError(
                    f"{word}: {group} comes with other groups and is not chosen itself; choose by"
                    f" {', '.join(f'{name}=' for name in GROUPS[:-1])} or {GROUPS[-1]}="
                )
            if key != group:
                raise UserError(f"{word}: {group} is chosen without a sign before it; use {group}={value or 'NAME'}")
            # A name with a path or an ending in it would be a file elsewhere, or another run_dir.
            if group == "method" and value in BROKEN:
                raise BROKEN[value]
            if value == "null" or not re.fullmatch(r"[A-Za-z_]\w*", value):
                raise UserError(f"{word} names no file of configs/{group}; use {choices(group)}")
        elif "${" in value and group in SETTINGS and SETTINGS[group][0].group:
            # OmegaConf would put what it stands for in the place of the whole group.
            raise UserError(f"{word}: {group} is a group of settings; use {SETTINGS[group][0].words(group)}")
    words, overrides = _replace_architectures(words, hydra_overrides(words, SETTINGS))
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            try:
                composed = compose("config", overrides=[*overrides, *search_path()], return_hydra_config=True)
            except ValueError as error:
                if isinstance(error, OmegaConfBaseException):
                    raise
                # omegaconf (2.3) takes what follows a list's name for a number, and does not catch its own error
                raise UserError(_below_a_list(words)) from error
        chosen = composed.hydra.runtime.choices
        experiment = chosen["experiment"]
        _check_recipe(chosen, words)
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        unknown = next(_unknown_keys(composed, ""), None)
        if unknown is not None:
            raise UserError(no_such_setting(unknown, words, SETTINGS))
        if composed.run_dir is None:
            composed.run_dir = f"runs/{experiment}"
        config: Config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(explain(error, words, overrides, SETTINGS)) from error
    for group, chosen, known in (
        ("method", config.method, {name: settings for name, (_, settings) in METHODS.items()}),
        ("data", config.data, DATA),
    ):
        if known.get(chosen.name) is not type(chosen):
            raise UserError(f"{group}.name={chosen.name} is not the {group} that was chosen; use {group}=NAME instead")
    check(config)
    return config


def _check_recipe(chosen: Mapping[str, str], words: list[str]) -> None:
    """Refuse an experiment's own recipe for a model that was typed: it may hold the rates of a tiny network."""
    typed = {word.partition("=")[0] for word in words}
    pair = f"{chosen['model']}_{chosen['method']}"
    if "model" in typed and "recipe" not in typed and chosen["recipe"] != pair:
        raise UserError(
            f"experiment={chosen['experiment']} has a recipe of its own, {chosen['recipe']}, which is not for"
            f" model={chosen['model']}; add recipe={pair}, or start from another experiment"
        )


def _below_a_list(words: list[str]) -> str:
    """The message for a word that goes on behind a list's name."""
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        whole = next((name for name in SETTINGS if key.startswith(f"{name}.") and not SETTINGS[name][0].group), None)
        if whole is not None:
            return f"there is no setting {key}; did you mean {whole}?"
    return "a setting goes on behind the name of a list; a list is given whole, KEY=[...]"


def _replace_architectures(words: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """``ROLE.architecture={...}`` in the place of the recipe's, whose keys Hydra would keep, and allow no others.

    Returns words and overrides, as long as each other.
    """
    both: list[tuple[str, str]] = []
    for word, override in zip(words, overrides, strict=True):
        key, _, value = override.partition("=")
        if key.endswith(".architecture") and value.startswith("{"):
            both += [(word, f"{key}=null"), (word, f"+{override}")]
        else:
            both.append((word, override))
    return [word for word, _ in both], [override for _, override in both]


def load_config(path: Path) -> Config:
    """The configuration that a run wrote as ``config.yaml``.

    Raises:
        UserError: no such file, or one that this version does not understand.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a run")
    try:
        loaded = OmegaConf.load(path)
        typed = OmegaConf.merge(OmegaConf.structured(without_literals(Config)), loaded)
        typed.method = OmegaConf.merge(
            OmegaConf.structured(without_literals(METHODS[loaded.method.name][1])), loaded.method
        )
        typed.data = OmegaConf.merge(OmegaConf.structured(without_literals(DATA[loaded.data.name])), loaded.data)
        return OmegaConf.to_object(typed)
    except UserError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split("\n    full_key")[0].split())[:200]
        raise UserError(f"{path} is not a configuration of this version ({reason}); give another run") from error
    except RecursionError as error:
        raise UserError(f"{path} is not a configuration ({error}); give another run") from error


def _unknown_keys(node: DictConfig, prefix: str) -> Iterator[str]:
    """Keys that ``+key=value`` put beside the fields of a dataclass; OmegaConf would drop them silently."""
    settings = OmegaConf.get_type(node)
    for key in node:
        if is_dataclass(settings) and key not in {f.name for f in fields(settings)}:
            yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _unknown_keys(child, f"{prefix}{key}.")
