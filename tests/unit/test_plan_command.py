"""``train.py plan=true``: what it writes, what it adds up to, and what it refuses."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from distill.config import compose_config
from distill.data.encoders.ltx2 import Ltx2TextEncoder
from distill.data.encoders.wan import TextEncoder
from distill.planning import command, encoders, extrapolation, prediction
from distill.planning.command import as_planned, plan_without_gpus, planned_shapes
from distill.planning.prediction import hardware_names, load_hardware, predict
from distill.planning.simulation import Simulation, StepCost, simulate
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.measure.memory import LiveStorages, Peak
from tests.tiers import slow
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.tiny_pipeline import build_tiny_pipeline
from tests.unit.refused import check_command
from train import main

GIB = 2**30


def simulation(config, plan, **arguments):
    """Return results in the form of a simulation's."""
    resting = {("teacher", "parameters"): 4 * GIB, ("student", "parameters"): 7 * GIB, ("fake", "optimizer"): 2 * GIB,
               ("student", "ema"): GIB}  # fmt: skip
    peak = {**resting, ("student", "activations"): 16 * GIB, ("teacher", "gathered"): GIB}
    sent = {("all_gather", "default_pg"): 9 * 10**9, ("all_to_all", "mesh_ulysses"): 45 * 10**9}
    steps = {"student": StepCost(flops=8e15, recomputed=2e15, sent=sent), "fake": StepCost(flops=4e15)}
    return Simulation(
        resting=resting,
        peaks={"": Peak(14 * GIB, resting), "student/dmd/backward": Peak(31 * GIB, peak)},
        steps=steps,
        host=Peak(3 * GIB, {("student", "host"): 3 * GIB}),
        queries={"student/dmd/forward": 2 * 32760 * 5120, "fake/fake_score/forward": 1},
    )


ENCODERS = {
    "encode/captions": Peak(20 * GIB, {("encoders", "parameters"): 20 * GIB}),
    "decode": Peak(10 * GIB, {("encoders", "parameters"): GIB, ("encoders", "activations"): 9 * GIB}),
}


@pytest.fixture
def plan(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "simulate_any_depth", simulation)
    monkeypatch.setattr(command, "encoder_peaks", lambda config, latents: ENCODERS)

    def run(*words, run_dir=tmp_path / "run"):
        return main(["experiment=wan2_1_t2v_14b_dmd2", "plan=true", "world=16", f"run_dir={run_dir}", *words])

    return run


def test_what_plan_json_holds(plan, tmp_path):
    """The plan needs no weights, clips or encoders. 8 ranks share a clip's tokens; two such groups hold other clips."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".plan.json").write_text("a user's")
    for _ in range(2):  # the second plan replaces the first
        assert plan() == 0
    theirs, page, file = sorted((tmp_path / "run").iterdir())
    assert theirs.read_text() == "a user's"
    assert page.read_text().startswith("<!")
    found = json.loads(file.read_text())
    assert found["world"] == 16 and found["tokens"] == 32760 and found["hardware"] == "h20"
    kernel = 2 * 4 * 32760 * 5120 / 8 / GIB  # fp32, for both inputs of guidance
    assert found["allocated_gib"] == pytest.approx(31 + kernel)
    # Two groups send, and the group dp adds one more.
    assert found["device_gib"] == pytest.approx(1.05 * (31 + kernel) + 0.6 + 3 * 0.3)
    assert found["fits"] is True and found["peak_phase"] == "student/dmd/backward"
    assert found["phases"]["decode"]["gib"] == 24, "in addition to what is held between steps"
    assert found["phases"]["encode/captions"]["gib"] == 20, "before anything else is there"
    # A checkpoint's copy holds the student's parameters and average, and the fake's optimizer.
    assert found["host_gib_of"] == {"offloaded": 3, "checkpoint_staging": 10} and found["host_gib"] == 13
    assert found["roles"]["student"]["activations_gib"] == 16 and found["roles"]["fake"]["optimizer_gib"] == 2
    rate = 0.8 * 148e12
    # all-gathers beyond the node take 9 / 50 s, less than the compute; the exchange inside a node uses NVLink.
    student, fake = 1e16 / 8 / rate + 45 / 450, 4e15 / 8 / rate
    config = compose_config(["experiment=wan2_1_t2v_14b_dmd2"])
    every = config.method.fake_updates_per_student_update + 1
    seconds = (student + (every - 1) * fake) / every
    assert found["seconds_per_step"] == pytest.approx(seconds)
    assert found["mfu"] == pytest.approx(2 * (8e15 + (every - 1) * 4e15) / every / seconds / 16 / 148e12)
    assert found["gpu_hours"] == pytest.approx(seconds * config.steps * 16 / 3600)


@cache
def planned(*words):
    """Return configuration and plan of the 14B recipe."""
    return plan_without_gpus(compose_config(["experiment=wan2_1_t2v_14b_dmd2", "plan=true", *words]))


def test_sparse_attention_is_slower_than_its_operations():
    config, run = planned("world=16")
    found = simulation(config, run)
    found.steps["fake"] = StepCost(flops=4e15, sparse=1e15)
    seconds = predict(config, run, found, load_hardware("h20"), {}).seconds["fake"]
    assert seconds == pytest.approx((3e15 + 1e15 / 0.45) / 8 / (0.8 * 148e12))


def seconds_of(sent, *words, world=16, copied=0.0):
    """Return the seconds of a student's step that computes next to nothing, but sends and copies bytes."""
    config, run = planned(f"world={world}", *words)
    found = simulation(config, run)
    found.steps["student"] = StepCost(flops=1.0, sent=sent, copied=copied)
    return predict(config, run, found, load_hardware("h20"), {}).seconds["student"]


