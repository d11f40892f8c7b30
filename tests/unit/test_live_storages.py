"""The counter of live storages, against allocations of known sizes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fsdp_cp.measure.memory import LiveStorages

KIB = 1024


def _floats(kib):
    return torch.zeros(kib * KIB // 4)


def test_allocations_frees_and_peak():
    with LiveStorages() as live:
        a = _floats(4)
        b = _floats(8)
        assert live.bytes == 12 * KIB
        del a
        assert live.bytes == 8 * KIB
        c = b + 1
        assert live.bytes == live.peak_bytes == 16 * KIB
        del b
    assert (live.bytes, live.peak_bytes) == (8 * KIB, 16 * KIB)
    del c
    assert (live.bytes, live.peak_bytes) == (0, 16 * KIB)


def test_views_and_in_place_operations_count_once():
    outside = _floats(64)
    with LiveStorages() as live:
        a = _floats(4)
        views = [a.view(2, -1), a[3:], a.view(2, -1).t(), a.detach()]
        a.add_(1).mul_(2)
        torch.add(a, 1, out=a)
        more = outside.view(-1, 2)[1:]
        outside.add_(1)
        assert live.bytes == live.peak_bytes == 4 * KIB
        del a
        assert live.bytes == 4 * KIB, "its views still hold it"
        del views
        assert live.bytes == 0
    assert more.untyped_storage().nbytes() == 64 * KIB


def test_what_is_older_than_the_context_is_not_counted_and_its_memory_is_reused_safely():
    old = [_floats(16) for _ in range(20)]
    with LiveStorages() as live:
        for tensor in old:
            tensor.add_(1)
        del tensor
        old.clear()
        new = [_floats(16) for _ in range(20)]  # the allocator hands out the same addresses
        assert live.bytes == 320 * KIB
        new.clear()
        assert live.bytes == 0
    assert live.peak_bytes == 320 * KIB


def test_resizing_of_tensor_and_storage():
    with LiveStorages() as live:
        x = _floats(4)
        x.resize_(2 * KIB)
        assert live.bytes == 8 * KIB
        x.untyped_storage().resize_(0)
        assert live.bytes == 0
        x.untyped_storage().resize_(8 * KIB)
        assert live.bytes == live.peak_bytes == 8 * KIB
    resize = torch.UntypedStorage.resize_
    with LiveStorages(), LiveStorages():
        assert torch.UntypedStorage.resize_ is not resize
    assert torch.UntypedStorage.resize_ is resize


@torch.library.custom_op("test_live_storages::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    temporary = torch.cat([x, x, x])  # 3 x the input, freed before the operator returns
    return temporary[: x.numel()] * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("test_live_storages::nested_fill", mutates_args=("x",))
def nested_fill(x: torch.Tensor) -> None:
    x.copy_(twice(x))


def test_inside_custom_operators():
    x = _floats(4)
    with LiveStorages() as live:
        y = twice(x)
        assert live.bytes == 4 * KIB
        assert live.peak_bytes == 16 * KIB, "3 + 1 inputs live inside of the operator"
    torch.testing.assert_close(y, 2 * x)
    with LiveStorages() as live:
        nested_fill(x)
    assert (live.bytes, live.peak_bytes) == (0, 16 * KIB)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_sees_what_autograd_saves_and_frees(checkpointed):
    def square_chain(x):
        for _ in range(8):
            x = x * x  # saves its input
        return x

    x = _floats(4).requires_grad_()
    with LiveStorages() as live:
        y = checkpoint(square_chain, x, use_reentrant=False) if checkpointed else square_chain(x)
        assert live.bytes == (4 if checkpointed else 32) * KIB
        loss = y.sum()
        del y
        loss.backward()
        assert live.peak_bytes >= 32 * KIB
        del loss
        assert live.bytes == 4 * KIB, "the gradient of x"
    x.grad = None
    assert live.bytes == 0
