"""Every command that README, docs, docstrings, Makefile and Dockerfile name runs, at test size, from another folder.

``RULES`` says how. A command that the documents have and no rule matches fails :func:`test_every_command_has_a_rule`;
so does a rule that matches nothing any more.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import shlex
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e import documented
from tests.e2e.documented import Found, find_commands, of_markdown, taken_apart
from tests.e2e.launch import ROOT, environment
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from tests.unit.test_recipes import ARCHITECTURES

SMALL = [
    "device=cpu", "steps=2", "batch_size=2", "log.every=1", "checkpoint.every=0", "sample.every=0", "sample.prompts=1",
    "sample.student_steps=[1]", "sample.teacher_steps=[]", "sample.report_clips=0",
]  # fmt: skip
"""What makes a quickstart one of a few seconds."""
REPLACED = ("device", "steps", "run_dir", "checkpoint.resume")
"""Settings of a quickstart that its small run has values of its own for."""
RUN_ALREADY: set[tuple] = set()
MODULES = {
    "benchmarks.attention_overlap": ["--tokens", "64", "--rounds", "1"],
    "benchmarks.cp_attention": ["--quick", "--world", "2", "--tokens", "1024"],
    "benchmarks.load_memory": ["--parameters", "3e6", "--world", "2"],
    "benchmarks.parity": ["--steps", "1"],
    "benchmarks.quickstart_step": ["--cycles", "1"],
    "benchmarks.sharding": ["--world", "2", "--rounds", "1"],
}
"""What makes a benchmark small."""
FEWER = {"benchmarks.parity": ("MESHES", 2), "benchmarks.sharding": ("CASES", 4)}
"""Benchmarks that take minutes at their smallest: how many of their cases are run here, in this process."""


@dataclass(frozen=True)
class Places:
    """Small stand-ins for the files that the documents speak of; ``elsewhere`` is where the commands are typed."""

    root: Path

    @property
    def elsewhere(self) -> Path:
        return self.root / "elsewhere"

    def put(self, word: str) -> str:
        """``word`` with this machine's paths in the place of the documents'."""
        if word == "TEXT":
            return "a red circle growing"
        if word in ("RUN_DIR", "RUN", "/shared/runs/wan_dmd2"):
            return str(self.run)
        for name in ("/ckpt", "/data", "/shared"):
            word = re.sub(rf"(^|=){name}(?=/|$)", rf"\g<1>{self.root}{name}", word)
        word = re.sub(r"(^|=)(/tmp/pipeline|FOLDER)$", rf"\g<1>{self.root}/pipeline", word)
        word = re.sub(r"(^|=)CLIPS$", rf"\g<1>{self.root}/clips", word)
        return word if word not in ("OUT", "OUT.safetensors", "timeline.png") else str(self.elsewhere / word)

    @property
    def run(self) -> Path:
        """A finished run, for the commands that take one."""
        folder = self.root / "run"
        if not (folder / "export").is_dir():
            arguments = ["torchrun", "--nproc-per-node", "2", "train.py", "experiment=quickstart", f"run_dir={folder}"]
            start(shlex.join([*arguments, *SMALL]), self)
        return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Places:
    """Tiny pipeline and clips, and folders of Wan's shapes: safetensors files with a header, and holes for the rest."""
    found = Places(tmp_path_factory.mktemp("documented"))
    found.elsewhere.mkdir()
    build_tiny_pipeline(found.root / "pipeline")
    render_clips(found.root / "clips", 2, frames=40, fps=8, height=72, width=120)
    render_clips(found.root / "data" / "clips", 2)
    captions = "".join(f"a bird, number {i}\n" for i in range(30))
    for name in ("prompts.txt", "vidprom_filtered_extended.txt"):
        (found.root / "data" / name).write_text(captions)
    for size, architecture in (("1.3B", "1_3b"), ("14B", "14b")):
        _write_hollow_wan(found.root / "ckpt" / f"Wan2.1-T2V-{size}-Diffusers", ARCHITECTURES[architecture])
    return found


def _write_hollow_wan(folder: Path, architecture: dict) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        transformer, vae = WanTransformer3DModel(**architecture), AutoencoderKLWan()
        text = UMT5EncoderModel(UMT5Config(vocab_size=256384, d_model=4096, d_ff=10240, num_layers=24, num_heads=64))
    text.config.architectures = ["UMT5EncoderModel"]
    for part, model in (("transformer", transformer), ("vae", vae), ("text_encoder", text)):
        (folder / part).mkdir(parents=True)
        (model.config.save_pretrained if part == "text_encoder" else model.save_config)(folder / part)
        _write_hollow_shards(folder / part, {name: list(tensor.shape) for name, tensor in model.state_dict().items()})
    (folder / "tokenizer").mkdir()


