"""The smallest Wan, and a role of it."""

from fsdp_cp.mesh import Mesh
from models.roles.role import Role
from models.roles.role_plan import RolePlan, plan_role
from tests.oracles.tiny_wan import tiny_role

SMALL = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 2,
    "out_channels": 2,
    "text_dim": 6,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def small_role(mesh: Mesh, plan: RolePlan | None = None, trainable: bool = True, **settings) -> Role:
    """Build a role, by default of random weights, on the CPU for clips ``(2, 1, 4, 4)`` and texts ``(3, 6)``."""
    plan = plan or plan_role("student", checkpoint=None, architecture=SMALL, **settings)
    return tiny_role(plan, mesh, latents=(2, 1, 4, 4), conditions={"text": (3, 6)}, trainable=trainable)
