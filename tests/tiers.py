"""Marks of tests, and cases of a parametrized test, for ``make test``, ``make test-all`` and ``make test-long``."""

from collections.abc import Iterable
from typing import Any

import pytest

slow, long = pytest.mark.slow, pytest.mark.long


def slow_case(*values: Any, **options: Any) -> Any:
    """Return a case of a parametrized test that ``make test`` leaves out."""
    return pytest.param(*values, marks=slow, **options)


def long_case(*values: Any, **options: Any) -> Any:
    """Return a case of a parametrized test that only ``make test-long`` runs."""
    return pytest.param(*values, marks=long, **options)


def parametrize(names: str | tuple[str, ...], cases: Iterable[Any], *, quick: int, **options: Any) -> Any:
    """Parametrize a test as pytest does; the cases after the first ``quick`` are slow."""

    def later(case: Any) -> Any:
        if hasattr(case, "marks"):
            return case._replace(marks=[*case.marks, slow])
        return slow_case(*((case,) if isinstance(names, str) else case))

    chosen = [case if i < quick else later(case) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(names, chosen, **options)
