"""How each command that the documents have is run: ``RULES``, of which the first that matches counts."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e import documented
from tests.e2e.documented import taken_apart
from tests.e2e.documented_places import SMALL, Places, start
from tests.e2e.launch import ROOT, environment

REPLACED = ("device", "steps", "run_dir", "checkpoint.resume")
"""Settings of a quickstart that its small run has values of its own for."""
RUN_ALREADY: set[tuple] = set()
MODULES = {
    "benchmarks.attention_overlap": ["--tokens", "64", "--rounds", "1"],
    "benchmarks.checkpoints": ["--millions", "1"],
    "benchmarks.cp_attention": ["--quick", "--world", "2", "--tokens", "1024"],
    "benchmarks.load_memory": ["--parameters", "3e6", "--world", "2"],
    "benchmarks.parity": ["--steps", "1"],
    "benchmarks.quickstart_step": ["--cycles", "1"],
    "benchmarks.sharding": ["--world", "2", "--rounds", "1"],
}
"""What makes a benchmark small."""
FEWER = {
    "benchmarks.parity": ("MESHES", 2),
    "benchmarks.quickstart_step": ("MESHES", 1),
    "benchmarks.sharding": ("CASES", 4),
}
"""Benchmarks that take minutes at their smallest: how many of their cases are run here, in this process."""


# How a command is run. Each is called with the command, the places and pytest's capsys, and fails by an assertion.


def quickstart(command: str, places: Places, capsys, *, typed: bool = False) -> None:
    """Two steps, with what the command sets; commands that are the same at this size run once."""
    launch = taken_apart(command)
    words = {"experiment=quickstart", *launch.words} if "experiment=" not in command else set(launch.words)
    same = (launch.target, launch.world, frozenset(w for w in words if w.partition("=")[0] not in REPLACED))
    if same in RUN_ALREADY:
        return
    run_dir = places.elsewhere / f"run_{time.monotonic_ns()}"
    more = [*SMALL, f"run_dir={run_dir}"]
    if "ode_regression" in command:
        more += ["method.num_trajectories=4", "method.teacher_steps=4", f"method.trajectories={places.root}/paths"]
        if taken_apart(command).module:
            assert "4 trajectories in" in start(command, places, *more).stdout
            return
        start(command.replace("train.py", "-m distill.trajectories"), places, *more)
    start(command, places, *more, typed=typed)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (run_dir / "export" / "student" / "config.json").is_file()
    RUN_ALREADY.add(same)


def dry_run(command: str, places: Places, capsys) -> None:
    """All checks of a run of that world; what is missing to it may be the disk alone, which is looked at last."""
    from train import main

    launch = taken_apart(command)
    if "dry_run=true" in launch.words:
        done = start(command, places, check=False)
        expect_dry(done.returncode, done.stderr)
        return
    code = main([*map(places.put, launch.words), "dry_run=true", f"world={launch.world}"])
    expect_dry(code, capsys.readouterr().err)


def planned(command: str, places: Places, capsys) -> None:
    """All checks of a plan; the simulation, which takes minutes, is run by tests/distributed/test_planning.py."""
    from distill.config import compose_config
    from distill.planning.command import as_planned, planned_shapes, require_plannable
    from distill.setup import plan_run

    config = compose_config([*map(places.put, taken_apart(command).words)])
    require_plannable(config)
    config = as_planned(config)
    assert plan_run(config, shapes=planned_shapes(config)).mesh.world == config.world


def expect_dry(code: int, error: str) -> None:
    assert code == 0 or "are free; use another disk" in error, error


def trajectories_of_wan(command: str, places: Places, capsys) -> None:
    """The checks of ``distill.trajectories``; and ``train.py`` with the same refuses to begin without trajectories."""
    from distill.config import compose_config
    from distill.setup import plan_run
    from distill.trajectories import _TeacherAlone
    from train import main

    launch = taken_apart(command)
    words = [*map(places.put, launch.words), "dry_run=true", f"world={launch.world}"]
    config = compose_config(words)
    for other in (config.student, config.fake):
        other.checkpoint = other.architecture = None
    assert plan_run(config, _TeacherAlone).micro_batch_size == 1
    assert main(words) == 2 and "python -m distill.trajectories" in capsys.readouterr().err


def module(command: str, places: Places, capsys) -> None:
    """``python -m MODULE``, with what makes it small."""
    launch = taken_apart(command)
    if launch.target == "benchmarks.cp_attention":
        pytest.importorskip("yunchang", reason="the extra bench is not installed")
    same = (launch.target, launch.world, frozenset({"--out"} & set(launch.words)))
    if launch.target in MODULES and same in RUN_ALREADY:
        return
    RUN_ALREADY.add(same)
    small = list(MODULES.get(launch.target, ()))
    if "--out" in launch.words:
        small += ["--out", str(places.elsewhere / "picture.png")]
    if launch.target in FEWER:
        benchmark, (name, count) = importlib.import_module(launch.target), FEWER[launch.target]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, name, getattr(benchmark, name)[:count])
            assert benchmark.main([*launch.words, *small]) == 0
        printed = capsys.readouterr().out
    else:
        printed = start(command, places, *small).stdout
    assert printed.strip()
    if "--out" in launch.words:
        assert (places.elsewhere / "picture.png").stat().st_size > 1000


def tiny_pipeline(command: str, places: Places, capsys) -> None:
    """One of test size; a second time its folder is somebody's."""
    command = command.replace("/tmp/", f"{places.elsewhere}/tiny_")
    folder = Path(taken_apart(command).words[0])
    start(command, places)
    there = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert folder / "model_index.json" in there
    again = start(command, places, check=False)
    assert again.returncode == 2 and "is there and not empty; give a new folder" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == there


