"""Shared fixtures of the tests with several processes."""

import pytest

from tests.oracles import wan64 as in_fp64
from tests.oracles.tiny_wan import ARCHITECTURE, write_checkpoints
from tests.pools import Pools


@pytest.fixture(scope="module")
def pools():
    """Return pools of ranks that the tests of a file share; use ``pools[size].run(function, *args)``."""
    with Pools() as opened:
        yield opened


@pytest.fixture(scope="module")
def checkpoints(request, tmp_path_factory):
    """Return a folder with a tiny teacher, student and fake score, of ``LAYERS`` blocks if the file sets it.

    Runs also write into the folder.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    layers = getattr(request.module, "LAYERS", ARCHITECTURE["num_layers"])
    write_checkpoints(folder, ARCHITECTURE | {"num_layers": layers})
    return folder


@pytest.fixture(scope="module")
def wan64(tmp_path_factory):
    """Return the folder of a checkpoint of :mod:`tests.oracles.wan64`."""
    return in_fp64.write_checkpoint(tmp_path_factory.mktemp("wan64"))
