"""Attention written out in float64 in one process, and the same case over the ranks of a process group."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.mask import BlockMask, block_causal
from fsdp_cp.mesh import Mesh, build_mesh, resolve_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens


def context_mesh(world: int, ulysses: int | str, heads: int) -> Mesh:
    """Return the mesh of these ranks. Each process makes it once, since every mesh has process groups with threads."""
    shape = resolve_mesh(world_size=world, cp=world, ulysses=ulysses, heads=heads)
    return _context_mesh(shape.ring, shape.ulysses)


@lru_cache
def _context_mesh(ring: int, ulysses: int) -> Mesh:
    return build_mesh(cp=ring * ulysses, ring=ring, ulysses=ulysses)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Self-attention case over ``ring x ulysses`` ranks."""

    ring: int = 1
    ulysses: int = 1
    tokens: tuple[int, ...] = (12,)
    """Number of tokens per segment. The local sequence joins several segments."""
    text: int = 0
    """Number of text tokens. Every rank holds all of them, as ``joint``."""
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 6
    batch: int = 2
    scale: float | None = None
    masked: bool = False
    """Whether to mask random keys, all keys of one sample, and all keys of the first sample except the last key of the
    last segment."""
    block: int | None = None
    mask: BlockMask | None = None
    """Mask over all tokens, text first."""
    head_groups: int = 1
    backend: str = "auto"
    dtype: torch.dtype = torch.float64

    @property
    def world(self) -> int:
        return self.ring * self.ulysses

    @property
    def total(self) -> int:
        return self.text + sum(self.tokens)


@dataclass
class Inputs:
    """Inputs over all tokens, text first: q, k, v, their tangents, the weight of the output in the loss, the mask."""

    primals: list[Tensor]
    tangents: list[Tensor]
    weight: Tensor
    mask: Tensor | None


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.total * 100 + case.heads * 10 + case.head_dim)

    def draw(heads: int) -> Tensor:
        shape = (case.batch, case.total, heads, case.head_dim)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    primals, tangents = ([draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)] for _ in range(2))
    mask = None
    if case.masked:
        mask = torch.rand(case.batch, case.total, generator=generator) > 0.4
        mask[0, :-1], mask[0, -1] = False, True
        if case.batch > 1:
            mask[1] = False
    return Inputs(primals, tangents, draw(case.heads), mask)


def dense_mask(mask: BlockMask) -> Tensor:
    """Return ``(tokens, tokens)`` bool, True where the query of the row sees the key of the column."""
    dense, first = torch.zeros(mask.tokens, mask.tokens, dtype=torch.bool), 0
    for count, ranges in zip(mask.queries, mask.keys, strict=True):
        for start, stop in ranges:
            dense[first : first + count, start:stop] = True
        first += count
    return dense


def plain_attention(q: Tensor, k: Tensor, v: Tensor, case: Case, mask: Tensor | None) -> Tensor:
    """Attend by matrix product, softmax and matrix product. A row without keys is 0."""
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    logits = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :], -torch.inf)
    if case.block:
        number = torch.arange(q.shape[1]) // case.block
        logits = logits.masked_fill(number[:, None] < number[None, :], -torch.inf)
    if case.mask:
        logits = logits.masked_fill(~dense_mask(case.mask), -torch.inf)
    dead = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return torch.einsum("bhst,bthd->bshd", weights, v)


NAMES = ("out", "dq", "dk", "dv", "dual out", "tangent")


def oracle(case: Case) -> list[Tensor]:
    """Return output, gradients of q, k and v, output again, and its tangent (:data:`NAMES`), always in float64."""
    inputs = make_inputs(case)
    primals, tangents = ([x.double() for x in xs] for xs in (inputs.primals, inputs.tangents))

    def attend(q, k, v):
        return plain_attention(q, k, v, case, inputs.mask)

    leaves = [x.clone().requires_grad_() for x in primals]
    out = attend(*leaves)
    grads = torch.autograd.grad((out * inputs.weight.double()).sum(), leaves)
    _, tangent = torch.func.jvp(attend, tuple(primals), tuple(tangents))
    return [out.detach(), *grads, out.detach(), tangent]


