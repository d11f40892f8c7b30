"""Checks of refusals that do not depend on their wording, and of files that stay."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distill.data.encoders.choose import choose_encoders
from fsdp_cp.errors import UserError


@contextmanager
def refused(setting: str) -> Iterator[None]:
    """Require that the block raises a ``UserError`` of one line that names ``setting``."""
    with pytest.raises(UserError, match=re.escape(setting)) as caught:
        yield
    assert "\n" not in str(caught.value)


def refuses_all(kind: type, *cases: dict) -> None:
    """Require that ``kind`` refuses each of ``cases``, naming the last setting of it as ``method.SETTING``."""
    for settings in cases:
        with refused(f"method.{list(settings)[-1]}"):
            kind(**settings)


def refusal(function, *args, **kwargs) -> str:
    """Return the line of the ``UserError`` that ``function(*args, **kwargs)`` raises."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    (line,) = str(caught.value).splitlines()
    return line


def check_command(main: Callable[[list[str]], int], capsys, named: str, *arguments: object) -> None:
    """Require that the command ``main`` exits with code 2 and one line that has ``named``."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and named in line, line


def change(file: Path, **settings) -> None:
    """Set ``settings`` of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def check_no_encoders(folder: Path, file: str, settings: dict, named: str) -> None:
    """Require that the encoders of ``folder`` with other ``settings`` are refused by a line that has ``named``."""
    change(folder / file, **settings)
    line = refusal(choose_encoders, folder)
    assert line.startswith(f"data.encoders={folder}") and named in line


def snapshot(*folders: Path) -> dict[str, str]:
    """Return a hash of every file below ``folders``."""
    found = {}
    for file in (file for folder in folders for file in sorted(folder.rglob("*"))):
        about = os.readlink(file) if file.is_symlink() else ""
        if file.is_file() and not file.is_symlink():
            about = hashlib.sha256(file.read_bytes()).hexdigest()
        found[str(file)] = about
    return found
