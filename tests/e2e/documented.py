"""Finds the commands that README, docs, docstrings, Makefile, Dockerfile name; test_documented_commands runs them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.launch import ROOT

PROGRAMS = (
    "torchrun python python3 make pip docker hf sbatch srun git wandb tensorboard py-spy torchfrtrace pytest head kill"
).split()
"""A text that begins with one of these, and goes on, is a command wherever it stands."""
SHELL = ("bash", "sh", "console")
"""Languages of fenced blocks of which every line is a command."""
OTHER = ("python", "csv", "text", "yaml", "json", "bibtex", "diff")
"""Languages of fenced blocks that hold none."""
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=\S*\s+")


@dataclass(frozen=True)
class Found:
    """A command as somebody would type it, on one line; of a script, all of it."""

    command: str
    where: str
    """File in which it stands first."""

    @property
    def is_script(self) -> bool:
        return self.command.startswith("#!")


def find_commands() -> list[Found]:
    """Every command, once, in the order of the files."""
    texts = [(path, path.read_text()) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    found = [Found(command, _name(path)) for path, text in texts for command in of_markdown(text)]
    modules = [ROOT / "train.py", ROOT / "tests" / "tiny_pipeline.py"]
    for package in ("fsdp_cp", "models", "distill", "benchmarks"):
        modules += sorted((ROOT / package).rglob("*.py"))
    for path in modules:
        found += [Found(c, _name(path)) for c in of_docstring(ast.get_docstring(ast.parse(path.read_text())) or "")]
    comments = [line[1:] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("#")]
    found += [Found(command, "Dockerfile") for command in _lines("\n".join(comments))]
    listed = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    found += [Found(" ".join(line.split()[:2]), "make help") for line in listed.splitlines()]
    first: dict[str, Found] = {}
    for item in found:
        first.setdefault(item.command, item)
    return list(first.values())


def of_markdown(text: str) -> list[str]:
    """Commands of fenced blocks, of blocks indented by four spaces, and of `inline code`, table cells included.

    Raises:
        AssertionError: a fenced block in a language that is neither shell nor known to hold no commands.
    """
    found: list[str] = []

    def fenced(match: re.Match[str]) -> str:
        language, body = match["language"], match["body"]
        assert language in (*SHELL, *OTHER, ""), f"```{language}: are these commands? say so in tests/e2e/documented.py"
        if body.startswith("#!"):
            found.append(body.strip())
        elif language not in OTHER:
            found.extend(_lines(body, every=language in SHELL))
        return ""

    rest = re.sub(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", fenced, text, flags=re.M | re.S)
    found += _lines("\n".join(line for line in rest.splitlines() if line.startswith("    ")))
    return found + _inline(r"`([^`]+)`", rest)


def of_docstring(text: str) -> list[str]:
    """Commands in double backquotes, and on lines of their own."""
    return _inline(r"``([^`]+)``", text) + _lines("\n".join(line for line in text.splitlines() if line[:4] == "    "))


def _inline(pattern: str, text: str) -> list[str]:
    codes = (" ".join(code.split()) for code in re.findall(pattern, text))
    return [_bare(code) for code in codes if _is_command(code)]


def _lines(text: str, *, every: bool = False) -> list[str]:
    """The commands on the lines of ``text``, continued lines joined, comments gone; with ``every``, all of them."""
    lines = (line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines())
    lines = (re.sub(r"(^|\s+)#\s.*$", "", line) for line in lines)
    return [_bare(line) for line in lines if line and (every or _is_command(line))]


def _is_command(text: str) -> bool:
    words = _bare(text).split()
    return len(words) > 1 and words[0] in PROGRAMS


def _bare(command: str) -> str:
    """Without the environment, and the virtual environment's folder, in front of it."""
    while match := _ASSIGNMENT.match(command):
        command = command[match.end() :]
    return re.sub(r"\s+", " ", command.removeprefix(".venv/bin/")).strip()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Launch:
    """``torchrun OPTIONS TARGET WORDS``, ``python TARGET WORDS``, taken apart."""

    world: int
    """Number of ranks; 0 under plain ``python``."""
    module: bool
    """Is ``target`` a module (``-m``)?"""
    target: str
    words: list[str]


def taken_apart(command: str) -> Launch:
    """Read a command line of ``torchrun`` or ``python``; ``...`` in the place of torchrun's options is two ranks."""
    program, *words = shlex.split(command)
    sizes = {"--nnodes": 1, "--nproc-per-node": 1}
    module = False
    while program == "torchrun" and (words[0].startswith("-") or words[0] == "..."):
        option = words.pop(0)
        if option == "...":
            sizes["--nproc-per-node"] = 2
        elif option == "-m":
            module = True
            break
        elif option != "--standalone":
            value = words.pop(0)
            if option in sizes:
                sizes[option] = 2 if value == "N" else int(value)
    if program != "torchrun" and words[0] == "-m":
        module = bool(words.pop(0))
    world = sizes["--nnodes"] * sizes["--nproc-per-node"] if program == "torchrun" else 0
    return Launch(world=world, module=module, target=words[0], words=words[1:])
