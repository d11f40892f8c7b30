"""Small fp64 Wan, by diffusers in one process and as a role over ranks. Its 12 heads fit most meshes."""

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.settings import ShardSettings
from models.roles.role_plan import plan_role
from tests.oracles import tiny_wan
from tests.oracles.seeded import random_network

ARCHITECTURE = tiny_wan.ARCHITECTURE | {
    "num_attention_heads": 12, "attention_head_dim": 6, "ffn_dim": 80,
}  # fmt: skip
BATCH = 2
LATENTS = (4, 5, 6, 6)  # 45 tokens
TEXT = (5, 10)


def write_checkpoint(folder):
    """Write a Wan with random weights, biases included, as a diffusers folder."""
    random_network(lambda: WanTransformer3DModel(**ARCHITECTURE)).save_pretrained(folder)
    return folder


def sharded_role(folder, sizes, latents=LATENTS, checkpointing=False):
    """Return the role in fp64 on ``build_mesh(**sizes)``, and the mesh."""
    mesh = build_mesh(**sizes, heads=ARCHITECTURE["num_attention_heads"])
    plan = plan_role("student", checkpoint=str(folder), sharding=ShardSettings(activation_checkpointing=checkpointing))
    return tiny_wan.tiny_role(plan, mesh, latents=latents, conditions={"text": TEXT}, precision="fp64"), mesh


def plain_wan(folder):
    """Load diffusers' network in fp64."""
    return nn.Module.to(WanTransformer3DModel.from_pretrained(folder), torch.float64)


def sample(latents, seed=0):
    """Return x, t, text and a target of a global batch, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(BATCH, *latents, generator=generator, dtype=torch.float64) for _ in range(2))
    t = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    return x, t, torch.randn(BATCH, *TEXT, generator=generator, dtype=torch.float64), target
