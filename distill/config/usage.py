"""Text of ``train.py --help`` and ``--cfg job``, generated from the configuration and its dataclasses."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

from omegaconf import MISSING, OmegaConf

from distill.config.compose import compose_config, wanted_information
from distill.config.errors import GROUPS, choices, recipes_of
from distill.config.kinds import walk_settings
from distill.config.schema import OWNERS, Config
from fsdp_cp.errors import shown

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


_Row = tuple[str, Any, str]
"""Key of a setting, its value and its docstring."""


def information(arguments: list[str]) -> str | None:
    """Return the text for ``--help`` or ``--cfg job`` in ``arguments``; ``None`` without either."""
    wanted, words = wanted_information(arguments)
    if wanted is None:
        return None
    chosen = dict(word.split("=", 1) for word in words if re.match(r"(experiment|method)=", word))
    if wanted != "cfg" and "method" in chosen and "experiment" not in chosen:  # --help method=rcm
        recipes = sorted(recipes_of("method", chosen["method"]), key=lambda name: not name.startswith("quickstart"))
        words = [*(f"experiment={name}" for name in recipes[:1]), *words]
    config = compose_config(words)
    if wanted == "cfg":
        return OmegaConf.to_yaml(OmegaConf.create(asdict(config))).rstrip()
    names = " ".join(words) or "experiment=quickstart (the default)"
    body = _every_setting(config) if wanted == "help all" else usage(config)
    return "\n".join([*_HEAD, *_groups(), "", f"Values are those of {names}.", *body])


def usage(config: Config) -> list[str]:
    """Return the lines of the short text: the most used settings with their meaning, the others with their value."""
    lines = list(_in_lines(row for row in _rows("", config) if "." not in row[0]))
    for name in ("mesh", "method", "data"):
        settings = getattr(config, name)
        lines += ["", f"{name}.*" + (f" of {name}={settings.name}:" if name != "mesh" else ":")]
        lines += _in_lines(_rows(f"{name}.", settings))
    lines += [
        "",
        "Other settings, which --help all describes. ROLE is teacher, student or fake; values are the student's.",
    ]
    others = {"ROLE.": config.student, "optim.ROLE.": config.optim.student}
    above = ("mesh", "teacher", "student", "fake", "method", "data")
    for name in [item.name for item in fields(Config) if item.name not in above]:
        if is_dataclass(group := getattr(config, name)):
            others[f"{name}."] = group
    for prefix, group in others.items():
        rows = (row for row in _rows("", group) if not row[0].startswith(("student.", "fake.")))
        lines += _in_paragraph(prefix, rows)
    return lines


def _every_setting(config: Config) -> list[str]:
    values = {type(chosen): chosen for chosen in (config, config.method, config.data)}
    lines = []
    for prefix, settings in OWNERS:
        title = "" if settings in values else ", which is not chosen: defaults"
        lines += ["", f"{settings.__name__}{title}:"]
        for row in _rows(prefix, values.get(settings) or settings()):
            lines.append(f"  {_with_value(row, whole=True):<46} {row[2]}")
    return lines


def _groups() -> Iterator[str]:
    for group in GROUPS:
        text = f"{group + '=':<12} {' | '.join(choices(group))}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 15, break_on_hyphens=False)


def _rows(prefix: str, chosen: Any) -> Iterator[_Row]:
    """Yield every setting of the dataclass ``chosen`` and its groups, with its value."""
    for key, setting in walk_settings(type(chosen), prefix):
        name = key.rpartition(".")[2]
        if not setting.group and name != "name" and key not in ("method", "data"):
            yield key, attrgetter(key.removeprefix(prefix))(chosen), field_docs(setting.owner).get(name, "")


def _with_value(row: _Row, *, whole: bool = False) -> str:
    """Return ``key=value``, or the key alone if a value is required. Long values are cut."""
    key, value = row[0], shown(row[1])
    if not whole and len(value) > _LONGEST:
        value = f"{value[:12]}..."  # Chinese letters are two columns wide
    return key if row[1] == MISSING else f"{key}={value}"


def _in_lines(rows: Iterable[_Row]) -> Iterator[str]:
    """Yield lines with key and value on the left and the wrapped meaning on the right."""
    for row in rows:
        left = f"  {_with_value(row):<{_KEY}} "
        if len(left) > _KEY + 3:
            yield left.rstrip()
            left = ""
        meaning = textwrap.wrap(row[2], _WIDTH - _KEY - 3, break_on_hyphens=False) or [""]
        for head, line in zip([left, *[""] * len(meaning)], meaning, strict=False):
            yield f"{head:<{_KEY + 3}}{line}".rstrip()


def _in_paragraph(prefix: str, rows: Iterable[_Row]) -> Iterator[str]:
    """Wrap ``key=value`` of ``rows`` into lines without breaking one."""
    unbroken = " ".join(_with_value(row).replace(" ", "\0") for row in rows)
    head, rest = f"  {prefix:<12} ", " " * 15
    for line in textwrap.wrap(unbroken, _WIDTH, initial_indent=head, subsequent_indent=rest, break_on_hyphens=False):
        yield line.replace("\0", " ")


@cache
def field_docs(settings: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
