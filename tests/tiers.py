"""Cases of a parametrized test: some for ``make test``, the others for ``make test-all``."""

from collections.abc import Iterable
from typing import Any

import pytest


def parametrize(names: str | tuple[str, ...], cases: Iterable[Any], *, quick: int, **options: Any) -> Any:
    """Parametrize a test as pytest does; the cases after the first ``quick`` are slow."""

    def later(case: Any) -> Any:
        if hasattr(case, "marks"):
            return case._replace(marks=[*case.marks, pytest.mark.slow])
        return pytest.param(*((case,) if isinstance(names, str) else case), marks=pytest.mark.slow)

    chosen = [case if i < quick else later(case) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(names, chosen, **options)
