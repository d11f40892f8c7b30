"""Results of ``benchmarks.gpu``, kept between starts as JSON and shown as Markdown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.process import FINISHED
from fsdp_cp.errors import UserError

NOT_RUN = "not run"


@dataclass(kw_only=True)
class Results:
    """Results of a device: its parts, each with versions and commit."""

    file: Path
    """Path of the JSON file. The Markdown file is next to it."""
    device: str
    tiny: bool
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parts by name, each with ``status``, ``seconds``, ``error``, ``rows`` and ``made_with``."""

    @classmethod
    def read(cls, folder: Path, device: str, tiny: bool) -> Results:
        """Read the results in ``folder``, if any.

        Raises:
            UserError: a file with other contents.
        """
        name = re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_") + ("_tiny" if tiny else "")
        results = cls(file=folder / f"gpu_{name}.json", device=device, tiny=tiny)
        if not results.file.is_file():
            return results
        try:
            stored = json.loads(results.file.read_text())
            results.parts = {part: dict(record) for part, record in stored["parts"].items()}
            for record in results.parts.values():
                if not isinstance(record["rows"], list) or not isinstance(record["status"], str):
                    raise ValueError("a part without rows")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{results.file} is not a result of this command; remove it or give another --out"
            ) from error
        return results

    def has(self, name: str) -> bool:
        """Return whether the part is finished."""
        return self.parts.get(name, {}).get("status") == FINISHED

    def write(self, parts: Sequence[Part]) -> None:
        """Write both files, each atomically.

        Raises:
            UserError: a folder that cannot be written.
        """
        described = {"device": self.device, "tiny": self.tiny, "parts": self.parts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            for file, text in (
                (self.file, json.dumps(described, indent=1) + "\n"),
                (self.file.with_suffix(".md"), self.markdown(parts)),
            ):
                unfinished = file.with_name(f".{file.name}.{os.getpid()}")
                unfinished.write_text(text)
                unfinished.replace(file)
        except OSError as error:
            raise UserError(f"--out {self.file.parent} cannot be written ({error.strerror}); give another") from error

    def markdown(self, parts: Sequence[Part]) -> str:
        """Return the page: the status of each part, and its table, in the order of ``parts``."""
        size = " at test size: numbers say that the program works, and nothing else" if self.tiny else ""
        lines = [
            f"# {self.device}, by `python -m benchmarks.gpu`{size}\n",
            "| part | | seconds | commit | versions |",
            "|---|---|---|---|---|",
        ]
        for part in parts:
            record = self.parts.get(part.name, {"status": NOT_RUN})
            made = dict(record.get("made_with", {}))
            commit = made.pop("commit", "")
            status = ": ".join(filter(None, (record["status"], record.get("error"))))
            seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
            versions = ", ".join(f"{name} {version}" for name, version in made.items())
            lines.append("| " + " | ".join(map(_cell, (part.name, status, seconds, commit, versions))) + " |")
        for part in parts:
            if part.name in self.parts and (rows := self.parts[part.name]["rows"]):
                lines += [f"\n## {part.name}\n", part.shows + "\n", table(rows)]
        return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of rows. It has all their columns, by first appearance, with errors last."""
    titles = list(dict.fromkeys(key for row in rows for key in row if key not in ("what", "error")))
    if any("error" in row for row in rows):
        titles.append("error")
    lines = ["| " + " | ".join(["", *titles]) + " |", "|" + "---|" * (len(titles) + 1)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(title)) for title in ("what", *titles)) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return " ".join(str(value).replace("|", "/").split())
