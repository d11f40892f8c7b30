"""The text of ``train.py --help``, made from the dataclasses of the configuration."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import fields, is_dataclass
from itertools import pairwise

from omegaconf import MISSING

from distill.config import CONFIGS, DATA, Config
from distill.methods import METHODS


def usage() -> str:
    """The text of ``train.py --help``: the groups and every key with its default and meaning."""
    lines = [
        "torchrun --nproc-per-node N train.py experiment=NAME [key=value ...]",
        "",
        "Distils a video diffusion transformer into a few-step student. Later overrides win; lists are [a,b,c].",
        "",
    ]
    for group in ("experiment", "method", "data", "mesh", "optim"):
        names = sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))
        lines.append(f"  {group}=  {' | '.join(names)}")
    sections: list[tuple[str, type]] = [("", Config)]
    sections += [("method.", settings) for _, settings in METHODS.values()]
    sections += [("data.", settings) for settings in DATA.values()]
    for prefix, settings in sections:
        lines += ["", f"{settings.__name__}:"]
        lines += [f"  {key:<46} {text}" for key, text in _described(settings, prefix)]
    return "\n".join(lines)


def _described(settings: type, prefix: str) -> list[tuple[str, str]]:
    """(key=default, meaning) of every field, nested ones included; the meaning is the string below the field."""
    meanings = _field_docs(settings)
    rows: list[tuple[str, str]] = []
    for item in fields(settings):
        default = item.default if item.default is not MISSING_DEFAULT else None
        if item.default_factory is not MISSING_DEFAULT:
            default = item.default_factory()
        if is_dataclass(default):
            rows += _described(type(default), f"{prefix}{item.name}.")
        elif item.name != "name" and default != MISSING:
            shown = "null" if default is None else str(default)
            rows.append((f"{prefix}{item.name}={shown}", meanings.get(item.name, "")))
        elif item.name != "name" and item.name in meanings:
            rows.append((f"{prefix}{item.name}", meanings[item.name]))
    return rows


def _field_docs(settings: type) -> dict[str, str]:
    """The string literal below each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
