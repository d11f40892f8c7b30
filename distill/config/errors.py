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

from distill.config.kinds import Setting
from distill.methods import INSTALLED

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = ("experiment", "model", "method", "recipe", "data", "cluster", "adapters", "mesh")
"""What is chosen by the name of a file."""
_REMOVED = re.compile(r"(wan2_1_t2v_(?:1_3b|14b))(_720p)?_(dmd2|rcm)(_4nodes)?")
"""Experiments of earlier versions that are now composed."""
REMOVED = {
    "checkpoint.verify": "sizes are always compared; docs/operations.md has a command that compares the sums",
    "log.groups": "plan=true and dry_run=true show what each role takes on a rank",
    "optim": "choose all numbers of a model with a method by recipe=NAME; single ones stay as optim.ROLE.KEY=VALUE",
    "planning.before_run": "run plan=true before the run",
    "student.lora.init": "A is drawn as a linear layer's weight, B begins at 0",
    "fake.lora.init": "A is drawn as a linear layer's weight, B begins at 0",
}
"""Settings of earlier versions: their successor, or the reason."""
_LONGEST = 200


def group_files(group: str) -> list[Path]:
    """Return the YAML files of a group, ours and those of installed methods, by name."""
    folders = dict.fromkeys([CONFIGS, *INSTALLED.values()])
    return sorted((path for folder in folders for path in (folder / group).glob("*.yaml")), key=lambda path: path.stem)