def on_a_run(command: str, places: Places, capsys) -> None:
    """``distill.sample`` and ``models.export`` on a finished run; torchrun's 8 ranks are 2 here."""
    launch = taken_apart(command.replace("--nproc-per-node 8", "--nproc-per-node 2"))
    if launch.target == "models.export":
        out = Path(places.put(launch.words[1]))
        start(command, places)
        assert (out / "config.json").is_file() or (out / "student" / "config.json").is_file()
        return
    out = places.elsewhere / f"clips_{time.monotonic_ns()}"
    start(command.replace("--nproc-per-node 8", "--nproc-per-node 2"), places, "--out", str(out))
    wanted = {"--count 8": 8, "--caption TEXT": 1}
    assert len(list(out.glob("*.mp4"))) == next((n for words, n in wanted.items() if words in command), 4)


def sweep_checks(command: str, places: Places, capsys) -> None:
    """All checks of a sweep's first and last point; the points of others run in tests/e2e/test_sweep.py."""
    from distill.sweep.check import check_points
    from distill.sweep.points import parse_words
    from distill.sweep.torchrun import parse_arguments

    given = parse_arguments([*map(places.put, taken_apart(command).words)])
    found = parse_words(given.words)
    points = found.points()
    # The jobs' machine has GPUs, and this one may have none.
    ends, elsewhere = [points[0], points[-1]], not torch.cuda.is_available()
    checked = check_points(found.fixed, ends, world=given.world, planned=given.plan, elsewhere=elsewhere)
    assert [point.refusal for point in checked] == [None, None] and len(points) >= 4


def sweep_help(command: str, places: Places, capsys) -> None:
    """Its help is there."""
    from distill.sweep.command import main

    assert main(["--help"]) == 0 and "sweep_dir=" in capsys.readouterr().out


def form(command: str, places: Places, capsys) -> None:
    """A form, with placeholders: what it names is there, and its help knows the options."""
    launch = taken_apart(command.replace("[", "").replace("]", ""))
    name = launch.target.removesuffix(".py")
    package = importlib.util.find_spec(name).submodule_search_locations is not None
    main = importlib.import_module(f"{name}.__main__" if package else name).main
    subcommand = [word for word in launch.words[:1] if package and not word.startswith("-")]
    asked = [*subcommand, "--help"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [launch.target, "--help"])
        try:
            code = main(asked) if inspect.signature(main).parameters else main()
        except SystemExit as end:  # argparse's
            code = end.code
    shown = capsys.readouterr().out
    assert not code and shown
    for option in set(re.findall(r"--[a-z]+", " ".join(launch.words))) - {"--help"}:
        assert option in shown


def of_any_experiment(command: str, places: Places, capsys) -> None:
    """``train.py`` in this process, for the default experiment."""
    from train import main

    assert main([word.replace("NAME", "quickstart") for word in taken_apart(command).words]) == 0


def shell(command: str, places: Places, capsys) -> None:
    """Through bash, with paths of this machine."""
    words = re.sub(r"(?<![\w.])/data/", f"{places.root}/data/", command)
    subprocess.run(["bash", "-euc", words], cwd=places.elsewhere, check=True, capture_output=True, text=True)


