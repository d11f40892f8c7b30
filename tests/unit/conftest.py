"""Shared fixtures of the tests in one process."""

import pytest

from tests.tiny_pipeline import build_tiny_pipeline


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the folder of a complete tiny pipeline."""
    return build_tiny_pipeline(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """Make files next to the working folders that nothing may change."""
    folder = tmp_path_factory.mktemp("around")
    for name in ("notes.txt", "0.mp4", "config.json", "words.safetensors", "x"):
        (folder / name).write_text(name)
    return folder