def equal_blocks(case: Case) -> BlockMask | None:
    """Return the causal mask of blocks of ``case.block`` tokens, of which the last may have fewer."""
    if case.block is None:
        return None
    whole, rest = divmod(case.total, case.block)
    return block_causal([case.block] * whole + [rest] * (rest > 0))


def attend_on_rank(case: Case, mesh, tensors: list[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Attend on this rank's tokens of the full inputs. Return the local output and the text's output."""
    text, *segments = zip(*(x.split((case.text, *case.tokens), dim=1) for x in tensors), strict=True)
    local = [torch.cat([split_tokens(s[i], mesh) for s in segments], dim=1) for i in range(3)]
    out = context_parallel_attention(
        *local,
        mesh=mesh,
        total_tokens=case.tokens if len(case.tokens) > 1 else case.tokens[0],
        scale=case.scale,
        backend=case.backend,
        key_mask=mask,
        mask=case.mask or equal_blocks(case),
        joint=tuple(text) if case.text else None,
        head_groups=case.head_groups,
    )
    return out if case.text else (out, None)


def _full(case: Case, mesh, out: Tensor, out_text: Tensor | None) -> Tensor:
    local = [-(-total // case.world) for total in case.tokens]
    parts = [gather_tokens(x, mesh, total) for x, total in zip(out.split(local, dim=1), case.tokens, strict=True)]
    return torch.cat([*([] if out_text is None else [out_text]), *parts], dim=1)


def on_ranks(case: Case) -> list[Tensor]:
    """Return the tensors of :func:`oracle`, computed over the ranks of this process group. Gradients are summed."""
    mesh = context_mesh(case.world, case.ulysses, case.kv_heads)
    inputs = make_inputs(case)
    leaves = [x.clone().requires_grad_() for x in inputs.primals]
    out, out_text = attend_on_rank(case, mesh, leaves, inputs.mask)
    full = _full(case, mesh, out, out_text)
    # All ranks hold the video's part of the loss. The text's part feeds split computation, so each rank has a part of
    # its gradient.
    loss = (full[:, case.text :] * inputs.weight[:, case.text :]).sum()
    if case.text:
        share = (mesh.cp_rank + 1) / sum(range(1, case.world + 1))
        loss = loss + share * (out_text * inputs.weight[:, : case.text]).sum()
    loss.backward()
    grads = [x.grad.to(torch.promote_types(case.dtype, torch.float32)) for x in leaves]
    for grad in grads:
        dist.all_reduce(grad)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs.primals, inputs.tangents, strict=True)]
        dual, tangent = forward_ad.unpack_dual(_full(case, mesh, *attend_on_rank(case, mesh, duals, inputs.mask)))
        return [full.detach(), *grads, dual.clone(), tangent.clone()]


def all_on_ranks(cases: list[Case]) -> list[list[Tensor]]:
    return [on_ranks(case) for case in cases]


def errors(ours: list[Tensor], truth: list[Tensor], case: Case) -> dict[str, float]:
    """Return the norms of the differences, relative to the truth's norm.

    The denominator is at least 1e-3 of the norm of the incoming gradient or tangents: with one key, the gradients of q
    and k are exactly 0, and a kernel's are 1e-17 of the incoming gradient.
    """
    inputs = make_inputs(case)
    floor = 1e-3 * torch.stack([inputs.weight.double().norm(), *(t.double().norm() for t in inputs.tangents)]).max()
    return {
        name: ((a.double() - b).norm() / torch.maximum(b.norm(), floor)).item() if a.isfinite().all() else float("inf")
        for name, a, b in zip(NAMES, ours, truth, strict=True)
    }
