"""Messages for unknown settings and unknown files of config groups, with the name that was probably meant."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from distill.config.kinds import REMOVED_KEYS, RENAMED, Setting, short
from distill.config.schema import SETTINGS
from distill.data.base import ClipSettings
from distill.data.settings import BROKEN as BROKEN_DATA
from distill.data.settings import DATA
from distill.methods import BROKEN, INSTALLED, METHODS
from fsdp_cp.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = ("experiment", "model", "method", "recipe", "data", "cluster", "adapters")
"""Config groups from which a user chooses a file by name."""


def group_files(group: str) -> list[Path]:
    """Return the YAML files of a group, including those of installed methods, sorted by name."""
    folders = dict.fromkeys([CONFIGS, *INSTALLED.values()])
    return sorted((path for folder in folders for path in (folder / group).glob("*.yaml")), key=lambda path: path.stem)


def sized_data() -> dict[str, list[str]]:
    """Return the parts of each ``data=SOURCE_SIZE``: a data set that decodes clips, and a size of ``configs/data``."""
    sources = [name for name, settings in DATA.items() if issubclass(settings, ClipSettings)]
    return {f"{source}_{size.stem}": [source, size.stem] for source in sources for size in group_files("data")}


def choices(group: str) -> list[str]:
    if group == "data":
        return sorted([*DATA, *sized_data()])
    return sorted(METHODS) if group == "method" else [path.stem for path in group_files(group)]


def search_path() -> list[str]:
    """Return the override that adds the YAML files of installed methods, if there are any."""
    folders = ",".join(f"'file://{folder}'" for folder in sorted(set(INSTALLED.values())))
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def recipes_of(group: str, name: str) -> list[str]:
    """Return the experiments whose file chooses ``name`` of ``group``."""
    line = re.compile(rf"^\s*- override /{group}: {re.escape(name)}$", re.MULTILINE)
    return [path.stem for path in group_files("experiment") if line.search(path.read_text())]


def check_choice(group: str, name: str) -> None:
    """Check that a user can choose ``name`` from ``group``; the error has the nearest name."""
    broken = {"method": BROKEN, "data": BROKEN_DATA}.get(group, {})
    if name in broken:
        raise broken[name]
    names = choices(group)
    if name in names:
        return
    # h20 means h20x4 or h20x8, not h200.
    longer = [other for other in names if re.match(rf"{re.escape(name)}(?!\d)", other)] if name else []
    near = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if len(names) > 10:
        names = [*names[:6], f"another of the {len(names)} in configs/{group}"]
    raise UserError(f"{group}={short(name)} does not exist; use {' or '.join(near or names)}")


def no_recipe(name: str) -> str:
    """Return the message for an unknown recipe ``MODEL_METHOD``."""
    models = [path.stem for path in group_files("model") if name.startswith(path.stem)]
    method = name.removeprefix(next(iter(models), ""))
    others = [path.stem for path in group_files("recipe") if path.stem.endswith(method)]
    alike = [f"recipe={recipe}" for recipe in others if ("quickstart" in recipe) == name.startswith("quickstart")]
    hint = f"; take another model's by {' or '.join(alike)}" if alike else ""
    return f"recipe={name} does not exist: no numbers are published for this model and method{hint}"


def no_such_setting(key: str, known: Mapping[str, Setting]) -> str:
    """Return the message for a typed ``key`` that is not among the ``known`` settings of the run."""
    group = key.partition(".")[0]
    if removed := REMOVED_KEYS.get(key.rpartition(".")[2]):
        return f"{key} {removed}"
    if key in RENAMED:
        return f"{key} was renamed; use {RENAMED[key]}"
    if key in SETTINGS:
        owners = sorted(f"{group}={setting.owner.name}" for setting in SETTINGS[key])
        chosen = known[f"{group}.name"].owner.name
        return f"{key} is a setting of {' or '.join(owners)}, but this run has {group}={chosen}; leave it out"
    names = [name for name, setting in known.items() if not setting.group and not name.endswith(".name")]
    near = _nearest(key, names)
    inside = [name for name in names if "." in key and name.rpartition(".")[0] == key.rpartition(".")[0]]
    hint = f"did you mean {near}?" if near else f"use {', '.join(inside[:6])}" if inside else "see train.py --help"
    return f"{short(key)} is not a setting; {hint}"


def _nearest(key: str, names: Sequence[str]) -> str | None:
    """Return the setting that ``key`` probably means, if any. Settings of the same group come first."""
    group, _, last = key.rpartition(".")
    inside = {name.rpartition(".")[2]: name for name in reversed(names) if group and name.startswith(f"{group}.")}
    if longer := [name for name in inside if name.startswith(f"{last}_")]:  # dp means dp_shard, not cp
        return inside[min(longer, key=len)]
    if close := difflib.get_close_matches(last, list(inside), n=1, cutoff=0.5):
        return inside[close[0]]
    elsewhere = [name for name in names if key.startswith(f"{name}.") or name.endswith(f".{last}")]
    if not (elsewhere or inside):
        elsewhere = difflib.get_close_matches(key, [*names, *GROUPS], n=1, cutoff=0.5)
    return elsewhere[0] if elsewhere else None
