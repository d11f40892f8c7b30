"""The recipe for Wan2.2 TI2V 5B, by text alone and with a first frame.

It is composed, built on meta, and sharded over a fake process group of its 8 ranks.
"""

import json

import pytest
import torch
from torch.distributed.tensor import Shard

import models.roles.load
from distill.config import compose_config
from distill.data.encoders.choose import choose_encoders
from distill.planning.command import as_planned, planned_shapes
from distill.planning.encoders import encoder_settings
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.sequence import local_token_count
from models.families.wan import TI2V_VAE, Wan
from models.roles.load import build_role
from tests.unit.refused import refused
from tests.unit.test_recipes import fake_world, write_encoders

RANKS, CP, TOKENS, PARAMETERS = 8, 4, 27_280, 4_999_787_712
EXPERIMENT = "experiment=wan2_2_ti2v_5b_dmd2"
LATENTS = (48, 31, 44, 80)
ROLES = ("teacher", "student", "fake")
TI2V_5B = Wan.planning.networks["wan2_2_ti2v_5b"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Write the settings of its encoders and its index, without weights."""
    folder = write_encoders(tmp_path_factory.mktemp("pipeline"), **TI2V_VAE)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(Wan.defaults() | TI2V_5B))
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline", "expand_timesteps": true}')
    return folder


def composed(pipeline, *words):
    architecture = json.dumps(TI2V_5B).replace('"', "")
    roles = [f"{role}.architecture={architecture}" for role in ROLES]
    config = compose_config(
        [EXPERIMENT, "dry_run=true", f"data.path={pipeline}", f"data.encoders={pipeline}", *roles, *words]
    )
    config.world = RANKS
    return config


@pytest.mark.slow
def test_it_fits_its_node(pipeline, monkeypatch):
    monkeypatch.setattr(models.roles.load, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    config = composed(pipeline, "data.image=first_frame")
    data = config.data
    assert (data.num_frames, data.height, data.width, data.fps) == (121, 704, 1280, 24.0)
    latents, shapes = data.sample_shapes()
    assert latents == {"video": LATENTS}
    assert shapes == {"text": (512, 4096), "first_frame": (48, 1, 44, 80)}
    plan = plan_run(config)
    assert [role.name for role in plan.roles] == list(ROLES) and plan.micro_batch_size == 1
    with fake_world(RANKS):
        mesh = mesh_of_shape(plan.mesh, device_type="cpu")
        assert (mesh.shape.dp_shard, mesh.shape.cp, mesh.shape.ulysses, mesh.shape.ring) == (RANKS // CP, CP, CP, 1)
        assert local_token_count(TOKENS, CP) * CP == TOKENS, "no pads"
        states = 0
        for role_plan in plan.roles:
            trained = role_plan.name in plan.method.trained_roles
            role = build_role(
                role_plan, mesh=mesh, device=torch.device("meta"), trainable=trained, shapes=latents,
                condition_shapes=shapes,
            )  # fmt: skip
            assert role.tokens == TOKENS and role.networks[0].precision == "bf16"
            assert sum(p.numel() for p in role.parameters()) == PARAMETERS
            for name, parameter in role.weights().items():
                assert parameter.placements == (Shard(0),) and parameter.device_mesh.size() == RANKS, name
            local = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
            # Weights and Adam's moments of trained roles, the student's average; gradients once.
            states += local * {"teacher": 1, "student": 5, "fake": 3}[role_plan.name]
        assert abs(states / 1e9 - 21.2) < 0.1


def test_a_first_frame_costs_times_of_tokens():
    wan, text = Wan(), {"text": (512, 4096)}
    config = wan.defaults() | TI2V_5B
    alone = wan.flops(config, {"video": LATENTS}, text).forward
    framed = wan.flops(config, {"video": LATENTS}, text | {"first_frame": (48, 1, 44, 80)}).forward
    width = 24 * 128
    assert framed - alone == 2 * (TOKENS - 1) * width * (256 + 7 * width) and 1 < framed / alone < 1.02


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.width=1264"], "data.width=1264"),
        (["data.num_frames=120"], "data.num_frames=120"),
        (["data.num_frames=1", "data.image=first_frame"], "data.image=first_frame"),
    ],
)
def test_refusals(pipeline, words, named):
    with refused(named):
        plan_run(composed(pipeline, *words))


def test_it_is_planned_without_encoders():
    config = as_planned(compose_config([EXPERIMENT, "plan=true", "world=8", "data.image=first_frame"]))
    latents, shapes = planned_shapes(config)
    assert latents == {"video": LATENTS} and shapes.keys() == {"text", "first_frame"}
    assert plan_run(config, shapes=(latents, shapes)).mesh.cp == CP
    text, vae, of_image = encoder_settings(config, (latents, shapes))
    assert text["d_model"] == 4096 and vae["z_dim"] == 48 and not of_image
    config.data.width = 1272
    with pytest.raises(UserError):
        planned_shapes(config)


@pytest.mark.parametrize("text", ["[", '{"expand_timesteps": "yes"}'])
def test_an_index_that_says_neither_is_refused(pipeline, text):
    index, found = pipeline / "model_index.json", choose_encoders(pipeline)
    before = index.read_text()
    index.write_text(text)
    with refused("data.encoders=x"):
        found.inspect_image("data.encoders=x")
    index.write_text(before)
