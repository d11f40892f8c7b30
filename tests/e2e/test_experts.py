"""Wan 2.2's A14B in small, from mp4 files to clips: two experts, trained at two ranks, stopped, gone on with on another
mesh, exported, and sampled by plain diffusers pipelines of both experts.
"""

import json
import shutil

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from safetensors.torch import load_file

from distill import sample
from distill.config import load_config
from distill.methods import build_method
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models import export
from models.load import build_role
from models.role_plan import plan_role
from tests.e2e.launch import losses, train
from tests.e2e.test_image_to_video import first_frame
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from train import main

CAPTIONS = ["a green square, drifting", "a red square, drifting"]
STEPS = [1.0, 0.9375, 0.8333, 0.625]
BOUNDARY = 0.875
EXPERTS = ("transformer", "transformer_2")


def words(pipeline, clips):
    return [
        "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "optim.student.lr=1e-2",
        "data.height=32", "data.width=48", "batch_size=2", f"method.step_list={STEPS}",
        "method.student_sampler=ode", "method.fake_updates_per_student_update=1", "method.guidance_scale_2=1.5",
        "seed=7",
        "sample.student_steps=[4]", "sample.report_clips=0", "sample.teacher_steps=[2]",
        f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']", "checkpoint.every=2", "checkpoint.keep=0",
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["text", pytest.param("image", marks=pytest.mark.slow)])
def folders(request, tmp_path_factory):
    """A pipeline folder, clips, and a run of six steps that was stopped after two."""
    image = request.param == "image"
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline, image=image, boundary=BOUNDARY)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120)
    line = [*words(pipeline, clips), f"run_dir={run_dir}", *(["data.image=first_frame"] if image else [])]
    train(2, *line, "mesh.cp=2", "steps=2", "export.at_end=false", "sample.at_end=false")
    train(2, *line, "mesh.dp_shard=2", "mesh.cp=1", "steps=6")
    return pipeline, clips, run_dir, image


class NoDraws:
    """Of a sampler that adds no noise."""


def ours(run_dir, student, noise):
    config = load_config(run_dir / "config.yaml")
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=run_dir, captions=CAPTIONS)
    role = build_role(
        plan_role("student", checkpoint=str(student)),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
    )
    assert len(role.networks) == 2 and role.boundaries == (BOUNDARY,)
    method = build_method(config.method, {"student": role})
    return method.generate("student", noise, data.condition(CAPTIONS), 4, NoDraws())


def test_a_plain_pipeline_of_both_experts_generates_what_our_sampler_does(folders):
    base, clips, run_dir, image = folders
    student = run_dir / "export" / "student"
    noise = torch.randn(2, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    latents = run_ranks(1, ours, run_dir, student, noise)[0]

    def generate(experts, boundary=BOUNDARY):
        pipeline = (WanImageToVideoPipeline if image else WanPipeline).from_pretrained(
            base,
            **{name: WanTransformer3DModel.from_pretrained(experts / name) for name in EXPERTS},
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
                run_dir / "export" / "scheduler", stochastic_sampling=False
            ),
            boundary_ratio=boundary,
        )
        pipeline.set_progress_bar_config(disable=True)
        made = []
        for i, caption in enumerate(CAPTIONS):
            given = {"image": first_frame(clips / ["clip_1.mp4", "clip_0.mp4"][i])} if image else {}
            made += pipeline(
                prompt=caption, height=32, width=48, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
                guidance_scale_2=1.0, latents=noise[i : i + 1], output_type="latent", return_dict=False, **given,
            )[0]  # fmt: skip
        return torch.stack(made)

    def off(theirs):
        return ((latents - theirs).norm() / theirs.norm()).item()

    assert off(generate(student)) < 1e-3, "the cost of times that are met to 1e-5"
    assert off(generate(student, boundary=0.7)) > 3e-3, "the check above can tell the experts apart"
    assert off(generate(base)) > 3e-3, "and what was trained"


