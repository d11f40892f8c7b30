"""Every experiment composes; each Wan recipe is built on meta and sharded over a fake process group of its size."""

import itertools
import json
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, reduce

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import Shard

import models.load
from distill.config import CONFIGS, compose_config
from distill.data import sample_shapes
from distill.methods import METHODS
from distill.setup import plan_run
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import local_token_count
from models.load import build_role

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
STATES_GB = {("1_3b", 1): 6.0, ("1_3b", 4): 1.5, ("14b", 1): 60.7, ("14b", 4): 15.2}
RANKS_PER_NODE = 8
RECIPES = list(itertools.product(ARCHITECTURES, TOKENS, ("dmd2", "rcm")))
MEANFLOW = ("1_3b", "480p", "meanflow")


def recipe_name(network, resolution, method, nodes):
    parts = ["wan2_1_t2v", network, *([resolution] if resolution != "480p" else []), method]
    return "_".join(parts + ([f"{nodes}nodes"] if nodes > 1 else []))


@lru_cache
def compose_experiment(name):
    return compose_config([f"experiment={name}"])


def test_there_is_a_recipe_for_each_combination_and_no_other():
    found = {path.stem for path in (CONFIGS / "experiment").glob("wan2_1_*.yaml")}
    assert found == {recipe_name(*recipe, nodes) for recipe in RECIPES for nodes in (1, 4)} | {
        recipe_name(*MEANFLOW, 1)
    }


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml")))
def test_it_composes(name):
    config = compose_experiment(name)
    assert config.run_dir == f"runs/{name}" and config.steps > 0


def test_student_and_fake_score_start_from_the_teacher():
    config = compose_config(["experiment=wan2_1_t2v_14b_720p_rcm_4nodes", "teacher.checkpoint=/ckpt"])
    assert config.student.checkpoint == config.fake.checkpoint == "/ckpt"


@contextmanager
def fake_world(size):
    """Rank 0 of a process group whose collectives do nothing (private: torch.testing._internal, torch 2.11 to 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class World:
    """What recipes on the same number of nodes share: a mesh per shape, and one network per way to build and shard."""

    def __init__(self, nodes):
        self.nodes, self.size = nodes, nodes * RANKS_PER_NODE
        self._built = {}

    def _once(self, key, build):
        return self._built[key] if key in self._built else self._built.setdefault(key, build())

    def mesh(self, plan):
        key = json.dumps(["mesh", plan.mesh_settings, plan.heads])
        return self._once(key, lambda: build_mesh(**plan.mesh_settings, heads=plan.heads, device_type="cpu"))

    def role(self, role_plan, mesh, trainable, shapes):
        # The same at each resolution: `shapes` only decides how many tokens it expects.
        key = repr((role_plan.config, role_plan.sharding, role_plan.additions, mesh.shape, trainable))
        return self._once(
            key,
            lambda: build_role(
                role_plan,
                mesh=mesh,
                device=torch.device("meta"),
                trainable=trainable,
                latent_shape=shapes[0],
                text_shape=shapes[1],
            ),
        )


@pytest.fixture(scope="module", params=[1, 4], ids=["1node", "4nodes"])
def world(request):
    with fake_world(request.param * RANKS_PER_NODE), pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
        yield World(request.param)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The settings of Wan2.1's encoders, without weights."""
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


