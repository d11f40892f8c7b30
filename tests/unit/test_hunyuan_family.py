"""HunyuanVideo 1.5 and LTX-Video in one process: times, plans, and adapters of layers that nothing reads."""

import json
from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import DataDependentOutputException

from distill.planning import encoders
from fsdp_cp.measure.fake_world import fake_tensors
from models.condition import Condition
from models.families.hunyuan import Hunyuan, own_forward, own_rotary_tables
from models.families.ltx import LTX
from models.lora.plan import plan_lora
from models.lora.settings import LoraSettings
from tests.oracles.samples import video
from tests.oracles.tiny_hunyuan import ARCHITECTURE
from tests.unit.refused import refused
from tests.unit.test_flops import hunyuan_inputs, ltx_inputs

HUNYUAN = Hunyuan()
STUDENT = [1.0, 0.9375, 5 / 6, 0.625]


@pytest.fixture
def one_rank():
    """Return the attributes that the family reads of a mesh whose tokens are not split."""
    return SimpleNamespace(cp_size=1, cp_rank=0)


@pytest.mark.parametrize("patches", [{}, {"patch_size": 2, "patch_size_t": 3}], ids=str)
def test_rotary_tables_are_the_network_s_own(one_rank, patches):
    network = HunyuanVideo15Transformer3DModel(**ARCHITECTURE | patches)
    latents = torch.randn(1, 9, 3, 4, 6)
    theirs, (*ours, total) = network.rope(latents), own_rotary_tables(network.rope, one_rank, latents)
    assert total == len(theirs[0]) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def without_attention(one_rank):
    """Return a network with this family's forward and no attention, which needs a process group, and its inputs."""
    _, network, *inputs = hunyuan_inputs({}, 1, (1, 2, 2), 3)
    network.transformer_blocks = torch.nn.ModuleList()
    for block in network.context_embedder.token_refiner.refiner_blocks:
        block.attn.set_processor(_Nothing())
    network.forward = partial(own_forward, network, one_rank)
    return network, *inputs


class _Nothing:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        return hidden_states


@pytest.mark.parametrize("name", ["hunyuan", "ltx"])
def test_times_reach_the_sines_in_fp32_whatever_the_network_computes_in(without_attention, name):
    """The times 501 and 502 are both 502 in bf16. HunyuanVideo's plain network would round them."""
    family, (network, x, t, condition) = HUNYUAN, without_attention
    if name == "ltx":
        family, network, x, t, condition = ltx_inputs({}, 1, (1, 2, 2), 3)
    seen = []
    for part, module in network.named_modules():
        if part.endswith("time_proj"):
            module.register_forward_hook(lambda _m, args, _out: seen.append(args[0]))
    torch.nn.Module.to(network, torch.bfloat16)
    with torch.no_grad():
        velocity = family.outputs(network, video(x.bfloat16()), t + 0.001, condition.to(torch.bfloat16)).velocity.video
    assert [time.item() for time in seen] == pytest.approx([501.0] * (2 if name == "hunyuan" else 1), abs=1e-3)
    assert {time.dtype for time in seen} == {torch.float32}
    assert velocity.dtype == torch.bfloat16 and velocity.shape == x.shape


@pytest.mark.slow
def test_it_runs_on_fake_tensors(without_attention):
    """diffusers' own forward asks the data whether there is an image; fake tensors cannot answer."""
    network, x, t, condition = without_attention
    with fake_tensors() as mode, torch.no_grad():
        mode.allow_non_fake_inputs = True
        given = Condition({name: mode.from_tensor(value) for name, value in condition.tensors.items()})
        inputs = (network, video(mode.from_tensor(x)), mode.from_tensor(t), given)
        assert HUNYUAN.outputs(*inputs).velocity.video.shape == x.shape
        del network.forward
        with pytest.raises(DataDependentOutputException):
            HUNYUAN.outputs(*inputs)