def help_knows(command: str, places: Places, capsys) -> None:
    """The program is installed, and its help knows the options."""
    program, *words = shlex.split(command)
    sub = [word for word in words[:1] if program == "hf"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *sub, "--help"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in done.stdout


def syntax(command: str, places: Places, capsys) -> None:
    """Only its syntax; the rule says why."""
    done = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_target(command: str, places: Places, capsys) -> None:
    """``make -n`` from another folder says what it would do: the target changes the checkout, or is the tests."""
    assert _make(command.split()[1], places)


def make_tests(command: str, places: Places, capsys) -> None:
    """``make test``'s own command line collects a file of tests."""
    line = _make("test", places, "PYTEST_ARGS=--collect-only -q tests/unit/test_samplers.py")[-1]
    words = shlex.split(line)[2:]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "tests collected" in done.stdout, done.stdout + done.stderr


def make_quickstart(command: str, places: Places, capsys) -> None:
    """``make quickstart``'s own command line, at test size."""
    quickstart(documented._bare(_make("quickstart", places)[-1]), places, capsys, typed=True)


def _make(target: str, places: Places, *more: str) -> list[str]:
    words = ["make", "-n", "--no-print-directory", "-C", str(ROOT), target, *more]
    done = subprocess.run(words, cwd=places.elsewhere, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in re.sub(r"\\\n\s*", " ", done.stdout).splitlines() if line.strip()]


def sbatch_script(command: str, places: Places, capsys) -> None:
    """The script runs, with stand-ins for srun, scontrol and torchrun; what torchrun is given passes the dry run."""
    from train import main

    checkout = places.root / "shared" / "fsdp_cp"
    (checkout / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    tools = {
        checkout / ".venv" / "bin" / "torchrun": 'printf "%s\\n" torchrun "$@"',
        places.root / "tools" / "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\n"$@"',
        places.root / "tools" / "scontrol": "printf 'node%d\\n' 1 2 3 4",
    }
    for path, body in tools.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    nodes = re.search(r"#SBATCH --nodes=(\d+)", command)[1]
    env = environment() | {
        "PATH": f"{places.root / 'tools'}:{os.environ['PATH']}",
        "SLURM_NNODES": nodes, "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-4]",
    }  # fmt: skip
    text = command.replace("cd /shared/fsdp_cp", f"cd {checkout}")
    done = subprocess.run(["bash", "-c", text], env=env, cwd=places.elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launch = taken_apart(shlex.join(done.stdout.splitlines()))
    assert launch.world == 8 * int(nodes) and launch.target == "train.py"
    assert nodes == "1" or "node1:29500" in done.stdout
    code = main([*map(places.put, launch.words), "dry_run=true", f"world={launch.world}"])
    expect_dry(code, capsys.readouterr().err)


def fault_handler(command: str, places: Places, capsys) -> None:
    """With ``PYTHONFAULTHANDLER=1`` the signal prints where a process is."""
    env = environment() | {"PYTHONFAULTHANDLER": "1"}
    code = "import time\nprint('here', flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "here\n"
        subprocess.run(shlex.split(command.replace("PID", str(process.pid))), check=True)
        assert "in <module>" in process.communicate(timeout=30)[1]


def elsewhere(command: str, places: Places, capsys) -> None:
    """Run by the test that the rule names, which is there."""
    file, test = rule_of(command).why.split("::")
    assert f"def {test}(" in (ROOT / file).read_text()


def virtual_environment(command: str, places: Places, capsys) -> None:
    """Without pip in it, which takes most of the time."""
    words = shlex.split(command)[1:]
    subprocess.run([sys.executable, *words, "--without-pip"], cwd=places.elsewhere, check=True)
    assert (places.elsewhere / ".venv" / "bin" / "python").exists()


@dataclass(frozen=True)
class Rule:
    """How the commands that ``pattern`` matches in full are run."""

    pattern: str
    how: Callable[[str, Places, object], None]
    slow: bool = False
    why: str = ""
    """Why no more than syntax, or where else it runs."""


LIBRARY = "tests/e2e/test_library_snippet.py"
RULES = [
    # With Wan's recipes: GPUs. All that a run checks before it needs one.
    Rule(r"torchrun .*-m distill\.trajectories experiment=wan.*", trajectories_of_wan),
    Rule(r"torchrun .*train\.py experiment=wan.*", dry_run),
    Rule(r"python train\.py experiment=wan.* dry_run=true.*", dry_run),
    Rule(r"python train\.py experiment=\w+ plan=(true|suggest) world=\d+.*", planned),
    Rule(r"torchrun .*train\.py \.\.\.", form, why="the same as the command before it"),
    Rule(r"#!/bin/bash\n#SBATCH.*", sbatch_script),
    # The quickstarts.
    Rule(r"torchrun .*-m distill\.trajectories experiment=quickstart.*", quickstart, slow=True),
    Rule(r"torchrun .*train\.py( experiment=quickstart.*)?", quickstart, slow=True),
    Rule(r"torchrun --nproc-per-node 2 FILE", elsewhere, why=f"{LIBRARY}::test_the_same_losses_on_more_ranks"),
    Rule(r"python (-m distill\.sweep|train\.py --multirun) .*experiment=(wan|quickstart).*", sweep_checks),
    Rule(r"python -m distill\.sweep( experiment=NAME .*)?", sweep_help),
    # The other commands.
    Rule(
        r"python -m models\.export RUN OUT --format [a-z-]+",
        form,
        why="tests/distributed/test_lora_checkpoints.py runs them",
    ),
    Rule(
        r"python -m models\.lora extract FULL BASE OUT --rank 64",
        form,
        why="tests/distributed/test_lora_extract.py runs it",
    ),
    Rule(r"(python|torchrun .*) -m (distill\.sample|models\.export) (RUN|/shared)[^\[]*", on_a_run, slow=True),
    Rule(r"python -m tests\.tiny_((ltx|hunyuan)_)?pipeline /tmp/(pipeline|ltx|hunyuan)", tiny_pipeline, slow=True),
    Rule(r"python -m distill\.data\.word_table OUT\.safetensors", module, slow=True),
    Rule(
        r"python -m benchmarks\.(distillation|experts|modes|stability|fp8( --distil)?|lora( --ranks 16)?)",
        form,
        why="tests/e2e/test_benchmarks.py runs them",
    ),
    Rule(r"python -m benchmarks\.(planning|overhead|weak_scaling|pooled)( --.+)?", form, why="as those"),
    Rule(r"python -m benchmarks\.gpu( --device cpu --tiny)?", form, why="tests/e2e/test_gpu_benchmark.py, in small"),
    Rule(r"python -m benchmarks\.real_size --out \S+", form, why="tests/e2e/test_benchmarks.py runs it in small"),
    Rule(r"python -m benchmarks\.(chaos|two_hosts)", form, why="tests/e2e/test_chaos.py runs them"),
    Rule(r"python -m benchmarks\.\w+( --out \S+)?", module, slow=True),
    Rule(r"python -m models\.verify FOLDER", form, why="tests/e2e/test_verify.py runs it, on two experts too"),
    Rule(r"python -m models\.verify FOLDER_OR_FAMILY", form, why="tests/e2e/test_verify.py runs it"),
    Rule(r"python train\.py (--help|--cfg job|dry_run=true world=8) experiment=NAME", of_any_experiment),
    Rule(r"python train\.py --help( all| method=\w+)?", of_any_experiment),
    Rule(r"torchrun --nproc-per-node N train\.py experiment=NAME key=value \.\.\.", form),
    Rule(r"python train\.py SETTINGS dry_run=true world=8", form, why="run with settings in docs/from_zero.md"),
    Rule(r"(python|torchrun .*) -m (distill\.\w+|tests\.tiny_pipeline)( .*[\[N].*)?", form),
    # make, pip and what comes with the installation.
    Rule(r"make quickstart", make_quickstart, slow=True),
    Rule(r"make test", make_tests, slow=True),
    Rule(r"make (help|install|test-slow|test-long|lint|constraints|clean|distclean)", make_target),
    Rule(r"python3 -m venv \.venv", virtual_environment),
    Rule(r"hf download .*", help_knows, why="no network"),
    Rule(r"torchfrtrace .*", help_knows, why="traces are NCCL's, on GPUs"),
    Rule(r"head -n .*", shell),
    Rule(r"export (TORCH_FR|GLOO_SOCKET).*", shell),
    Rule(r"kill -ABRT PID", fault_handler),
    # What cannot run here.
    Rule(r"pip install .*", syntax, why="no network; the extras and pins are checked by tests/unit/test_packaging.py"),
    Rule(r"git clone .*", syntax, why="no network, and the repository's address is the reader's"),
    Rule(r"docker .*", syntax, why="no docker in a test"),
    Rule(r"sbatch .*", syntax, why="no SLURM; the scripts themselves run with stand-ins, above"),
    Rule(r"(wandb|tensorboard) .*", syntax, why="an extra, and a network"),
    Rule(r"for process in .*py-spy.*", syntax, why="py-spy is no dependency"),
]


def rule_of(command: str) -> Rule | None:
    """The first rule that matches all of ``command``."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, command, re.S)), None)
