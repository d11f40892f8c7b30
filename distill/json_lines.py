"""Files of one JSON object a line, as a run appends to them: read whatever was done to them, cut back on resume."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.report.media import atomic_path
from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)

_MOST_STEPS = 2**53
"""Steps are drawn as floats, which tell no two larger ones apart."""


@dataclass(slots=True)
class Lines:
    """What a file of JSON lines holds."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """The objects, in the order of the file."""
    unreadable: int = 0
    """Lines that are no JSON object; empty lines do not count."""


def read_objects(path: str | os.PathLike[str]) -> Lines:
    """The JSON objects of a file, whatever else is in it; none of a file that is not there or is not a file."""
    found = Lines()
    if Path(path).is_file():
        with open(path, "rb") as file:
            for line in file:
                record = parse(line)
                if record is not None:
                    found.records.append(record)
                elif line.strip():
                    found.unreadable += 1
    return found


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one line, or ``None``."""
    try:
        record = json.loads(line.decode("utf-8"))  # not json.loads(bytes), which would guess UTF-16 and UTF-32
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number of 4,300 digits; brackets nested too deep
        return None
    return record if isinstance(record, dict) else None


def step_of(record: dict[str, Any] | None) -> int | None:
    """The record's ``step``, or ``None`` where it is no step: missing, text, a fraction, negative, true."""
    step = None if record is None else record.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MOST_STEPS
    return step if is_step else None


def finite_number(value: Any) -> float:
    """A number that JSON holds as a float; NaN for whatever is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer of 400 digits
        return math.nan


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after ``step``, and a torn last line; a resumed run writes them again.

    Whatever can be read and is not after ``step`` is kept, byte for byte and in its order. A line elsewhere that cannot
    be read is dropped too, or the run would append to a file that no program reads; the file as it was is then kept
    beside, as ``NAME.damaged``. The log says how many lines went, and why.

    Args:
        path: ``metrics.jsonl`` or another file of such lines; may be absent.
        step: the checkpoint's step.

    Raises:
        UserError: a full disk or a folder that cannot be written; the file is then as it was.
    """
    if path.is_file():
        try:
            _cut_back(path, step)
        except OSError as error:
            raise UserError(
                f"{path} cannot be cut back to step {step} ({error.strerror}); make room there and start again"
            ) from error


def _cut_back(path: Path, step: int) -> None:
    later = unreadable = 0
    torn = False
    with path.open("rb") as source, atomic_path(path) as temporary, temporary.open("xb") as kept:
        for line, is_last in _with_last(source):
            record = parse(line)
            at = step_of(record)
            if at is None:
                torn = is_last and record is None
                unreadable += not torn
            elif at > step:
                later += 1
            else:
                kept.write(line if line.endswith(b"\n") else line + b"\n")
        if unreadable:
            log.warning(
                "%s: %d damaged line(s) that are no records left out; the file as it was is kept as %s",
                path,
                unreadable,
                _keep_damaged(path),
            )
    if torn:
        log.info("%s: the last line was torn and is left out", path)
    if later:
        log.info("%s: %d line(s) after step %d left out; the run writes them again", path, later, step)


def _with_last(lines: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each line that is not empty, with whether it is the last of them."""
    held = None
    for line in lines:
        if line.strip():
            if held is not None:
                yield held, False
            held = line
    if held is not None:
        yield held, True


def _keep_damaged(path: Path) -> Path:
    """Copy the file to ``NAME.damaged``, or ``NAME.damaged_2`` and so on: never over an earlier one."""
    number = 1
    while True:
        target = path.with_name(f"{path.name}.damaged" + (f"_{number}" if number > 1 else ""))
        try:
            with path.open("rb") as source, target.open("xb") as copy:
                try:
                    shutil.copyfileobj(source, copy)
                    copy.flush()
                except OSError:
                    target.unlink()  # half a copy would pass for the whole
                    raise
            return target
        except FileExistsError:
            number += 1
