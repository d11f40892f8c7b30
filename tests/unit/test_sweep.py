"""Sweeps in one process: grammar, names, folders, refusals, outcomes of jobs, table and picture."""

import csv
import json
import random
import string
import sys
from pathlib import Path

import pytest
from PIL import Image

from distill.config import compose_config
from distill.sweep.command import INTERRUPTED, PLANNED, lines_of, main, parse_arguments, write_csv, write_picture
from distill.sweep.job import DONE, FAILED, OUT_OF_MEMORY, REFUSED, classify, measurements
from distill.sweep.points import check_points, parse_words, point_name, role_turns
from tests.tiers import parametrize, slow
from tests.unit.refused import check_command, refusal
from train import main as train

QUICK = ["experiment=quickstart", "device=cpu", "batch_size=2"]


def test_hydras_grammar():
    fixed, swept = parse_words(["data.num_frames=21,41", "mesh.cp=range(1,3)", "seed=choice(3,3,1)", "b='x,y'"])
    assert swept == {"data.num_frames": ["21", "41"], "mesh.cp": ["1", "2"], "seed": ["3", "1"]} and fixed == [
        "b='x,y'"
    ]
    words = ["data.path=/a b/(c", "sample.captions=[x,y]", "method.step_list=[1,2],[3]"]
    assert parse_words(words) == (words[:2], {"method.step_list": ["[1,2]", "[3]"]})


@pytest.mark.parametrize(
    "words",
    [
        ["seed=interval(1,2)"],
        ["seed=range(1,2,0)"],
        ["seed=range(2,1)"],
        ["seed=range(0,1e9)"],
        ["seed=glob(*)"],
        ["seed=1"],
        ["seed=1,2", "++seed=3"],
    ],
)
def test_words_that_are_no_sweep(words):
    refusal(parse_words, words)


def test_names_are_of_one_point_and_fit_a_folder(tmp_path):
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + "/ .,'()[]{}:äß中"
    values = {"".join(draw.choices(letters, k=draw.randint(1, 300))) for _ in range(300)} | {"a/b", "a_b", "a:b", ".."}
    found = [point_name({"optim.student.lr": value, "seed": "1"}) for value in sorted(values)]
    assert len(set(found)) == len(values)
    for name in found:
        assert name.startswith("lr=") and "/" not in name and len(name.encode()) < 220
        (tmp_path / name).mkdir()
    assert point_name({"a.b": "1", "c": "2"}) == "b=1,c=2"
    assert point_name({"a.b": "1", "c.b": "2"}) == "a.b=1,c.b=2"


