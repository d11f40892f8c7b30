"""A check of refusals that does not depend on their wording."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

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
