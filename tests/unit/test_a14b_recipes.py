"""The recipes for Wan2.2 A14B, text and image to video: composed, built on meta and sharded over a fake process group
of their 32 ranks, or with adapters of 8; and their settings beside those that the documents name."""

import json
from functools import reduce

import pytest
import torch
import yaml
from torch.distributed.tensor import Shard

import models.fill
from distill.config import compose_config
from distill.config.errors import CONFIGS
from distill.planning.coding import encoder_settings
from distill.planning.command import as_planned, planned_shapes
from distill.setup import plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import mesh_of_shape
from models.families.wan import Wan
from models.load import build_roles
from tests.unit.test_recipes import fake_world

LATENTS = (16, 21, 60, 104)
TOKENS = 32_760
ROLES = ("teacher", "student", "fake")
PARAMETERS = {"t2v": 14_288_491_584, "i2v": 14_288_901_184}
"""Of one expert; image to video has 20 channels more to embed."""
BOUNDARY = {"t2v": 0.875, "i2v": 0.9}


def planned(kind, *words):
    """The run that ``plan=true`` simulates: published networks, no encoders."""
    config = as_planned(compose_config([f"experiment=wan2_2_{kind}_a14b_dmd2", "plan=true", *words]))
    shapes = planned_shapes(config)
    return config, shapes, plan_run(config, shapes=shapes)


@pytest.mark.parametrize(
    ("kind", "words", "ranks", "states"),
    [
        ("t2v", ["world=32"], 32, 34.0),
        ("i2v", ["world=32"], 32, 34.0),
        ("t2v", ["world=8", "adapters=lora", "cluster=h20x8", "batch_size=8"], 8, 9.46),
        ("i2v", ["world=8", "adapters=lora", "cluster=h20x8", "batch_size=8"], 8, 9.46),
    ],
)
def test_it_is_built_for_its_ranks(monkeypatch, kind, words, ranks, states):
    monkeypatch.setattr(models.fill, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    monkeypatch.setattr("models.lora.plan.LoraPlan.fill", lambda *args, **kwargs: None)
    config, (latents, shapes), plan = planned(kind, *words)
    assert latents == LATENTS and ("image_latents" in shapes) == (kind == "i2v") and "image_embeds" not in shapes
    assert all(role.boundaries == (BOUNDARY[kind],) and role.experts == 2 for role in plan.roles)
    with fake_world(ranks):
        mesh = mesh_of_shape(plan.mesh, device_type="cpu")
        assert (mesh.shape.dp_shard, mesh.shape.cp, mesh.shape.ulysses) == (ranks // 8, 8, 8)
        roles = build_roles(
            plan.roles, trained=plan.method.trained_roles, mesh=mesh, device=torch.device("meta"),
            latent_shape=latents, condition_shapes=shapes,
        )  # fmt: skip
        found = 0
        for name, role in roles.items():
            assert role.tokens == TOKENS and len(role.networks) == 2 and role.networks[0].precision == "bf16"
            for network in role.networks:
                assert sum(p.numel() for p in network.base_parameters().values()) == PARAMETERS[kind]
            for key, weight in role.weights().items():
                assert weight.placements[-1] == Shard(0) and weight.device_mesh.size() in (8, ranks), key
            local = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
            found += local * {"teacher": 1, "student": 4, "fake": 3}[name]
            if name == "student":
                found += local / 2  # one expert has gradients at a time
        assert abs(found / 1e9 - states) < 0.01 * states
        shared = [
            roles[role].networks[i] is roles["teacher"].networks[i] for role in ("student", "fake") for i in (0, 1)
        ]
        assert set(shared) == {"adapters=lora" in words}, "two bases in bf16, or six networks"


def test_no_image_encoder_is_planned():
    config, shapes, _ = planned("i2v", "world=32")
    text, vae, of_image = encoder_settings(config, shapes)
    assert text["d_model"] == 4096 and not vae and not of_image


@pytest.mark.parametrize("name", ["rcm", "scm", "flow_matching"])
def test_other_methods_are_words_on_the_same_line(name):
    config, _, plan = planned("t2v", "world=32", f"method={name}")
    assert config.method.name == name and all(role.experts == 2 for role in plan.roles)
    with pytest.raises(UserError, match="a model of two experts, which method=meanflow does not know"):
        planned("t2v", "world=32", "method=meanflow")


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_the_settings_are_those_of_the_documents(kind):
    """docs/methods/README.md, the section on it: a setting, ours, published, where."""
    text = (CONFIGS.parent / "docs" / "methods" / "README.md").read_text()
    part = text.split("\n#### dmd2 of Wan 2.2 A14B")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    column = rows[0].index({"t2v": "T2V", "i2v": "I2V"}[kind])
    table = {row[0].strip("`"): row[column] for row in rows[2:]}
    config = compose_config([f"experiment=wan2_2_{kind}_a14b_dmd2"])
    assert len(table) == len(rows) - 2 > 10
    for key, value in table.items():
        assert reduce(getattr, key.split("."), config) == yaml.safe_load(value.strip("`")), key


def test_published_boundaries_are_of_published_networks():
    wan = Wan()
    assert wan.published_boundaries.keys() <= wan.published.keys()
    assert json.loads(json.dumps(dict(wan.published_boundaries))) == {
        "wan2_2_t2v_a14b": 0.875, "wan2_2_i2v_a14b": 0.9,
    }  # fmt: skip