@pytest.mark.parametrize("sampler", ["renoise", "ode"])
def test_an_export_s_scheduler_is_met_by_the_times_that_the_pipeline_hands_over(sampler):
    """HunyuanVideo15Pipeline (diffusers 0.42) calls ``set_timesteps(sigmas=1 ... 1 / n)``."""
    assert diffusers.__version__.startswith("0.42"), "look at HunyuanVideo15Pipeline.__call__: passes_times is its"
    scheduler = HUNYUAN.schedulers(times=STUDENT, stochastic=sampler == "renoise")["scheduler"]
    _, network, *_ = hunyuan_inputs({}, 1, (1, 1, 1), 3)
    seen = []
    network.time_embed.time_proj.register_forward_hook(lambda _m, args, _out: seen.append(args[0].item() / 1000))
    guider = ClassifierFreeGuidance(guidance_scale=1.0)
    vae = AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1)
    pipeline = HunyuanVideo15Pipeline(None, None, network, vae, scheduler, None, None, guider)
    pipeline.set_progress_bar_config(disable=True)
    text = {"prompt_embeds": torch.zeros(1, 3, 10), "prompt_embeds_mask": torch.ones(1, 3)}
    text |= {"prompt_embeds_2": torch.zeros(1, 4, 8), "prompt_embeds_mask_2": torch.zeros(1, 4)}
    latents = torch.randn(1, 4, 1, 1, 1)
    pipeline(**text, latents=latents, height=16, width=16, num_inference_steps=4, output_type="latent")
    assert seen == pytest.approx(STUDENT, abs=1e-6)


def test_encoders_of_ltx_are_planned():
    """The test builds the published encoders on the meta device, and plans a VAE that takes a time."""
    text = encoders.build_encoder
    with torch.device("meta"):
        assert type(text(LTX().planning.text_encoder | {"num_layers": 1})).__name__ == "T5EncoderModel"
        assert type(text({"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1})).__name__ == "UMT5EncoderModel"
        vae = encoders.build_vae(LTX().planning.vae)
    assert type(vae).__name__ == "AutoencoderKLLTXVideo" and vae.spatial_compression_ratio == 32
    small = json.loads(json.dumps(LTX().planning.vae)) | {
        "block_out_channels": [8] * 4, "decoder_block_out_channels": [8] * 4, "layers_per_block": [1] * 5,
        "decoder_layers_per_block": [1] * 5, "latent_channels": 4, "timestep_conditioning": True,
    }  # fmt: skip
    latents = torch.zeros(1, 4, 2, 2, 2)
    peak = encoders._peak(partial(encoders.build_vae, small), lambda vae: encoders._decode(vae, latents))
    assert peak.bytes > 0


def test_encoders_of_hunyuan_are_planned():
    with torch.device("meta"):
        glyphs = encoders.build_encoder(HUNYUAN.planning.text_encoder_2)
        text = encoders.build_encoder(HUNYUAN.planning.text_encoder | {"num_hidden_layers": 1})
        vae = encoders.build_vae(HUNYUAN.planning.vae)
        image = encoders.build_encoder(HUNYUAN.planning.image_encoder)
    assert type(glyphs).__name__ == "T5EncoderModel" and sum(p.numel() for p in glyphs.parameters()) > 0.21e9
    assert type(text).__name__ == "Qwen2_5_VLTextModel" and type(image).__name__ == "SiglipVisionModel"
    assert type(vae).__name__ == "AutoencoderKLHunyuanVideo15" and vae.spatial_compression_ratio == 16


LAST = ARCHITECTURE["num_layers"] - 1
UNREAD = [
    f"transformer_blocks.{LAST}.{name}" for name in ("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
]


def test_adapters_of_layers_that_nothing_reads_are_left_out_of_a_file(tmp_path):
    """Other projects train all linear layers of the blocks. The outputs of these three layers are not used."""
    network = HunyuanVideo15Transformer3DModel(**ARCHITECTURE)
    linear = [
        name
        for name, module in network.named_modules()
        if name.startswith("transformer_blocks.") and isinstance(module, torch.nn.Linear)
    ]
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors = {}
    for name in linear:
        out, into = network.get_submodule(name).weight.shape
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(2, into)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(out, 2)
    save_file(tensors, file)
    plan = plan_lora(network, HUNYUAN, LoraSettings(rank=2), "student", file)
    assert set(plan.targets) == set(linear) - set(UNREAD) == plan.saved.read().keys()
    assert set(plan_lora(network, HUNYUAN, LoraSettings(rank=2), "student").targets) == set(plan.targets)
    settings = LoraSettings(rank=2, targets=["*.attn.to_add_out"])
    plan = plan_lora(network, HUNYUAN, settings, "student")
    assert plan.targets == tuple(f"transformer_blocks.{i}.attn.to_add_out" for i in range(LAST)), "of a wildcard too"


@pytest.mark.parametrize(
    ("settings", "layer"),
    [
        ({"targets": ["*.attn.to_q", UNREAD[0]]}, UNREAD[0]),
        ({"targets": [f"transformer_blocks.{LAST}.ff_context.*"]}, UNREAD[1]),
    ],
)
def test_adapters_that_would_never_train_are_refused(settings, layer):
    network = HunyuanVideo15Transformer3DModel(**ARCHITECTURE)
    with refused(layer):
        plan_lora(network, HUNYUAN, LoraSettings(rank=2, **settings), "student")