def _write_hollow_shards(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Safetensors files of at most 10 GB, as diffusers writes them, and their index."""
    shards: list[dict] = [{}]
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        if end > 10**10:
            shards.append({})
            begin, end = 0, end - begin
        shards[-1][name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    where = {}
    for i, header in enumerate(shards, start=1):
        raw = json.dumps(header).encode()
        file = f"diffusion_pytorch_model{f'-{i:05}-of-{len(shards):05}' if len(shards) > 1 else ''}.safetensors"
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(8 + len(raw) + list(header.values())[-1]["data_offsets"][1])
        where |= dict.fromkeys(header, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


# How a command is run. Each is called with the command, the places and pytest's capsys, and fails by an assertion.


def start(command: str, places: Places, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command line of torchrun or python as a user in another folder would."""
    launch = taken_apart(command)
    env = environment()
    if launch.module and launch.target.split(".")[0] in ("benchmarks", "tests"):
        env["PYTHONPATH"] = str(ROOT)  # these are in the checkout and not installed
    target = ["-m", launch.target] if launch.module else [str(ROOT / launch.target)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.world)]
    done = subprocess.run(
        [sys.executable, *(torchrun if launch.world else []), *target, *map(places.put, launch.words), *more],
        cwd=places.elsewhere, env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def quickstart(command: str, places: Places, capsys) -> None:
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
    start(command, places, *more)
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
        _expect_dry(done.returncode, done.stderr)
        return
    code = main([*map(places.put, launch.words), "dry_run=true", f"world={launch.world}"])
    _expect_dry(code, capsys.readouterr().err)


def _expect_dry(code: int, error: str) -> None:
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
    assert plan_run(config, _TeacherAlone).micro == 1
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


def form(command: str, places: Places, capsys) -> None:
    """A form, with placeholders: what it names is there, and its help knows the options."""
    launch = taken_apart(command.replace("[", "").replace("]", ""))
    main = importlib.import_module(launch.target.removesuffix(".py")).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [launch.target, "--help"])
        try:
            code = main(["--help"]) if inspect.signature(main).parameters else main()
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
    quickstart(documented._bare(_make("quickstart", places)[-1]), places, capsys)


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
    _expect_dry(code, capsys.readouterr().err)


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
    Rule(r"torchrun .*train\.py \.\.\.", form, why="the same as the command before it"),
    Rule(r"#!/bin/bash\n#SBATCH.*", sbatch_script),
    # The quickstarts.
    Rule(r"torchrun .*-m distill\.trajectories experiment=quickstart.*", quickstart, slow=True),
    Rule(r"torchrun .*train\.py( experiment=quickstart.*)?", quickstart, slow=True),
    Rule(r"torchrun --nproc-per-node 2 FILE", elsewhere, why=f"{LIBRARY}::test_the_same_losses_on_more_ranks"),
    # The other commands.
    Rule(r"(python|torchrun .*) -m (distill\.sample|models\.export) (RUN|/shared)[^\[]*", on_a_run, slow=True),
    Rule(r"python -m tests\.tiny_pipeline /tmp/pipeline", module, slow=True),
    Rule(r"python -m distill\.data\.word_table OUT\.safetensors", module, slow=True),
    Rule(r"python -m benchmarks\.(distillation|modes|stability)", form, why="tests/e2e/test_benchmarks.py runs them"),
    Rule(r"python -m benchmarks\.\w+( --out \S+)?", module, slow=True),
    Rule(r"python train\.py (--help|--cfg job|dry_run=true world=8) experiment=NAME", of_any_experiment),
    Rule(r"python train\.py --help", form),
    Rule(r"torchrun --nproc-per-node N train\.py experiment=NAME key=value \.\.\.", form),
    Rule(r"python train\.py SETTINGS dry_run=true world=8", form, why="run with settings in docs/from_zero.md"),
    Rule(r"(python|torchrun .*) -m (distill\.\w+|tests\.tiny_pipeline)( .*[\[N].*)?", form),
    # make, pip and what comes with the installation.
    Rule(r"make quickstart", make_quickstart, slow=True),
    Rule(r"make test", make_tests, slow=True),
    Rule(r"make (help|install|test-slow|lint|constraints|clean|distclean)", make_target),
    Rule(r"python3 -m venv \.venv", virtual_environment),
    Rule(r"hf download .*", help_knows, why="no network"),
    Rule(r"torchfrtrace .*", help_knows, why="traces are NCCL's, on GPUs"),
    Rule(r"head -n .*", shell),
    Rule(r"export TORCH_FR.*", shell),
    Rule(r"kill -ABRT PID", fault_handler),
    # What cannot run here.
    Rule(r"pip install .*", syntax, why="no network; the extras and pins are checked by tests/unit/test_packaging.py"),
    Rule(r"git clone .*", syntax, why="no network, and the repository's address is the reader's"),
    Rule(r"docker .*", syntax, why="no docker in a test"),
    Rule(r"sbatch .*", syntax, why="no SLURM; the scripts themselves run with stand-ins, above"),
    Rule(r"(wandb|tensorboard) .*", syntax, why="an extra, and a network"),
    Rule(r"for process in .*py-spy.*", syntax, why="py-spy is no dependency"),
]
COMMANDS = find_commands()


