"""Networks and data that a family cannot run, and one line for each that names the setting or the tensor."""

import pytest
import torch

from models.families.hunyuan import Hunyuan
from models.families.ltx import LTX
from models.families.ltx2 import LTX2
from models.families.minimax_h3 import MiniMaxH3
from models.families.wan import Wan
from models.sample import AUDIO, VIDEO
from tests.oracles import tiny_hunyuan, tiny_ltx, tiny_wan
from tests.unit.refused import refusal, refused

ARCHITECTURES = {
    LTX: tiny_ltx.ARCHITECTURE,
    Hunyuan: tiny_hunyuan.ARCHITECTURE,
    LTX2: LTX2().examples()["2.0"],
    MiniMaxH3: MiniMaxH3().examples()["t2av"],
    Wan: tiny_wan.ARCHITECTURE,
}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (LTX, "num_layers", True), (LTX, "num_layers", 10**9), (LTX, "patch_size", 2), (LTX, "out_channels", 8),
        (LTX, "cross_attention_dim", 16), (LTX, "norm_eps", "small"),
        (LTX, "_class_name", "LTX2VideoTransformer3DModel"),
        (Hunyuan, "num_layers", 10**9), (Hunyuan, "in_channels", 8), (Hunyuan, "rope_axes_dim", [4, 4]),
        (Hunyuan, "rope_axes_dim", [4, 4, 6]), (Hunyuan, "rope_theta", 0), (Hunyuan, "qk_norm", "layer_norm"),
        (Hunyuan, "use_meanflow", True), (Hunyuan, "_class_name", "LTXVideoTransformer3D"),
        (LTX2, "audio_patch_size", 2), (LTX2, "audio_cross_attention_dim", 24), (LTX2, "audio_cross_attn_mod", True),
        (MiniMaxH3, "patch_size", [2, 2, 2]), (MiniMaxH3, "rope_freq_dim", 3), (MiniMaxH3, "freq_dim", 15),
    ],
)  # fmt: skip
def test_networks_that_cannot_run(kind, key, value):
    with torch.device("meta"):
        line = refusal(kind().build, ARCHITECTURES[kind] | {key: value}, "teacher.architecture")
    assert line.startswith("teacher.architecture")
    assert value in line if key == "_class_name" else f": {key}={value!r} " in line


def configured(kind, **changes):
    return kind().defaults() | ARCHITECTURES[kind] | changes


SOUND = MiniMaxH3().sample_shapes(configured(MiniMaxH3), (4, 2, 4, 4))
KEYFRAMES = MiniMaxH3().optional_shapes(configured(MiniMaxH3), SOUND[VIDEO], 7, 1)
OTHER_TEXT = LTX2().condition_shapes(LTX2().defaults() | LTX2().examples()["2.3"], (4, 3, 6, 10), 7)
TAKEN = {
    LTX: ({VIDEO: (4, 3, 2, 2)}, {"text": (7, 10), "text_mask": (7,), "latent_spacing": (4,)}),
    Hunyuan: ({VIDEO: (4, 3, 5, 3)}, tiny_hunyuan.CONDITION_SHAPES | tiny_hunyuan.IMAGE_SHAPES),
    LTX2: (
        LTX2().sample_shapes(configured(LTX2), (4, 3, 6, 10)),
        LTX2().condition_shapes(configured(LTX2), (4, 3, 6, 10), 7),
    ),
    MiniMaxH3: (SOUND, {"text": (7, configured(MiniMaxH3)["text_dim"])} | KEYFRAMES),
    Wan: ({VIDEO: (4, 3, 6, 8)}, {"text": tiny_wan.TEXT_SHAPE}),
}


@pytest.mark.parametrize(
    ("kind", "sample", "condition", "named"),
    [
        (LTX, {}, {"text": (7, 12)}, "text"),
        (LTX, {VIDEO: (16, 3, 2, 2)}, {}, "latents"),
        (LTX, {}, {"text_mask": None}, "text_mask"),
        (LTX, {}, {"image_latents": (4, 3, 2, 2)}, "image"),
        (LTX, {}, {"first_frame": (4, 1, 2, 3)}, "first_frame"),
        (LTX, {VIDEO: (4, 1, 2, 2)}, {"first_frame": (4, 1, 2, 2)}, "first_frame"),
        (Hunyuan, {}, {"text": (5, 12)}, "text"),
        (Hunyuan, {VIDEO: (16, 3, 5, 3)}, {}, "latents"),
        (Hunyuan, {}, {"text_mask": None}, "text_mask"),
        (Hunyuan, {}, {"glyphs": (4, 9)}, "glyphs"),
        (Hunyuan, {}, {"image_embeds": None}, "image_embeds"),
        (Hunyuan, {}, {"image_latents": (4, 3, 5, 3)}, "image_latents"),
        (Hunyuan, {VIDEO: (4, 1, 5, 3)}, {}, "first_frame"),
        (LTX2, {AUDIO: (2, 13, 3)}, {}, "teacher"),
        (LTX2, {}, OTHER_TEXT, "teacher"),
        (MiniMaxH3, {AUDIO: (6, 14, 1)}, {}, "teacher"),
        (MiniMaxH3, {AUDIO: (5, 14, 2)}, {}, "teacher"),
        (MiniMaxH3, {}, {"keyframes": (4, 1, 4, 6)}, "keyframes"),
        (MiniMaxH3, {}, {"keyframes": (24, 1, 4, 4)}, "keyframes"),
        (MiniMaxH3, {}, {"keyframe_anchors": (2,)}, "keyframe_anchors"),
        (MiniMaxH3, {}, {"text_tags": (8,)}, "text_tags"),
        (MiniMaxH3, {}, {"first_frame": (4, 1, 4, 4)}, "first_frame"),
        (Wan, {}, KEYFRAMES, "keyframes"),
    ],
)
def test_data_that_a_network_cannot_take(kind, sample, condition, named):
    taken, given = TAKEN[kind]
    kind().check_sample(configured(kind), taken, given, "teacher")
    given = {name: shape for name, shape in (given | condition).items() if shape is not None}
    with refused(named):
        kind().check_sample(configured(kind), taken | sample, given, "teacher")
