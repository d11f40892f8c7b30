"""Sparse attention over ranks against dense attention written out in float64: output, gradients, tangent."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.mesh import build_mesh
from fsdp_cp.tiles import Tiles, sparse_tiles
from tests.oracles.sparse_attention import SparseCase, all_on_ranks, errors, oracle, random_case

FACTORS = [
    (1, 1), (1, 2), (2, 1), (3, 1),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 1))),
    pytest.param(3, 2, marks=pytest.mark.long),
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
            assert max(worst.values()) <= 1e-12, (case, worst)
            assert recomputed == 0, case


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_values_gradients_and_tangents(pools, ring, ulysses):
    """Uneven counts, dense segments, equal scores, fewer tokens than ranks, large logits, both orders."""
    _check(pools, [replace(case, ring=ring, ulysses=ulysses) for case in CASES])


@pytest.mark.long
def test_two_hundred_random_cases(pools):
    cases = [random_case(seed) for seed in range(200)]
    for world in sorted({case.world for case in cases}):
        _check(pools, [case for case in cases if case.world == world])


def test_a_comparison_can_fail():
    case = CASES[0]
    worst = errors(oracle(replace(case, sparsity=0.3)), oracle(case), case)
    assert min(worst[name] for name in ("out", "dq", "dk", "dv", "tangent")) > 1e-3


class _Network(nn.Module):
    """Network with sparse attention over a video of 4 x 5 x 6 patches, and a table of positions."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.tiles = mesh, Tiles((4, 5, 6), (2, 2, 2))
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
            sparse = sparse_tiles(self.tiles.on(self.mesh), 0.7)
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
    return [out.detach(), *grads]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (3, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_network_in_tile_order(pools, ring, ulysses):
    """Patches, positions and the output keep their tokens: the plan puts them in tile order and back."""
    world = ring * ulysses
    for ours in pools[world].run(_network, {"cp": world, "ring": ring, "ulysses": ulysses}):
        for a, b in zip(ours, pools[1].run(_network, {})[0], strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
