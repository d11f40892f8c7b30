"""Networks with sparse attention written out densely, in one process and float64."""

import math
from dataclasses import replace

import torch
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from torch import Tensor, nn

from models import verify
from models.families.base import config_of
from models.families.wan_attention import WanSelfAttention, _keys_values, _rotate
from models.roles.role_plan import RolePlan
from tests.oracles.sparse_attention import SparseCase, dense_sparse_attention


class WrittenOutWan(WanSelfAttention):
    """Attention of :func:`tests.oracles.sparse_attention.dense_sparse_attention` with a gate of its own."""

    def __init__(self, case: SparseCase, gate: nn.Module):
        self.case, self.gate = case, gate

    def __call__(self, attn, hidden_states: Tensor, text, mask, rotary_emb) -> Tensor:
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k, v = _keys_values(attn, hidden_states)
        q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        gate = self.gate(hidden_states).unflatten(2, (attn.heads, -1))
        out = dense_sparse_attention(self.case, q, k, v, gate)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


class WrittenOutH3:
    """The same for MiniMax-H3's packed sequence of one sample."""

    def __init__(self, case: SparseCase, gate: nn.Module):
        self.case, self.gate = case, gate

    def __call__(self, attn, hidden_states: Tensor, rotary_emb=None, attention_mask=None) -> Tensor:
        layers = (attn.to_q, attn.to_k, attn.to_v, self.gate)
        q, k, v, gate = (layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in layers)
        q, k = _apply_rotary_emb(attn.norm_q(q), *rotary_emb), _apply_rotary_emb(attn.norm_k(k), *rotary_emb)
        dense = [rows for rows in self.case.dense if rows]
        text = q.shape[1] - sum(dense[1:]) - self.case.segments[-1]  # captions differ in length
        out = dense_sparse_attention(replace(self.case, dense=(text, *dense[1:])), q, k, v, gate)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


class WrittenOutLTX2:
    """The same for the video of LTX-2, whose own gate is diffusers'."""

    def __init__(self, case: SparseCase, gate: nn.Module):
        self.case, self.gate = case, gate

    def __call__(
        self, attn, hidden_states: Tensor, text=None, mask=None, rotary_emb=None, key_rotary_emb=None,
        perturbation_mask=None, all_perturbed=False,
    ) -> Tensor:  # fmt: skip
        rotated = {"split": apply_split_rotary_emb, "interleaved": apply_interleaved_rotary_emb}[attn.rope_type]
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k = rotated(q, rotary_emb), rotated(k, rotary_emb)
        heads = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states), self.gate(hidden_states)))
        out = dense_sparse_attention(self.case, *heads).type_as(q)
        if attn.to_gate_logits is not None:
            out = out * 2 * torch.sigmoid(attn.to_gate_logits(hidden_states))[..., None]
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


PROCESSORS = {"wan": WrittenOutWan, "minimax_h3": WrittenOutH3, "ltx2": WrittenOutLTX2}


def written_out(plan: RolePlan, grid: tuple[int, int, int], optional: bool = False) -> verify.Result:
    """Return the results of the network of ``plan``, a folder with gates, as :func:`models.verify.plain_result`."""
    sparse, family = plan.sparse, type(plan.family)()
    assert sparse is not None
    parts, shapes = verify.sample_shapes(plan, grid, optional)
    given = family.given_frames(shapes)

    def build(config, setting):
        network = plan.family.build(config, setting)
        case = SparseCase(
            grid=(grid[0] - given, *grid[1:]), tile=tuple(sparse.settings.tile), sparsity=sparse.settings.sparsity,
            head_dim=family.head_dim(config_of(network)),
            dense=(*family.dense_rows(config_of(network), parts, shapes), *[math.prod(grid[1:])] * given),
        )  # fmt: skip
        for layer in sparse.gates:
            parent = network.get_submodule(layer.parent)
            parent.to_gate_compress = nn.Linear(layer.inputs, layer.outputs, layer.bias)
            attention = parent.attn1 if family.name == "wan" else parent
            attention.set_processor(PROCESSORS[family.name](case, parent.to_gate_compress))
        return network

    family.build = build  # type: ignore[method-assign]
    with torch.random.fork_rng(devices=[]):
        return verify.plain_result(replace(plan, family=family), grid, optional)
