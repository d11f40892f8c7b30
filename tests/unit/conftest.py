"""Shared fixtures of the tests in one process."""

import pytest
import torch

from fsdp_cp import build_mesh
from fsdp_cp.launch import process_group
from tests.tiny_pipeline import build_tiny_pipeline


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a complete tiny pipeline, which no test changes."""
    return build_tiny_pipeline(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def one_rank():
    """Return the mesh of a process group of one rank."""
    with process_group(torch.device("cpu")):
        yield build_mesh(heads=2)
