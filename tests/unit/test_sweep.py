"""Sweeps without a process: grammar, names, folders, what is refused, what a job's end is called, table and picture."""

import csv
import json
import random
import string
import sys
from pathlib import Path

import pytest
import torch

from distill.config import compose_config
from distill.sweep.check import check_points, role_turns
from distill.sweep.command import main
from distill.sweep.folder import POINT, read_settings, rows
from distill.sweep.outcome import DONE, FAILED, OUT_OF_MEMORY, PLANNED, REFUSED, classify, measurements
from distill.sweep.picture import lines_of, write_picture
from distill.sweep.points import Point, parse_words
from distill.sweep.table import markdown, write_csv
from distill.sweep.torchrun import parse_arguments, wants_sweep
from fsdp_cp.errors import UserError
from train import main as train

QUICK = ["experiment=quickstart", "device=cpu", "batch_size=2"]


def names(*words: str) -> list[str]:
    return [point.name for point in parse_words(words).points()]


def test_hydras_grammar():
    assert names("data.num_frames=21,41", "mesh.cp=range(1,3)") == [
        "num_frames=21,cp=1", "num_frames=21,cp=2", "num_frames=41,cp=1", "num_frames=41,cp=2",
    ]  # fmt: skip
    found = parse_words(["method=glob(d*)", "data.path=/a b/(c", "sample.captions=[x,y]", "method.step_list=[1,2],[3]"])
    assert found.values == {"method": ("dcm", "dmd2"), "method.step_list": ("[1,2]", "[3]")}, "no schemas"
    assert found.fixed == ("data.path=/a b/(c", "sample.captions=[x,y]")
    assert parse_words(["a=choice(3,3,1)"]).values == {"a": ("3", "1")}, "a point once"
    assert parse_words(["a=1,2", "b='x,y'"]).fixed == ("b='x,y'",)
    assert parse_words(["a=5", "b=2"], swept_before=["a"]).values == {"a": ("5",)}, "one more value"


def test_what_is_no_sweep():
    for words in (
        ["seed=interval(1,2)"],
        ["seed=range(1,2,0)"],
        ["seed=range(2,1)"],
        ["seed=range(0,1e9)"],
        ["seed=1"],
        ["seed=1,2", "++seed=3"],
    ):
        with pytest.raises(UserError) as caught:
            parse_words(words).points()
        assert "\n" not in str(caught.value), words


def test_names_are_of_one_point_and_fit_a_folder(tmp_path):
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + "/ .,'()[]{}:äß中"
    values = {"".join(draw.choices(letters, k=draw.randint(1, 300))) for _ in range(300)} | {"a/b", "a_b", "a:b", ".."}
    found = [Point((("optim.student.lr", value), ("optim.fake.lr", "1"))).name for value in sorted(values)]
    assert len(set(found)) == len(values)
    for name in found:
        assert name.startswith("student.lr=") and "/" not in name and len(name.encode()) < 220
        (tmp_path / name).mkdir()
    assert Point((("a.b", "1"), ("c", "2"))).name == "b=1,c=2"


