"""``ROLE.lora.*``: refusals before anything is built, the layers that get adapters, and their first values."""

import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from distill.config import compose_config
from distill.run.setup import plan_run
from fsdp_cp.mesh import build_mesh
from models.families.wan import Wan
from models.lora.plan import plan_lora, target_layers
from models.lora.settings import LoraSettings
from models.roles.load import build_roles
from models.roles.role_plan import plan_role, sharing
from tests.oracles.full_tensors import full_tensors
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE
from tests.tiers import parametrize, slow, slow_case
from tests.unit.refused import refused


@pytest.fixture(scope="module")
def network():
    with torch.device("meta"):
        return WanTransformer3DModel(**ARCHITECTURE)


def test_by_default_all_linear_layers_of_the_blocks(network):
    found = target_layers(network, Wan(), LoraSettings(rank=4), "student.lora.")
    assert len(found) == 10 * ARCHITECTURE["num_layers"]
    assert all(isinstance(network.get_submodule(name), torch.nn.Linear) for name in found)
    assert {name.split(".")[0] for name in found} == {"blocks"}


def test_patterns(network):
    targets = ["*.attn1.to_?", "condition_embedder.time_proj"]
    settings = LoraSettings(rank=2, targets=targets)
    found = target_layers(network, Wan(), settings, "")
    assert len(found) == 3 * ARCHITECTURE["num_layers"] + 1


def test_a_shallower_network_keeps_the_layers_that_it_has(network):
    settings = LoraSettings(rank=2, targets=["blocks.0.attn1.to_q", "blocks.1.attn1.to_q"])
    plan = plan_lora(network, Wan(), settings, "student")
    with torch.device("meta"):
        shallow = WanTransformer3DModel(**ARCHITECTURE | {"num_layers": 1})
    assert plan.for_network(shallow).targets == ("blocks.0.attn1.to_q",)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 49}, "rank"),
        ({"rank": 4, "targets": ["*.q_proj"]}, "targets"),
        ({"rank": 4, "targets": ["*.norm_q"]}, "targets"),
        ({"rank": -1}, "rank"),
        ({"rank": 4, "alpha": 0.0}, "alpha"),
    ],
    ids=str,
)
def test_what_no_adapters_can_be(network, settings, named):
    with refused(named):
        target_layers(network, Wan(), LoraSettings(**settings), "student.lora.")


WORDS = ("experiment=quickstart", "device=cpu", "mesh.cp=1", "student.lora.rank=4", "fake.lora.rank=4")


@parametrize(
    ("words", "named"),
    [
        (("student.strategy=optim",), "student.strategy"),
        (("fake.activation_checkpointing=full",), "fake.activation_checkpointing"),
        (("student.precision=bf16",), "student.precision"),
        (("student.compile=true",), "student.compile"),
        (("student.master_dtype=bf16", "precision=bf16"), "student.master_dtype"),
        (("student.lora.dropout=0.1",), "student.lora.dropout"),
        (("student.lora.train=[*.ffn]",), "student.lora.train"),
        (("teacher.lora.rank=4",), "teacher.lora"),
        (("student.training_adapter=assets",), "student.training_adapter"),
        (("method=flow_matching", "student.training_adapter=assets"), "student.training_adapter"),
        (("method=flow_matching", "student.training_adapter=assets", "method.keep_weight=0.5"), "method.keep_weight"),
    ],
    ids=str,
    quick=4,
)
def test_settings_that_exclude_each_other(words, named):
    with refused(named):
        plan_run(compose_config([*WORDS, *words]))


@slow
def test_a_run_does_not_replace_what_it_begins_with(checkpoints, tmp_path):
    """The export replaces neither a network nor adapters that a run starts from. Without an export they are allowed."""
    own = tmp_path / "export" / "student"
    shutil.copytree(checkpoints / "teacher", own)
    words = ["experiment=quickstart", f"run_dir={tmp_path}"]
    with refused("fake.checkpoint"):
        plan_run(compose_config([*words, f"fake.checkpoint={own}"]))
    adapters = tmp_path / "export" / "student_lora"
    adapters.mkdir()
    matrices = {"lora_A": torch.ones(2, 48), "lora_B": torch.ones(48, 2)}
    save_file(
        {f"transformer.blocks.0.attn1.to_q.{name}.weight": value for name, value in matrices.items()},
        adapters / "pytorch_lora_weights.safetensors",
    )
    words += [f"teacher.checkpoint={checkpoints / 'teacher'}", f"student.checkpoint={adapters}"]
    with refused("student.checkpoint"):
        plan_run(compose_config(words))


@slow
def test_who_shares():
    def groups(*words):
        plan = plan_run(compose_config([*WORDS, *words]))
        return [[role.name for role in group] for group in sharing(plan.roles, plan.method.trained_roles)]

    assert groups() == [["teacher", "student", "fake"]]
    assert groups("fake.lora.rank=0", "fake.activation_checkpointing=full") == [["teacher", "student"], ["fake"]]
    assert groups("student.lora.rank=0") == [["teacher", "fake"], ["student"]]
    assert groups("student.lora.rank=0", "fake.lora.rank=0") == [["teacher"], ["student"], ["fake"]]


def _first_values(path, architecture):
    mesh = build_mesh(dp_shard=2, cp=1, heads=4)
    where = {
        "mesh": mesh, "device": torch.device("cpu"), "shapes": {"video": LATENT_SHAPE},
        "condition_shapes": CONDITION_SHAPES, "seed": 5,
    }  # fmt: skip
    adapters = {"teacher": None, "student": LoraSettings(rank=8), "fake": LoraSettings(rank=8)}
    plans = [plan_role(n, checkpoint=path, architecture=architecture, lora=lora) for n, lora in adapters.items()]
    roles = build_roles(plans, trained=("student", "fake"), **where)
    assert roles["teacher"].network is roles["student"].network is roles["fake"].network
    plain = build_roles([plan_role("teacher", checkpoint=path, architecture=architecture)], trained=(), **where)
    return {name: full_tensors(role.weights()) for name, role in (*roles.items(), ("plain", plain["teacher"]))}


@pytest.mark.parametrize("random", [False, slow_case(True)])
def test_first_values(pools, checkpoints, random):
    """The base has the values without adapters, from files and from a seed; A has peft's values; B is zero."""
    path, architecture = (None, ARCHITECTURE) if random else (str(checkpoints / "teacher"), None)
    found = pools[2].run(_first_values, path, architecture)
    weights = found[0]
    assert weights["teacher"].keys() == weights["plain"].keys()
    for name, value in weights["plain"].items():
        assert torch.equal(value, weights["teacher"][name]), name
    for role in ("student", "fake"):
        a = [v for name, v in weights[role].items() if ".lora_A." in name]
        assert all(not v.any() for name, v in weights[role].items() if ".lora_B." in name) and len(a) == 20
        for value in a:  # uniform in +-1/sqrt(features), of deviation 1/sqrt(3 features)
            limit = value.shape[1] ** -0.5
            assert value.abs().max() <= limit and value.std() == pytest.approx(limit / 3**0.5, rel=0.15)
        assert len({value.flatten()[0].item() for value in a}) == 20, "each layer has its own"
    for name, value in found[1]["student"].items():
        assert torch.equal(value, weights["student"][name])
