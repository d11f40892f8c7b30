"""The fused Triton kernel of attention with tangents, in Triton's interpreter, against float64.

The interpreter shows what the kernel computes in fp32. It shows neither speed nor bf16 products on a GPU. Triton reads
``TRITON_INTERPRET`` when it is imported, and inductor does not compile under it, so ``make test-triton`` starts a
separate process.
"""

import os
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

import fsdp_cp.attention
from fsdp_cp.context.check_parallel import relative_error
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition
from tests.oracles.wan64 import LATENTS, plain_wan, sample, sharded_role
from tests.oracles.written_out import WrittenOut

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton: pip install 'fsdp-cp[triton]'")


def _written_out(q, k, v, mask, scale):
    """Return output and log-sum-exp of attention, ``(B, S, H, D)`` in fp64. Rows without a key give 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    p = logits.softmax(-1).nan_to_num(0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), logits.logsumexp(-1)


def _inputs(generator, head_dim, heads, strided):
    """Return q, k, v and their tangents. If strided, heads come first and rows have gaps."""
    tensors = []
    for tokens, count in [(37, heads[0]), (75, heads[1]), (75, heads[1])] * 2:
        if strided:
            wide = torch.randn(2, count, tokens, 2 * head_dim, generator=generator)
            tensors.append(wide.transpose(1, 2)[..., 3 : 3 + head_dim])
        else:
            tensors.append(torch.randn(2, tokens, count, head_dim, generator=generator))
    return tensors


CASES = [(head_dim, (1, 1, 1), False) for head_dim in (12, 24, 64, 96, 128)]
CASES += [(32, moves, True) for moves in product((0, 1), repeat=3) if any(moves)]


@pytest.mark.parametrize(("head_dim", "moves", "masked"), CASES)
def test_values_and_tangents_equal_float64(head_dim, moves, masked):
    """Cases: uneven ends, grouped heads, odd strides, absent tangents and masks; whole, and in two merged chunks."""
    from fsdp_cp.attention.kernels.triton_dual import attention_dual

    generator = torch.Generator().manual_seed(head_dim + sum(moves))
    tensors = _inputs(generator, head_dim, (4, 2 if head_dim % 8 else 4), strided=head_dim in (24, 32))
    primals, tangents = tensors[:3], tensors[3:]
    mask = None
    if masked:
        mask = torch.rand(2, 75, generator=generator) < 0.7
        mask[0, 0] = mask[0, -1] = True
        mask[1] = False
    wide = [x.double() for x in primals]
    moved = [x.double() if there else torch.zeros_like(x).double() for x, there in zip(tangents, moves, strict=True)]
    rows = slice(0, 1) if masked else slice(None)  # a row without keys has no derivative to compare with
    (out, lse), (t_out, t_lse) = torch.func.jvp(lambda *x: _written_out(*x, mask, 0.3), tuple(wide), tuple(moved))
    given = [x if there else None for x, there in zip(tangents, moves, strict=True)]

    def part(keys):
        taken = [x if x is None or i % 3 == 0 else x[:, keys] for i, x in enumerate([*primals, *given])]
        return attention_dual(*taken, None if mask is None else mask[:, keys], 0.3)

    whole, first, second = part(slice(None)), part(slice(None, 41)), part(slice(41, None))
    w = torch.sigmoid(second.lse - first.lse)
    wide_w, shift = (x.transpose(1, 2)[..., None] for x in (w, w * (1 - w) * (second.t_lse - first.t_lse)))
    merged = (
        first.out + wide_w * (second.out - first.out),
        torch.logaddexp(first.lse, second.lse),
        first.t_out + wide_w * (second.t_out - first.t_out) + shift * (second.out - first.out),
        first.t_lse + w * (second.t_lse - first.t_lse),
    )
    for name, expected, *ours in zip(whole._fields, (out, lse, t_out, t_lse), whole, merged, strict=True):
        for found in ours:
            error = (found[rows] - expected[rows]).norm() / expected[rows].norm().clamp(min=1e-3)
            assert error < 2e-6, f"{name} is off by {error:.1e}"
    if masked:
        assert [x[1].unique().item() for x in whole] == [0, -torch.inf, 0, 0]


def test_half_precision_comes_out_in_fp32():
    """The interpreter computes bf16 inputs in fp32, so this checks the kernel's call and not its rounding."""
    from fsdp_cp.attention.kernels.triton_dual import attention_dual

    tensors = [x.bfloat16() for x in _inputs(torch.Generator().manual_seed(1), 16, (2, 2), strided=False)]
    wide = [x.double() for x in tensors]
    (out, _), (t_out, _) = torch.func.jvp(lambda *x: _written_out(*x, None, 0.25), tuple(wide[:3]), tuple(wide[3:]))
    found = attention_dual(*tensors, None, 0.25)
    assert {x.dtype for x in found} == {torch.float32}
    assert relative_error(found.out, out) < 2e-6 and relative_error(found.t_out, t_out) < 2e-6


def _derivative_of_wan(folder, sizes):
    """Return the derivative of a network with the fused kernel, and how often each layer launched the kernel."""
    from fsdp_cp.attention.kernels.triton_dual import attention_dual

    launches = 0

    def fused(*tensors_and_scale):
        nonlocal launches
        launches += 1
        *tensors, scale = tensors_and_scale
        in_fp32 = [x if x is None or x.dtype == torch.bool else x.float() for x in tensors]
        return type(dual := attention_dual(*in_fp32, scale))(*(x.double() for x in dual))

    chosen = fsdp_cp.attention.choose_dual
    fsdp_cp.attention.choose_dual = lambda *_: fused
    try:
        role, _ = sharded_role(folder, sizes)
        x, t, text, direction = (tensor[:1] for tensor in sample(LATENTS))
        with torch.no_grad(), forward_ad.dual_level():
            dual = role.velocity(video(forward_ad.make_dual(x, direction)), t, text_condition(text)).video
            return *forward_ad.unpack_dual(dual), launches
    finally:
        fsdp_cp.attention.choose_dual = chosen


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 3, "ring": 3}, {"cp": 4, "ring": 2}])
def test_derivatives_of_a_network_on_meshes(pools, wan64, sizes):
    """Each self-attention launches the kernel once per chunk of keys, and each text attention once."""
    network = plain_wan(wan64).requires_grad_(False)
    for block in network.blocks:
        block.attn1.set_processor(WrittenOut())
        block.attn2.set_processor(WrittenOut())
    x, t, text, direction = (tensor[:1] for tensor in sample(LATENTS))

    def velocity(x):
        return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]

    out, tangent = torch.func.jvp(velocity, (x,), (direction,))
    for ours, t_ours, launches in pools[sizes["cp"]].run(_derivative_of_wan, wan64, sizes):
        assert relative_error(ours, out) < 1e-5 and relative_error(t_ours, tangent) < 1e-5
        assert launches == len(network.blocks) * (sizes.get("ring", 1) + 1)


@pytest.mark.parametrize("problem", [None, "broken"])
def test_a_kernel_that_fails_its_check_is_not_used(problem, caplog):
    from fsdp_cp.attention.kernels import choose, triton_dual

    choose._fused.cache_clear()
    with caplog.at_level("INFO", logger="fsdp_cp.attention"):
        fused = choose._fused("triton_dual", lambda *_: problem, torch.device("cpu"), torch.bfloat16, 64)
    assert fused is (triton_dual.attention_dual if problem is None else None)
    assert len(caplog.records) == 1 and ("broken" in caplog.text) == (problem is not None)
    choose._fused.cache_clear()
