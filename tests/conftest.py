"""Settings that every test shares."""

import logging
import os

import pytest

# Ranks share two cores: without this, each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _logging_begins_anew():
    """A command that runs inside the tests' process sets the root logger up: the next test must not see it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
