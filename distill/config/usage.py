"""Text of ``train.py --help`` and ``--cfg job``, generated from the configuration and its dataclasses."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from omegaconf import MISSING, OmegaConf

from distill.config.command_line import wanted_information
from distill.config.compose import compose_config
from distill.config.errors import GROUPS, group_files, recipes_of
from distill.config.kinds import settings_of
from distill.config.schema import Config
from distill.data import DATA
from distill.methods import METHODS
from fsdp_cp.errors import shown
from fsdp_cp.sharding.settings import ShardSettings

ROLES = ("teacher", "student", "fake")
_WIDTH = 120
_KEY = 40
_LONGEST = 30
"""Maximal length of a value in the short text, in characters."""
_HEAD = [
    "torchrun --nproc-per-node N train.py experiment=NAME [key=value ...]",
    "",
    "Distills a video diffusion transformer into a few-step student. Later overrides win; lists are [a,b,c].",
    "--help method=rcm has that method's settings; --help all has every setting of all roles, methods and data sets.",
    "--cfg job prints the composed configuration; dry_run=true checks it and starts nothing.",
    "",
]


class _Row(NamedTuple):
    """A setting, its value and its docstring."""

    key: str
    value: Any
    meaning: str


def information(arguments: list[str]) -> str | None:
    """Return the text for ``--help`` or ``--cfg job`` in ``arguments``; ``None`` without either.

    Raises:
        UserError: settings that do not compose; an option that train.py does not have.
    """
    wanted, words = wanted_information(arguments)
    if wanted is None:
        return None
    chosen = dict(word.split("=", 1) for word in words if re.match(r"(experiment|method)=", word))
    if wanted != "cfg" and "method" in chosen and "experiment" not in chosen:  # --help method=rcm
        words = [*(f"experiment={name}" for name in recipes_of("method", chosen["method"])[:1]), *words]
    config = compose_config(words)
    if wanted == "cfg":
        return OmegaConf.to_yaml(OmegaConf.create(asdict(config))).rstrip()
    names = " ".join(words) or "experiment=quickstart (the default)"
    body = _every_setting(config) if wanted == "help all" else usage(config)
    return "\n".join([*_HEAD, *_groups(), "", f"Values are those of {names}.", *body])


def usage(config: Config) -> list[str]:
    """Return the lines of the short text: the most used settings with their meaning, the others with their value.

    Settings that roles share are listed once. Methods and data sets that are not chosen are left out.
    """
    rows = list(_rows(Config, "", config))
    top = [row for row in rows if "." not in row.key and row.key != "expert_draws"]
    lines = list(_in_lines(top))
    for name in ("mesh", "method", "data"):
        settings = getattr(config, name)
        lines += ["", f"{name}.*" + (f" of {name}={settings.name}:" if name != "mesh" else ":")]
        lines += _in_lines(_rows(type(settings), f"{name}.", settings))
    sharding = {item.name for item in fields(ShardSettings)} - {"precision"} | {"architecture", "boundary"}
    roles = list(_shared(rows, "{}.", ROLES))
    lines += ["", "ROLE.* of teacher, student, fake, as teacher.checkpoint, and sharding (docs/configuration.md):"]
    lines += _in_lines([row for row in roles if row.key.removeprefix("ROLE.") not in sharding])
    rest = [_short(row, "ROLE.") for row in roles if row.key.removeprefix("ROLE.") in sharding]
    rest.append(f"experts={config.student.experts} (student's; of the run: expert_draws={config.expert_draws})")
    lines += _in_paragraph("ROLE.", rest)
    lines += ["", "Other settings; --help all describes each:"]
    for pattern, other in (("optim.{}.", "fake"), ("{}.lora.", "fake"), ("{}.causal.", "teacher")):
        name = pattern.format("ROLE")
        lines += _in_paragraph(name, [_short(row, name) for row in _shared(rows, pattern, ("student", other))])
    of_roles = [pattern.format(role) for pattern in ("{}", "optim.{}", "{}.lora", "{}.causal") for role in ROLES]
    above = ("", "mesh", *of_roles)
    for prefix, group in groupby(rows, lambda row: row.key.rpartition(".")[0]):
        if prefix not in above:
            lines += _in_paragraph(f"{prefix}.", [_short(row, f"{prefix}.") for row in group])
    return lines


def _every_setting(config: Config) -> list[str]:
    """Return the lines of ``--help all``: every key with its value and its whole meaning."""
    sections: list[tuple[str, type, Any]] = [("", Config, config)]
    for prefix, chosen, classes in (
        ("method.", config.method, [settings for _, settings in METHODS.values()]),
        ("data.", config.data, list(DATA.values())),
    ):
        sections.append((prefix, type(chosen), chosen))
        sections += [(prefix, settings, None) for settings in classes if settings is not type(chosen)]
    lines = []
    for prefix, settings, chosen in sections:
        title = "" if chosen is not None else ", which is not chosen: defaults"
        lines += ["", f"{settings.__name__}{title}:"]
        for row in _rows(settings, prefix, chosen):
            lines.append(f"  {_with_value(row, shown(row.value)):<46} {row.meaning}")
    return lines


def _groups() -> Iterator[str]:
    """Yield the choices of each group; two short groups share a line."""
    texts = [f"{group + '=':<12} {' | '.join(path.stem for path in group_files(group))}" for group in GROUPS]
    while texts:
        text = texts.pop(0)
        if texts and len(text) < 30 and len(texts[0]) < 30:
            text = f"{text:<30} {texts.pop(0)}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 15, break_on_hyphens=False)


def _rows(cls: type, prefix: str, chosen: Any) -> Iterator[_Row]:
    """Yield every setting of ``cls`` and its groups, with the values of ``chosen``, or with defaults if it is None."""
    for key, setting in settings_of(cls, prefix):
        name = key.rpartition(".")[2]
        if not setting.group and name != "name" and key not in ("method", "data"):
            value = setting.default if chosen is None else attrgetter(key.removeprefix(prefix))(chosen)
            yield _Row(key, value, _field_docs(setting.owner).get(name, ""))


def _shared(rows: Sequence[_Row], pattern: str, owners: Sequence[str]) -> Iterator[_Row]:
    """Yield each setting that all ``owners`` have, once, with the student's value and any other roles' values."""
    by_key = {row.key: row for row in rows}
    first = pattern.format(owners[0])
    for name in [row.key.removeprefix(first) for row in rows if row.key.startswith(first)]:
        if any(f"{pattern.format(owner)}{name}" not in by_key for owner in owners):
            continue
        mine = {owner: _cut(by_key[f"{pattern.format(owner)}{name}"].value) for owner in owners}
        others = [f"{owner}: {value}" for owner, value in mine.items() if value != mine["student"]]
        value = mine["student"] + (f" ({', '.join(others)})" if others else "")
        yield _Row(f"{pattern.format('ROLE')}{name}", value, by_key[f"{pattern.format(owners[-1])}{name}"].meaning)


def _with_value(row: _Row, value: str) -> str:
    return row.key if row.value == MISSING else f"{row.key}={value}"


def _short(row: _Row, prefix: str) -> str:
    value = row.value if row.key.startswith(("ROLE.", "optim.ROLE.")) else _cut(row.value)
    return f"{row.key.removeprefix(prefix)}={value}"


def _cut(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= _LONGEST else f"{text[:12]}..."  # Chinese letters are two columns wide


def _in_lines(rows: Iterable[_Row]) -> Iterator[str]:
    """Yield lines with key and value on the left and the wrapped meaning on the right."""
    for row in rows:
        value = row.value if row.key.startswith("ROLE.") else _cut(row.value)
        left = f"  {_with_value(row, value):<{_KEY}} "
        if len(left) > _KEY + 3:
            yield left.rstrip()
            left = ""
        lines = textwrap.wrap(row.meaning, _WIDTH - _KEY - 3, break_on_hyphens=False) or [""]
        yield from (
            f"{head:<{_KEY + 3}}{line}".rstrip() for head, line in zip([left, *[""] * len(lines)], lines, strict=False)
        )


def _in_paragraph(prefix: str, keys: Sequence[str]) -> Iterator[str]:
    """Wrap keys into lines without breaking a key."""
    unbroken = " ".join(key.replace(" ", "\0") for key in keys)
    lines = textwrap.wrap(
        unbroken, _WIDTH, initial_indent=f"  {prefix:<12} ", subsequent_indent=" " * 15, break_on_hyphens=False
    )
    return (line.replace("\0", " ") for line in lines)


@cache
def _field_docs(settings: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
