"""The Wan that runs are compared on: its sizes, and checkpoints of three of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

ARCHITECTURE = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 3,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}
LATENT_SHAPE = (4, 3, 8, 8)  # 48 tokens
TEXT_SHAPE = (5, 10)
CONDITION_SHAPES = {"text": TEXT_SHAPE}


def write_checkpoints(
    folder: Path, architecture: Mapping[str, Any] = ARCHITECTURE, boundaries: Mapping[str, float] | None = None
) -> None:
    """Random teacher, student and fake networks in diffusers layout; three different ones.

    Args:
        folder: gets a folder for each.
        architecture: of all.
        boundaries: of roles that are two experts, as a pipeline.
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = WanTransformer3DModel(**architecture)
        # diffusers' initialisation leaves biases at 0, which would hide errors in their gradients.
        for parameter in network.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return network
