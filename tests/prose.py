"""Relapses in our prose: ``python -m tests.prose [PATH ...]`` prints them and exits with 1 if there are any.

Without a path, check all pages and all code. The checks find docstrings that begin with a fragment, words with a
plainer synonym, and pages above their word budget. They do not prove that prose is good.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "train.py")
EVERYTHING += ("docs", "fsdp_cp", "models", "distill", "configs", "benchmarks", "tests")
UNCHECKED = ("tests/prose.py", "tests/unit/test_documents.py")  # the checker and its test
BUDGET = {  # words of a page, or of each page in a folder, without code blocks
    "README.md": 860,
    "ARCHITECTURE.md": 815,
    "CONTRIBUTING.md": 450,
    "docs/getting_started.md": 900,
    "docs/data.md": 1560,
    "docs/running.md": 2010,
    "docs/configuration.md": 1250,
    "docs/planning.md": 880,
    "docs/models.md": 1865,
    "docs/references.md": 280,
    "docs/causal.md": 730,
    "docs/evaluating.md": 980,
    "docs/trouble.md": 520,
    "docs/extending.md": 760,
    "docs/library.md": 1670,
    "docs/gradients.md": 460,
    "docs/comparison.md": 520,
    "docs/sparse.md": 700,
    "docs/fine_tuning.md": 600,
    "docs/methods/README.md": 550,
    "docs/methods": 540,
}
FRAGMENT = re.compile(r"\s*(Of|What|How|As|Those|Whose|Nor|Which|With|Is|Where|Inside|Does)\b")
WORDS = re.compile(r"\b(anew|afresh|gone on|goes? on with|lets? go of|behind|beside)\b|\bis no [\w ]+;", re.IGNORECASE)
ALLOWED = re.compile(r"left behind|lags? behind", re.IGNORECASE)


def words_of(page: str) -> int:
    """Return the number of words of a page, without code blocks and table rules."""
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"```.*?```", "", page, flags=re.DOTALL).split())


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for child in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                yield child.lineno, str(child.value.value)


def findings(name: str, text: str) -> Iterator[str]:
    """Yield a line for each relapse in the file ``name`` with this ``text``."""
    for number, docstring in docstrings(ast.parse(text)) if name.endswith(".py") else ():
        if FRAGMENT.match(docstring):
            yield f"{name}:{number}: docstring begins with {docstring.split()[0]!r}"
    for number, line in enumerate(text.splitlines(), 1):
        for match in WORDS.finditer(ALLOWED.sub("", line)):
            yield f"{name}:{number}: {match[0]!r}"
    budget = BUDGET.get(name, BUDGET.get(str(Path(name).parent), 0 if name.startswith("docs/") else None))
    if budget is not None and words_of(text) > budget:
        yield f"{name}: {words_of(text)} words, {budget} allowed"


def main(arguments: list[str]) -> int:
    """Print the findings in these files and folders; return the exit code."""
    lines = []
    for path in [ROOT / name for name in arguments or EVERYTHING]:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT))
            if file.suffix in (".py", ".md", ".yaml", ".j2") or name == "Makefile":
                lines += findings(name, file.read_text()) if not name.startswith(UNCHECKED) else []
    print("\n".join([*lines, f"{len(lines)} findings"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