@slow
def test_the_rate_is_that_of_the_attention_that_is_installed(monkeypatch):
    config, run = planned("world=16")
    for installed, rate in ((False, 0.48), (True, 0.55)):
        if installed:
            monkeypatch.setattr(prediction.metadata, "version", lambda name: "4.0.0b36")
        seconds = predict(config, run, simulation(config, run), load_hardware("h200"), {}).seconds
        assert seconds["fake"] == pytest.approx(4e15 / 8 / (rate * 989.4e12)), installed


@slow
def test_activations_go_to_the_host_and_back_beside_the_gathers():
    assert seconds_of({}, copied=16e9) == pytest.approx(2 * 16 / 64)
    assert seconds_of({("all_gather", "default_pg"): 50e9}, copied=16e9) == pytest.approx(1)


@slow
def test_what_is_sent_takes_the_link_of_its_group():
    """9e9 bytes take .02 s inside a node and .18 s between nodes. Attention's exchange is added."""
    gather, exchange = ("all_gather", "default_pg"), ("all_to_all", "mesh_ulysses")
    assert seconds_of({gather: 9e9}) == pytest.approx(0.18)
    assert seconds_of({gather: 9e9}, world=8) == pytest.approx(0.02)
    assert seconds_of({gather: 9e9, exchange: 9e9}) == pytest.approx(0.18 + 0.02)
    # If cp covers the whole world, its group is the default group.
    assert seconds_of({gather: 9e9, ("all_to_all", "default_pg"): 9e9}, world=8) == pytest.approx(0.02 + 0.02)
    shards = ("reduce_scatter", "mesh_dp_shard_cp")
    assert seconds_of({shards: 9e9}, "mesh.dp_replicate=2") == pytest.approx(0.02), "replicas of whole nodes"


@slow
@pytest.mark.parametrize("word", ["student.offload=cpu", "teacher.precision=fp32"])
def test_no_seconds_for_products_that_are_not_in_bf16_and_for_what_the_host_computes(plan, tmp_path, word):
    assert plan(word) == 0
    found = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert found["fits"] is True and found["seconds_per_step"] is None and found["mfu"] is None


@slow
def test_fp8_is_planned_as_without_it(plan, tmp_path):
    assert plan("planning.hardware=h100", "student.fp8=torchao", "teacher.fp8=torchao") == 0
    found = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan("planning.hardware=h100", run_dir=tmp_path / "plain") == 0
    expected = json.loads((tmp_path / "plain" / "plan.json").read_text())
    assert found == expected


@slow
def test_samples_after_the_last_step_are_not_the_trainings():
    """``allocated_gib`` stands next to what is measured when training ends."""
    config, run = planned("world=8")
    found = {}
    for every in (0, 10):
        sampled = replace(config, sample=replace(config.sample, every=every))
        made = simulation(sampled, run)
        made.peaks["sample/student"] = Peak(50 * GIB, {("student", "activations"): 50 * GIB})
        found[every] = predict(sampled, run, made, load_hardware("h20"), ENCODERS)
    assert found[10].allocated_gib == 50 > found[0].allocated_gib
    assert found[0].most_gib == found[10].most_gib == 50, "the device must hold them all the same"


