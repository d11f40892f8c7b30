"""Wan2.2 A14B recipes: composed, then built on meta and sharded over a fake process group of their ranks."""

import pytest
import torch
from torch.distributed.tensor import Shard

import models.roles.load
from distill.config import compose_config
from distill.planning.command import as_planned, planned_shapes
from distill.planning.encoders import encoder_settings
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import mesh_of_shape
from models.roles.load import build_roles
from tests.unit.test_recipes import fake_world

LATENTS = (16, 21, 60, 104)
TOKENS = 32_760
PARAMETERS = {"t2v": 14_288_491_584, "i2v": 14_288_901_184}
"""Number of parameters of one expert. Image to video embeds 20 more channels."""
BOUNDARY = {"t2v": 0.875, "i2v": 0.9}


def planned(kind, *words):
    """Return config, shapes and plan of a ``plan=true`` run: published networks, no encoders on disk."""
    config = as_planned(compose_config([f"experiment=wan2_2_{kind}_a14b_dmd2", "plan=true", *words]))
    shapes = planned_shapes(config)
    return config, shapes, plan_run(config, shapes=shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "ranks", "states"),
    [
        ("t2v", ["world=8", "adapters=lora", "cluster=h20x8", "batch_size=8"], 8, 9.46),
        ("i2v", ["world=32"], 32, 34.0),
    ],
)
def test_it_is_built_for_its_ranks(monkeypatch, kind, words, ranks, states):
    monkeypatch.setattr(models.roles.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    monkeypatch.setattr("models.lora.plan.LoraPlan.fill", lambda *args, **kwargs: None)
    config, (latents, shapes), plan = planned(kind, *words)
    assert latents == {"video": LATENTS}
    assert ("image_latents" in shapes) == (kind == "i2v") and "image_embeds" not in shapes
    text, vae, image = encoder_settings(config, (latents, shapes))
    assert text["d_model"] == 4096 and not vae and not image
    assert all(role.boundaries == (BOUNDARY[kind],) and role.experts == 2 for role in plan.roles)
    with fake_world(ranks):
        mesh = mesh_of_shape(plan.mesh, device_type="cpu")
        assert (mesh.shape.dp_shard, mesh.shape.cp, mesh.shape.ulysses) == (ranks // 8, 8, 8)
        roles = build_roles(
            plan.roles, trained=plan.method.trained_roles, mesh=mesh, device=torch.device("meta"),
            shapes=latents, condition_shapes=shapes,
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


def test_a_method_that_does_not_know_experts_is_refused():
    with pytest.raises(UserError, match="method=meanflow"):
        planned("t2v", "world=32", "method=meanflow", "recipe=wan2_1_t2v_1_3b_meanflow")
