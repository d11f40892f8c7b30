"""Failures that are kept until the collectives are done: which is raised, and which tensors it holds."""

import gc
import weakref

import pytest
import torch

from fsdp_cp.attention.failures import Failure, StopRecomputation, communication


def _work(error, seen):
    big = torch.zeros(3)
    seen.append(weakref.ref(big))
    raise error("told")


def test_the_first_one_is_raised_at_the_end():
    steps = []
    with pytest.raises(KeyError) as caught, Failure() as failure:
        for error in (KeyError, ValueError):
            assert failure.attempt(_work, error, []) is None
        steps.append(failure.attempt(sum, (1, 2)))
        raise ConnectionError
    assert steps == [3] and isinstance(caught.value.__context__, ConnectionError)


@pytest.mark.parametrize("error", [StopRecomputation, KeyboardInterrupt])
def test_what_is_no_failure_leaves_at_once(error):
    with pytest.raises(error), Failure() as failure:
        failure.attempt(_work, error, [])
        pytest.fail("went on")


def _disconnected(own):
    with Failure() as failure:
        if own:
            failure.attempt(_work, KeyError, [])
        with communication():
            raise ConnectionError


def test_a_broken_connection_leaves_at_once():
    """An outer call must not continue with other exchanges."""
    for own in (False, True):
        with pytest.raises(KeyError if own else ConnectionError), Failure() as outer:
            outer.attempt(_disconnected, own)
            pytest.fail("went on")


def test_out_of_memory_lets_go_of_the_tensors_at_once():
    seen = []
    with pytest.raises(torch.OutOfMemoryError), Failure() as failure:
        failure.attempt(_work, torch.OutOfMemoryError, seen)
        assert seen[0]() is None


def _raises(seen):
    with Failure() as failure:
        failure.attempt(_work, KeyError, seen)


def test_nothing_is_kept_once_the_caller_has_caught_it():
    seen = []
    gc.disable()
    try:
        try:
            _raises(seen)
        except KeyError:
            assert seen[0]() is not None, "debuggers see the frame that failed"
        assert seen[0]() is None
    finally:
        gc.enable()