def compose_recipe(name, network, pipeline):
    """The recipe with random weights of the published shape in place of a checkpoint."""
    architecture = json.dumps(ARCHITECTURES[network]).replace('"', "")
    roles = [f"{role}.architecture={architecture}" for role in ("teacher", "student", "fake")]
    return compose_config([f"experiment={name}", f"data.path={pipeline}", f"data.encoders={pipeline}", *roles])


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_a_recipe_fits_its_nodes(recipe, world, pipeline):
    network, resolution, method = recipe
    config = compose_recipe(recipe_name(*recipe, world.nodes), network, pipeline)
    data = config.data
    assert (data.num_frames, data.height, data.width, data.fps) == SIZES[resolution]

    plan = plan_run(config)
    assert [role.name for role in plan.roles] == ["teacher", "student", "fake"]
    mesh, shapes = world.mesh(plan), sample_shapes(data)
    shape = mesh.shape
    assert (shape.dp_replicate, shape.dp_shard, shape.cp) == (1, world.size // CP[network], CP[network])
    # Heads let all of cp be Ulysses, whose all-to-all stays inside a node.
    assert (shape.ring, shape.ulysses) == (1, CP[network]) and plan.heads % shape.ulysses == 0
    assert RANKS_PER_NODE % shape.cp == 0
    assert local_token_count(TOKENS[resolution], shape.cp) * shape.cp == TOKENS[resolution]  # no pads
    assert plan.micro == 1 and config.batch_size == 8 * world.nodes

    local_bytes = {}
    for role_plan in plan.roles:
        trained = role_plan.name in plan.method.trained_roles
        role = world.role(role_plan, mesh, trained, shapes)
        assert role.precision == "bf16" and role.trainable == trained
        assert role_plan.check_sample(*shapes) == TOKENS[resolution]
        assert sum(p.numel() for p in role.parameters()) == PARAMETERS[network]
        for name, parameter in role.weights().items():
            assert parameter.placements == (Shard(0),) and parameter.device_mesh.size() == world.size, name
            wide = trained or "time_embedder" in name  # which computes in fp32
            assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
        local_bytes[role_plan.name] = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
        ideal = PARAMETERS[network] * (4 if trained else 2) / world.size
        assert abs(local_bytes[role_plan.name] / ideal - 1) < 0.01
        assert role_plan.sharding.activation_checkpointing == ("full" if trained else "none")

    # Masters, Adam's two moments, the average; gradients of the role that trains; the teacher as it computes.
    student, fake = local_bytes["student"], local_bytes["fake"]
    states = student * (3 + config.student.ema.enabled) + 3 * fake + max(student, fake) + local_bytes["teacher"]
    assert abs(states / 1e9 - STATES_GB[network, world.nodes]) < 0.1
    blocks = role.network.blocks
    block, root = (
        sum(p.numel() for p in blocks[0].parameters()),
        sum(p.numel() for name, p in role.weights().items() if not name.startswith("blocks.")),
    )
    gathered = 2 * (3 * block + root)  # docs/sharding.md, gather_stream=own
    gradients = 2 * block + 2 * 4 * block  # one block's in bf16, gradient_buffers=2 in fp32
    width = ARCHITECTURES[network]["num_attention_heads"] * 128
    inputs = 2 * width * local_token_count(TOKENS[resolution], shape.cp) * len(blocks)  # full checkpointing
    assert states + gathered + gradients + inputs < 75e9  # of 96: the rest is for a block that runs again


def test_the_recipe_of_meanflow_is_planned(pipeline):
    config = compose_recipe(recipe_name(*MEANFLOW, 1), "1_3b", pipeline)
    config.world, config.dry_run = RANKS_PER_NODE, True
    plan = plan_run(config)
    assert [(role.name, tuple(role.additions)) for role in plan.roles] == [
        ("teacher", ()),
        ("student", ("second_time",)),
    ]
    assert plan.micro == 1 and all(role.sharding.precision == "bf16" for role in plan.roles)


def documented():
    """(method, network) -> setting -> (value of ours, the row), as docs/methods/README.md says."""
    text = (CONFIGS.parent / "docs" / "methods" / "README.md").read_text()
    tables = {}
    for part in text[text.index("### Ours and published") : text.index("## Reading metrics")].split("\n#### ")[1:]:
        method, _, rest = part.partition("\n")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines() if line[:1] == "|"]
        networks = {"1.3B": "1_3b", "14B": "14b"}
        for column, name in enumerate(rows[0][1:], 1):
            if name in networks:
                values = {row[0].strip("`"): (yaml.safe_load(row[column].strip("`")), row) for row in rows[2:]}
                assert len(values) == len(rows) - 2, "a setting stands there twice"
                tables[method, networks[name]] = values
    return tables


DOCUMENTED = documented()


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("recipe", [*RECIPES, MEANFLOW], ids="-".join)
def test_the_settings_are_those_of_the_table(recipe, nodes):
    """None of them may be changed by an experiment's body, or by a default, unnoticed."""
    network, _, method = recipe
    if recipe == MEANFLOW and nodes > 1:
        return
    config = compose_experiment(recipe_name(*recipe, nodes))
    table = DOCUMENTED[method, network]
    wanted = {f"method.{item.name}" for item in fields(config.method)} - {"method.name"}
    trained = METHODS[method][0].trained_roles
    wanted |= {f"optim.{role}.{key}" for role in trained for key in ("lr", "betas", "weight_decay", "eps", "warmup")}
    wanted |= {"steps", "batch_size", "precision", "optim.clip", "student.ema.decay", "student.ema.start"}
    assert not wanted - table.keys(), "settings without a row"
    for key, (value, _) in table.items():
        found = reduce(getattr, key.split("."), config)
        if key == "batch_size":
            found /= nodes
        assert found == value, f"{key} is {found}, and the table says {value}"
    assert config.student.ema.enabled
    assert all(getattr(config.optim, role).schedule == "constant" for role in trained)
    assert config.data.negative_prompt.startswith("色调艳丽") and config.data.negative_prompt.endswith("倒着走")


@pytest.mark.parametrize("case", DOCUMENTED, ids="-".join)
def test_the_table_says_where_a_value_is_published_or_why_it_is_ours(case):
    for key, (_, row) in DOCUMENTED[case].items():
        published, where, why = row[-3:]
        assert where or why or published in ("no", "none"), f"{key}: neither a source nor a reason"


def test_the_students_train_as_often_as_the_recipes_say():
    for name, updates in (("dmd2", 1200), ("rcm", 1200)):
        for network in ARCHITECTURES:
            config = compose_experiment(recipe_name(network, "480p", name, 1))
            method = METHODS[name][0](config.method, {})
            joint = range(getattr(config.method, "consistency_steps", 0), config.steps)
            assert sum(method.trained_role(step) == "student" for step in joint) == updates