def test_where_weights_are_gathered_is_planned_as_it_is_set():
    """The setting decides how many blocks are held at once, on a CPU too. Settings for GPUs only are dropped."""
    words = ("student.gather_stream=compute", "fake.compile=true")
    config = as_planned(compose_config(["experiment=wan2_1_t2v_14b_dmd2", "plan=true", "world=8", *words]))
    assert config.student.gather_stream == "compute" and config.fake.compile is False


@slow
@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ((), [(4, 4, 4), (5, 5, 5)]),
        (("fake.gradient_buffers=4",), [(6, 6, 6), (7, 7, 7)]),
        (("student.architecture={num_layers: 20}",), [(40, 20, 40)]),
        (("method.gan_weight_student=1e-3",), [(40, 40, 40)]),
    ],
)
def test_which_networks_are_told_from_shallow_ones(monkeypatch, words, layers):
    (config, plan), seen = planned("world=8", *words), []

    def recorded(config, plan, stands_for):
        seen.append(tuple(role.config["num_layers"] for role in plan.roles))
        return simulation(config, plan)

    monkeypatch.setattr(extrapolation, "simulate", recorded)
    told = extrapolation.simulate_any_depth(config, plan)
    assert seen == layers and told.peak.bytes == 31 * GIB, "a line through two equal values is flat"


@slow
@pytest.mark.parametrize(
    "words",
    [
        ("experiment=quickstart_dfd", "student.checkpoint=assets/quickstart_teacher"),
        ("experiment=quickstart_teacher", "method.weight=gaussian"),
    ],
    ids=["data forcing", "gaussian weights"],
)
def test_draws_without_values_are_planned(words):
    config = compose_config([*words, "plan=true", "world=1", "mesh.cp=1", "batch_size=1", "sample.at_end=false"])
    assert simulate(*plan_without_gpus(config)).steps["student"].flops > 0


def test_of_several_sizes_the_one_with_most_tokens_is_planned():
    sizes = "data.buckets=[[81,480,832],[49,720,1280],[81,832,480]]"
    config, plan = planned("world=8", "data=video_folder_480p", sizes)
    assert plan.tokens == 13 * 45 * 80 and config.data.sizes == [[49, 720, 1280]]
    assert plan.shapes == planned("world=8", "data=video_folder_720p", "data.num_frames=49")[1].shapes
    with pytest.raises(UserError, match="830"):
        planned("world=8", "data=video_folder_480p", "data.buckets=[[81,480,832],[81,480,830]]")


@slow
def test_image_to_video_without_encoders():
    """The plan has the shapes of the published CLIP's features, that encoder's memory, and the refusals of a run."""
    words = ["experiment=wan2_1_t2v_14b_dmd2", "plan=true", "world=8"]
    image, model = "data.image=first_frame", "planning.model=wan2_1_i2v_14b"
    config = as_planned(compose_config([*words, image, model, "sample.at_end=false", "sample.every=0"]))
    parts, shapes = planned_shapes(config)
    latents = parts["video"]
    assert shapes == {
        "text": (512, 4096), "image_latents": latents, "image_mask": (4, *latents[1:]), "image_embeds": (257, 1280),
    }  # fmt: skip
    assert plan_run(config, shapes=(parts, shapes)).roles[0].config["in_channels"] == 36
    config.data.height, config.data.width, config.data.num_frames = 16, 16, 1
    peak = encoders.encoder_peaks(config, ({"video": (16, 1, 2, 2)}, shapes))["encode/images"]
    parameters, width = 4 * 630_766_080, 1280
    assert peak.by["encoders", "parameters"] == pytest.approx(parameters, rel=0.01)
    assert 32 * 257 * width * 4 < peak.by["encoders", "activations"] < 0.2 * parameters, "a state of each block"
    for alone in (image, model):
        config = as_planned(compose_config([*words, alone]))
        with pytest.raises(UserError):
            plan_run(config, shapes=planned_shapes(config))


