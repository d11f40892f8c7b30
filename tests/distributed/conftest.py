"""What the tests with several processes share."""

import pytest

from tests.oracles import wan64 as in_fp64
from tests.oracles.tiny_wan import write_checkpoints
from tests.pools import Pools


@pytest.fixture(scope="module")
def pools():
    """``pools[size].run(function, *args)`` on ranks that the tests of a file share."""
    with Pools() as opened:
        yield opened


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a teacher, a student and a fake score in miniature; runs go into it as well."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def wan64(tmp_path_factory):
    """The folder of a checkpoint of :mod:`tests.oracles.wan64`."""
    return in_fp64.write_checkpoint(tmp_path_factory.mktemp("wan64"))
