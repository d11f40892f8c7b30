"""Settings that every test shares."""

import logging
import os
import sys

import pytest

from tests.frozen import freeze

# Rewrite assertions of shared modules, so that their failures show values as those of tests do.
pytest.register_assert_rewrite("tests.oracles", "tests.e2e", "tests.unit")
# Ranks share two cores: without this, each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _ranks_are_forked_with_their_imports():
    """Name the modules that the fork server imports once for all ranks; the first start decides.

    torch imports one of them at its first forward derivative. xdist's controller runs no fixture, so it does not
    import torch.
    """
    from fsdp_cp.runtime import local_ranks

    local_ranks.PRELOAD = (
        "torch", "distill.train.trainer", "tests.oracles.sharded_run", "torch._decomp.decompositions_for_jvp", "pytest",
        "tests.frozen",
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _examples_do_not_depend_on_earlier_tests():
    """Keep constants of the modules imported so far out of Hypothesis' examples (private, hypothesis 6.170)."""
    if "hypothesis" in sys.modules:
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_sought_among_new_objects():
    freeze()


@pytest.fixture(autouse=True)
def _logging_begins_anew():
    """Reset the root logger before each test, since commands that run in the tests' process configure it."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in [handler for handler in root.handlers if not type(handler).__module__.startswith("_pytest")]:
        root.removeHandler(handler)