def rule_of(command: str) -> Rule | None:
    """The first rule that matches all of ``command``."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, command, re.S)), None)


def test_every_command_has_a_rule():
    without = [f"{item.where}: {item.command}" for item in COMMANDS if rule_of(item.command) is None]
    assert not without, "documented, but not run by any rule of this file:\n" + "\n".join(without)
    used = {id(rule_of(item.command)) for item in COMMANDS}
    assert not [rule.pattern for rule in RULES if id(rule) not in used], "rules that match nothing that is documented"
    assert all(rule.why for rule in RULES if rule.how is syntax)


def test_commands_are_found_wherever_they_stand():
    text = """
Start `python -m a.b --c` or `make me`, not `train.py` or `python`.

| command | what |
|---|---|
| `torchrun ... train.py x=1` | it |

    torchrun --nproc-per-node 2 train.py \\
        y=2          # a note

```
.venv/bin/torchrun train.py z=1   # a note
a tree/    python -m in a listing is none
```

```bash
A=1 cp here there
```

```python
make = "me"
```
"""
    assert sorted(of_markdown(text)) == sorted([
        "python -m a.b --c", "make me", "torchrun ... train.py x=1", "torchrun --nproc-per-node 2 train.py y=2",
        "torchrun train.py z=1", "cp here there",
    ])  # fmt: skip
    with pytest.raises(AssertionError, match="are these commands"):
        of_markdown("```fish\nls\n```\n")


def test_settings_in_quotes_compose():
    """``'key=value'`` of README and docs, as the shell hands them on."""
    from distill.config import compose_config

    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    quoted = {code for text in texts for code in re.findall(r"`('[a-z_.]+=[^`]*'|\"[a-z_.]+=[^`]*\")`", text)}
    assert len(quoted) > 4
    for code in sorted(code for code in quoted if "..." not in code):
        (word,) = shlex.split(code)
        config = compose_config(["data=video_folder", "data.path=a", "data.encoders=b", word])  # takes any caption
        key = word.partition("=")[0].split(".")
        assert getattr(getattr(config, key[0]), key[1]) if len(key) == 2 else getattr(config, key[0])


def _cases(slow: bool) -> list[Found]:
    return [item for item in COMMANDS if (rule := rule_of(item.command)) is not None and rule.slow is slow]


def _quick() -> list:
    """A few of the quick ones at once: a dry run of each of them takes seconds."""
    items = _cases(slow=False)
    return [pytest.param(item, marks=() if i % 5 == 0 else pytest.mark.slow) for i, item in enumerate(items)]


def _name(item: Found) -> str:
    return re.sub(r"\W+", "_", item.command)[:90]


@pytest.mark.parametrize("item", _quick(), ids=_name)
def test_command(item, places, capsys, monkeypatch):
    monkeypatch.chdir(places.elsewhere)
    rule_of(item.command).how(item.command, places, capsys)
    assert not (places.elsewhere / "runs").exists(), "a dry run writes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("item", _cases(slow=True), ids=_name)
def test_command_in_small(item, places, capsys, monkeypatch):
    monkeypatch.chdir(places.elsewhere)
    rule_of(item.command).how(item.command, places, capsys)


@pytest.mark.slow
def test_two_nodes_meet_as_documented(places):
    """Two torchruns on this machine as two nodes, with the options of the SLURM script and of docs/methods/rcm.md."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    run_dir = places.elsewhere / "two_nodes"
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "17",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", str(ROOT / "train.py"),
        *SMALL, f"run_dir={run_dir}",
    ]  # fmt: skip
    options = {"cwd": places.elsewhere, "env": environment(), "text": True}
    nodes = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) for _ in range(2)]
    printed = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    start_of_run = json.loads((run_dir / "starts.jsonl").read_text())
    assert start_of_run["world_size"] == 2 and "--nnodes 2" in start_of_run["command"]


@pytest.mark.slow
def test_the_python_blocks_of_run_md(places, monkeypatch):
    """Those of "The student in diffusers" as they stand, but for the clip's size, beside a run in ``runs/NAME``."""
    text = (ROOT / "docs" / "run.md").read_text()
    section = text.split("## The student in diffusers")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    code = "\n".join(blocks).replace("height=480, width=832, num_frames=81", "height=32, width=48, num_frames=17")
    code = re.sub(r"torch\.randn\(\s*1, 16, 21, 60, 104\s*\)", "torch.randn(1, 16, 5, 4, 6)", code)
    code = re.sub(r"^(pipeline\(PROMPT.*)$", r"clips.append(\1)", code, flags=re.M)
    assert len(blocks) == 2 and code.count("clips.append") == 2 and "480" not in code and "104" not in code
    found = [item.command for item in COMMANDS if "data=video_folder data.path=CLIPS" in item.command]
    folder = places.elsewhere / "with_pipeline"
    published = "method.step_list=[1.0,0.9375,0.8333,0.625]"
    size = ["data.height=32", "data.width=48"]
    start(found[0], places, *SMALL, *size, published, f"run_dir={folder / 'runs' / 'NAME'}")
    monkeypatch.chdir(folder)
    names = {"BASE": str(places.root / "pipeline"), "PROMPT": "a red square", "clips": []}
    exec(compile(code, "docs/run.md", "exec"), names)
    assert [clip.frames[0].shape for clip in names["clips"]] == [(17, 32, 48, 3)] * 2
