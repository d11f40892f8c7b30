"""A transformer as a user of the library writes it."""

import torch.nn.functional as F
from torch import nn

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens

PLAN = {"blocks.0": {"hidden_states": SplitTokens(split_dim=1)}, "head": GatherTokens(gather_dim=1)}
TOKENS, DIM, HEADS = 12, 18, 6


class Block(nn.Module):
    def __init__(self, dim=DIM, heads=HEADS, hidden=31, tokens=None):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.mesh, self.heads, self.tokens = None, heads, tokens

    def forward(self, hidden_states, scale=1):
        q, k, v = self.qkv(self.norm(hidden_states) * scale).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.mesh is not None:
            out = context_parallel_attention(q, k, v, mesh=self.mesh, total_tokens=self.tokens)
        else:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        hidden_states = hidden_states + self.out(out.flatten(2))
        return hidden_states + self.mlp(hidden_states)


class Transformer(nn.Module):
    def __init__(self, dim=DIM, **sizes):
        super().__init__()
        self.embed, self.head = nn.Linear(5, dim), nn.Linear(dim, 5)
        self.blocks = nn.ModuleList(Block(dim, **sizes) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
