"""What the tests in one process share."""

import pytest

from tests.tiny_pipeline import build_tiny_pipeline


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a whole pipeline in miniature."""
    return build_tiny_pipeline(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """Files that nothing may touch, beside the folders that are worked on."""
    folder = tmp_path_factory.mktemp("around")
    for name in ("notes.txt", "0.mp4", "config.json", "words.safetensors", "x"):
        (folder / name).write_text(name)
    return folder