def search_path() -> list[str]:
    """Return the override with which Hydra finds the YAML files of installed methods; none where there are no such."""
    folders = ",".join(f"'file://{folder}'" for folder in sorted(set(INSTALLED.values())))
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def explain(
    error: Exception, words: Sequence[str], overrides: Sequence[str], known: Mapping[str, list[Setting]]
) -> str:
    """What is wrong with ``words``.

    Args:
        error: Hydra's or OmegaConf's, about ``overrides``.
        words: as they were typed.
        overrides: ``words`` as Hydra got them (:func:`distill.config.command_line.hydra_overrides`).
        known: every setting by its key.
    """
    text = str(error.__cause__ or error) if "Could not override" not in str(error) else str(error)
    parser = OverridesParser.create()
    for word, override in zip(words, overrides, strict=True):
        try:
            if parser.parse_override(override).is_sweep_override():
                hint = "; python -m distill.sweep runs several values in turn" if _key(word) in known else ""
                return _wrong_value(word, words, known) + hint
        except HydraException:  # which does not always say which word it was
            return _wrong_value(word, words, known)
    missing = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if missing:
        key = missing.group(1)
        typed = next((name for name in map(_key, words) if name == key or name.endswith(f".{key}")), None)
        return no_such_setting(typed, words, known) if typed else _not_of_this_method(key, words)
    option = re.search(r"(?:Could not find|In .*: Could not find) '([^']+)'", text)
    if option:
        group, _, name = option.group(1).rpartition("/")
        if group == "experiment" and (instead := words_instead(name)) is not None:
            return (
                f"there is no experiment={name} any more; use {' '.join(instead)}, and run_dir=runs/{name} to go on"
                " with its run"
            )
        if group == "recipe" and not any(_key(word) == "recipe" for word in words):
            recipes = [path.stem for path in group_files("recipe") if not path.stem.startswith("quickstart")]
            same = [f"recipe={recipe}" for recipe in recipes if recipe.endswith(f"_{_chosen_names(words)['method']}")]
            return (
                f"no numbers are published for this model and method (recipe={name}); take another pair's with"
                f" {' or '.join(same)}"
            )
        # h20 is h20x4 or h20x8, not h200.
        longer = [each for each in _names(group) if re.match(rf"{re.escape(name)}(?!\d)", each)]
        if len(longer) > 1:
            return f"there is no {group}={name}; use {' or '.join(longer)}"
        near = longer or difflib.get_close_matches(name, _names(group), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"there is no {group}={name}{hint}; use {choices(group)}"
    if unset := re.search(r"missing mandatory value: (\w+)", text):
        return f"{unset[1]} is not set, and no recipe of this method sets it; give {unset[1]}=VALUE"
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
    if key == "optim":  # it was a group of files
        return f"{_short(word)}: {REMOVED[key]}"
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
            recipes = recipes_of(group, chosen[group])
            near = [name for name in recipes if name.split("_")[0] == experiment.split("_")[0]]
            listed = " or ".join(f"experiment={name}" for name in (near or recipes)[:3])
            return (
                f"experiment={experiment} is a recipe for another {group}: it sets {group}.{key}, which"
                f" {group}={chosen[group]} does not have" + (f"; use {listed}" if listed else "")
            )
    return f"experiment={experiment} sets {key}, which there is not; see python train.py --help"


def recipes_of(group: str, name: str) -> list[str]:
    """The experiments whose own file chooses ``name`` of ``group``."""
    line = re.compile(rf"^\s*- override /{group}: {re.escape(name)}$", re.MULTILINE)
    return [path.stem for path in group_files("experiment") if line.search(path.read_text())]


def no_such_setting(key: str, words: Sequence[str], known: Mapping[str, list[Setting]]) -> str:
    """``key`` is not a setting of the groups that ``words`` choose: which one may have been meant."""
    if key in REMOVED and key not in known:
        return f"{key} was removed; {REMOVED[key]}"
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
    near = _nearest(key, own)
    if near is not None:
        return f"there is no setting {_short(key)}; did you mean {near}?"
    group = key.rpartition(".")[0]
    if within := [name for name in own if name.rpartition(".")[0] == group and group and not name.endswith(".name")]:
        return f"there is no setting {_short(key)}; use {', '.join(within[:6])}" + (", ..." if within[6:] else "")
    return f"there is no setting {_short(key)}; see train.py --help"


def _nearest(key: str, own: Sequence[str]) -> str | None:
    """The setting of ``own`` that ``key`` may have meant.

    Those of its own group come first: over whole keys, mesh.context_parallel is nearest to method.teacher_sampler.
    """
    group, _, last = key.rpartition(".")
    inside = {name.rpartition(".")[2]: name for name in reversed(own) if group and name.startswith(f"{group}.")}
    initials = "".join(word[:1] for word in last.split("_")) if "_" in last else last
    for name in (last, initials):  # context_parallel is cp
        if name in inside:
            return inside[name]
    if longer := [name for name in inside if name.startswith(f"{last}_")]:  # dp is dp_shard, not cp
        return inside[min(longer, key=len)]
    if close := difflib.get_close_matches(last, list(inside), n=1, cutoff=0.5):
        return inside[close[0]]
    if close := [name for name in own if name.endswith(f".{last}")]:  # lr, where optim.student.lr is meant
        return max(close, key=lambda name: len(set(key.split(".")) & set(name.split("."))))
    close = [] if inside else difflib.get_close_matches(key, [*own, *GROUPS], n=1, cutoff=0.5)
    return close[0] if close else None


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
                composed: DictConfig = compose("config", overrides=[*chosen, *search_path()])
            # An experiment may set what the method that was typed has not: typed it is all the same.
            typed = {group: name for group, _, name in (word.partition("=") for word in groups)}
            there = {g: n for g, n in typed.items() if g != "experiment" and n in _names(g)}
            return {"method": composed.method.name, "data": composed.data.name} | there
        except (HydraException, OmegaConfBaseException):
            continue
    return {}


def words_instead(experiment: str) -> list[str] | None:
    """What to type instead of an experiment that there was until settings that vary alone got groups of their own."""
    name = _REMOVED.fullmatch(experiment)
    if name is None or (CONFIGS / "experiment" / f"{experiment}.yaml").is_file():
        return None
    return [
        f"experiment={name[1]}_{name[3]}",
        *(["data=video_folder_720p"] if name[2] else []),
        *(["cluster=h20x8x4", "batch_size=32"] if name[4] else []),
    ]


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+")


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def _names(group: str) -> list[str]:
    return [path.stem for path in group_files(group)]


def choices(group: str) -> str:
    """The files of a group, as in a sentence; of many the first."""
    names = _names(group)
    if len(names) > 10:
        return f"{', '.join(names[:6])} or another of the {len(names)} in configs/{group}"
    return " or ".join(names) or "another group"
