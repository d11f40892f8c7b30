"""Sparse attention over ranks against dense attention written out in float64: output, gradients, tangent."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention import sparse as sparse_module
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.mask import block_causal
from fsdp_cp.attention.pieces import counts
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.mesh import OneRank, build_mesh
from fsdp_cp.sequence import split_tokens
from fsdp_cp.sharding.activations import ATTENTION, recompute_in_backward
from fsdp_cp.tiles import Sparse, Tiles, sparse_tiles
from tests.oracles.attention import context_mesh
from tests.oracles.sparse_attention import (
    SparseCase,
    all_on_ranks,
    attend,
    errors,
    largest_logit,
    make_inputs,
    oracle,
    random_case,
)
from tests.tiers import long, long_case, slow_case

FACTORS = [
    (1, 1), (1, 2), (2, 1), (3, 1),
    *(slow_case(*sizes) for sizes in ((2, 2), (4, 1))),
    long_case(3, 2),
]  # fmt: skip
CASES = [
    SparseCase(grid=(5, 6, 7), sparsity=0.6),
    SparseCase(grid=(9, 6, 7), sparsity=0.8, is_ordered=True, head_groups=2, size=6.0),
    SparseCase(grid=(9, 6, 5), sparsity=0.7, is_tied=True),
    SparseCase(grid=(6, 5, 6), dense=(70, 5), sparsity=0.8, is_ordered=True, size=2.0),
    SparseCase(grid=(4, 5, 3), dense=(1, 3), tile=(2, 2, 2), sparsity=0.7, has_gate=False),
    SparseCase(grid=(1, 1, 2), sparsity=0.9),
    SparseCase(grid=(1, 5, 6), tile=(1, 1, 1), sparsity=0.9, size=32.0, is_ordered=True),
]


def _check(pools, cases):
    ranks = pools[cases[0].world].run(all_on_ranks, cases)
    for i, case in enumerate(cases):
        truth = oracle(case)
        for rank in ranks:
            *ours, recomputed = rank[i]
            worst = errors(ours, truth, case)
            # Four roundings of the largest logit, for logits above 1,000.
            assert max(worst.values()) <= max(1e-12, 1e-15 * largest_logit(case)), (case, worst)
            assert recomputed == 0, case


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_values_gradients_and_tangents(pools, ring, ulysses):
    """Uneven counts, dense segments, equal scores, fewer tokens than ranks, large logits, both orders."""
    _check(pools, [replace(case, ring=ring, ulysses=ulysses) for case in CASES])


@long
def test_two_hundred_random_cases(pools):
    cases = [random_case(seed) for seed in range(200)]
    for world in sorted({case.world for case in cases}):
        _check(pools, [case for case in cases if case.world == world])


def test_a_comparison_can_fail():
    case = CASES[0]
    worst = errors(oracle(replace(case, sparsity=0.3)), oracle(case), case)
    assert min(worst[name] for name in ("out", "dq", "dk", "dv", "tangent")) > 1e-3


def test_one_tile_of_one_sample_and_head_is_dense():
    q, k, v = torch.randn(3, 1, 27, 1, 8, dtype=torch.float64)
    sparse = sparse_tiles(Tiles((3, 3, 3), (4, 4, 4)), 0.5)
    out = context_parallel_attention(q, k, v, mesh=OneRank(), total_tokens=27, sparse=sparse)
    dense = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert torch.allclose(out, dense, rtol=1e-12)


# --- what is sent, kept, and computed again ---


def _sent(case):
    """Return bytes of gathers and reduce-scatters by axis, in forward, backward and the derivative."""
    mesh = context_mesh(case.world, case.ulysses, case.ulysses)
    local = sum(-(-rows // case.world) for rows in case.segments)
    heads = case.heads * case.ulysses
    tensors = [torch.randn(2, local, heads, case.head_dim, dtype=case.dtype, requires_grad=True) for _ in range(4)]
    sparse = sparse_tiles(Tiles(case.grid, case.tile, case.is_ordered), case.sparsity)

    def attend(q, k, v, gate):
        return context_parallel_attention(q, k, v, mesh=mesh, total_tokens=case.segments, sparse=sparse, gate=gate)

    with CollectiveCounter() as forward:
        out = attend(*tensors)
    with CollectiveCounter() as backward:
        out.sum().backward()
    with torch.no_grad(), forward_ad.dual_level(), CollectiveCounter() as derivative:
        attend(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))
    counted = []
    for counter in (forward, backward, derivative):
        kinds = ("all_gather", "reduce_scatter")
        counted.append({kind: counter.bytes[kind] for kind in kinds if counter.bytes[kind]})
    layout = Layout(case.segments, case.segments, ulysses=case.ulysses, ring=case.ring, tiles=sparse.tiles)
    return counted, counts(layout)[0]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), long_case(3, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_traffic_of_means_and_coarse_output(pools, ring, ulysses, dtype):
    """Bytes equal the formula of :mod:`fsdp_cp.attention.sparse`, whatever is chosen."""
    case = SparseCase(ring=ring, ulysses=ulysses, grid=(5, 8, 7), dense=(9,), heads=2, dtype=dtype, is_ordered=True)
    for counted, slots in pools[case.world].run(_sent, case):
        n = 2 * slots * case.heads * case.head_dim  # batch, heads of a rank
        wide = 8 if dtype == torch.float64 else 4
        rows = wide * (ulysses - 1) * n
        forward, backward = 24 * (ring - 1) * n + rows, 3 * wide * (ring - 1) * n + rows
        assert counted == [{"all_gather": forward}, {"reduce_scatter": backward}, {"all_gather": 2 * forward}]


def _inputs(case):
    """Return q, k, v and the gate on one rank, and a mesh of one."""
    tensors = make_inputs(case)[0]
    return [x.clone().requires_grad_() for x in tensors], context_mesh(1, 1, 1)


def _recomputed():
    """Return gradients without and with recomputation, and the numbers of choices in each forward and backward."""
    case = SparseCase(grid=(4, 5, 6), dense=(), tile=(2, 2, 2), heads=2, is_ordered=True, ring=2)
    mesh = context_mesh(2, 1, 1)
    sparse, found = sparse_tiles(Tiles(case.grid, case.tile, True), 0.7), []
    for keep in (None, (), ATTENTION, ("fsdp_cp.sparse_attention",)):
        leaves = [split_tokens(x, mesh).clone().requires_grad_() for x in make_inputs(case)[0]]
        module = nn.Module()
        module.forward = lambda q, k, v, gate: context_parallel_attention(
            2 * q, k, v, mesh=mesh, total_tokens=120, sparse=sparse, gate=gate
        )
        if keep is not None:
            recompute_in_backward(module, keep)
        with mock.patch.object(sparse_module, "choose_tiles", wraps=sparse_module.choose_tiles) as chosen:
            module.forward(*leaves).square().sum().backward()
        found.append(([x.grad for x in leaves], chosen.call_count))
    return found


def test_a_kept_choice_is_not_made_again(pools):
    """Full recomputation chooses again, alike; selective keeps the choice. Gradients are equal bit by bit."""
    for rank in pools[2].run(_recomputed):
        (plain, once), *others = rank
        assert [count for _, count in others] == [2, 1, 1] and once == 1
        for grads, _ in others:
            assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


def _choice_bytes(sparsities):
    case = SparseCase(grid=(5, 6, 7), dense=(70,), heads=3)
    kept = []
    for sparsity in sparsities:
        (q, k, v, gate), mesh = _inputs(case)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # noqa: B023
            sparse = sparse_tiles(Tiles(case.grid, case.tile), sparsity)
            context_parallel_attention(q, k, v, mesh=mesh, total_tokens=case.segments, sparse=sparse, gate=gate)
        kept.append([x.shape for x in saved if x.dtype == torch.uint8])
    return kept


def test_the_choice_takes_a_bit_for_each_pair_of_tiles(pools):
    tiles = 2 + 2 * 2 * 2
    assert pools[1].run(_choice_bytes, (0.0, 0.5, 0.9))[0] == [[(2, 3, tiles, -(-tiles // 8))]] * 3


def _checked_gradients():
    case = SparseCase(grid=(3, 2, 2), dense=(3,), tile=(2, 1, 2), sparsity=0.5)
    tensors, mesh = _inputs(case)
    return torch.autograd.gradcheck(lambda *x: attend(case, mesh, *x), tensors, fast_mode=True)


def test_gradcheck(pools):
    assert pools[1].run(_checked_gradients) == [True]


def _ramp(backend):
    """Return the graphs of a compiled call for three kept counts, and the largest difference to uncompiled calls."""
    case = SparseCase(grid=(4, 5, 6), tile=(2, 2, 2), dense=(7,), heads=2)
    tensors, mesh = _inputs(case)
    tiles, counter = Tiles(case.grid, case.tile), CompileCounterWithBackend(backend)

    def run(q, k, v, gate, sparse):
        return context_parallel_attention(2 * q, k, v, mesh=mesh, total_tokens=(7, 120), sparse=sparse, gate=gate)

    compiled, difference = torch.compile(run, fullgraph=True, backend=counter), 0.0
    for sparsity in (0.9, 0.5, 0.3):
        grads = []
        for call in (run, compiled):
            out = call(*tensors, sparse_tiles(tiles, sparsity))
            grads.append(torch.autograd.grad(out.square().sum(), tensors))
        difference = max(difference, *((a - b).abs().max().item() for a, b in zip(*grads, strict=True)))
    return counter.frame_count, difference


@pytest.mark.parametrize("backend", ["aot_eager", long_case("inductor")])
def test_one_graph_serves_a_ramp_of_kept_counts(pools, backend):
    (graphs, difference) = pools[1].run(_ramp, backend)[0]
    assert graphs == 1 and difference < 1e-12


# --- arguments ---


def _mistakes():
    mesh = context_mesh(1, 1, 1)
    tiles = Tiles((2, 3, 4), (2, 2, 2))
    for wrong in ({"grid": (2, 3)}, {"grid": (2, 0, 4)}, {"grid": (2, 3, 4), "tile": (2, 2, 0)}):
        with pytest.raises(UserError):
            Tiles(**wrong)
    for sparsity in (1, 1.0, -0.1, "0.5", True):
        with pytest.raises(UserError):
            sparse_tiles(tiles, sparsity)
    with pytest.raises(UserError):
        Sparse(tiles, torch.tensor(2.0))
    good = {"sparse": sparse_tiles(tiles, 0.5), "total_tokens": 24}
    q = torch.randn(1, 24, 2, 8)
    wrongs = [
        {"gate": q, "total_tokens": 24},
        good | {"gate": q[:, :, :1]},
        good | {"key_mask": torch.ones(1, 24, dtype=torch.bool)},
        good | {"mask": block_causal((12, 12))},
        good | {"joint": (q, q, q)},
        good | {"total_tokens": (4, 20)},
        good | {"backend": "cpu_flash"},
        {"sparse": 0.5, "total_tokens": 24},
    ]
    for wrong in wrongs:
        with pytest.raises(UserError):
            context_parallel_attention(q, q, q, mesh=mesh, **wrong)
    with pytest.raises(UserError):
        context_parallel_attention(q, q[:, :, :1], q[:, :, :1], mesh=mesh, **good)
    return True


def test_mistakes_get_one_line(pools):
    assert pools[1].run(_mistakes) == [True]


# --- a network whose plan splits in tile order ---


class _Network(nn.Module):
    """Network with sparse attention over a video of 4 x 5 x 6 patches, and a table of positions."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.tiles = mesh, Tiles((4, 5, 6), (2, 2, 2))
        self.attended = self.tiles.on(mesh)
        self.embed, self.head = nn.Conv3d(2, 8, (1, 2, 2), (1, 2, 2)), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        plan = {
            "": {"positions": SplitTokens(split_dim=1)},
            "embed": EmbedOwnTokens(),
            "head": GatherTokens(gather_dim=1),
        }
        of_video = {"hidden_states": self.tiles, "positions": self.tiles}
        parallelize_context(self, mesh=mesh, plan=plan, tiles=lambda x, positions: of_video)

    def forward(self, x, positions):
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + positions[0]
            q, k, v, gate = block(x).unflatten(-1, (4, 2, 4)).unbind(2)
            sparse = sparse_tiles(self.attended, 0.7)
            x = x + context_parallel_attention(q, k, v, mesh=self.mesh, sparse=sparse, gate=gate).flatten(2)
        return self.head(x)


def _network(sizes):
    """Return the output and the gradients of the network, summed over ranks."""
    mesh = build_mesh(**sizes)
    torch.manual_seed(0)
    network = _Network(mesh).double()
    x, positions, weight = (torch.randn(s, dtype=torch.float64) for s in ((2, 2, 4, 10, 12), (2, 120, 8), (2, 120, 3)))
    out = network(x, (positions,))
    (out * weight).sum().backward()
    grads = [p.grad for p in network.parameters()]
    if mesh.cp_size > 1:
        for grad in grads:
            dist.all_reduce(grad)
        network.attended = replace(network.attended, is_ordered=not network.attended.is_ordered)
        with pytest.raises(UserError):  # on all ranks, before anything is sent
            network(x, (positions,))
    return [out.detach(), *grads]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (3, 1), (1, 2), slow_case(2, 2)])
def test_a_network_in_tile_order(pools, ring, ulysses):
    """Patches, positions and the output keep their tokens: the plan puts them in tile order and back."""
    world = ring * ulysses
    for ours in pools[world].run(_network, {"cp": world, "ring": ring, "ulysses": ulysses}):
        for a, b in zip(ours, pools[1].run(_network, {})[0], strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
