"""A Wan with sparse attention written out densely, in one process and float64."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from models import verify
from models.families.base import config_of
from models.families.wan_attention import WanSelfAttention, _keys_values, _rotate
from models.roles.role_plan import RolePlan
from tests.oracles.sparse_attention import SparseCase, dense_sparse_attention


class WrittenOut(WanSelfAttention):
    """Attention of :func:`tests.oracles.sparse_attention.dense_sparse_attention` with a gate of its own."""

    case: SparseCase
    gate: nn.Module | None

    def __call__(self, attn, hidden_states: Tensor, text, mask, rotary_emb) -> Tensor:
        cos, sin = rotary_emb
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k, v = _keys_values(attn, hidden_states)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        gate = self.gate(hidden_states).unflatten(2, (attn.heads, -1))
        out = dense_sparse_attention(self.case, q, k, v, gate)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def written_out(plan: RolePlan, grid: tuple[int, int, int], **inputs) -> verify.Result:
    """Return the results of the network of ``plan``, a folder with gates, as :func:`models.verify.plain_result`."""
    sparse = plan.sparse
    assert sparse is not None
    original = plan.family.build

    def build(config, setting):
        network = original(config, setting)
        case = SparseCase(
            grid=grid, tile=tuple(sparse.settings.tile), sparsity=sparse.settings.sparsity,
            head_dim=plan.family.head_dim(config_of(network)),
        )  # fmt: skip
        for index, block in enumerate(network.blocks):
            if index in sparse.settings.dense_layers:
                continue
            block.to_gate_compress = nn.Linear(block.attn1.to_q.in_features, block.attn1.to_q.in_features)
            processor = WrittenOut.__new__(WrittenOut)
            processor.case, processor.gate = case, block.to_gate_compress
            block.attn1.set_processor(processor)
        return network

    family = type(plan.family)()
    family.build = build  # type: ignore[method-assign]
    with torch.random.fork_rng(devices=[]):
        return verify.plain_result(replace(plan, family=family), grid, **inputs)
