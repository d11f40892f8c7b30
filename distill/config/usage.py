"""The texts of ``train.py --help`` and ``--cfg job``, made from the configuration and its dataclasses."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from omegaconf import MISSING, OmegaConf

from distill.config.checks import ROLES, TRAINED
from distill.config.command_line import wanted_information
from distill.config.compose import compose_config
from distill.config.errors import GROUPS, group_files, recipes_of
from distill.config.schema import Config
from distill.data import DATA
from distill.methods import METHODS
from fsdp_cp.errors import shown
from fsdp_cp.sharding.settings import ShardSettings

_WIDTH = 120
_KEY = 40
_LONGEST = 30
"""Letters of a value in the short text."""
_HEAD = [
    "torchrun --nproc-per-node N train.py experiment=NAME [key=value ...]",
    "",
    "Distils a video diffusion transformer into a few-step student. Later overrides win; lists are [a,b,c].",
    "--help method=rcm has that method's settings; --help all has every setting of all roles, methods and data sets.",
    "--cfg job prints the composed configuration; dry_run=true checks it and starts nothing.",
    "",
]


def information(arguments: list[str]) -> str | None:
    """What ``--help`` or ``--cfg job`` among ``arguments`` asks for; ``None`` where neither is there.

    Raises:
        UserError: settings that do not compose; an option that train.py does not have.
    """
    wanted, overrides = wanted_information(arguments)
    if wanted is None:
        return None
    if wanted != "cfg":
        overrides = [*_experiment_for(overrides), *overrides]
    config = compose_config(overrides)
    if wanted == "cfg":
        return OmegaConf.to_yaml(OmegaConf.create(asdict(config))).rstrip()
    text = long_usage if wanted == "help all" else usage
    return text(config, " ".join(overrides))


def _experiment_for(overrides: list[str]) -> list[str]:
    """The experiment of a method that is asked about alone, as in ``--help method=rcm``."""
    chosen = dict(word.split("=", 1) for word in overrides if re.match(r"(experiment|method)=", word))
    if "experiment" in chosen or "method" not in chosen:
        return []
    return [f"experiment={name}" for name in recipes_of("method", chosen["method"])[:1]]


def usage(config: Config, chosen: str = "") -> str:
    """Return the text of ``train.py --help``, three screens: the groups, and the most used settings with their meaning.

    Settings that roles share stand there once, and those of the chosen method and data set alone.

    Args:
        config: whose values are shown.
        chosen: the words that made it.
    """
    lines = [*_HEAD, *_groups(), "", f"Values are those of {chosen or 'experiment=quickstart (the default)'}."]
    own = [(key, *rest) for key, *rest in _described(Config, "", config, _short) if "." not in key.partition("=")[0]]
    lines += _in_lines([row for row in own if not row[0].startswith("expert_draws=")])  # below, with experts
    for name in ("mesh", "method", "data"):
        settings = getattr(config, name)
        lines += ["", f"{name}.*" + (f" of {name}={settings.name}:" if name != "mesh" else ":")]
        lines += _in_lines(_described(type(settings), f"{name}.", settings, _short))
    shards = {item.name for item in fields(ShardSettings)} - {"precision"} | {"architecture", "boundary"}
    roles = list(_shared("ROLE", {name: getattr(config, name) for name in ROLES}))
    lines += ["", f"ROLE.* of {', '.join(ROLES)}, as teacher.checkpoint, and how each is sharded (docs/sharding.md):"]
    lines += _in_lines([row for row in roles if row[2] not in shards])
    rest = [key.removeprefix("ROLE.") for key, _, name in roles if name in shards]
    lines += _in_paragraph(
        "ROLE.",
        [*rest, f"experts={config.student.experts} (student's; of the run: expert_draws={config.expert_draws})"],
    )
    lines += ["", "What else there is; --help all says what each is:"]
    rates = {name: getattr(config.optim, name) for name in TRAINED}
    lines += _in_paragraph("optim.ROLE.", [key.removeprefix("ROLE.") for key, *_ in _shared("ROLE", rates)])
    adapters = {name: getattr(config, name).lora for name in TRAINED}
    lines += _in_paragraph("ROLE.lora.", [key.removeprefix("ROLE.") for key, *_ in _shared("ROLE", adapters)])
    averages = [(f"{name}.ema", getattr(config, name).ema) for name in TRAINED]
    for name, settings in (("optim", config.optim), *averages, *_rest(config)):
        rows = _described(type(settings), "", settings, _short)
        lines += _in_paragraph(f"{name}.", [key for key, _ in rows if "." not in key.partition("=")[0]])
    return "\n".join(lines)


def long_usage(config: Config, chosen: str = "") -> str:
    """The text of ``train.py --help all``: every key with its value and its whole meaning.

    Args:
        config: whose values are shown; of methods and data sets that it has not, the defaults.
        chosen: the words that made it.
    """
    lines = [*_HEAD, *_groups(), "", f"Values are those of {chosen or 'experiment=quickstart (the default)'}."]
    sections: list[tuple[str, type, Any]] = [("", Config, config)]
    for prefix, own, classes in (
        ("method.", config.method, [settings for _, settings in METHODS.values()]),
        ("data.", config.data, list(DATA.values())),
    ):
        sections.append((prefix, type(own), own))
        sections += [(prefix, settings, None) for settings in classes if settings is not type(own)]
    for prefix, settings, own in sections:
        title = "" if own is not None else ", which is not chosen: defaults"
        lines += ["", f"{settings.__name__}{title}:"]
        lines += [f"  {key:<46} {text}" for key, text in _described(settings, prefix, own)]
    return "\n".join(lines)


def _groups() -> Iterator[str]:
    """Each group's choices; those of the next one stand behind them where both are few."""
    texts = []
    for group in GROUPS:
        names = " | ".join(path.stem for path in group_files(group))
        texts.append(f"{group + '=':<12} {names}")
    while texts:
        text = texts.pop(0)
        if texts and len(text) < 30 and len(texts[0]) < 30:
            text = f"{text:<30} {texts.pop(0)}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 15, break_on_hyphens=False)


