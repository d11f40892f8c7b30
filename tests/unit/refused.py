"""Checks of refusals that do not depend on their wording, and of files that stay."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


def snapshot(*folders: Path) -> dict[str, str]:
    """Return a hash of every file below ``folders``."""
    found = {}
    for file in (file for folder in folders for file in sorted(folder.rglob("*"))):
        about = os.readlink(file) if file.is_symlink() else ""
        if file.is_file() and not file.is_symlink():
            about = hashlib.sha256(file.read_bytes()).hexdigest()
        found[str(file)] = about
    return found