def test_both_experts_were_trained_each_by_itself(folders):
    base, _, run_dir, _ = folders
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [{key for key in line if key.endswith("/lr")} for line in lines]
    assert len(lines) == 6 == len(losses(run_dir)), "two of the first start and four of the second"
    assert set().union(*rates) <= {f"{role}.{noise}/lr" for role in ("student", "fake") for noise in ("high", "low")}
    state = json.loads((run_dir / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert state["boundaries"] == {"student": [BOUNDARY], "fake": [BOUNDARY]}
    assert sum(state["updates"].values()) == 6 and all(count for count in state["updates"].values())
    for name in EXPERTS:
        before, after = (load_file(next((f / name).glob("*.safetensors"))) for f in (base, run_dir / "export/student"))
        assert before.keys() == after.keys() and not all(torch.equal(before[key], after[key]) for key in before)


def test_exports_of_a_checkpoint(folders, tmp_path, capfd):
    _, _, run_dir, _ = folders
    command = ["--weights", "ema"]
    assert export.main([str(run_dir), str(tmp_path / "both"), *command]) == 0
    for name in EXPERTS:
        assert (
            export.main([str(run_dir), str(tmp_path / name), *command, "--expert", ("high", "low")[name[-1] == "2"]])
            == 0
        )
        ours, alone, at_the_end = (
            load_file(next(folder.glob("*.safetensors")))
            for folder in (tmp_path / "both" / name, tmp_path / name, run_dir / "export" / "student" / name)
        )
        assert ours.keys() == alone.keys() == at_the_end.keys()
        assert all(torch.equal(ours[key], alone[key]) and torch.equal(ours[key], at_the_end[key]) for key in ours)
    assert json.loads((tmp_path / "both" / "model_index.json").read_text())["boundary_ratio"] == BOUNDARY
    (tmp_path / "both" / "transformer" / "mine.txt").write_text("kept")
    capfd.readouterr()
    assert export.main([str(run_dir), str(tmp_path / "both"), *command]) == 2
    assert "transformer/mine.txt is not of the earlier export in it; nothing was changed" in capfd.readouterr().err


def test_sampling_an_export_by_the_command(folders, tmp_path):
    _, _, run_dir, _ = folders
    assert sample.main([str(run_dir), "--steps", "3", "--caption", CAPTIONS[0], "--out", str(tmp_path / "clips")]) == 0
    assert (tmp_path / "clips" / "0.mp4").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method.rollout=full"], "its expert for times from 0.875 on would never be trained"),
        (["method.step_list=[1.0,0.9]", "sample.student_steps=[2]"], "has no time below 0.875, where the student's"),
        (["experiment=quickstart_dcm", "-method."], "teacher.checkpoint is a model of two experts, which method=dcm"),
        (["teacher.checkpoint={one}", "student.checkpoint={one}", "fake.checkpoint={one}"], "guidance_scale_2=1.5 is"),
        (["teacher.checkpoint={pipeline}/transformer"], "is the expert for high noise of a model of two"),
        (["teacher.boundary=0.5"], "teacher.boundary=0.5 is for teacher.architecture"),
        (["teacher.gather_early=true"], "gather_early=true: "),
        (["student.checkpoint={one}"], "was made with boundaries 0.875 between the experts of the student, not none"),
    ],
)  # fmt: skip
def test_what_experts_cannot_do_is_refused_by_name(folders, tmp_path, capfd, changes, message):
    base, clips, run_dir, image = folders
    one = tmp_path / "one"
    shutil.copytree(base / "transformer_2", one)
    filled = [change.format(pipeline=base, one=one) for change in changes]
    line = [*words(base, clips), "mesh.cp=1", "steps=6", f"run_dir={run_dir}", "device=cpu", "dry_run=true"]
    if "-method." in changes:
        line = [word for word in line if not word.startswith(("method.", "experiment"))]
        filled.remove("-method.")
    assert main([*line, *filled, *(["data.image=first_frame"] if image else [])]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert message in error, error


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of both roles' adapters on one base of two experts."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline, boundary=BOUNDARY)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120)
    line = [
        *words(pipeline, clips),
        "student.lora.rank=4",
        "fake.lora.rank=4",
        "log.groups=true",
        "optim.student.lr_scale={*.lora_*: 10.0}",
        f"run_dir={run_dir}",
    ]
    done = train(2, *line, "mesh.cp=2", "steps=6")
    return pipeline, run_dir, done.stdout + done.stderr


def test_adapters_of_both_experts(adapted, tmp_path):
    """Merged in the export, and by diffusers from the files: the same clips."""
    base, run_dir, said = adapted
    assert "adapters of rank 4 on the teacher's networks" in said
    export_dir = run_dir / "export"
    files = {name: export_dir / f"student_lora_{expert}" for name, expert in zip(EXPERTS, ("high", "low"), strict=True)}
    assert not (export_dir / "student_lora").exists()
    merged = {name: WanTransformer3DModel.from_pretrained(export_dir / "student" / name) for name in EXPERTS}
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(export_dir / "scheduler", stochastic_sampling=False)
    noise = torch.randn(1, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))

    def generate(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(
            CAPTIONS[0], height=32, width=48, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
            guidance_scale_2=1.0, latents=noise, output_type="latent", return_dict=False,
        )[0]  # fmt: skip

    whole = generate(WanPipeline.from_pretrained(base, **merged, scheduler=scheduler))
    plain = WanPipeline.from_pretrained(base, scheduler=scheduler)
    untrained = generate(plain)
    for name, folder in files.items():
        plain.load_lora_weights(folder, load_into_transformer_2=name == EXPERTS[1])
    loaded = generate(plain)
    assert ((loaded - whole).norm() / whole.norm()).item() < 1e-4
    assert ((untrained - whole).norm() / whole.norm()).item() > 1e-3
    command = [str(run_dir), str(tmp_path / "merged"), "--weights", "ema", "--format", "merged"]
    assert export.main(command) == 0
    for name in EXPERTS:
        one, other = (
            load_file(next((folder / name).glob("*.safetensors")))
            for folder in (tmp_path / "merged", export_dir / "student")
        )
        assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())