def test_every_hardware_has_all_its_numbers():
    for hardware in map(load_hardware, hardware_names()):
        assert 70 < hardware.memory_gib < 200 and 100 < hardware.bf16_tflops < 3000 and 0 < hardware.sustained < 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["planning.hardware=h21"], "planning.hardware"),
        (["world=12"], "mesh.cp"),
        (["plan=suggest", "run_dir=/dev/null/run"], "run_dir"),
    ],
)
def test_refusals_are_one_line(plan, capsys, words, named, tmp_path):
    check_command(lambda words: plan(*words), capsys, named, *words)
    assert not list(tmp_path.iterdir())


def test_torchrun_around_it_is_refused(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plan() == 2 and not list(tmp_path.iterdir())


@slow
def test_files_of_somebody_else_stay(plan, tmp_path, capsys):
    for name, text, words in (
        ("plan.json", '{"made_by": "me"}', []),
        ("plan.html", "mine", []),
        ("suggestions.json", "[1]", ["plan=suggest"]),
    ):
        (tmp_path / name).write_text(text)
        assert plan(*words, run_dir=tmp_path) == 2 and (tmp_path / name).read_text() == text
        assert name in capsys.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


@slow
def test_encoders_take_what_real_ones_do(tmp_path):
    folder = build_tiny_ltx2_pipeline(tmp_path)
    gemma, connectors = (json.loads((folder / p / "config.json").read_text()) for p in ("text_encoder", "connectors"))
    text = {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    vae = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
           "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}  # fmt: skip
    for network, call in (
        (lambda: encoders.build_encoder(text), lambda model: TextEncoder.encode_zeros([model], 24)),
        (
            lambda: nn.ModuleList([encoders.build_encoder(gemma), encoders.build_vae(connectors)]),
            lambda models: Ltx2TextEncoder.encode_zeros(models, 64),
        ),
        (lambda: encoders.build_vae(vae), lambda model: model.encode(torch.zeros(1, 3, 9, 32, 32))),
        (lambda: encoders.build_vae(vae), lambda model: model.decode(torch.zeros(1, 4, 5, 16, 16))),
    ):
        told = encoders._peak(network, call)
        with LiveStorages() as live, torch.no_grad():
            real = network().eval()
            held = live.bytes
            live.reset_peak()
            call(real)
        assert told.by[("encoders", "parameters")] == pytest.approx(held, rel=1e-3)  # literals of a few bytes
        assert told.bytes == pytest.approx(live.peak_bytes, rel=0.01)


def test_what_is_encoded_and_decoded(monkeypatch):
    monkeypatch.setattr(encoders, "_peak", lambda build, call: Peak(1, {}))
    words = ["experiment=wan2_1_t2v_14b_dmd2", "plan=true", "world=8"]

    def phases(*more):
        return list(
            encoders.encoder_peaks(as_planned(compose_config([*words, *more])), ({"video": (16, 21, 60, 104)}, {}))
        )

    assert "encode/clips" not in phases("data=captions") and "encode/clips" in phases("data=video_folder_480p")
    assert "decode" not in phases("sample.at_end=false", "sample.every=0")
    assert "decode" in phases("sample.at_end=false", "sample.every=0", "guard.every=10")
    assert not encoders.encoder_peaks(compose_config(["experiment=quickstart"]), ({"video": (3, 8, 16, 16)}, {}))


@slow
def test_a_vae_in_bf16_and_tiles_takes_less(tmp_path):
    build_tiny_pipeline(tmp_path)
    words = ["experiment=quickstart", "data=video_folder", f"data.path={tmp_path}", f"data.encoders={tmp_path}"]
    words += ["data.height=320", "data.width=320", "data.num_frames=1", "sample.at_end=false", "sample.every=0"]
    exact, half, tiled = (
        encoders.encoder_peaks(compose_config([*words, *more]), ({"video": (16, 1, 40, 40)}, {}))["encode/clips"]
        for more in ([], ["data.vae_precision=bf16"], ["data.vae_tiling=true"])
    )
    for kind in ("parameters", "activations"):
        assert half.by["encoders", kind] == pytest.approx(exact.by["encoders", kind] / 2, rel=0.05)
    assert tiled.by["encoders", "activations"] < 0.8 * exact.by["encoders", "activations"]


def test_a_plan_of_two_experts_takes_the_larger_guidance_scale():
    words = ["experiment=wan2_2_t2v_a14b_dmd2", "plan=true", "world=8", "method.guidance_scale_2=7"]
    assert as_planned(compose_config(words)).method.guidance == 7