def _rest(config: Config) -> Iterator[tuple[str, Any]]:
    """Groups of settings that no other part of the short text has."""
    shown_already = {"mesh", "method", "data", "optim", *ROLES}
    for item in fields(config):
        if is_dataclass(getattr(config, item.name)) and item.name not in shown_already:
            yield item.name, getattr(config, item.name)


def _shared(name: str, owners: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(NAME.key=value, meaning, key) of what all ``owners`` have: the student's value, and others where they differ."""
    meanings = {kind: _field_docs(kind) for kind in map(type, owners.values())}
    for item in fields(next(iter(owners.values()))):
        values = {owner: _short(getattr(settings, item.name)) for owner, settings in owners.items()}
        others = [f"{owner}: {value}" for owner, value in values.items() if value != values["student"]]
        key = f"{name}.{item.name}={values['student']}" + (f" ({', '.join(others)})" if others else "")
        yield key, meanings[type(owners["fake"])].get(item.name, ""), item.name


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= _LONGEST else f"{text[:12]}..."  # Chinese letters are two columns wide


def _in_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield key and value, and next to them the meaning, wrapped."""
    for key, meaning, *_ in rows:
        left = f"  {key:<{_KEY}} "
        lines = textwrap.wrap(meaning, _WIDTH - _KEY - 3, break_on_hyphens=False) or [""]
        if len(left) > _KEY + 3:
            yield left.rstrip()
            left = " " * (_KEY + 3)
        yield (left + lines[0]).rstrip()
        yield from (" " * (_KEY + 3) + line for line in lines[1:])


def _in_paragraph(prefix: str, keys: Sequence[str]) -> Iterator[str]:
    """As many keys on a line as fit, none of them broken."""
    line = f"  {prefix:<12}" if prefix else " "
    for key in keys:
        if len(line) + 2 + len(key) > _WIDTH and line.strip() != prefix:
            yield line
            line = " " * (14 if prefix else 1)
        line += f" {key}"
    yield line


def _described(settings: type, prefix: str, own: Any, written: Callable[[Any], str] = shown) -> list[tuple[str, str]]:
    """(key=value, meaning) of every field, nested ones included; the meaning is the string below the field.

    The values are those of ``own``, the defaults where it is ``None``.
    """
    meanings = _field_docs(settings)
    rows: list[tuple[str, str]] = []
    for item in fields(settings):
        if own is not None:
            value = getattr(own, item.name)
        elif item.default_factory is not MISSING_DEFAULT:
            value = item.default_factory()
        else:
            value = item.default if item.default is not MISSING_DEFAULT else None
        if is_dataclass(value):
            if item.name not in ("method", "data"):  # which have sections of their own
                rows += _described(type(value), f"{prefix}{item.name}.", value, written)
        elif item.name != "name" and value != MISSING:
            rows.append((f"{prefix}{item.name}={written(value)}", meanings.get(item.name, "")))
        elif item.name != "name" and item.name in meanings:
            rows.append((f"{prefix}{item.name}", meanings[item.name]))
    return rows


@cache
def _field_docs(settings: type) -> dict[str, str]:
    """The string literal below each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
