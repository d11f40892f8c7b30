"""The LTX-Video family in one process: times, refusals and plans."""

import json
from functools import partial

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel

from distill.planning import encoders
from models.families.ltx import LTX
from tests.oracles.samples import video
from tests.oracles.tiny_ltx import ARCHITECTURE
from tests.unit.refused import refused
from tests.unit.test_flops import ltx_inputs

LTX_FAMILY = LTX()


def test_times_reach_the_sines_in_fp32_whatever_the_network_computes_in():
    """The times 501 and 502 are both 502 in bf16."""
    _, network, x, t, condition = ltx_inputs({}, 1, (1, 2, 2), 3)
    seen = []
    network.time_embed.emb.time_proj.register_forward_hook(lambda _m, args, _out: seen.append(args[0]))
    torch.nn.Module.to(network, torch.bfloat16)
    with torch.no_grad():
        velocity = LTX_FAMILY.outputs(
            network, video(x.bfloat16()), t + 0.001, condition.to(torch.bfloat16)
        ).velocity.video
    assert seen[0].dtype == torch.float32 and seen[0].item() == pytest.approx(501.0, abs=1e-3)
    assert velocity.dtype == torch.bfloat16 and velocity.shape == x.shape


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", True), ("num_layers", 10**9), ("patch_size", 2), ("out_channels", 8),
        ("cross_attention_dim", 16), ("norm_eps", "small"), ("_class_name", "LTX2VideoTransformer3DModel"),
    ],
)  # fmt: skip
def test_networks_that_cannot_run_are_refused_by_name(key, value):
    with refused("teacher.checkpoint"), torch.device("meta"):
        LTX_FAMILY.build(ARCHITECTURE | {key: value}, "teacher.checkpoint")


SHAPES = {"text": (7, 10), "text_mask": (7,), "latent_spacing": (4,)}


@pytest.mark.parametrize(
    ("shapes", "latents", "name"),
    [
        (SHAPES | {"text": (7, 12)}, (4, 3, 2, 2), "text"),
        (SHAPES, (16, 3, 2, 2), "latents"),
        ({"text": (7, 10)}, (4, 3, 2, 2), "text_mask"),
        (SHAPES | {"image_latents": (4, 3, 2, 2)}, (4, 3, 2, 2), "image"),
        (SHAPES | {"first_frame": (4, 1, 2, 3)}, (4, 3, 2, 2), "first_frame"),
        (SHAPES | {"first_frame": (4, 1, 2, 2)}, (4, 1, 2, 2), "first_frame"),
    ],
)
def test_data_that_it_cannot_take_are_refused_by_name(shapes, latents, name):
    config = dict(LTXVideoTransformer3DModel(**ARCHITECTURE).config)
    LTX_FAMILY.check_sample(config, {"video": (4, 3, 2, 2)}, SHAPES, "student.checkpoint")
    with refused(name):
        LTX_FAMILY.check_sample(config, {"video": latents}, shapes, "student.checkpoint")


def test_its_encoders_are_planned():
    """The test builds the published encoders on the meta device, and plans a VAE that takes a time."""
    text = encoders.build_text_encoder
    with torch.device("meta"):
        assert type(text(LTX_FAMILY.planning.text_encoder | {"num_layers": 1})).__name__ == "T5EncoderModel"
        assert type(text({"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1})).__name__ == "UMT5EncoderModel"
        vae = encoders.build_vae(LTX_FAMILY.planning.vae)
    assert type(vae).__name__ == "AutoencoderKLLTXVideo" and vae.spatial_compression_ratio == 32
    small = json.loads(json.dumps(LTX_FAMILY.planning.vae)) | {
        "block_out_channels": [8] * 4, "decoder_block_out_channels": [8] * 4, "layers_per_block": [1] * 5,
        "decoder_layers_per_block": [1] * 5, "latent_channels": 4, "timestep_conditioning": True,
    }  # fmt: skip
    latents = torch.zeros(1, 4, 2, 2, 2)
    peak = encoders._peak(partial(encoders.build_vae, small), lambda vae: encoders._decode(vae, latents))
    assert peak.bytes > 0
