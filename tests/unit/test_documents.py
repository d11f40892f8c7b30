"""Dead links in the documents, and commands that do not exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from distill.config.errors import GROUPS, choices
from tests.prose import findings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(page for folder in ("docs", "benchmarks") for page in (ROOT / folder).rglob("*.md"))
NAMES_OF_OTHERS = [ROOT / name for name in ("CHANGELOG.md", "docs/extending.md")]
"""Pages that also name commands that were removed, or that a reader adds."""
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
    return {slug if not slugs[:i].count(slug) else f"{slug}-{slugs[:i].count(slug)}" for i, slug in enumerate(slugs)}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(<?([^)\s>]+)", CODE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    return dead


def exists(module: str) -> bool:
    """Whether ``python -m module`` finds it; our own modules are not imported for that."""
    file, top = ROOT / module.replace(".", "/"), module.partition(".")[0]
    if (ROOT / top).is_dir():
        return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    return importlib.util.find_spec(top) is not None


def missing_commands(text: str) -> list[str]:
    code = "\n".join(CODE.findall(text))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    missing = [f"-m {m}" for m in re.findall(r"(?:python|torchrun)[^\n`|]*? -m ([a-z][\w.]*)", code) if not exists(m)]
    missing += [f"make {target}" for target in re.findall(r"\bmake ([a-z][a-z-]*)", code) if target not in targets]
    for group, name in re.findall(r"(?<![\w.+/-])([a-z]+)=([a-z]\w*)(?![\w.{/,)])", code):
        if group in GROUPS and name not in choices(group):
            missing.append(f"{group}={name}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_name_only_what_is_there(page):
    assert dead_links(page, page.read_text()) == []
    results = page.is_relative_to(ROOT / "benchmarks")
    assert results or page in NAMES_OF_OTHERS or missing_commands(page.read_text()) == []


def test_the_checks_find_what_is_missing():
    text = "[a](README.md) [b](nowhere.md) [c](#no-such-heading) `[d](code.md)` [e](https://example.org)"
    assert dead_links(ROOT / "README.md", text) == ["nowhere.md", "#no-such-heading"]
    text = (
        "make nothing `make test` `make nothing` `torchrun -m distill.nowhere` `python -m pip` `python -m models.lora`"
    )
    found = missing_commands(text + "\n```\ntrain.py data=nowhere data.path=x cluster=h200x8 experiment=NAME\n```")
    assert found == ["-m distill.nowhere", "make nothing", "data=nowhere"]


def test_the_prose_checker_finds_relapses():
    code = 'class Role:\n    """A role."""\n    config = 1\n    """Of its networks."""\n'
    code += '# stands behind it\nx = "a is no number;"\n'
    assert [line.partition(": ")[2] for line in findings("a.py", code)] == [
        "docstring begins with 'Of'",
        "'behind'",
        "'is no number;'",
    ]
    assert list(findings("docs/new.md", "Two words.")) == ["docs/new.md: 2 words, 0 allowed"]
    assert not list(findings("docs/data.md", "It resumes, and no rank lags behind."))
