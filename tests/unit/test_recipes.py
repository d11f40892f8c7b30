"""Recipes, planned from published sizes, built on meta and sharded over a fake process group of their size.

test_combinations.py checks what the recipes set, whichever words compose them.
"""

import json

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import models.roles.load
from distill.config import compose_config
from distill.planning import extrapolation
from distill.planning.command import as_planned, planned_shapes
from distill.planning.encoders import encoder_settings
from distill.run.setup import plan_run
from fsdp_cp.measure.fake_world import fake_world
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.sequence import local_token_count
from models.roles.load import build_role, build_roles
from models.roles.role_plan import sharing
from tests.tiers import long_case, slow
from tests.unit.refused import refused

# transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and -14B-Diffusers.
SHARED = {
    "patch_size": [1, 2, 2],
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
ARCHITECTURES = {
    "1_3b": SHARED | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "14b": SHARED | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
PARAMETERS = {"1_3b": 1_418_996_800, "14b": 14_288_491_584}
CP = {"1_3b": 4, "14b": 8}
TOKENS = {"480p": 32_760, "720p": 75_600}
SIZES = {"480p": (81, 480, 832, 16.0), "720p": (81, 720, 1280, 16.0)}
STATES_GB = {"1_3b": 6.0, "14b": 17.9}
RANKS_PER_NODE = 8
OF_WAN = {"text": (512, 4096)}
OF_LTX = {"text": (128, 4096), "text_mask": (128,), "latent_spacing": (4,)}
OF_HUNYUAN = {"text": (1000, 3584), "text_mask": (1000,), "glyphs": (256, 1472), "glyph_mask": (256,)}
A14B, TI2V = (16, 21, 60, 104), (48, 31, 44, 80)
OTHERS = ["experiment=wan2_1_t2v_1_3b_dmd2", "recipe=wan2_1_t2v_1_3b_dmd2", "world=8"]
PUBLISHED = {  # words; shape of latents, conditions, tokens; cp, parameters of a network, boundaries
    "t2v_a14b": (["experiment=wan2_2_t2v_a14b_dmd2", "world=32"], A14B, OF_WAN, 32_760, 8, 14_288_491_584, (0.875,)),
    "i2v_a14b": (["experiment=wan2_2_i2v_a14b_dmd2", "world=32"], A14B,
                 OF_WAN | {"image_latents": A14B, "image_mask": (4, *A14B[1:])}, 32_760, 8, 14_288_901_184, (0.9,)),
    "ti2v_5b": (["experiment=wan2_2_ti2v_5b_dmd2", "world=8", "data.image=first_frame"], TI2V,
                OF_WAN | {"first_frame": (48, 1, 44, 80)}, 27_280, 4, 4_999_787_712, ()),
    "ltx": ([*OTHERS, "model=ltx_video_13b", "data.max_text_tokens=128"], (128, 11, 15, 26), OF_LTX, 4290, 8,
            13_042_569_344, ()),
    "ltx2_3": (["experiment=ltx2_3_t2av_dmd2", "world=8", "adapters=none"],
               {"video": (128, 31, 24, 16), "audio": (8, 241, 16)},
               {"text": (1024, 4096), "audio_text": (1024, 2048), "fps": (1,)}, 11_904, 8, 18_988_838_144, ()),
    "ltx2_5": (["experiment=ltx2_5_t2av_dmd2", "world=8", "adapters=none"],
               {"video": (128, 31, 24, 16), "audio": (8, 241, 16)},
               {"text": (1024, 4096), "audio_text": (1024, 2048), "fps": (1,)}, 11_904, 8, 18_987_859_200, ()),
    "minimax_h3": (["experiment=minimax_h3_t2av_dmd2", "world=8", "adapters=none"],
                   {"video": (24, 37, 48, 84), "audio": (32, 207, 2)}, {"text": (512, 5120)}, 37_296, 8, 33_122_992_896,
                   ()),
    "hunyuan": ([*OTHERS, "model=hunyuan_video1_5", "data.max_text_tokens=1000"], (32, 21, 30, 52), OF_HUNYUAN, 32_760,
                8, 8_326_608_160, ()),
}  # fmt: skip
"""Image to video embeds 20 more channels than text to video."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Write the settings of Wan's encoders, without weights."""
    folder = tmp_path_factory.mktemp("pipeline")
    for part, settings in (
        ("vae", {"_class_name": "AutoencoderKLWan"}),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "d_model": 4096}),
        ("tokenizer", {}),
    ):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(settings))
        (folder / part / "model.safetensors").touch()
    return folder


