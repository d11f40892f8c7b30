"""The parts of a report's page that tell of the run itself: what went wrong, its starts, settings and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from distill.run_facts import Start, start_facts


def troubles(found: Sequence[str]) -> str:
    """What went wrong, at the top of the page; nothing where nothing did."""
    if not found:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<div class="troubles"><strong>Something went wrong in this run.</strong><ul>{items}</ul></div>'


def subtitle(data: Mapping[str, Any]) -> str:
    """How long, where and until when: a page that a later start left behind shows itself."""
    start = _starts(data)[-1:]
    parts = [f"{data['run']['steps']} steps"] if isinstance(data["run"].get("steps"), int) else []
    parts += [start[0].device] if start and start[0].device else []
    parts.append(f"written {_date(data['written'])}")
    return f'<p class="note">{escape(", ".join(parts))}</p>'


def facts(data: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """The newest start and the facts of the run, as a list of terms; then all starts, where there are several."""
    starts = _starts(data)
    shown = start_facts(starts[-1]) if starts else {}
    if "started" in shown:
        shown["started"] = _date(shown["started"])
    run = {key: value for key, value in data["run"].items() if not (key == "versions" and "versions" in shown)}
    shown |= {"report written": _date(data["written"])} | run
    for key, value in measured.items():
        shown.setdefault(key, value)
    terms = "".join(f"<dt>{escape(key)}</dt><dd>{_fact(key, value)}</dd>" for key, value in shown.items())
    return f"<dl>{terms}</dl>" + _all_starts(starts, data["unreadable_starts"])


def _starts(data: Mapping[str, Any]) -> list[Start]:
    return [Start(**start) for start in data["starts"]]


def _date(text: str) -> str:
    """An ISO time without its T, and without parts of a second."""
    return text.replace("T", " ", 1) if len(text) < 40 else text[:40]


def _all_starts(starts: Sequence[Start], unreadable: int) -> str:
    note = (
        f'<p class="note">Left out: {unreadable} line{"s" * (unreadable != 1)} of starts.jsonl that could not be'
        " read.</p>"
        if unreadable
        else ""
    )
    if len(starts) < 2:
        return note
    head = ["Started", "From step", "Commit", "Host", "Hardware", "Command"]
    lines = []
    for start in starts:
        found = start_facts(start)
        commit = found.get("commit", "")
        commit = commit[:12] + commit[len(start.commit or "") :]
        cells = [_date(start.started or ""), start.from_step, commit, start.host]
        cells += [found.get("hardware")]
        row = "".join(f"<td>{escape('' if cell is None else str(cell))}</td>" for cell in cells)
        lines.append(f"<tr>{row}<td><code>{escape(start.command or '')}</code></td></tr>")
    steps = [str(start.from_step) for start in starts if start.from_step is not None]
    told = f"{len(starts)} starts" + (f", from steps {', '.join(steps)}" if steps else "")
    heads = "".join(f'<th scope="col">{text}</th>' for text in head)
    table = f'<table class="numbers"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'{note}<details><summary>{told}</summary><div class="scroll">{table}</div></details>'


def settings(compared: Sequence[Mapping[str, Any]]) -> str:
    """All settings, folded; those that differ from their defaults come first and are marked."""
    if not compared:
        return ""
    differing = sum(row["differs"] for row in compared)
    lines = []
    for row in compared:
        default = _setting(row["default"]) if row["differs"] else ""
        cells = f"<td>{escape(_setting(row['value']))}</td><td>{escape(default)}</td>"
        kind = ' class="differs"' if row["differs"] else ""
        lines.append(f'<tr{kind}><th scope="row"><code>{escape(row["key"])}</code></th>{cells}</tr>')
    head = '<thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">Default</th></tr></thead>'
    summary = f"All {len(compared)} settings; {differing} differ from the defaults and come first"
    table = f'<table class="settings" id="settings">{head}<tbody>{"".join(lines)}</tbody></table>'
    return f'<details><summary>{summary}</summary><div class="scroll">{table}</div></details>'


def _setting(value: Any) -> str:
    if value == "???":
        return "none; must be given"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def files(names: Sequence[str]) -> str:
    """Links to what lies beside the page."""
    links = ", ".join(f'<a href="{quote(name)}">{escape(name)}</a>' for name in names)
    return f"<p>Beside this page: {links}.</p>" if links else ""


def _fact(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return escape(", ".join(f"{k} {v}" for k, v in value.items()))
    if isinstance(value, list):
        return "<br>".join(escape(str(v)) for v in value)
    if key.endswith("command"):
        return f"<pre><code>{escape(str(value))}</code></pre>"
    return "" if value is None else escape(f"{value:.4g}" if isinstance(value, float) else str(value))
