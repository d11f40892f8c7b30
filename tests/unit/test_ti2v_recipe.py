"""The recipe for Wan2.2 TI2V 5B: composed, built on meta and sharded over a fake process group of its 8 ranks, by text
alone and with a first frame."""

import json

import pytest
import torch
from torch.distributed.tensor import Shard

import models.fill
from distill.config import compose_config
from distill.data.first_frame import frame_in_place
from distill.planning.coding import build_vae, encoder_settings
from distill.planning.command import as_planned, planned_shapes
from distill.setup import plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.sequence import local_token_count
from models.families.wan import Wan
from models.families.wan_frames import PUBLISHED, VAE
from models.load import build_role
from tests.unit.test_recipes import fake_world

RANKS, CP, TOKENS, PARAMETERS = 8, 4, 27_280, 4_999_787_712
EXPERIMENT = "experiment=wan2_2_ti2v_5b_dmd2"
LATENTS = (48, 31, 44, 80)
ROLES = ("teacher", "student", "fake")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The settings of its encoders and its index, without weights."""
    folder = tmp_path_factory.mktemp("pipeline")
    for part, settings in (
        ("vae", {"_class_name": "AutoencoderKLWan", **VAE}),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "d_model": 4096}),
        ("tokenizer", {}),
    ):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(settings))
        (folder / part / "model.safetensors").touch()
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(dict(PUBLISHED)))
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline", "expand_timesteps": true}')
    return folder


def composed(pipeline, *words):
    architecture = json.dumps(dict(PUBLISHED)).replace('"', "")
    roles = [f"{role}.architecture={architecture}" for role in ROLES]
    config = compose_config(
        [EXPERIMENT, "dry_run=true", f"data.path={pipeline}", f"data.encoders={pipeline}", *roles, *words]
    )
    config.world = RANKS
    return config


@pytest.mark.parametrize("image", [None, "first_frame"])
def test_it_fits_its_node(pipeline, monkeypatch, image):
    monkeypatch.setattr(models.fill, "initialise", lambda *args, **kwargs: None)  # nothing to fill on meta
    config = composed(pipeline, f"data.image={image or 'null'}")
    data = config.data
    assert (data.num_frames, data.height, data.width, data.fps) == (121, 704, 1280, 24.0)
    latents, shapes = data.sample_shapes()
    assert latents == LATENTS
    assert shapes == {"text": (512, 4096)} | ({"first_frame": (48, 1, 44, 80)} if image else {})
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
                role_plan, mesh=mesh, device=torch.device("meta"), trainable=trained, latent_shape=latents,
                condition_shapes=shapes,
            )  # fmt: skip
            assert role.tokens == TOKENS and role.networks[0].precision == "bf16"
            assert sum(p.numel() for p in role.parameters()) == PARAMETERS
            for name, parameter in role.weights().items():
                assert parameter.placements == (Shard(0),) and parameter.device_mesh.size() == RANKS, name
            local = sum(p.to_local().numel() * p.element_size() for p in role.parameters())
            # Weights and Adam's moments of those that train, the student's average; gradients once.
            states += local * {"teacher": 1, "student": 5, "fake": 3}[role_plan.name]
        assert abs(states / 1e9 - 21.2) < 0.1


def test_a_first_frame_costs_times_of_tokens():
    wan, text = Wan(), {"text": (512, 4096)}
    config = dict(PUBLISHED)
    alone = wan.forward_flops(config, TOKENS, text)
    framed = wan.forward_flops(config, TOKENS, text | {"first_frame": (48, 1, 44, 80)})
    width = 24 * 128
    assert framed - alone == 2 * (TOKENS - 1) * width * (256 + 7 * width) and 1 < framed / alone < 1.02


@pytest.mark.parametrize("name", ["dmd2", "rcm", "flow_matching", "meanflow"])
def test_other_methods_are_words_on_the_same_line(pipeline, name):
    config = composed(pipeline, f"method={name}", "data.image=first_frame")
    plan = plan_run(config)
    assert config.method.name == name and plan.mesh.cp == CP


def test_of_the_vertical_size_and_of_captions(pipeline):
    assert composed(pipeline, "data.height=1280", "data.width=704").data.sample_shapes()[0] == (48, 31, 80, 44)
    config = composed(pipeline, "data=captions_704p")
    assert config.data.sample_shapes()[0] == LATENTS and config.data.negative_prompt.startswith("色调艳丽")
    small = composed(pipeline, "data=video_folder_480p").data.sample_shapes()[0]
    assert Wan().tokens(dict(PUBLISHED), small) == 21 * 15 * 26


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.width=1264"], "data.width=1264 is not a multiple of 32"),
        (["data.num_frames=120"], "data.num_frames=120 does not fit the VAE"),
        (["data=captions_704p", "data.image=first_frame"], "data=captions has no clips; use data=video_folder"),
        (["data.num_frames=1", "data.image=first_frame"], "gives 1 latent frame, and data.image=first_frame gives it"),
    ],
)
def test_refusals(pipeline, words, message):
    with pytest.raises(UserError) as caught:
        plan_run(composed(pipeline, *words))
    assert message in str(caught.value)


@pytest.mark.parametrize("image", ["null", "first_frame"])
def test_it_is_planned_without_encoders(image):
    config = as_planned(compose_config([EXPERIMENT, "plan=true", "world=8", f"data.image={image}"]))
    latents, shapes = planned_shapes(config)
    assert latents == LATENTS and ("first_frame" in shapes) == (image != "null") and len(shapes) < 3
    assert plan_run(config, shapes=(latents, shapes)).mesh.cp == CP
    text, vae, of_image = encoder_settings(config, (latents, shapes))
    assert text["d_model"] == 4096 and vae["z_dim"] == 48 and not of_image
    config.data.width = 1272
    with pytest.raises(UserError, match="Wan 2.2's VAE takes 4k . 1 frames of multiples of 16 pixels"):
        planned_shapes(config)


def test_keys_that_the_class_of_the_vae_does_not_know_are_passed_by():
    """Published folders have ``clip_output``, which diffusers 0.42 has not."""
    with torch.device("meta"):
        assert build_vae({**VAE, "clip_output": False, "_class_name": "AutoencoderKLWan"}).config.z_dim == 48


@pytest.mark.parametrize("text", ["[", '{"expand_timesteps": "yes"}'])
def test_an_index_that_says_neither_is_refused(pipeline, text):
    index = pipeline / "model_index.json"
    before = index.read_text()
    index.write_text(text)
    with pytest.raises(
        UserError, match="^data.encoders=x: model_index.json (cannot be read|has expand_timesteps='yes')"
    ):
        frame_in_place(pipeline, "data.encoders=x")
    index.write_text(before)
