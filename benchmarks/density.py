"""Density of the product's code: ``python -m benchmarks.density [PATH ...]``. Counts another checkout with ``--root``.

Prints the tokens (without comments, docstrings and layout), tokens on a line, functions with many branches and
statements with many tokens. A nested function counts alone and in the one around it.

- A branch is an ``if``, ``for``, ``while``, ``except``, ``assert``, ``case``, conditional expression, comprehension,
  each of its conditions, and each further operand of ``and`` or ``or``. A function has one more.
- A compound statement counts by its header, up to the first statement inside it. An f-string is one token, as Python
  3.11 reads it. Tables of constants are counted apart: assignments of a display or a call outside of functions.
- ``listed`` statements are read line by line: signatures, and calls or displays of at least five named values.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import at_least_1

PRODUCT = ("fsdp_cp", "models", "distill", "train.py")
_LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER}
_BORDERS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_BRANCHES = (
    *(ast.If, ast.IfExp, ast.match_case, ast.For, ast.While, ast.comprehension),
    *(ast.ExceptHandler, ast.Assert),
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TABLES = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Call)
Place = tuple[int, int]
"""Line and column, in bytes as ``ast`` counts them."""


@dataclass
class Counts:
    """Counts of several files."""

    tokens: int = 0
    lines: int = 0
    statements: int = 0
    functions: list[tuple[int, str]] = field(default_factory=list)
    """Branches and place of each function."""
    heavy: list[tuple[int, str]] = field(default_factory=list)
    """Tokens and place of each statement that is no table."""
    tables: list[tuple[int, str]] = field(default_factory=list)


def places_of_tokens(text: str) -> Iterator[Place]:
    """Yield the place of each token that counts."""
    lines = text.split("\n")
    opens, closes = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))
    depth, before = 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT:
            continue
        docstring = token.type == tokenize.STRING and before in _BORDERS
        if depth == 0 and token.type not in _BORDERS and not docstring:
            line, column = token.start
            yield line, len(lines[line - 1][:column].encode())
        depth += (token.type == opens) - (token.type == closes)
        before = token.type


def branches(function: ast.AST) -> int:
    """Return the number of branches of a function."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, _BRANCHES)
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.match_case):
            count += node.guard is not None
    return count


def header_end(statement: ast.stmt) -> Place:
    """Return where a simple statement ends, or the header of a compound one."""
    inside = getattr(statement, "body", None)
    if isinstance(statement, ast.Match):
        first: ast.AST = statement.cases[0].pattern
    elif inside:
        first = inside[0]
    else:
        assert statement.end_lineno is not None and statement.end_col_offset is not None
        return statement.end_lineno, statement.end_col_offset
    if isinstance(first, (*_FUNCTIONS, ast.ClassDef)) and first.decorator_list:
        first = first.decorator_list[0]
    return first.lineno, first.col_offset  # type: ignore[attr-defined]  # all patterns and statements have a place


def is_table(statement: ast.stmt) -> bool:
    """Return whether a statement outside of functions assigns a table."""
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, _TABLES)


def is_listed(statement: ast.stmt) -> bool:
    """Return whether a statement is a signature, or ends in a call or a display of at least five named values."""
    value = getattr(statement, "value", None)
    names = value.keywords if isinstance(value, ast.Call) else value.keys if isinstance(value, ast.Dict) else []
    return isinstance(statement, _FUNCTIONS) or len(names) >= 5


def statements(node: ast.AST, *, in_function: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield each statement below ``node``, and whether it is a table."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, is_table(child) and not in_function
        yield from statements(child, in_function=in_function or isinstance(child, _FUNCTIONS))


def count_file(file: Path, name: str, counts: Counts) -> None:
    """Add a file's counts."""
    text = file.read_text(encoding="utf-8")
    places, tree = list(places_of_tokens(text)), ast.parse(text)
    counts.tokens += len(places)
    counts.lines += len({line for line, _ in places})
    for statement, table in statements(tree):
        start = statement.lineno, statement.col_offset
        size = bisect_left(places, header_end(statement)) - bisect_left(places, start)
        counts.statements += size > 0  # a docstring has no tokens
        where = f"{name}:{statement.lineno}{' listed' if is_listed(statement) else ''}"
        (counts.tables if table else counts.heavy).append((size, where))
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            counts.functions.append((branches(node), f"{name}:{node.lineno} {node.name}"))


def count(root: Path, paths: Iterable[str]) -> Counts:
    """Return the counts of all Python files at ``paths``, files or folders relative to ``root``."""
    counts = Counts()
    for path in paths:
        place = root / path
        if not place.exists():
            raise SystemExit(f"{place} does not exist; give files or folders relative to --root")
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            count_file(file, str(file.relative_to(root)), counts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.density", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", default=PRODUCT, help="by default the whole product")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of the checkout, by default this one")
    parser.add_argument("--branches", type=at_least_1, default=15, help="list functions with more (15)")
    parser.add_argument("--tokens", type=at_least_1, default=60, help="list statements with more (60)")
    args = parser.parse_args()
    counts = count(args.root, args.paths)
    density = counts.tokens / max(counts.lines, 1)
    print(f"{counts.tokens:,} tokens on {counts.lines:,} lines with code, {density:.1f} a line")
    for name, bounds, found in (
        (f"of {len(counts.functions):,} functions, branches", {15, 20, args.branches}, counts.functions),
        (f"of {counts.statements:,} statements, tokens", {40, 60, args.tokens}, counts.heavy),
        ("without listed ones, tokens", {40, 60}, [found for found in counts.heavy if not found[1].endswith("listed")]),
        ("tables of constants, tokens", {40, 60}, counts.tables),
    ):
        numbers = [f"{_above(bound, found)} above {bound}" for bound in sorted(bounds)]
        print(f"{name}: {', '.join(numbers)}")
    for unit, bound, found in (("branches", args.branches, counts.functions), ("tokens", args.tokens, counts.heavy)):
        for size, where in sorted(found, reverse=True):
            if size > bound:
                print(f"{size:4d} {unit}  {where}")


def _above(bound: int, found: Iterable[tuple[int, str]]) -> int:
    return sum(size > bound for size, _ in found)


if __name__ == "__main__":
    main()