def test_a_file_of_adapters_is_of_one_expert(adapted, tmp_path, capfd):
    _, run_dir, _ = adapted
    command = [str(run_dir), str(tmp_path / "lora"), "--weights", "ema", "--format", "diffusers-lora"]
    assert export.main(command) == 2
    assert "is two experts, and a file is of one; add --expert high or low" in capfd.readouterr().err
    assert export.main([*command, "--expert", "low"]) == 0
    theirs, ours = (
        load_file(next(folder.glob("*.safetensors")))
        for folder in (tmp_path / "lora", run_dir / "export" / "student_lora_low")
    )
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("low", "high")])
def alone(request, tmp_path_factory):
    """A run that trains one of the student's experts."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline, boundary=BOUNDARY)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120)
    line = [*words(pipeline, clips), f"student.experts={request.param}", "mesh.cp=2"]
    train(2, *line, "steps=2", f"run_dir={run_dir}", "export.at_end=false", "sample.at_end=false")
    train(2, *line, "steps=4", f"run_dir={run_dir}")
    return pipeline, clips, run_dir, request.param


def test_one_expert_trained_alone(alone, tmp_path, capfd):
    """The other is exported as its checkpoint has it; a checkpoint holds the trained one."""
    base, clips, run_dir, trained = alone
    student = run_dir / "export" / "student"
    for name, expert in zip(EXPERTS, ("high", "low"), strict=True):
        before, after = (load_file(next((folder / name).glob("*.safetensors"))) for folder in (base, student))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before) == (expert != trained)
    state = json.loads((run_dir / "checkpoints" / "step_00000004" / "state.json").read_text())
    assert sorted(state["updates"]) == ["fake.high", "fake.low", f"student.{trained}"]
    assert state["updates"][f"student.{trained}"] == 2
    assert export.main([str(run_dir), str(tmp_path / "both"), "--weights", "ema"]) == 2
    assert f"holds the student's expert for {trained} noise alone" in capfd.readouterr().err
    assert export.main([str(run_dir), str(tmp_path / "one"), "--weights", "ema", "--expert", trained]) == 0
    one = load_file(next((tmp_path / "one").glob("*.safetensors")))
    same = load_file(next((student / EXPERTS[trained == "low"]).glob("*.safetensors")))
    assert one.keys() == same.keys() and all(torch.equal(one[key], same[key]) for key in one)
    line = [*words(base, clips), "mesh.cp=1", f"run_dir={run_dir}", "device=cpu", "dry_run=true", "steps=4"]
    for changes, message in (
        ([], "has what trains student."),
        (["experiment=quickstart_rcm", "student.experts=low"], "method=rcm's rollouts end at times of both experts"),
    ):
        of_method = [word for word in line if not changes or not word.startswith(("method.", "experiment"))]
        assert main([*of_method, *changes]) == 2
        assert message in capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", EXPERTS)
def test_an_export_never_replaces_an_expert_of_its_own_base(adapted, tmp_path, capfd, name):
    """One that an earlier export put into the pipeline, as the documents say: it is no foreign folder."""
    base, run_dir, _ = adapted
    pipeline = tmp_path / "pipeline"
    shutil.copytree(base, pipeline)
    shutil.rmtree(pipeline / name)
    command = [str(run_dir), str(pipeline / name), "--weights", "ema", "--format", "merged", "--expert", "low"]
    assert export.main(command) == 0, "the run's own base is another folder"
    before = {path: path.read_bytes() for path in (pipeline / name).iterdir()}
    capfd.readouterr()
    assert export.main([*command, "--base", str(pipeline)]) == 2
    assert "would replace the adapters' base" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in (pipeline / name).iterdir()} == before


def test_adapters_of_one_expert_are_not_taken_for_both(adapted, tmp_path, capfd):
    base, run_dir, _ = adapted
    clips = render_clips(tmp_path / "clips", 1, frames=24, fps=8)
    line = [word for word in words(base, clips) if not word.startswith("student.checkpoint")]
    line += [f"student.checkpoint={run_dir}/export/student_lora_low", "mesh.cp=1", "steps=2", f"run_dir={tmp_path}/run"]
    assert main([*line, "device=cpu", "dry_run=true"]) == 2
    assert "holds adapters of one network, and its base is two experts" in capfd.readouterr().err
    assert main([*line, "device=cpu", "dry_run=true", "student.experts=low"]) == 0
