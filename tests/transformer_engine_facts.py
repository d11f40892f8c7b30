"""Signatures and assertions of Transformer Engine, read from its wheels without importing them.

``python -m tests.transformer_engine_facts WHEEL...`` writes ``transformer_engine_facts.json`` next to this file. The
wheels come from ``pip download --no-deps transformer-engine==VERSION``.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
Facts = dict[str, str | bool]


def read() -> dict[str, Facts]:
    """Return the committed facts, by version."""
    return json.loads(FILE.read_text())


def facts_of(wheel: Path) -> Facts:
    """Return the facts of one wheel. Functions are their arguments, without annotations."""
    with zipfile.ZipFile(wheel) as archive:

        def tree(path: str) -> ast.Module:
            return ast.parse(archive.read(f"transformer_engine/{path}"))

        linear, base = tree("pytorch/module/linear.py"), tree("pytorch/module/base.py")
        forward = _find(linear, "Linear.forward")
        attention, casting = tree("pytorch/cpp_extensions/fused_attn.py"), tree("pytorch/quantization.py")
        (check,) = (x for x in ast.walk(_find(tree("pytorch/utils.py"), "assert_dim_for_fp8_exec")) if _is_if(x))
        return {
            "Linear": _arguments(_find(linear, "Linear.__init__")),
            "Linear.forward": _arguments(forward),
            "Linear.forward leaves Dynamo": "no_torch_dynamo" in "".join(map(ast.unparse, forward.decorator_list)),
            "Linear.forward reads is_fsdp2": "self.is_fsdp2" in ast.unparse(forward),
            "register_parameter": _arguments(_find(base, "TransformerEngineBaseModule.register_parameter")),
            "reset_parameters": _arguments(_find(linear, "Linear.reset_parameters")),
            "state is empty for stateless recipes": "is_stateless_recipe"
            in ast.unparse(_find(base, "TransformerEngineBaseModule.get_extra_state")),
            "refused sizes": ast.unparse(check.test),
            "autocast": _arguments(_find(casting, "autocast.__init__")),
            "Float8CurrentScaling": _fields(_find(tree("common/recipe/__init__.py"), "Float8CurrentScaling")),
            "fused_attn_fwd": _arguments(_find(attention, "fused_attn_fwd")),
            "fused_attn_bwd": _arguments(_find(attention, "fused_attn_bwd")),
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


def _fields(kind: ast.ClassDef) -> str:
    return ", ".join(
        f"{ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)}={ast.unparse(node.value)}"
        for node in kind.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
    )


if __name__ == "__main__":
    found = {wheel.name.split("-")[1]: facts_of(wheel) for wheel in map(Path, sys.argv[1:])}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
