"""The configuration: what composes, and what is refused before anything is built."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from distill.config import Config, compose_config, load_config
from distill.config.checks import micro_batch_size
from distill.config.errors import CONFIGS
from distill.config.schema import RoleSettings
from distill.data.order import Batching
from distill.data.settings import CaptionsSettings, VideoFolderSettings
from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import ShardSettings
from tests.unit.refused import refusal, refused

# ---------------------------------------------------------------- what composes


def test_quickstart_is_the_default_and_distils_moving_shapes():
    config = compose_config([])
    assert config == compose_config(["experiment=quickstart"])
    assert config.run_dir == "runs/quickstart" and config.precision == "fp32"
    assert config.method.name == "dmd2" and config.data.name == "moving_shapes"


def test_another_data_set_brings_its_own_sizes():
    data = compose_config(["data=video_folder", "data.path=/videos", "data.height=64"]).data
    assert data == VideoFolderSettings(path="/videos", height=64)
    large = compose_config(["data=captions_720p", "sample.report_clips=0"]).data
    body = yaml.safe_load((CONFIGS / "data" / "480p.yaml").read_text())
    assert large == CaptionsSettings(**body | {"height": 720, "width": 1280})
    with refused("data=720p"):
        compose_config(["data=720p"])


def test_student_and_fake_start_from_the_teacher_unless_told_otherwise():
    config = compose_config(["teacher.checkpoint=/ckpt/a"])
    assert config.teacher.checkpoint == config.student.checkpoint == config.fake.checkpoint == "/ckpt/a"
    config = compose_config(["teacher.checkpoint=/ckpt/a", "student.checkpoint=/ckpt/b"])
    assert (config.student.checkpoint, config.fake.checkpoint) == ("/ckpt/b", "/ckpt/a")


def test_command_line_has_the_last_word_over_the_experiment():
    overrides = ["steps=7", "optim.student.lr=0.5", "run_dir=/tmp/mine", "method.guidance_scale=1.5", "mesh.ulysses=2"]
    config = compose_config(["experiment=quickstart", *overrides])
    assert (config.steps, config.optim.student.lr, config.run_dir) == (7, 0.5, "/tmp/mine")
    assert config.method.guidance_scale == 1.5 and config.mesh.ulysses == 2
    assert compose_config(["optim.clip=null", "student.ema.decay=null"]).optim.clip is None
    role = compose_config(["student.activation_checkpointing=true", "precision=bf16", "teacher.precision=fp32"])
    assert role.student.activation_checkpointing == "full" and role.fake.precision == "bf16"
    assert role.teacher.precision == "fp32"


def test_an_architecture_can_be_given_on_the_command_line():
    """A role without a checkpoint needs ROLE.architecture."""
    config = compose_config(["student.checkpoint=null", "student.architecture={num_layers: 2, text_dim: 8}"])
    assert config.student.architecture == {"num_layers": 2, "text_dim": 8}
    config = compose_config(["experiment=quickstart_teacher", "student.architecture.num_layers=2"])
    assert config.student.architecture["num_layers"] == 2 and len(config.student.architecture) > 2


def test_each_role_has_sharding_settings_of_its_own():
    assert {item.name for item in fields(ShardSettings)} <= {item.name for item in fields(RoleSettings)}
    given = {"strategy": "optim", "reduce_dtype": "bf16", "forward_prefetch": 2}
    config = compose_config(["fake.keep_operators=[aten.mm]", *(f"fake.{key}={value}" for key, value in given.items())])
    assert {key: getattr(config.fake, key) for key in given} == given and config.fake.keep_operators == ["aten.mm"]
    assert config.student == compose_config([]).student, "other roles keep theirs"


def test_a_written_configuration_is_read_back_as_it_was(tmp_path):
    settings = ["student.keep_operators=[aten.mm]", "student.activation_checkpointing=selective", "fake.offload=cpu"]
    patterns = [
        "optim.student.no_decay=[*.bias]",
        "optim.fake.lr_scale={blocks.0.*: 0.1, proj_out.*: 2}",
        "precision=bf16",
    ]
    for experiment in ("quickstart", "quickstart_meanflow", "wan2_2_i2v_a14b_dmd2"):
        config = compose_config([f"experiment={experiment}", *settings, *patterns])
        of_another_version = {"earlier": {"setting": 1}, "seeds": [2]}
        stored = OmegaConf.create(asdict(config) | of_another_version)
        stored.student.communication_buffers = "pooled"  # removed values, which did not change results
        stored.attention.backend = "transformer_engine"
        OmegaConf.save(stored, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config, experiment
    assert list(config.optim.fake.lr_scale.items()) == [("blocks.0.*", 0.1), ("proj_out.*", 2)], "in their order"


# ---------------------------------------------------------------- values


@pytest.fixture(scope="module")
def good() -> Config:
    return compose_config([])


@pytest.mark.parametrize(
    ("batch", "micro", "dp", "expected"), [(8, None, 1, 8), (8, None, 4, 2), (8, 2, 2, 2), (8, 1, 8, 1), (8, 8, 1, 8)]
)
def test_micro_batch_size(good, batch, micro, dp, expected):
    assert micro_batch_size(replace(good, batch_size=batch, micro_batch_size=micro), dp) == expected


@pytest.mark.parametrize(
    ("batch", "micro", "draws", "dp", "expected"), [(8, None, 2, 1, 4), (8, 2, 2, 1, 2), (16, 1, 4, 4, 1)]
)
def test_parts_of_a_batch_are_of_whole_micro_batches(good, batch, micro, draws, dp, expected):
    config = replace(good, batch_size=batch, micro_batch_size=micro, expert_draws=draws)
    assert micro_batch_size(config, dp) == expected
    batching = Batching(global_size=batch, micro_batch_size=expected, dp_rank=dp - 1, dp_size=dp, parts=draws)
    for i in range(batching.accumulation):
        assert {p * draws // batch for p in batching.positions(i)} == {batching.part(i)}, "the same on every mesh"


@pytest.mark.parametrize(("micro", "draws", "setting"), [(None, 3, "expert_draws"), (4, 4, "micro_batch_size")])
def test_parts_that_do_not_divide_are_refused(good, micro, draws, setting):
    with pytest.raises(UserError, match=f"^{setting}="):
        micro_batch_size(replace(good, batch_size=8, micro_batch_size=micro, expert_draws=draws), 1)


@pytest.mark.parametrize(("batch", "micro", "dp"), [(8, None, 3), (2, None, 4), (8, 3, 2)])
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(good, batch, micro, dp):
    config = replace(good, batch_size=batch, micro_batch_size=micro)
    message = refusal(micro_batch_size, config, dp)
    setting, _, values = message.partition("; use ")[2].rpartition("=")
    for value in values.split(", "):
        fixed = replace(config, **{setting or "micro_batch_size": int(value)})
        assert micro_batch_size(fixed, dp) >= 1, message


def test_composing_leaves_no_output_folder_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config([])
    assert list(Path.cwd().iterdir()) == []
