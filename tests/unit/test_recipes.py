"""Every experiment composes, and the Wan recipe's mesh and sizes fit the published network."""

from dataclasses import asdict

import pytest
import torch

from distill.checks import micro_batch_size
from distill.config import CONFIGS, compose_config
from fsdp_cp.mesh import resolve_mesh
from fsdp_cp.sequence import local_token_count
from models.wan import Wan

WAN_1_3B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml")))
def test_it_composes(name):
    config = compose_config([f"experiment={name}"])
    assert config.run_dir == f"runs/{name}" and config.steps > 0


def test_wan_1_3b_fits_its_mesh():
    config = compose_config(["experiment=wan2_1_t2v_1_3b_dmd2", "teacher.checkpoint=/ckpt"])
    assert config.student.checkpoint == config.fake.checkpoint == "/ckpt"
    with torch.device("meta"):
        network = Wan.build(WAN_1_3B, "student.architecture")
    assert sum(p.numel() for p in network.parameters()) == 1_418_996_800
    shape = resolve_mesh(world_size=8, heads=Wan.heads(network.config), **asdict(config.mesh))
    assert (shape.dp_shard, shape.cp) == (2, 4) and micro_batch_size(config, shape.dp) == 1
    # 81 frames of 480 x 832: 4x in time after the first frame, 8x in space, 16 channels.
    latent_shape = (16, (config.data.num_frames - 1) // 4 + 1, config.data.height // 8, config.data.width // 8)
    tokens = Wan.tokens(network.config, latent_shape, "student.checkpoint")
    assert tokens == 32_760 and local_token_count(tokens, shape.cp) == 8_190
    # The published settings (rCM for Wan 1.3B): none of them may be changed by an experiment's body unnoticed.
    assert (config.optim.student.lr, config.optim.fake.lr) == (2e-6, 4e-7)
    assert config.method.fake_updates_per_student_update == 5 and config.method.guidance_scale == 5.0
    assert list(config.method.step_list) == [1.0, 0.9375, 0.8333, 0.625] and config.method.shift == 5.0
