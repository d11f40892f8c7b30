"""Signatures and assertions of Transformer Engine, read from its wheels without importing them.

``python -m tests.transformer_engine_facts WHEEL...`` writes ``transformer_engine_facts.json`` next to this file. The
wheels come from ``pip download --no-deps transformer-engine==VERSION``.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
Facts = dict[str, str]


def read() -> dict[str, Facts]:
    """Return the committed facts, by version."""
    return json.loads(FILE.read_text())


def facts_of(wheel: Path) -> Facts:
    """Return the facts of one wheel. Functions are their arguments, without annotations."""
    with zipfile.ZipFile(wheel) as archive:

        def tree(path: str) -> ast.Module:
            return ast.parse(archive.read(f"transformer_engine/{path}"))

        linear = tree("pytorch/module/linear.py")
        casting = tree("pytorch/quantization.py")
        (check,) = (x for x in ast.walk(_find(tree("pytorch/utils.py"), "assert_dim_for_fp8_exec")) if _is_if(x))
        return {
            "Linear": _arguments(_find(linear, "Linear.__init__")),
            "Linear.forward": _arguments(_find(linear, "Linear.forward")),
            "refused sizes": ast.unparse(check.test),
            "autocast": _arguments(_find(casting, "autocast.__init__")),
        }


def _is_if(node: ast.AST) -> bool:
    return isinstance(node, ast.If)


def _find(tree, path: str):
    for name in path.split("."):
        (tree,) = (node for node in tree.body if getattr(node, "name", None) == name)
    return tree


def _arguments(function: ast.FunctionDef) -> str:
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(function.args).removeprefix("self, ")


if __name__ == "__main__":
    found = {wheel.name.split("-")[1]: facts_of(wheel) for wheel in map(Path, sys.argv[1:])}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
