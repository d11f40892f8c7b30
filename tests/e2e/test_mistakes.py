"""A user's mistake: exit code 2 and one clear line, before anything is built."""

import json
import shutil
import time

import pytest
from diffusers import WanTransformer3DModel

from benchmarks.parity import ARCHITECTURE
from tests.e2e.launch import ROOT, train
from train import main


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def _refused(capsys, tmp_path, *overrides):
    assert main(["experiment=quickstart", f"run_dir={tmp_path}/run", *overrides]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "run").exists(), "refused before anything is written"
    return err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_sise=4", "did you mean batch_size?"),
        ("optim.student.lrr=1", "did you mean optim.student.lr?"),
        ("method.guidance_scal=1", "did you mean method.guidance_scale?"),
        ("data.hight=16", "did you mean data.height?"),
        ("steps=many", "steps"),
        ("method=dmd3", "did you mean dmd2?"),
        ("experiment=quikstart", "did you mean quickstart?"),
        ("mesh.cp=2", "does not divide the world of 1 ranks"),
        ("mesh.dp_shard=3", "needs 3 ranks, but the world has 1"),
        ("teacher.checkpoint=/no/such/folder", "teacher.checkpoint=/no/such/folder is not a folder"),
        ("precision=fp8", "use fp32 or bf16"),
        ("attention.backend=flashy", "attention.backend='flashy' is unknown; use auto or cpu_flash"),
        ("attention.backend=cudnn", "attention.backend='cudnn' runs on CUDA devices, not on cpu; use auto"),
        ("attention.head_groups=3", "does not divide the 4 heads of a rank; use 1, 2, 4"),
        ("attention.head_groups=0", "attention.head_groups=0 must be at least 1"),
        ("method.step_list=[0.5,0.9]", "must descend from 1.0"),
        ("micro_batch_size=5", "micro_batch_size=5 does not divide"),
        ("student.strategy=zero3", "student.strategy=zero3 is unknown; use no_shard or optim or optim_grads or"),
        ("fake.stratgy=optim", "did you mean fake.strategy?"),
        ("teacher.ofload=cpu", "did you mean teacher.offload?"),
        ("student.activation_checkpointing=5", "student.activation_checkpointing=5 is unknown; use none or full or"),
        (
            "student.keep_operators=[aten.mm]",
            "student.keep_operators is for student.activation_checkpointing=selective",
        ),
        ("fake.communication_buffers=symmetric", "is memory of NCCL, and the device is cpu; use default"),
        (
            "teacher.gather_early=true",
            "begins with a forward of the teacher; use student.gather_early=true",
        ),
        (
            "teacher.activation_checkpointing=full",
            "is for a role that trains, and with method=dmd2 the teacher does not; leave it out",
        ),
        ("teacher.forward_prefetch=0", "teacher.forward_prefetch=0 must be at least 1"),
        ("optim.student.no_decay=[*.bais]", "optim.student.no_decay: '*.bais' matches no parameter; names are as"),
        ("optim.fake.lr_scale={block.*: 0.1}", "optim.fake.lr_scale: 'block.*' matches no parameter"),
        (
            "optim.fake.implementation=fast",
            "optim.fake.implementation=fast is unknown; use foreach or fused or for_loop",
        ),
        ("log.norms_every=-1", "log.norms_every=-1 must be at least 0"),
    ],
)
def test_one_line_and_exit_code_2(capsys, tmp_path, override, message):
    # The quickstart's mesh.cp=2 does not fit one process; where that is not the mistake, it is set right.
    alone = () if override.startswith(("mesh.cp", "experiment")) else ("mesh.cp=1",)
    assert message in _refused(capsys, tmp_path, override, *alone)


def test_an_average_needs_masters_that_can_hold_it(capsys, tmp_path):
    settings = ("student.master_dtype=bf16", "precision=bf16", "mesh.cp=1")
    message = _refused(capsys, tmp_path, *settings, "student.ema.enabled=true")
    assert "an average in bf16 stands still" in message and "use student.master_dtype=keep" in message


def test_checkpoints_that_do_not_fit(capsys, tmp_path):
    network = WanTransformer3DModel(**ARCHITECTURE)
    good = tmp_path / "good"
    network.save_pretrained(good)
    other = tmp_path / "other_shape"
    shutil.copytree(good, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"ffn_dim": 96}))
    message = _refused(capsys, tmp_path, f"student.checkpoint={other}", "mesh.cp=1")
    assert "student.checkpoint" in message and "blocks.0.ffn.net.0.proj" in message and "(96," in message

    deeper = tmp_path / "deeper"
    shutil.copytree(good, deeper)
    (deeper / "config.json").write_text(json.dumps(config | {"num_layers": 4}))
    message = _refused(capsys, tmp_path, f"fake.checkpoint={deeper}", "mesh.cp=1")
    assert "lacks blocks.3." in message

    # Fits itself, but not the data: other text embeddings, then other channels.
    message = _refused(capsys, tmp_path, f"teacher.checkpoint={good}", "mesh.cp=1")
    assert "teacher.checkpoint takes text embeddings of size 10, but the data's have 32" in message
    channels = tmp_path / "channels"
    WanTransformer3DModel(**ARCHITECTURE | {"text_dim": 32}).save_pretrained(channels)
    message = _refused(capsys, tmp_path, f"teacher.checkpoint={channels}", "mesh.cp=1")
    assert "teacher.checkpoint takes latents of 4 channels, but the data has 3" in message


def test_mesh_degrees_that_do_not_fit(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = ("mesh.cp=4", "data.num_frames=7", "data.height=20", "data.width=20")  # 175 tokens are no mistake
    message = _refused(capsys, tmp_path, *sizes, "mesh.ulysses=3")
    assert "mesh.ulysses=3 does not divide mesh.cp=4; use a mesh.ulysses among auto, 1" in message
    message = _refused(capsys, tmp_path, *sizes, "mesh.ring=4", "mesh.ulysses=4")
    assert "mesh.ring=4 x mesh.ulysses=4 is not mesh.cp=4; use" in message and "mesh.ring among auto, 1" in message
    message = _refused(capsys, tmp_path, "mesh.cp=1", "mesh.dp_replicate=4")
    assert "which needs strategy=no_shard on every role; use mesh.dp_replicate=1" in message
    unsharded = [f"{role}.strategy=no_shard" for role in ("teacher", "student", "fake")]
    message = _refused(capsys, tmp_path, "mesh.cp=1", "mesh.dp_replicate=4", *unsharded, "micro_batch_size=3")
    assert "micro_batch_size=3 does not divide" in message, "the mesh is none of its mistakes then"


def test_the_process_itself_exits_with_2_and_soon(tmp_path):
    started = time.monotonic()
    done = train(0, "experiment=quickstart", "mesh.cp=1", "sed=1", f"run_dir={tmp_path}/run", check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "did you mean seed?" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - started < 60


def test_help_lists_what_can_be_set(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "experiment=",
        "quickstart",
        "mesh.cp",
        "teacher.checkpoint",
        "checkpoint.resume",
        "method.guidance_scale",
        "student.strategy=optim_grads_params",
        "fake.offload",
        "optim.student.no_decay",
        "log.norms_every=0",
    ):
        assert word in text
