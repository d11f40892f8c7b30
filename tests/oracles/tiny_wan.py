"""Tiny Wan for comparisons: its sizes, and checkpoints of three networks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from fsdp_cp.mesh import Mesh
from models.condition import Condition
from models.roles.load import build_role
from models.roles.role import Role
from models.roles.role_plan import RolePlan
from tests.oracles.seeded import random_network

ARCHITECTURE = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}
LATENT_SHAPE = (4, 3, 8, 8)  # 48 tokens
TEXT_SHAPE = (5, 10)
CONDITION_SHAPES = {"text": TEXT_SHAPE}
IMAGE = ARCHITECTURE | {
    "in_channels": 2 * LATENT_SHAPE[0] + 4, "image_dim": 14, "added_kv_proj_dim": 48,
}  # fmt: skip
IMAGE_SHAPES = {
    "text": (512, 10), "image_latents": LATENT_SHAPE, "image_mask": (4, *LATENT_SHAPE[1:]), "image_embeds": (5, 14),
}  # fmt: skip
"""Network and conditions of image-to-video, whose text is 512 tokens."""


def text_condition(text: Tensor, null_text: Tensor | None = None, empty_text: Tensor | None = None) -> Condition:
    """Return a condition with only caption embeddings.

    Args:
        text: ``(B, L, D)``.
        null_text: embeddings of the negative prompt, ``(L, D)``.
        empty_text: embeddings of the empty caption, ``(L, D)``.
    """
    null = {} if null_text is None else {"text": null_text}
    empty = {} if empty_text is None else {"text": empty_text}
    return Condition({"text": text}, null, empty)


def tiny_role(
    plan: RolePlan, mesh: Mesh, *, latents=LATENT_SHAPE, conditions=CONDITION_SHAPES, device="cpu", **options: Any
) -> Role:
    """Build a role, to be trained unless the ``options`` of ``build_role`` say otherwise, for clips of these shapes."""
    return build_role(
        plan, mesh=mesh, device=torch.device(device), shapes={"video": latents}, condition_shapes=conditions,
        **{"trainable": True} | options,
    )  # fmt: skip


def write_checkpoints(
    folder: Path, architecture: Mapping[str, Any] = ARCHITECTURE, boundaries: Mapping[str, float] | None = None
) -> None:
    """Write three different random networks, teacher, student and fake, in diffusers layout.

    Args:
        folder: where each network gets a folder.
        architecture: configuration of all networks.
        boundaries: boundary of each role that is two experts; the role is written as a pipeline.
    """
    for seed, name in enumerate(("teacher", "student", "fake")):
        if boundaries is None or name not in boundaries:
            _random_wan(architecture, seed).save_pretrained(folder / name)
            continue
        for number, expert in enumerate(("transformer", "transformer_2")):
            _random_wan(architecture, 10 * (number + 1) + seed).save_pretrained(folder / name / expert)
        index = json.dumps({"boundary_ratio": boundaries[name]})
        (folder / name / "model_index.json").write_text(index)


def _random_wan(architecture: Mapping[str, Any], seed: int) -> WanTransformer3DModel:
    return random_network(lambda: WanTransformer3DModel(**architecture), seed)
