"""Wan recipes, built on meta and sharded over a fake process group of their size.

test_combinations.py checks what the recipes set, whichever words compose them.
"""

import json
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import models.roles.load
from distill.config import compose_config
from distill.run.parameter_groups import parameter_groups
from distill.run.setup import plan_run
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.sequence import local_token_count
from models.roles.load import build_role
from models.roles.role_plan import sharing
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
STATES_GB = {("1_3b", 1): 6.0, ("1_3b", 4): 1.8, ("14b", 1): 60.7, ("14b", 4): 17.9}
RANKS_PER_NODE = 8
RECIPES = [  # network, resolution, method, nodes
    pytest.param("1_3b", "480p", "dmd2", 1, marks=pytest.mark.slow),
    pytest.param("1_3b", "720p", "rcm", 4, marks=pytest.mark.long),
    pytest.param("14b", "480p", "dmd2", 1, marks=pytest.mark.long),
    pytest.param("14b", "720p", "rcm", 4, marks=pytest.mark.slow),
]


def words_of(network, resolution, method, nodes):
    """Return the words that a user types for a recipe."""
    words = [f"experiment=wan2_1_t2v_{network}_{method}"]
    words += [f"data=video_folder_{resolution}"] if resolution != "480p" else []
    return words + (["cluster=h20x8x4", "batch_size=32"] if nodes == 4 else [])


def test_student_and_fake_score_start_from_the_teacher():
    config = compose_config([*words_of("14b", "720p", "rcm", 4), "teacher.checkpoint=/ckpt"])
    assert config.student.checkpoint == config.fake.checkpoint == "/ckpt"


@contextmanager
def fake_world(size):
    """Enter rank 0 of a process group whose collectives do nothing.

    This uses torch.testing._internal (private, torch 2.11 to 2.13).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_encoders(folder, **vae):
    """Write the settings of Wan's encoders, without weights."""
    for part, settings in (
        ("vae", {"_class_name": "AutoencoderKLWan", **vae}),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "d_model": 4096}),
        ("tokenizer", {}),
    ):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(settings))
        (folder / part / "model.safetensors").touch()
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("pipeline"))


def compose_recipe(words, network, pipeline):
    """Compose the recipe with random weights of the published shape in place of a checkpoint."""
    architecture = json.dumps(ARCHITECTURES[network]).replace('"', "")
    roles = [f"{role}.architecture={architecture}" for role in ("teacher", "student", "fake")]
    # The check runs on a machine without a GPU.
    return compose_config([*words, "dry_run=true", f"data.path={pipeline}", f"data.encoders={pipeline}", *roles])


@pytest.mark.parametrize(("network", "resolution", "method", "nodes"), RECIPES)
def test_a_recipe_fits_its_nodes(network, resolution, method, nodes, pipeline, monkeypatch):
    monkeypatch.setattr(models.roles.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    config = compose_recipe(words_of(network, resolution, method, nodes), network, pipeline)
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
    assert abs(states / 1e9 - STATES_GB[network, nodes]) < 0.1


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "cluster", "world"),
    [("dmd2", "h20x8", 8), pytest.param("scm", "h200", 1, marks=pytest.mark.long)],
)
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
            for group, names in parameter_groups(role.own_shapes, settings, role.name).items()
            for name in names
        }
        assert settings.lr == before.lr and settings.additions_lr == before.additions_lr
        assert {rates[name] for name in rates if ".lora_" in name} == {10 * before.lr}
        assert {rate for name, rate in rates.items() if ".lora_" not in name} <= {before.additions_lr or before.lr}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recipe runs where there is a GPU")
def test_a_recipe_does_not_run_on_the_cpu_unasked(pipeline):
    config = compose_recipe(["experiment=wan2_1_t2v_1_3b_dmd2"], "1_3b", pipeline)
    config.dry_run, config.world, config.mesh.cp = False, 1, 1
    with refused("device=cuda"):
        plan_run(config)
    config.device = "cpu"
    assert plan_run(config).mesh.world == 1, "asked for, it does"
