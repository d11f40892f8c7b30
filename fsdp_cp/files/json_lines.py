"""Files of JSON lines, to which a run appends: read them, and cut them back on resume."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_file import atomic_path

log = logging.getLogger(__name__)


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file in their order; other lines are logged. A missing file has no objects."""
    parsed = [parse(line) for line in path.open("rb") if line.strip()] if path.is_file() else []
    records = [record for record in parsed if record is not None]
    if len(records) < len(parsed):
        log.warning("%s: left out %d unreadable line(s)", path, len(parsed) - len(records))
    return records


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one line, or ``None``."""
    try:
        record = json.loads(line.decode("utf-8"))  # json.loads(bytes) would guess UTF-16 and UTF-32
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or a number of 4,300 digits; brackets nested too deep
        return None
    return record if isinstance(record, dict) else None


def step_of(record: dict[str, Any] | None) -> int | None:
    """Return the record's ``step``, or ``None`` unless it is an integer from 0 to 2**53, which a float can hold."""
    step = record.get("step") if record else None
    return step if type(step) is int and 0 <= step < 2**53 else None  # not isinstance: True is an int


def finite_number(value: Any) -> float:
    """Return a number as a float, or NaN for anything but a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after ``step``, which a resumed run writes again, and the lines that a kill tore.

    All other lines stay byte for byte, in order. The file may be absent. If it cannot be written, it is unchanged.
    """
    if not path.is_file():
        return
    later = unreadable = 0
    try:
        with path.open("rb") as source, atomic_path(path) as temporary, temporary.open("xb") as kept:
            for line in source:
                at = step_of(parse(line))
                if at is not None and at <= step:
                    kept.write(line if line.endswith(b"\n") else line + b"\n")
                later += at is not None and at > step
                unreadable += at is None and bool(line.strip())
    except OSError as error:
        raise UserError(f"{path} cannot be cut back to step {step} ({error.strerror}); make room and repeat") from error
    if later or unreadable:
        log.info("%s: dropped %d line(s) after step %d and %d torn line(s)", path, later, step, unreadable)