def test_the_command_line():
    given = parse_arguments(
        ["--nproc_per_node=4", "--nnodes", "2", "--rdzv-endpoint", "h:1", "seed=1,2", "--plan", "sweep_dir=x",
         "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "--prefix", "srun -n 2"]
    )  # fmt: skip
    assert given.torchrun == ("--nproc_per_node=4", "--nnodes", "2", "--rdzv-endpoint", "h:1") and given.world == 8
    assert (
        given.words == ("seed=1,2",) and given.sweep_dir == "x" and given.plan and given.prefix == ("srun", "-n", "2")
    )
    assert given.hydra == ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu")
    assert parse_arguments(["--nproc-per-node", "2", "seed=1"]).torchrun[0] == "--standalone"
    assert wants_sweep(["-m", "seed=1,2"]) and not wants_sweep(["--multirun", "--cfg", "job"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--bogus seed=1,2", "--bogus"),
        ("--nnodes 1:3 seed=1,2", "--nnodes"),
        ("seed=1,2 --nproc-per-node 2", "--nproc-per-node"),
        ("--prefix= seed=1,2", "--prefix"),
        ("seed=1,2 run_dir=x", "sweep_dir"),
        ("seed=1,2 log.every=5", "log.every"),
        ("seed=1,2 plan=true", "--plan"),
        ("seed=1,2 sweep_dir={tmp}/run", "sweep_dir"),
        ("seed=1,2 sweep_dir={tmp}/theirs", "sweep_dir"),
        ("seed=1,2 sweep_dir={tmp}/damaged", "sweep.json"),
        ("seed=1,2 sweep_dir={tmp}/points", "seed=2"),
        ("seed=1,2 steps=3", "steps=3"),
        ("seed=1,2 hydra/launcher=nowhere device=cpu mesh.cp=1", "nowhere"),
    ],
)
def test_mistakes_are_a_line_and_write_nothing(tmp_path, capsys, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    files = ("run/starts.jsonl", "theirs/sweep.csv", "damaged/sweep.json", "points/seed=2/a")
    for path in map(tmp_path.joinpath, files):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    before = sorted(path for path in tmp_path.rglob("*"))
    assert train(["--multirun", *words.replace("{tmp}", str(tmp_path)).split()]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and named in error
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_under_torchrun_a_sweep_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["seed=1,2"]) == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_whole_turns_of_the_roles_are_measured():
    def check(*words, world=2):
        found = parse_words([*QUICK, *words])
        return check_points(found.fixed, found.points(), world=world, planned=False)

    few, many = check("method.fake_updates_per_student_update=1,3", "mesh.cp=2")
    assert "steps=10" in few.words and (few.warm_up, few.measured) == (2, 8)
    assert "steps=12" in many.words and (many.warm_up, many.measured) == (4, 8)
    assert "export.at_end=false" in few.words and few.tokens == 6 * 4 * 4
    (given, refused) = check("export.at_end=true", "steps=13", "mesh.cp=2,3")
    assert "export.at_end=false" not in given.words and (given.warm_up, given.measured) == (5, 5)
    assert "mesh.cp=3" in refused.refusal and refused.tokens is None
    for consistency, turn in ((4, 3), (1000, 1)):
        words = ["experiment=quickstart_rcm", f"method.consistency_steps={consistency}", "method.student_every=3"]
        first, period = role_turns(compose_config(words))
        assert period == turn and (consistency == 1000 or first <= consistency), (first, period)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.slow
def test_a_gpu_is_asked_for_where_the_jobs_run():
    """Here by torchrun: none of them could; on other machines by a launcher: this one may be a login node."""
    found = parse_words([*(word for word in QUICK if not word.startswith("device=")), "device=cuda", "seed=1,2"])
    for elsewhere in (False, True):
        checked = check_points(found.fixed, found.points(), world=2, planned=False, elsewhere=elsewhere)
        assert [point.refusal is None for point in checked] == [elsewhere] * 2
        assert not any("dry_run" in word for point in checked for word in point.words)


SUMMARY = """\
train.py FAILED
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 17)
"""


@pytest.mark.parametrize(
    ("code", "output", "status", "says"),
    [
        (0, "RuntimeError: of a destructor", DONE, None),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" + SUMMARY.format(code=1),
         OUT_OF_MEMORY, "Tried to allocate 2 GiB"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
         OUT_OF_MEMORY, "can't allocate"),
        (1, "x\nMemoryError\n", OUT_OF_MEMORY, "MemoryError"),
        (1, SUMMARY.format(code=-9), OUT_OF_MEMORY, ""),
        (-9, "", OUT_OF_MEMORY, ""),
        (1, SUMMARY.format(code=-11), FAILED, "11"),
        (1, "error: run_dir=x is in use by process 3\n" + SUMMARY.format(code=2), REFUSED, "is in use"),
        (2, "error: mesh.cp=3 does not", REFUSED, "mesh.cp=3"),
        (1, "Traceback\n  File x\n[rank0]: ValueError: no such thing\n"
         "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + SUMMARY.format(code=1),
         FAILED, "ValueError: no such thing"),
        (3, "", FAILED, "3"),
        (127, "srun: error: no node\n", FAILED, "srun: error: no node"),
    ],
)  # fmt: skip
def test_how_a_job_ended(code, output, status, says):
    found, reason = classify(code, output)
    assert found == status
    assert reason is None if says is None else says in reason and "\n" not in reason


def test_what_is_measured(tmp_path):
    """Rates weighted by the seconds of their steps, the warm-up aside; memory above the start's."""
    seconds = [9.0, 9.0, 1.0, 3.0, 7.0]
    lines = [
        {"step": i + 1, "perf/seconds_per_step": s, "perf/tokens_per_second": 60 / s, "perf/mfu": None,
         "memory/peak_gib": 1 + i / 10}
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "starts.jsonl").write_text('{"resident_gib_before": 0.5}\n')
    found = measurements(tmp_path, warm_up=2, measured=2)
    assert found["measured_steps"] == 2 and found["seconds_per_step"] == 2 and found["mfu"] is None
    assert found["tokens_per_second"] == pytest.approx(120 / 4)
    assert found["allocated_gib"] == pytest.approx(1.4 - 0.5)
    (tmp_path / "starts.jsonl").write_text('{"resident_gib_before": null}\n')
    assert measurements(tmp_path, warm_up=2, measured=2)["allocated_gib"] == pytest.approx(1.4), "as on CUDA"


def table(**more):
    """2 lengths x 2 meshes, the longest of one mesh out of memory."""
    made = []
    for cp in ("1", "2"):
        for frames, tokens in (("6", 96), ("12", 192)):
            out = cp == "1" and frames == "12"
            row = {"overrides": {"data.num_frames": frames, "mesh.cp": cp}, "tokens": tokens, "mfu": None}
            row |= {"status": OUT_OF_MEMORY, "reason": "no | memory"} if out else {"status": DONE, "reason": None}
            row |= {"tokens_per_second": None if out else tokens * 2.5, "allocated_gib": None if out else tokens / 1e3}
            made.append(row | {"predicted_allocated_gib": tokens / 1.1e3, **more})
    return made


def test_table_and_picture(tmp_path):
    write_csv(tmp_path / "a.csv", table())
    found = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [row["status"] for row in found] == [DONE, OUT_OF_MEMORY, DONE, DONE]
    assert found[1]["reason"] == "no | memory" and found[1]["tokens_per_second"] == "" == found[0]["mfu"]
    assert float(found[3]["predicted_allocated_gib"]) == 192 / 1.1e3 and found[3]["data.num_frames"] == "12"
    rows = [line for line in markdown(table()).splitlines() if line.startswith("|")]
    assert len(rows) == 6 and len({row.replace(r"\|", "").count("|") for row in rows}) == 1
    lines = [("cp=1", [96, 192]), ("cp=2", [96, 192])]
    assert [(line.label, [row["tokens"] for row in line.rows]) for line in lines_of(table())] == lines
    assert write_picture(tmp_path / "a.png", table(), title="a") and (tmp_path / "a.png").exists()
    refused = [{"overrides": {"seed": "1"}, "status": REFUSED, "tokens": None}]
    assert not write_picture(tmp_path / "c.png", refused, title="c") and not (tmp_path / "c.png").exists()


RUNNER = """\
import json, os, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if words.get("plan"):
    plan = {"tokens": 96, "allocated_gib": 0.5, "mfu": 0.25, "seconds_per_step": 2.0}
    json.dump(plan, open(words["run_dir"] + "/plan.json", "w"))
elif words["seed"] == "3":
    print("MemoryError")
    sys.exit(1)
elif words["seed"] == "4":
    sys.exit("ValueError: four")
"""
"""Stands in for train.py, to see which points are started, with what, and when again."""


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A sweep of seeds in ``tmp_path / 's'`` whose points are the stand-in above, without torchrun around it."""
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    monkeypatch.setattr("distill.sweep.job.TRAIN", runner)
    shim = tmp_path / "torchrun.py"
    shim.write_text(
        f"import runpy, sys\nsys.argv = sys.argv[sys.argv.index({str(runner)!r}):]\nrunpy.run_path(sys.argv[0])"
    )
    prefix = f"{sys.executable} {shim}"

    def run(*words, code=0):
        given = ["--prefix", prefix, *QUICK, "mesh.cp=1", f"sweep_dir={tmp_path / 's'}", *words]
        assert main(given) == code
        settings = read_settings(tmp_path / "s")
        return {row["overrides"].get("seed"): row for row in rows(tmp_path / "s", settings)} if settings else {}

    return run


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was(swept, tmp_path, capsys):
    found = swept("seed=1,3", "--plan")
    assert {row["status"] for row in found.values()} == {PLANNED}
    assert found["1"]["predicted_tokens_per_second"] == 96 * 2 / 2 and found["1"]["predicted_mfu"] == 0.25
    found = swept("seed=1,3,4")
    assert [found[seed]["status"] for seed in "134"] == [DONE, OUT_OF_MEMORY, FAILED]
    assert found["4"]["reason"] == "ValueError: four" and found["1"]["predicted_allocated_gib"] == 0.5
    point = tmp_path / "s" / "seed=1" / POINT
    changed = point.stat().st_mtime_ns
    (tmp_path / "s" / "seed=1" / "mine.txt").write_text("a user's")
    swept("seed=2", "--plan")
    (tmp_path / "s" / "seed=2" / POINT).write_text('{"status": "running"}')  # of a sweep that was killed
    found = swept("seed=2", "hydra/launcher=basic")
    assert [found[seed]["status"] for seed in "1234"] == [DONE, DONE, OUT_OF_MEMORY, FAILED], "rows stay, one is new"
    capsys.readouterr()
    swept("seed=range(1,5)")
    assert "[1/1] seed=4" in capsys.readouterr().out, "the one that failed runs again, alone"
    assert point.stat().st_mtime_ns == changed and (tmp_path / "s" / "seed=1" / "mine.txt").exists()
    lines = (tmp_path / "s" / "sweep.csv").read_text().splitlines()
    assert len(lines) == 5 and json.loads((tmp_path / "s" / "sweep.json").read_text())["rows"][1]["status"] == DONE
    for word in ("precision=bf16", "data.num_frames=6,7"):
        swept("seed=1,2", word, code=2)
        assert word.split("=")[0] in capsys.readouterr().err
    assert main(["--nproc-per-node", "2", *QUICK, "mesh.cp=1", f"sweep_dir={tmp_path / 's'}", "seed=1,2"]) == 2


LAUNCHER = """\
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import run_job
from hydra.plugins.launcher import Launcher


@dataclass
class Recording:
    _target_: str = "hydra_plugins.recording.RecordingLauncher"
    file: str = ""


class RecordingLauncher(Launcher):
    def __init__(self, file):
        self.file = Path(file)

    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        import pickle

        done = []
        for overrides in job_overrides:
            task = pickle.loads(pickle.dumps(self.task))  # as for another machine
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            self.file.open("a").write(f"{config.point}\\n")
            done.append(run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context))
        return done


ConfigStore.instance().store(group="hydra/launcher", name="recording", node=Recording, provider="test")
"""


def test_a_launcher_plugin_of_hydras(swept, tmp_path, monkeypatch):
    """One that is installed as any other: found in the namespace ``hydra_plugins``, set up by ``hydra.launcher.*``."""
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "recording.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Singleton, "_instances", {k: v for k, v in Singleton._instances.items() if k is not Plugins})
    found = swept("seed=1,3", "hydra/launcher=recording", f"hydra.launcher.file={tmp_path}/calls", "--no-plan")
    assert Path(tmp_path / "calls").read_text() == "seed=1\nseed=3\n"
    assert [row["status"] for row in found.values()] == [DONE, OUT_OF_MEMORY]
    assert [row.get("predicted_allocated_gib") for row in found.values()] == [None, None]
