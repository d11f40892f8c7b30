"""Forward-mode derivatives of fake tensors allocate the same memory as those of real tensors."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.kernels.kernel import Reference, attention_dual
from fsdp_cp.measure import fake_world
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.activations import offload_inputs, recompute_in_backward
from fsdp_cp.tiles import Tiles, sparse_tiles
from tests.tiers import parametrize

NORMS = {"weight and bias": ((2, 300, 64), (64,), True), "weight": ((2, 300, 64), (64,), False),
         "of two dimensions": ((3, 50, 6, 64), (6, 64), True)}  # fmt: skip


def _both(held):
    """Return what ``held`` returns on real tensors and on fake ones."""
    found = []
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode, LiveStorages(fakes=True) as live:
            found.append(held(live))
    return found


@pytest.mark.parametrize("case", NORMS)
@torch.no_grad()
def test_the_tangent_of_a_layer_norm(case):
    """A fake tangent is on its device and takes the memory of a real one."""
    shape, normalised, biased = NORMS[case]

    def held(live):
        x, t, weight = torch.randn(shape), torch.randn(shape), torch.randn(normalised)
        bias = torch.randn(normalised) if biased else None
        live.reset_peak()
        before = live.bytes
        with forward_ad.dual_level():
            out = nn.functional.layer_norm(forward_ad.make_dual(x, t), normalised, weight, bias)
            assert forward_ad.unpack_dual(out).tangent.device == x.device
        return live.peak_bytes - before, live.bytes - before

    with mock.patch.object(nn.functional, "layer_norm", fake_world.layer_norm):
        real, fake = _both(held)
    assert fake == real


@parametrize("moving", ["kv", "qkv", ""], quick=1)
@pytest.mark.parametrize(("queries", "keys"), [(900, 1700), (100, 90)])
def test_two_tiles_of_attention_hold_what_all_do(queries, keys, moving):
    def held(live):
        shapes = {"q": (1, queries, 4, 8), "k": (1, keys, 2, 8), "v": (1, keys, 2, 8)}
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes.values())
        tangents = [torch.randn(shapes[x], dtype=torch.bfloat16) if x in moving else None for x in shapes]
        live.reset_peak()
        before = live.bytes
        if moving:
            kept = attention_dual(q, k, v, *tangents, None, 1.0)
        else:
            out, lse = Reference().forward(q, k, v, None, 1.0)
            kept = (out, lse, Reference().backward(out, q, k, v, out, lse, None, 1.0))
        return live.peak_bytes - before, live.bytes - before, kept and 0

    real, fake = _both(held)
    assert fake[1] == real[1] and fake[0] == pytest.approx(real[0], rel=1e-3)


def test_offloaded_activations_of_fake_tensors_go_with_their_graph():
    def held(live):
        network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        recompute_in_backward(network)
        offload_inputs(network)
        x = torch.randn(300, 256)
        live.reset_peak()
        before = live.bytes
        network(x).sum().backward()
        network.zero_grad()
        return live.peak_bytes - before, live.bytes - before

    real, fake = _both(held)
    assert fake == real and real[1] == 0 < real[0]


def test_sparse_attention_runs_on_fake_tensors():
    """Forward, backward and derivative; constants that a fake run left behind serve a real one."""
    with fake_world.fake_world(8, "cuda") as mode:
        for cp, ring in ((8, 2), (1, 1)):
            mesh = build_mesh(cp=cp, ring=ring)
            tiles = Tiles((5, 16, 16)).on(mesh)
            sparse, local = sparse_tiles(tiles, 0.9), -(-97 // cp) + tiles.tokens // cp
            call = partial(context_parallel_attention, mesh=mesh, total_tokens=(97, tiles.tokens), sparse=sparse)
            with mode:
                tensors = [torch.randn(1, local, 8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
                call(*tensors[:3], gate=tensors[3]).sum().backward()
                with torch.no_grad(), forward_ad.dual_level():
                    duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors]
                    out, tangent = forward_ad.unpack_dual(call(*duals[:3], gate=duals[3]))
                assert all(x.shape == tensors[0].shape for x in (out, tangent, *(x.grad for x in tensors)))
        q = torch.randn(1, local, 8, 64)
        out = call(q, q, q, gate=q)
        assert type(out) is torch.Tensor and out.isfinite().all()
