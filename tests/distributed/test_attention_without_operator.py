"""Attention without its custom operator, when no mode watches operators: the same numbers, and modes are noticed."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsdp_cp.attention import cross_attention, operators
from tests.oracles.attention import Case, on_ranks

NAMES = {"ring_attention", "ring_attention_backward"}


class _Seen(TorchDispatchMode):
    """Mode that records which of ``NAMES`` are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fsdp_cp" and func.overloadpacket.__name__ in NAMES:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _both(cases):
    """Return the results of each case without and with the operator, and the operators seen in the second run."""
    found = []
    for case in cases:
        with mock.patch.object(operators.attend_in_ring, "operator", side_effect=AssertionError("called")):
            alone = on_ranks(case)
        with _Seen() as seen:
            found.append((alone, on_ranks(case), seen.names))
    return found


@pytest.mark.slow
def test_the_same_to_the_last_bit(pools):
    ring, ulysses = 2, 2
    common = {"ring": ring, "ulysses": ulysses, "heads": 4 * ulysses, "kv_heads": 2 * ulysses, "dtype": torch.float32}
    cases = [
        Case(**common, tokens=(23,)),
        Case(**common, tokens=(19,), masked=True, text=3),
        Case(**common, tokens=(23,), block=4, head_groups=2),
        Case(**common | {"dtype": torch.bfloat16}, tokens=(16,)),
    ]
    for rank in pools[ring * ulysses].run(_both, cases):
        for case, (alone, operator, seen) in zip(cases, rank, strict=True):
            assert seen == NAMES, (case, seen)
            for a, b in zip(alone, operator, strict=True):
                assert torch.equal(a, b), case


def _leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 7, 2, 4, generator=generator, requires_grad=True) for _ in range(3)]


def _by_operator(work):
    """Return whether ``work()`` calls the operator."""
    with mock.patch.object(operators.attend_in_ring, "operator", wraps=operators.attend_in_ring.operator) as called:
        work()
    return called.called


def test_who_looks_is_noticed():
    q, k, v = _leaves()
    assert not _by_operator(lambda: cross_attention(q, k, v))
    with torch.no_grad():
        assert not _by_operator(lambda: cross_attention(q, k, v))
    with FlopCounterMode(display=False):
        assert _by_operator(lambda: cross_attention(q, k, v))
    with torch.profiler.profile() as profile:
        assert _by_operator(lambda: cross_attention(q, k, v).sum().backward())
    assert {f"fsdp_cp::{name}" for name in NAMES} <= {event.key for event in profile.key_averages()}
    fake = [FakeTensorMode().from_tensor(q.detach())] * 3  # outside of its mode
    assert operators.is_observed(*fake)
    seen = []
    torch.func.vmap(lambda x: (seen.append(operators.is_observed(x)), x)[1])(q)
    assert seen == [True]
    assert not operators.is_observed(q, k, v)


def test_who_comes_between_forward_and_recomputation_changes_nothing():
    """A profiler that starts in between sees the operator in backward, where the forward used none."""
    found = []
    for between in (False, True):
        leaves = _leaves()
        out = checkpoint(partial(cross_attention, backend="auto"), *leaves, use_reentrant=False)
        if between:
            with torch.profiler.profile():
                out.square().sum().backward()
        else:
            out.square().sum().backward()
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_second_derivative_is_refused():
    q, k, v = _leaves()
    (gradient,) = torch.autograd.grad(cross_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_without_gradients_nothing_is_kept():
    q, k, v = (x.detach() for x in _leaves())
    assert cross_attention(q, k, v).grad_fn is None
    v.requires_grad_()  # only one argument needs a gradient
    cross_attention(q, k, v).square().sum().backward()
    assert v.grad is not None and q.grad is None
