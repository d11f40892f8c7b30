"""What is set up before the process group."""

import os

import pytest
import torch

from fsdp_cp.launch import choose_allocator

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # remembered, so that the tests leave no trace
        monkeypatch.delenv(name)
    return monkeypatch


def allocator() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_the_allocator_is_set_on_cuda_alone(environment):
    choose_allocator(torch.device("cpu"), "expandable_segments:True")
    choose_allocator(torch.device("cuda", 0), None)
    assert allocator() == [None, None]
    choose_allocator(torch.device("cuda", 0), "expandable_segments:True")
    assert allocator() == [None, "expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_wins_over_the_setting(environment, name, caplog):
    environment.setenv(name, "max_split_size_mb:64")
    choose_allocator(torch.device("cuda", 0), "expandable_segments:True")
    assert os.environ[name] == "max_split_size_mb:64" and allocator().count(None) == 1
    assert f"{name}=max_split_size_mb:64 is set; cuda_allocator=expandable_segments:True is not used" in caplog.text
