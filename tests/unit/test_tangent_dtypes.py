"""Tangents have the dtype of their primal throughout a bf16 network; ``layer_norm`` of CUDA returns fp32 ones.

The meta device follows CUDA's rule, and computes nothing.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from distill.methods.common.derivatives import directional_derivative
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.mesh import build_mesh
from fsdp_cp.runtime.local_ranks import RankPool
from fsdp_cp.sequence import gather_tokens
from models.condition import Condition
from models.families.registry import FAMILIES
from models.sample import Sample
from tests.tiers import parametrize

EXAMPLES = [(name, example) for name, family in FAMILIES.items() for example in family.examples()]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks


def _linear_dtypes(family_name, example):
    """Return the dtypes of primal and tangent at each linear layer, and those of the derivative."""
    family = FAMILIES[family_name]
    config = family.defaults() | family.examples()[example]
    latents = (family.latent_channels(config), *(2 * patch for patch in family.patch_size(config)))
    shapes = family.condition_shapes(config, latents, 7)
    with torch.device("meta"):
        network = family.build(config, "example").to(torch.bfloat16)
        family.restore_buffers(network, torch.device("meta"))
        for unit in family.full_precision_units(network):
            unit.float()
        parts = family.sample_shapes(config, latents)
        x, t_x = (
            Sample({name: torch.randn(2, *shape, dtype=torch.bfloat16) for name, shape in parts.items()})
            for _ in range(2)
        )
        t = torch.rand(2)
        condition = Condition({name: torch.randn(2, *shape) for name, shape in shapes.items()}).to(torch.bfloat16)
    family.parallelize(network, build_mesh(dp_shard=2, cp=1), "auto", 1)
    seen = []

    def note(_module, args):
        primal, tangent = forward_ad.unpack_dual(args[0])
        seen.append((primal.dtype, primal.dtype if tangent is None else tangent.dtype, tangent is not None))

    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note)

    def velocity(x, t):
        return family.outputs(network, x, t, condition).velocity

    # Autocast, which attention asks for, does not know the meta device.
    unknown = mock.patch.multiple(torch, is_autocast_enabled=lambda *_: False, autocast=lambda *_, **__: nullcontext())
    with unknown:
        derivative = directional_derivative(velocity, x, t, t_x, mode="exact", step=0.0)
    return seen, derivative.dtype, derivative.shapes == x.shapes


@parametrize(("family", "example"), EXAMPLES, quick=1)
def test_every_linear_layer_gets_tangents_of_its_inputs_dtype(pool, family, example):
    seen, dtype, fits = pool.run(_linear_dtypes, family, example)[0]
    assert sum(moves for _, _, moves in seen) > 10, "most layers come after the state"
    assert all(primal == tangent for primal, tangent, _ in seen)
    assert dtype == (torch.float32 if family == "minimax_h3" else torch.bfloat16) and fits  # H3's last layers are fp32


def _wide_tangents(cp):
    """Run attention of bf16 with fp32 tangents, and with the same tangents in bf16."""
    mesh = build_mesh(dp_shard=2 // cp, cp=cp, heads=2)
    generator = torch.Generator().manual_seed(mesh.cp_rank)
    primals = [torch.randn(1, 5, 2, 8, generator=generator).bfloat16() for _ in range(3)]
    wide = [torch.randn(1, 5, 2, 8, generator=generator) for _ in range(3)]
    found = []
    for tangents in (wide, [x.bfloat16() for x in wide]):
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
            out = context_parallel_attention(*duals, mesh=mesh, total_tokens=5 * cp)
            found.append(forward_ad.unpack_dual(gather_tokens(out, mesh)))
            # A tangent alone that is too wide reaches the gather too.
            again = gather_tokens(forward_ad.make_dual(primals[0], tangents[0]), mesh)
            found.append(forward_ad.unpack_dual(again))
    return [[x.clone() for x in pair] for pair in found]


@pytest.mark.parametrize("cp", [1, 2])
def test_attention_rounds_tangents_that_are_wider_than_their_primal(pool, cp):
    for out, gathered, wanted, wanted_gathered in pool.run(_wide_tangents, cp):
        assert wanted[1].dtype == torch.bfloat16 and wanted[1].isfinite().all()
        for ours, theirs in zip([*out, *(gathered if cp > 1 else ())], [*wanted, *wanted_gathered], strict=False):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
