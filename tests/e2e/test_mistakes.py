"""A user's mistake: exit code 2 and one clear line, before anything is built."""

import json
import os
import shutil
import time

import pytest
from diffusers import WanTransformer3DModel
from omegaconf import OmegaConf

from distill.config import load_config
from tests.e2e import mistakes
from tests.e2e.launch import ROOT, run_command
from tests.e2e.mistakes_table import ACCEPTED
from tests.oracles.tiny_wan import ARCHITECTURE
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the rows of the table are typed; as it was, byte for byte, when all have been."""
    place = mistakes.make_place(tmp_path_factory.mktemp("mistakes"))
    before = mistakes.listing(place.base, deep=True)
    yield place
    assert mistakes.listing(place.base, deep=True) == before


def _rows():
    """Every 16th at once, every fourth with the slow tests; ``python -m tests.e2e.mistakes`` types them all."""
    for number, row in enumerate(mistakes.rows()):
        if number % 4 == 0:
            yield pytest.param(row, id=f"{number}", marks=() if number % 16 == 0 else pytest.mark.slow)


@pytest.mark.parametrize("row", list(_rows()))
def test_one_line_exit_code_2_and_nothing_changed(place, row):
    outcome, wrong = mistakes.answer(row, place)
    assert wrong is None, f"{row[1]}: {wrong}\n{outcome.error}"


def test_the_table_has_rows_of_every_setting_of_the_run():
    typed = " ".join(row[1] for row in mistakes.rows())
    assert len(list(mistakes.rows())) >= 180
    for group in ("mesh", "attention", "teacher", "student", "fake", "method", "optim", "data", "checkpoint", "log"):
        assert f"{group}." in typed
    assert all(
        f"{name}=" in typed for name in ("steps", "seed", "batch_size", "precision", "device", "run_dir", "world")
    )
    methods = {path.stem for path in (ROOT / "configs" / "method").glob("*.yaml")} - {"dmd2", "flow_matching"}
    assert all(f"experiment=quickstart_{method}" in typed for method in methods)


@pytest.mark.slow
def test_a_run_is_refused_with_the_line_of_a_dry_run(place):
    real = mistakes.DRY | {"dry_run": "false"}
    rows = [
        row for row in mistakes.rows() if row[3] is mistakes.DRY and "world=" not in row[1] and "-" not in row[1][:2]
    ]
    for section, typed, says, _ in rows[::7]:
        dry = mistakes.attempt(typed, place, mistakes.DRY)
        outcome, wrong = mistakes.answer((section, typed, says, real), place)
        assert wrong is None and outcome == dry, (typed, wrong, outcome, dry)


@pytest.mark.parametrize(("typed", "becomes"), ACCEPTED)
def test_what_looks_like_a_mistake_and_is_none(place, typed, becomes, capsys):
    home = {key: value for key, value in mistakes.DRY.items() if key not in ("run_dir", "dry_run")}
    _, _, words = mistakes.command_of(typed, place, home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", place.names["home"])
        assert main([*words, "--cfg", "job"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    for key, value in becomes.items():
        found = OmegaConf.select(config, key)
        value = place.filled(value) if isinstance(value, str) else value
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, (key, found)


@pytest.mark.slow
def test_a_run_with_every_such_path_at_once(tmp_path, monkeypatch):
    """From another folder, with a home folder, and all in config.yaml as it was typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "ho me"))
    name = """it's (1) [2] {3} a=b, c "d" größe 数 #5 $x; \\ end"""
    shutil.copytree(ROOT / "assets" / "quickstart_teacher", tmp_path / "ho me" / name)
    words = [f"{key}={value}" for key, value in mistakes.QUICK.items()]
    more = ["steps=1", "export.at_end=false", f"run_dir=runs/{name}", f"student.checkpoint=~/{name}", "data.fps=4"]
    assert main([*words, *more]) == 0
    config = load_config(tmp_path / "runs" / name / "config.yaml")
    assert config.run_dir == f"runs/{name}" and config.student.checkpoint == f"{tmp_path}/ho me/{name}"
    assert config.teacher.checkpoint == "assets/quickstart_teacher"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ho me", "runs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path, capsys):
    tmp_path.chmod(0o500)
    try:
        words = [f"{key}={value}" for key, value in mistakes.QUICK.items()]
        assert main([*words, "steps=1", f"run_dir={tmp_path}/run"]) == 2
        assert "cannot be written" in capsys.readouterr().err
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mesh.cp=4",), "does not divide the world of 2 ranks; use a mesh.cp among 1, 2"),
        (("checkpoint.resume={base}/nowhere",), "has no complete checkpoint"),
        (("method.shift=-1", "--multirun"), "a sweep starts torchrun itself"),
    ],
)
def test_under_torchrun_the_line_ends_its_summary(tmp_path, words, says):
    (tmp_path / "file").write_text("mine")
    words = [word.replace("{base}", str(tmp_path)) for word in words]
    done = run_command(2, "experiment=quickstart", f"run_dir={tmp_path}/run", *words)
    assert done.returncode == 1, "torchrun's own"
    assert says in "".join(done.stderr.splitlines()[-6:]), done.stderr[-3000:]
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(set(ours)) == 1 and says in ours[0], "all ranks say the same, and nothing else"
    assert "train.py" not in "".join(line for line in done.stderr.splitlines() if line.startswith("  File")), (
        done.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
    done = run_command(0, "experiment=quickstart", "mesh.cp=1", "sed=1", f"run_dir={tmp_path}/run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "did you mean seed?" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - started < 60


def test_help_lists_what_can_be_set(capsys):
    assert main(["--help", "all"]) == 0
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