def compose_recipe(words, network, pipeline):
    """Compose the recipe with random weights of the published shape in place of a checkpoint."""
    architecture = json.dumps(ARCHITECTURES[network]).replace('"', "")
    roles = [f"{role}.architecture={architecture}" for role in ("teacher", "student", "fake")]
    # The check runs on a machine without a GPU.
    return compose_config([*words, "dry_run=true", f"data.path={pipeline}", f"data.encoders={pipeline}", *roles])


@slow
@pytest.mark.parametrize(
    ("network", "resolution", "nodes", "words"),
    [
        ("1_3b", "480p", 1, ["experiment=wan2_1_t2v_1_3b_dmd2"]),
        ("14b", "720p", 4, ["experiment=wan2_1_t2v_14b_rcm", "data=video_folder_720p", "cluster=h20x8x4",
                            "batch_size=32"]),
    ],
)  # fmt: skip
def test_a_recipe_fits_its_nodes(network, resolution, nodes, words, pipeline, monkeypatch):
    monkeypatch.setattr(models.roles.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    config = compose_recipe(words, network, pipeline)
    data, world = config.data, nodes * RANKS_PER_NODE
    assert (data.num_frames, data.height, data.width, data.fps) == SIZES[resolution]

    with fake_world(world):
        plan = plan_run(config)
        assert [role.name for role in plan.roles] == ["teacher", "student", "fake"]
        mesh, shapes = mesh_of_shape(plan.mesh, device_type="cpu"), data.sample_shapes()
        shape = mesh.shape
        assert (shape.dp_replicate, shape.dp_shard, shape.cp) == (1, world // CP[network], CP[network])
        assert (shape.ring, shape.ulysses) == (1, CP[network])
        assert local_token_count(TOKENS[resolution], shape.cp) * shape.cp == TOKENS[resolution]  # no pads
        assert plan.micro_batch_size == 1 and config.batch_size == 8 * nodes

        local_bytes = {}
        for role_plan in plan.roles:
            trained = role_plan.name in plan.method.trained_roles
            role = build_role(
                role_plan, mesh=mesh, device=torch.device("meta"), trainable=trained, shapes=shapes[0],
                condition_shapes=shapes[1],
            )  # fmt: skip
            assert role.networks[0].precision == "bf16" and role.trainable == trained
            assert role_plan.tokens(*shapes) == TOKENS[resolution]
            assert sum(p.numel() for p in role.parameters()) == PARAMETERS[network]
            # On four nodes each has a copy of the frozen teacher.
            copies = nodes if not trained else 1
            placements, sizes = ((Shard(0),), (world,)) if copies == 1 else ((Replicate(), Shard(0)), (copies, 8))
            for name, parameter in role.weights().items():
                assert parameter.placements == placements and parameter.device_mesh.shape == sizes, name
                wide = trained or "time_embedder" in name  # the time embedder computes in fp32
                assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
            local_bytes[role_plan.name] = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
            ideal = PARAMETERS[network] * (4 if trained else 2) * copies / world
            assert abs(local_bytes[role_plan.name] / ideal - 1) < 0.01
            recomputed = "selective" if trained and network == "14b" else "none"
            assert role_plan.sharding.activation_checkpointing == recomputed

    # Masters, Adam's two moments, the average; gradients of the role that trains; the teacher in its compute dtype.
    student, fake = local_bytes["student"], local_bytes["fake"]
    states = student * (3 + config.student.ema.enabled) + 3 * fake + max(student, fake) + local_bytes["teacher"]
    assert abs(states / 1e9 - STATES_GB[network]) < 0.1


@slow
@pytest.mark.parametrize(
    ("words", "world", "mesh", "micro"),
    [
        (["experiment=wan2_1_t2v_1_3b_dmd2", "cluster=one_gpu"], 1, (1, 1), 1),
        (["experiment=wan2_1_t2v_14b_dmd2", "cluster=h200x8", "data=video_folder_720p"], 8, (1, 8), 2),
        (["experiment=wan2_1_t2v_1_3b_dmd2", "model=wan2_1_t2v_14b", "cluster=h20x8x4"], 32, (4, 8), 1),
    ],
)
def test_another_cluster_is_planned(words, world, mesh, micro, pipeline):
    network = "14b" if "14b" in " ".join(words) else "1_3b"
    config = compose_recipe(words, network, pipeline)
    config.world = world
    assert config.device == "cuda"
    plan = plan_run(config)
    assert {role.sharding.activation_checkpointing for role in plan.roles if role.name != "teacher"} == {"selective"}
    cp = plan.mesh.cp
    assert (world // cp, cp) == mesh and plan.micro_batch_size == micro and config.batch_size == 8


@slow
@pytest.mark.parametrize(("method", "cluster", "world"), [("dmd2", "h20x8", 8), long_case("scm", "h200", 1)])
def test_adapters_share_one_base(method, cluster, world, pipeline):
    words = ["experiment=wan2_1_t2v_14b_dmd2", f"method={method}", f"cluster={cluster}", "adapters=lora"]
    config = compose_recipe(words, "14b", pipeline)
    whole = compose_recipe([word for word in words if word != "adapters=lora"], "14b", pipeline)
    config.world, config.dry_run = world, True
    plan = plan_run(config)
    assert plan.mesh.cp == world and plan.micro_batch_size == 1
    assert len({role.base for role in plan.roles}) == 1
    assert [shared.name for shared in sharing(plan.roles, plan.method.trained_roles)[0]] == [r.name for r in plan.roles]
    for role in plan.roles[1:]:
        assert role.lora.settings.rank == 64 and len(role.lora.targets) == 10 * 40
        settings, before = getattr(config.optim, role.name), getattr(whole.optim, role.name)
        rates = {
            name: settings.lr * group.lr_scale
            for group, names in settings.groups(role.own_shapes, role.name).items()
            for name in names
        }
        assert settings.lr == before.lr and settings.additions_lr == before.additions_lr
        assert {rates[name] for name in rates if ".lora_" in name} == {10 * before.lr}
        assert {rate for name, rate in rates.items() if ".lora_" not in name} <= {before.additions_lr or before.lr}


@slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_planned_without_weights(name):
    """Sizes, shapes and mesh are those of ``plan=true``, which simulates shallow networks of this kind."""
    words, latents, conditions, tokens, cp, parameters, boundaries = PUBLISHED[name]
    config = as_planned(compose_config([*words, "plan=true"]))
    shapes = planned_shapes(config)
    assert shapes == (latents if isinstance(latents, dict) else {"video": latents}, conditions)
    plan = plan_run(config, shapes=shapes)
    assert (plan.mesh.cp, plan.mesh.ulysses, plan.mesh.world) == (cp, cp, config.world)
    for role in plan.roles:
        assert role.tokens(*shapes) == tokens and role.boundaries == boundaries
        assert sum(p.numel() for p in role.network.parameters()) == parameters
    shallow = extrapolation.shallow(role, 2)
    fewer = len(role.family.blocks(role.network)) - len(role.family.blocks(shallow.network))
    assert fewer == role.family.layers(role.config) - 2
    encoders = encoder_settings(config, config.data.encoders, shapes)
    assert encoders["text_encoder"] and not encoders["image_encoder"]


@slow
def test_adapters_of_two_experts_share_two_bases(monkeypatch):
    monkeypatch.setattr(models.roles.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    monkeypatch.setattr("models.lora.plan.LoraPlan.fill", lambda *args, **kwargs: None)
    words = ["experiment=wan2_2_t2v_a14b_dmd2", "world=8", "adapters=lora", "cluster=h20x8", "batch_size=8"]
    config = as_planned(compose_config([*words, "plan=true"]))
    latents, shapes = planned_shapes(config)
    plan = plan_run(config, shapes=(latents, shapes))
    with fake_world(8):
        roles = build_roles(
            plan.roles, trained=plan.method.trained_roles, mesh=mesh_of_shape(plan.mesh, device_type="cpu"),
            device=torch.device("meta"), shapes=latents, condition_shapes=shapes,
        )  # fmt: skip
        found = 0
        for name, role in roles.items():
            assert len(role.networks) == 2 and role.networks[0].precision == "bf16"
            assert all(each is base for each, base in zip(role.networks, roles["teacher"].networks, strict=True))
            local = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
            found += local * {"teacher": 1, "student": 4.5, "fake": 3}[name]  # one expert has gradients at a time
        assert abs(found / 1e9 - 9.46) < 0.1


def test_a_method_that_does_not_know_experts_is_refused():
    words = ["experiment=wan2_2_t2v_a14b_dmd2", "method=meanflow", "recipe=wan2_1_t2v_1_3b_meanflow", "plan=true"]
    with refused("method=meanflow"):
        config = as_planned(compose_config([*words, "world=32"]))
        plan_run(config, shapes=planned_shapes(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recipe runs where there is a GPU")
def test_a_recipe_does_not_run_on_the_cpu_unasked(pipeline):
    config = compose_recipe(["experiment=wan2_1_t2v_1_3b_dmd2"], "1_3b", pipeline)
    config.dry_run, config.world, config.mesh.cp = False, 1, 1
    with refused("device=cuda"):
        plan_run(config)
    config.device = "cpu"
    assert plan_run(config).mesh.world == 1, "asked for, it does"
