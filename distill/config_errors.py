"""Hydra's and OmegaConf's errors as one line that names the setting as it was typed and says what it takes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from distill.setting_kinds import Setting

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_GROUPS = ("experiment", "method", "data", "mesh", "optim")
_LONGEST = 200


def explain(
    error: Exception, words: Sequence[str], overrides: Sequence[str], known: Mapping[str, list[Setting]]
) -> str:
    """What is wrong with ``words``.

    Args:
        error: Hydra's or OmegaConf's, about ``overrides``.
        words: as they were typed.
        overrides: ``words`` as Hydra got them (:func:`distill.command_line.hydra_overrides`).
        known: every setting by its key.
    """
    text = str(error.__cause__ or error) if "Could not override" not in str(error) else str(error)
    parser = OverridesParser.create()
    for word, override in zip(words, overrides, strict=True):
        try:
            readable = not parser.parse_override(override).is_sweep_override()
        except HydraException:
            readable = False
        if not readable:  # Hydra does not always say which it was
            return _wrong_value(word, words, known)
    missing = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if missing:
        key = missing.group(1)
        typed = next((name for name in map(_key, words) if name == key or name.endswith(f".{key}")), None)
        return no_such_setting(typed, words, known) if typed else _not_of_this_method(key, words)
    option = re.search(r"(?:Could not find|In .*: Could not find) '([^']+)'", text)
    if option:
        group, _, name = option.group(1).partition("/")
        near = difflib.get_close_matches(name, _names(group), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"there is no {group}={name}{hint}; use {choices(group)}"
    about = re.search(r"full_key: (\S+)", text)
    key = re.sub(r"\[\d+\]", "", about.group(1)) if about else ""
    inside = next((name for name in map(_key, words) if name.startswith(f"{key}.") and name not in known), None)
    if key in known and inside is not None:  # mesh.cp.x=1, which makes a group of mesh.cp
        return no_such_setting(inside, words, known)
    word = next((word for word in reversed(words) if _key(word) == key), None)
    if word is not None and "${" in word:
        return f"{_short(word)}: {' '.join(text.split(' full_key')[0].split())[:_LONGEST]}; give the value itself"
    if word is not None and word.endswith("=???"):
        return f"{word}: ??? stands for a value that is missing; give one"
    if word is not None and key in known:
        return _wrong_value(word, words, known)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("object_type")]
    return " ".join(lines)


def _wrong_value(word: str, words: Sequence[str], known: Mapping[str, list[Setting]]) -> str:
    key = _key(word)
    if key not in known:
        return no_such_setting(key, words, known)
    settings = known[key]
    if len(settings) > 1:  # of several methods or data sets
        names = _chosen_names(words)
        settings = [setting for setting in settings if _is_chosen(key, [setting], names)] or settings
    if settings[0].group:
        return f"{_short(word)}: {key} is a group of settings; use {settings[0].words(key)}"
    return f"{_short(word)} must be {settings[0].words(key)}"


def _not_of_this_method(key: str, words: Sequence[str]) -> str:
    """The experiment's own file sets what the group that was chosen beside it does not know."""
    chosen = {w.split("=")[0]: w.split("=")[1] for w in words if re.match(r"(experiment|method|data)=\w+$", w)}
    experiment = chosen.get("experiment", "quickstart")
    for group in ("method", "data"):
        if group in chosen:
            recipes = [
                path.stem
                for path in sorted((CONFIGS / "experiment").glob("*.yaml"))
                if re.search(rf"^\s*- override /{group}: {chosen[group]}$", path.read_text(), re.MULTILINE)
            ]
            near = [name for name in recipes if name.split("_")[0] == experiment.split("_")[0]]
            listed = " or ".join(f"experiment={name}" for name in (near or recipes)[:3])
            return (
                f"experiment={experiment} is a recipe for another {group}: it sets {group}.{key}, which"
                f" {group}={chosen[group]} does not have" + (f"; use {listed}" if listed else "")
            )
    return f"experiment={experiment} sets {key}, which there is not; see python train.py --help"


def no_such_setting(key: str, words: Sequence[str], known: Mapping[str, list[Setting]]) -> str:
    """``key`` is not a setting of the groups that ``words`` choose: which one may have been meant."""
    names = _chosen_names(words)
    group, dot, _ = key.partition(".")
    if key in known and dot and group in names:  # of another method, or of another data set
        owners = sorted(f"{group}={setting.owner.name}" for setting in known[key])
        return (
            f"{key} is a setting of {' or '.join(owners)}, and this run has {group}={names[group]}; leave it out, or"
            " use a recipe for it"
        )
    role, dot, entry = key.partition(".architecture.")
    if dot and f"{role}.architecture" in known:
        return f"{key}: the recipe's {role}.architecture has no {entry}; use +{key}=VALUE to add it"
    own = [name for name, settings in known.items() if not settings[0].group and _is_chosen(name, settings, names)]
    near = difflib.get_close_matches(key, [*own, *_GROUPS], n=1, cutoff=0.5)
    near += [name for name in own if name.endswith(f".{key}")]  # lr, where optim.student.lr is meant
    return f"there is no setting {_short(key)}" + (f"; did you mean {near[0]}?" if near else "; see train.py --help")


def _is_chosen(name: str, settings: Sequence[Setting], chosen: Mapping[str, str]) -> bool:
    group, dot, _ = name.partition(".")
    return not dot or group not in chosen or any(setting.owner.name == chosen[group] for setting in settings)


def _chosen_names(words: Sequence[str]) -> dict[str, str]:
    """The method and the data set that ``words`` choose; nothing where they choose what there is not."""
    return _names_of(tuple(word for word in words if re.match(r"(experiment|method|data)=\w+$", word)))


@cache
def _names_of(groups: tuple[str, ...]) -> dict[str, str]:
    for chosen in (groups, tuple(word for word in groups if not word.startswith("method=")), ()):
        try:
            with initialize_config_dir(str(CONFIGS), version_base="1.3"):
                composed: DictConfig = compose("config", overrides=list(chosen))
            return {"method": composed.method.name, "data": composed.data.name}
        except (HydraException, OmegaConfBaseException):
            continue
    return {}


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+")


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def choices(group: str) -> str:
    """The files of a group, as in a sentence; of many the first."""
    names = _names(group)
    if len(names) > 8:
        return f"{', '.join(names[:6])} or another of the {len(names)} in configs/{group}"
    return " or ".join(names) or "another group"