def test_the_command_line():
    words = ["--nproc_per_node=4", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--prefix", "srun -n 2"]
    given = parse_arguments([*words, "seed=1,2", "--plan", "sweep_dir=x"])
    assert given.launcher[:3] == ["srun", "-n", "2"] and given.world == 8
    assert (
        given.launcher[-5:]
        == ["--nproc_per_node=4", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--nproc-per-node=4"][1:]
    )
    assert given.settings == ["seed=1,2"] and given.folder == Path("x") and given.plan
    assert "--standalone" in parse_arguments(["-m", "--nproc-per-node", "2", "seed=1"]).launcher


@parametrize(
    ("words", "named"),
    [
        ("--bogus seed=1,2", "--bogus"),
        ("--nnodes 1:3 seed=1,2", "--nnodes"),
        ("seed=1,2 --nproc-per-node 2", "--nproc-per-node"),
        ("--nproc-per-node 0 seed=1,2", "world"),
        ("--plan --no-plan seed=1,2", "--plan"),
        ("seed=1,2 sweep_dir=", "sweep_dir"),
        ("seed=1,2 run_dir=x", "sweep_dir"),
        ("seed=1,2 log.every=5", "log.every"),
        ("seed=1,2 plan=true", "--plan"),
        ("seed=1,2 sweep_dir={tmp}/run", "sweep_dir"),
        ("seed=1,2 sweep_dir={tmp}/theirs", "sweep_dir"),
        ("seed=1,2 sweep_dir={tmp}/damaged", "sweep.json"),
        ("seed=1,2 mesh.cp=1 sweep_dir={tmp}/points", "seed=2"),
        ("seed=1,2 steps=3", "steps=3"),
        ("seed=1,2 hydra/launcher=submitit_slurm", "hydra/launcher"),
    ],
    quick=6,
)
def test_mistakes_are_a_line_and_write_nothing(tmp_path, capsys, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    files = ("run/starts.jsonl", "theirs/sweep.csv", "damaged/sweep.json", "points/seed=2/a")
    for path in map(tmp_path.joinpath, files):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    before = sorted(path for path in tmp_path.rglob("*"))
    check_command(train, capsys, named, "--multirun", *words.replace("{tmp}", str(tmp_path)).split())
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_under_torchrun_a_sweep_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    check_command(main, capsys, "", "seed=1,2")


@slow
def test_whole_turns_of_the_roles_are_measured():
    def check(*words):
        return check_points(*parse_words([*QUICK, *words]), world=2, planned=False)

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
    """Rates are weighted by the seconds of their steps, without the warm-up. Memory is the growth since the start."""
    seconds = [9.0, 9.0, 1.0, 3.0, 7.0]
    lines = [
        {"step": i + 1, "perf/seconds_per_step": s, "perf/tokens_per_second": 60 / s, "perf/mfu": None,
         "memory/peak_gib": 1 + i / 10}
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "starts.jsonl").write_text('{"resident_gib_before": 0.5}\n')
    found = measurements(tmp_path, 2, 2)
    assert found["measured_steps"] == 2 and found["seconds_per_step"] == 2 and found["mfu"] is None
    assert found["tokens_per_second"] == pytest.approx(120 / 4)
    assert found["allocated_gib"] == pytest.approx(1.4 - 0.5)
    (tmp_path / "starts.jsonl").write_text('{"resident_gib_before": null}\n')
    assert measurements(tmp_path, 2, 2)["allocated_gib"] == pytest.approx(1.4), "as on CUDA"


def table():
    """Return a table of 2 lengths x 2 meshes. The longest point of one mesh is out of memory."""
    made = []
    for cp in ("1", "2"):
        for frames, tokens in (("12", 192), ("6", 96)):
            row = {"overrides": {"data.num_frames": frames, "mesh.cp": cp}, "tokens": tokens, "mfu": None}
            row |= {"status": DONE, "reason": None, "tokens_per_second": tokens * 2.5, "allocated_gib": tokens / 1e3}
            if cp == "1" and frames == "12":
                row |= {
                    "status": OUT_OF_MEMORY,
                    "reason": "no, memory",
                    "tokens_per_second": None,
                    "allocated_gib": None,
                }
            made.append(row | {"predicted_allocated_gib": tokens / 1.1e3})
    return made


def test_table_and_picture(tmp_path):
    write_csv(tmp_path / "a.csv", table())
    found = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [row["status"] for row in found] == [OUT_OF_MEMORY, DONE, DONE, DONE]
    assert found[0]["reason"] == "no, memory" and found[0]["tokens_per_second"] == "" == found[0]["mfu"]
    assert float(found[2]["predicted_allocated_gib"]) == 192 / 1.1e3 and found[2]["data.num_frames"] == "12"
    lines = {name: [row["tokens"] for row in line] for name, line in lines_of(table()).items()}
    assert lines == {"cp=1": [96, 192], "cp=2": [96, 192]}
    refused = {"overrides": {"seed": "1"}, "status": REFUSED, "tokens": None}
    for rows in (table(), [refused]):
        write_picture(tmp_path / "a.png", rows, title="a")
        assert Image.open(tmp_path / "a.png").size[0] > 500


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
"""Stand-in for train.py that shows which points start, with which words, and when they start again."""


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a sweep of seeds in ``tmp_path / 's'`` whose points run the stand-in, without torchrun around it."""
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    monkeypatch.setattr("distill.sweep.job.TRAIN", runner)
    shim = tmp_path / "torchrun.py"
    shim.write_text(
        f"import runpy, sys\nsys.argv = sys.argv[sys.argv.index({str(runner)!r}):]\nrunpy.run_path(sys.argv[0])"
    )

    def run(*words, code=0):
        given = ["--prefix", f"{sys.executable} {shim}", *QUICK, "mesh.cp=1", f"sweep_dir={tmp_path / 's'}", *words]
        assert main(given) == code
        rows = json.loads((tmp_path / "s" / "sweep.json").read_text())["rows"]
        with (tmp_path / "s" / "sweep.csv").open() as file:
            assert [row["status"] for row in csv.DictReader(file)] == [row["status"] or "" for row in rows]
        return {row["overrides"]["seed"]: row for row in rows}

    return run


@slow
def test_a_sweep_is_resumed(swept, tmp_path, capsys):
    found = swept("seed=1,3", "--plan")
    assert {row["status"] for row in found.values()} == {PLANNED}
    assert found["1"]["predicted_tokens_per_second"] == 96 * 2 / 2 and found["1"]["predicted_mfu"] == 0.25
    found = swept("seed=1,3,4")
    assert [found[seed]["status"] for seed in "134"] == [DONE, OUT_OF_MEMORY, FAILED]
    assert found["4"]["reason"] == "ValueError: four" and found["1"]["predicted_allocated_gib"] == 0.5
    (tmp_path / "s" / "seed=1" / "mine.txt").write_text("a user's")
    sweep_json = tmp_path / "s" / "sweep.json"
    killed = json.loads(sweep_json.read_text())
    killed["rows"][0]["status"] = INTERRUPTED
    sweep_json.write_text(json.dumps(killed))
    capsys.readouterr()
    found = swept("seed=1,2,3")
    assert [found[seed]["status"] for seed in "1234"] == [DONE, DONE, OUT_OF_MEMORY, FAILED]
    said = capsys.readouterr().out
    assert "[1/2] seed=1" in said and "[2/2] seed=2" in said, "the interrupted and the new point alone"
    swept("seed=range(1,5)")
    assert "[1/1] seed=4" in capsys.readouterr().out, "the one that failed runs again, alone"
    assert (tmp_path / "s" / "seed=1" / "mine.txt").exists()
    for word in ("precision=bf16", "data.num_frames=6,7"):
        swept("seed=1,2", word, code=2)
        assert word.split("=")[0] in capsys.readouterr().err
    assert main(["--nproc-per-node", "2", *QUICK, "mesh.cp=1", f"sweep_dir={tmp_path / 's'}", "seed=1,2"]) == 2
