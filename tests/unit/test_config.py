"""The configuration: what composes, what is refused, and whether the refusal helps."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from distill.config import Config, RoleSettings, compose_config, load_config
from distill.config.checks import check, micro_batch_size
from distill.config.errors import CONFIGS
from distill.data import MovingShapesSettings, VideoFolderSettings
from distill.data.order import Batching
from distill.methods import METHODS
from distill.methods.flow_matching import FlowMatchingSettings
from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import ShardSettings

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose_config(list(overrides))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


# ---------------------------------------------------------------- what composes


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = compose_config([f"experiment={experiment}"])
    assert type(config) is Config and config.run_dir == f"runs/{experiment}"
    assert type(config.method) is METHODS[config.method.name][1]
    assert isinstance(config.data, (MovingShapesSettings, VideoFolderSettings))
    assert config.steps >= 1 and config.batch_size >= 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_sizes_of_clips_live_in_data_and_never_in_an_experiment(experiment):
    body = yaml.safe_load((CONFIGS / "experiment" / f"{experiment}.yaml").read_text())
    sizes = {"num_frames", "height", "width", "fps"}
    assert not sizes & (body.get("data") or {}).keys(), "data=NAME on the command line could not replace them"


def test_quickstart_is_the_default_and_distils_moving_shapes():
    config = compose_config([])
    assert config == compose_config(["experiment=quickstart"])
    assert config.run_dir == "runs/quickstart" and config.precision == "fp32"
    assert config.method.name == "dmd2" and config.data.name == "moving_shapes"


def test_another_data_set_brings_its_own_sizes():
    data = compose_config(["data=video_folder", "data.path=/videos", "data.height=64"]).data
    body = yaml.safe_load((CONFIGS / "data" / "video_folder.yaml").read_text())
    expected = VideoFolderSettings(path="/videos", **{k: v for k, v in body.items() if k not in ("defaults", "path")})
    assert data == replace(expected, height=64)


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


def test_each_method_has_settings_of_its_own():
    method = compose_config(["experiment=quickstart_teacher", "method.time=uniform"]).method
    assert type(method) is FlowMatchingSettings and method.time == "uniform"


def test_an_architecture_can_be_given_on_the_command_line():
    """The error for a role without checkpoint names ROLE.architecture, so it must be settable."""
    config = compose_config(["student.checkpoint=null", "student.architecture={num_layers: 2, text_dim: 8}"])
    assert config.student.architecture == {"num_layers": 2, "text_dim": 8}
    config = compose_config(["experiment=quickstart_teacher", "student.architecture.num_layers=2"])
    assert config.student.architecture["num_layers"] == 2 and len(config.student.architecture) > 2


def test_each_role_is_sharded_as_its_own_keys_say():
    assert {item.name for item in fields(ShardSettings)} <= {item.name for item in fields(RoleSettings)}
    given = {
        "strategy": "optim",
        "precision": "bf16",
        "reduce_dtype": "bf16",
        "master_dtype": "fp32",
        "activation_checkpointing": "selective",
        "keep_operators": ["aten.mm", "fsdp_cp.ring_attention"],
        "activation_offload": True,
        "compile": True,
        "offload": "cpu",
        "forward_prefetch": 2,
        "backward_prefetch": 3,
        "keep_gathered": True,
        "gather_early": True,
        "gradient_buffers": 1,
        "separate_reduce_group": True,
        "communication_buffers": "symmetric",
        "reduce_unused": True,
        "gradient_scale": 0.5,
        "replicate": False,
        "shard_ranks": 4,
        "gather_stream": "compute",
        "fp8": "torchao",
        "fp8_gather": True,
    }
    assert given.keys() == {item.name for item in fields(ShardSettings)}
    written = {True: "true", str(given["keep_operators"]): "[aten.mm,fsdp_cp.ring_attention]"}
    overrides = [f"fake.{key}={written.get(v if v is True else str(v), v)}" for key, v in given.items()]
    config = compose_config(overrides)
    assert {key: getattr(config.fake, key) for key in given} == given
    assert config.student == compose_config([]).student, "other roles keep theirs"


def test_precision_of_a_role_is_the_runs_unless_set():
    config = compose_config(["precision=bf16", "teacher.precision=fp32"])
    assert (config.student.precision, config.fake.precision, config.teacher.precision) == ("bf16", "bf16", "fp32")


@pytest.mark.parametrize(("given", "meant"), [("true", "full"), ("false", "none"), ("selective", "selective")])
def test_checkpointing_as_yes_and_no(given, meant):
    assert compose_config([f"student.activation_checkpointing={given}"]).student.activation_checkpointing == meant


def test_patterns_of_parameters_from_the_command_line():
    patterns = ["optim.student.no_decay=[*.bias,*norm*]", "optim.fake.lr_scale={patch_embedding.*: 0.1, proj_out.*: 2}"]
    config = compose_config(patterns)
    assert config.optim.student.no_decay == ["*.bias", "*norm*"] and config.optim.student.lr_scale is None
    assert list(config.optim.fake.lr_scale.items()) == [("patch_embedding.*", 0.1), ("proj_out.*", 2)], "in their order"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_written_configuration_is_read_back_as_it_was(tmp_path, experiment):
    settings = ["student.keep_operators=[aten.mm]", "student.activation_checkpointing=selective", "fake.offload=cpu"]
    patterns = ["optim.student.no_decay=[*.bias]", "optim.fake.lr_scale={blocks.0.*: 0.1}", "precision=bf16"]
    config = compose_config([f"experiment={experiment}", *settings, *patterns])
    OmegaConf.save(OmegaConf.create(asdict(config)), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


# ---------------------------------------------------------------- misspelt keys and groups


@pytest.mark.parametrize(
    ("overrides", "named", "suggested"),
    [
        (["stpes=3"], "stpes", "steps"),
        (["bacth_size=8"], "bacth_size", "batch_size"),
        (["optim.student.lrr=1"], "optim.student.lrr", "optim.student.lr"),
        (["student.ema.enabld=true"], "student.ema.enabld", "student.ema.enabled"),
        (["teacher.chekpoint=/x"], "teacher.chekpoint", "teacher.checkpoint"),
        (["student.stratgy=optim"], "student.stratgy", "student.strategy"),
        (["fake.gather_erly=true"], "fake.gather_erly", "fake.gather_early"),
        (["optim.fake.nodecay=[a]"], "optim.fake.nodecay", "optim.fake.no_decay"),
        (["mesh.dp_shrad=2"], "mesh.dp_shrad", "mesh.dp_shard"),
        (["method.guidance_scal=2"], "method.guidance_scal", "method.guidance_scale"),
        (["experiment=quickstart_teacher", "method.logit_maen=0"], "method.logit_maen", "method.logit_mean"),
        (["data=video_folder", "data.max_text_token=3"], "data.max_text_token", "data.max_text_tokens"),
        (["data.num_frame=3"], "data.num_frame", "data.num_frames"),
        (["resume=never"], "resume", "checkpoint.resume"),
        (["methd=dmd2"], "methd", "method"),
        (["log.every=5", "checkpoint.evry=3"], "checkpoint.evry", "checkpoint.every"),
        (["mesh.context_parallel=2"], "mesh.context_parallel", "mesh.cp"),
        (["mesh.shard=2"], "mesh.shard", "mesh.dp_shard"),
        (["optim.lr=1"], "optim.lr", "optim.student.lr"),
        (["student.lr=1"], "student.lr", "optim.student.lr"),
        (["fake.lr=1"], "fake.lr", "optim.fake.lr"),
        (["lr=1"], "lr", "optim.student.lr"),
        (["cluser=h20x8"], "cluser", "cluster"),
        (["profile.ranks.lr=1"], "profile.ranks.lr", "profile.ranks"),
        (["modle=any"], "modle", "model"),
    ],
)
def test_a_misspelt_key_fails_with_the_right_suggestion(overrides, named, suggested):
    assert refusal(*overrides) == f"there is no setting {named}; did you mean {suggested}?"


@pytest.mark.parametrize("override", ["+stesp=3", "++stesp=3", "+optim.student.lrr=1", "+method.guidance_scal=2"])
def test_a_misspelt_key_with_a_plus_is_not_dropped_either(override):
    assert override.lstrip("+").split("=")[0] in refusal(override)


def test_a_key_of_another_method_is_refused():
    assert "method.caption_dropout" in refusal("method=dmd2", "method.caption_dropout=0.2")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("method=dmd3", ["method=dmd3", "did you mean dmd2", "flow_matching"]),
        ("experiment=quickstrat", ["experiment=quickstrat", "did you mean quickstart"]),
        ("data=movingshapes", ["data=movingshapes", "did you mean moving_shapes", "video_folder"]),
        ("mesh=eight", ["mesh=eight", "use auto"]),
        ("cluster=foo", ["cluster=foo", "use any or h200 or h200x8 or h20x4 or h20x8 or h20x8x4 or one_gpu or"]),
        (
            "model=wan2_1_t2v_14",
            ["did you mean wan2_1_t2v_14b", "use any or hunyuan_video1_5 or ltx_video_13b or"],
        ),
    ],
)
def test_an_unknown_choice_lists_those_that_exist(override, parts):
    message = refusal(override)
    assert all(part in message for part in parts), message


def test_where_nothing_of_its_group_is_near_the_groups_settings_are_named():
    named = "mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.ulysses, mesh.ring, mesh.own_groups"
    assert refusal("mesh.tensor_parallel=2") == f"there is no setting mesh.tensor_parallel; use {named}"


@pytest.mark.parametrize("word", ["published=x", "recipe=wan2_1", "optim/rcm=wan2_1_t2v_14b", "role=teacher"])
def test_what_comes_with_other_groups_is_not_chosen_itself(word):
    """Hydra would take it; published=x would drop what is published without a word."""
    assert "comes with other groups" in refusal(word) and "cluster=" in refusal(word)


# ---------------------------------------------------------------- wrong types and values


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("steps=abc", "steps"),
        ("steps=1.5", "steps"),
        ("mesh.cp=two", "mesh.cp"),
        ("method.guidance_scale=strong", "method.guidance_scale"),
        ("method.step_list=[1.0,a]", "method.step_list"),
        ("optim.student.betas=0.9", "optim.student.betas"),
        ("log.wandb=maybe", "log.wandb"),
        ("student=5", "student"),
        ("checkpoint=never", "checkpoint"),
        ("method.shift=0", "method.shift=0"),
        ("method.step_list=[0.9,1.0]", "method.step_list=[0.9, 1.0]"),
        ("~steps", "steps"),
        ("steps", "steps"),
        ("experiment=null", "experiment"),
        ("method=null", "method"),
        ("method.name=other", "method"),
        ("data.name=other", "data"),
    ],
)
def test_values_of_a_wrong_type_or_out_of_bounds_are_refused_by_name(override, named):
    assert named in refusal(override)


@pytest.fixture(scope="module")
def good() -> Config:
    return compose_config([])


def changed(config: Config, setting: str, value) -> Config:
    """``config`` with one dotted setting changed; every dataclass on the way is copied."""
    head, _, tail = setting.partition(".")
    assert head in {f.name for f in fields(config)}, setting
    return replace(config, **{head: changed(getattr(config, head), tail, value) if tail else value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("steps", 0),
        ("seed", -1),
        ("batch_size", 0),
        ("checkpoint.every", -1),
        ("checkpoint.keep", -1),
        ("log.every", 0),
        ("log.norms_every", -1),
        ("sample.every", -1),
        ("sample.prompts", 0),
        ("sample.report_clips", -1),
        ("sample.student_steps", [0]),  # a sampler of no steps would fail at the end of the run
        ("sample.student_steps", [64]),  # as would more steps than the student is trained for
        ("sample.teacher_steps", [0]),
        ("optim.max_skipped", 0),
        ("timeout.start", 0.0),
        ("timeout.step", 0.0),
        ("timeout.step", 60.5),  # longer than timeout.start
        ("timeout.start", 1e9),
        ("precision", "fp16"),
        ("precision", "fp64"),
        ("device", "tpu"),
        ("export.weights", "ema"),  # there is no average in the quickstart's default
        ("export.weights", "best"),
        ("export.dtype", "fp16"),
        ("optim.student.schedule", "linear"),
        ("optim.fake.schedule", "linear"),
        ("optim.student.implementation", "slow"),
        ("optim.student.lr_scale", {"a": -1.0}),
        ("optim.fake.lr_scale", {"a": "b"}),
        ("optim.fake.lr_scale", {"a": True}),
        ("optim.fake.lr_scale", {1: 0.5}),
        ("optim.fake.lr_scale", 0.5),
        ("optim.fake.lr_scale", {"a": float("nan")}),
        ("teacher.precision", "fp64"),
        ("student.precision", "fp8"),
        ("optim.student.betas", [0.9]),
        ("optim.fake.betas", [0.9, 1.0]),
        ("optim.student.lr", -1e-4),
        ("optim.fake.lr", float("nan")),
        ("optim.student.eps", -1.0),
        ("optim.student.weight_decay", -0.1),
        ("optim.student.warmup", -1),
        ("optim.clip", 0.0),
        ("student.ema.decay", 1.0),
        ("student.ema.decay", -0.1),
        ("student.ema.start", -1),
    ],
)
def test_bounds_are_checked_before_anything_is_built(good, setting, value):
    check(good)
    wrong = changed(good, setting, value)
    if setting == "export.weights":
        wrong = changed(wrong, "student.ema.enabled", False)
    with pytest.raises(UserError) as caught:
        check(wrong)
    assert str(caught.value).startswith(f"{setting}=") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("optim.clip", None), ("student.ema.decay", None), ("checkpoint.every", 0), ("checkpoint.keep", 0)],
)
def test_values_that_mean_none_are_allowed(good, setting, value):
    check(changed(good, setting, value))


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


@pytest.mark.parametrize(
    ("micro", "draws", "dp", "message"),
    [
        (None, 3, 1, "expert_draws=3 does not divide batch_size / data-parallel ranks = 8 / 1 = 8; use 1, 2, 4, 8, or"
         " batch_size=9"),
        (None, 3, 2, "expert_draws=3 does not divide batch_size / data-parallel ranks = 8 / 2 = 4; use 1, 2, 4, or"
         " batch_size=12"),
        (None, 0, 2, "expert_draws=0 is no number of parts; use 1, or more for roles of two experts"),
        (4, 4, 1, "micro_batch_size=4 does not divide batch_size / data-parallel ranks / expert_draws = 8 / 1 / 4 = 2;"
         " use 1, 2"),
    ],
)  # fmt: skip
def test_parts_that_do_not_divide_are_refused(good, micro, draws, dp, message):
    with pytest.raises(UserError) as caught:
        micro_batch_size(replace(good, batch_size=8, micro_batch_size=micro, expert_draws=draws), dp)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("batch", "micro", "dp"), [(8, None, 3), (2, None, 4), (8, 3, 2), (8, 0, 1), (8, -1, 1), (8, 16, 1)]
)
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(good, batch, micro, dp):
    config = replace(good, batch_size=batch, micro_batch_size=micro)
    with pytest.raises(UserError) as caught:
        micro_batch_size(config, dp)
    message = str(caught.value)
    setting, _, values = message.partition("; use ")[2].rpartition("=")
    for value in values.split(", "):
        fixed = replace(config, **{setting or "micro_batch_size": int(value)})
        assert micro_batch_size(fixed, dp) >= 1, message


def test_composing_leaves_no_output_folder_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config([])
    assert list(Path.cwd().iterdir()) == []
