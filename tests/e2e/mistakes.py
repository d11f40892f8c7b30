"""Type a user's mistakes, in this process: ``python -m tests.e2e.mistakes`` writes benchmarks/results/mistakes.md.

A row of tests/e2e/mistakes_table.py is good when it ends with exit code 2 and one line that has what the row says, and
when nothing at all has changed: not in the folders it names, nor in its working directory, its home or the repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusers import AutoencoderKLWan, WanTransformer3DModel

import train
from tests.e2e.launch import ROOT
from tests.e2e.mistakes_of_commands import COMMANDS
from tests.e2e.mistakes_table import RUNS, SETTINGS

QUICK = {
    "experiment": "quickstart",
    "device": "cpu",
    "mesh.cp": "1",
    "batch_size": "2",
    "sample.at_end": "false",
    "checkpoint.every": "1",
    "method.fake_updates_per_student_update": "1",
}
"""A run of two steps takes seconds."""
DRY = {"dry_run": "true", "device": "cpu", "mesh.cp": "1", "run_dir": "{new}"}
SECONDS = 60
"""A row that takes longer hangs."""
TEACHER = ROOT / "assets" / "quickstart_teacher" / "transformer"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the rows of one table are typed."""

    base: Path
    """Everything that they name is in here; nothing of it may change."""

    @property
    def names(self) -> dict[str, str]:
        """What the table's names stand for."""
        folders = {name: str(self.base / name) for name in ("things", "run", "other", "locked", "new", "here", "home")}
        return {**folders, "long": f"{self.base}/{'x' * 300}"}

    def filled(self, text: str) -> str:
        """``text`` with this place's paths for the table's names."""
        for name, value in self.names.items():
            text = text.replace("{" + name + "}", value)
        return text

    def hidden(self, text: str) -> str:
        """``text`` without paths of this machine: a name of the table for each."""
        for name, value in sorted(self.names.items(), key=lambda item: -len(item[1])):
            text = text.replace(value, f"<{name.upper()}>")
        return text.replace(str(self.base), "<BASE>").replace(str(ROOT), "<REPOSITORY>")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a command line."""

    code: int | str
    """Exit code; ``traceback`` or ``hangs``."""
    error: str
    """stderr."""

    @property
    def last(self) -> str:
        return self.error.splitlines()[-1] if self.error else ""


def make_place(base: Path) -> Place:
    """A finished run, copies of it, and the folders that the rows name."""
    for name in ("things", "here", "home", "work"):
        (base / name).mkdir(parents=True)
    words = [f"{key}={value}" for key, value in QUICK.items()]
    with _quiet():
        code = train.main([*words, "steps=2", f"run_dir={base / 'run'}"])
    assert code == 0, code
    for name in ("other", "locked"):
        shutil.copytree(base / "run", base / name)
    _make_things(base / "things", base / "run")
    return Place(base=base)


def _make_things(things: Path, run: Path) -> None:
    """Somebody's files, and checkpoints, runs and exports with something wrong with each."""
    (things / "file.txt").write_text("mine\n")
    (things / "metrics.jsonl").write_text("mine, and of no run\n")
    (things / "captions.txt").write_text("a cat\n")
    (things / "mine.safetensors").write_bytes(b"mine")
    config = json.loads((TEACHER / "config.json").read_text())
    for name, changes in (("wrong_shape", {"ffn_dim": 96}), ("deeper", {"num_layers": 5}), ("torn", {})):
        shutil.copytree(TEACHER, things / name)
        (things / name / "config.json").write_text(json.dumps(config | changes))
    weights = things / "torn" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    AutoencoderKLWan(
        base_dim=4, z_dim=2, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], latents_mean=[0.0] * 2,
        latents_std=[1.0] * 2,
    ).save_pretrained(things / "wrong_class")  # fmt: skip
    WanTransformer3DModel.load_config(str(TEACHER))  # the shipped one is whole
    shutil.copytree(TEACHER, things / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(run / "export" / "student", things / "export_and_mine")
    (things / "export_and_mine" / "mine.txt").write_text("mine\n")
    shutil.copytree(run, things / "damaged")
    (things / "damaged" / "checkpoints" / "step_00000002" / "state.json").write_text("{")
    shutil.copytree(run, things / "no_export", ignore=shutil.ignore_patterns("export"))
    (things / "not_yaml").mkdir()
    (things / "not_yaml" / "config.yaml").write_text("{[}")


def listing(folder: Path, *, deep: bool) -> dict[str, object]:
    """Every entry under ``folder``: size and time of the last change, or where ``deep`` a hash of its bytes.

    A run's lock file may be opened by a run that is refused then.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".lock":
            continue
        about = path.lstat()
        key = str(path.relative_to(folder))
        if path.is_dir():
            found[key] = "folder"
        elif deep:
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[key] = (about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def outside() -> set[str]:
    """What is in the repository, its caches left out."""
    return {str(path) for folder in (ROOT, ROOT / "runs") if folder.is_dir() for path in folder.iterdir()}


def command_of(typed: str, place: Place, defaults: dict[str, str]) -> tuple[dict[str, str], str, list[str]]:
    """(environment, program, words) of a row; ``train.py`` gets the ``defaults`` whose keys are not among its words."""
    words = shlex.split(place.filled(typed))
    environment = {}
    if "train.py" in words:
        environment = dict(word.split("=", 1) for word in words[: words.index("train.py")])
        words = words[words.index("train.py") + 1 :]
    if words[:2] == ["python", "-m"]:
        return environment, words[2], words[3:]
    keys = {word.partition("=")[0].lstrip("+~") for word in words}
    return environment, "train", [f"{k}={place.filled(v)}" for k, v in defaults.items() if k not in keys] + words


def attempt(typed: str, place: Place, defaults: dict[str, str]) -> Outcome:
    """Type ``typed`` in ``place``'s working directory, with its home folder."""
    environment, program, words = command_of(typed, place, defaults)
    main = importlib.import_module(program).main
    before = {key: os.environ.get(key) for key in [*environment, "HOME"]}
    directory = Path.cwd()
    os.environ |= {**environment, "HOME": str(place.base / "home")}
    os.chdir(place.base / "work")
    try:
        with _locked(place.base / "locked"):
            return called(main, words)
    finally:
        os.chdir(directory)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def called(main: Callable[[list[str]], int], words: list[str], seconds: int = SECONDS) -> Outcome:
    """What ``main(words)`` ends with; a traceback is in its ``error``."""
    with _quiet() as kept:
        code = _call(main, words, seconds)
    return Outcome(code=code, error=kept.text)


def _call(main: Callable[[list[str]], int], words: list[str], seconds: int) -> int | str:
    def ring(*_) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        return main(words) or 0
    except SystemExit as ended:  # argparse
        return ended.code or 0
    except TimeoutError:
        traceback.print_exc()
        return "hangs"
    except BaseException:
        traceback.print_exc()
        return "traceback"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


class _Kept:
    """What was written to stderr."""

    text = ""


@contextlib.contextmanager
def _quiet() -> Iterator[_Kept]:
    """Output goes to files (torch asks stderr for its number), and logging begins anew."""
    root, kept = logging.getLogger(), _Kept()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                yield kept
        finally:
            error.seek(0)
            kept.text = error.read().strip("\n")
            root.handlers[:] = handlers
            root.setLevel(level)


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """As if another process were writing into ``run_dir``."""
    with (run_dir / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def rows() -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """(section, what is typed, what the last line has, defaults of train.py) of every row."""
    for section, mistakes in SETTINGS.items():
        for typed, says in mistakes:
            yield section, typed, says, DRY
    for typed, says in RUNS:
        yield "Runs that are there already", typed, says, QUICK | {"run_dir": "{new}"}
    for command, mistakes in COMMANDS.items():
        for typed, says in mistakes:
            yield command, f"{command} {typed}", says, {}


def wrong_with(typed: str, says: str, outcome: Outcome, place: Place) -> str | None:
    """Why ``outcome`` is not what a mistake must end with; ``None`` if it is."""
    lines = outcome.error.splitlines()
    if outcome.code != 2:
        return f"exit code {outcome.code}"
    if "Traceback" in outcome.error:
        return "a traceback"
    if len(lines) != 1 and not lines[0].startswith("usage: "):
        return f"{len(lines)} lines"
    if place.filled(says) not in outcome.last:
        return f"does not say {place.filled(says)!r}"
    return None


def answer(row: tuple[str, str, str, dict[str, str]], place: Place) -> tuple[Outcome, str | None]:
    """What a row ends with, and what is wrong with that: changed files above all."""
    _, typed, says, defaults = row
    before, repository = listing(place.base, deep=False), outside()
    outcome = attempt(typed, place, defaults)
    wrong = wrong_with(typed, says, outcome, place)
    after = listing(place.base, deep=False)
    if after != before or outside() != repository:
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        wrong = f"{wrong or 'a good line, but'}; changed: {sorted(changed)[:5]}"
    for left in ("new", "new2"):
        shutil.rmtree(place.base / left, ignore_errors=True)
    return outcome, wrong


HEAD = """# A user's mistakes

{count} command lines, with the exit code and the last line of stderr of each. `python -m tests.e2e.mistakes` types
them, in one process, and writes this page; tests/e2e/test_mistakes.py checks that none gives a traceback, takes longer
than a minute, or changes a file. Lines without a command are words of `train.py`, with
`{defaults}` where they do not set it; under "Runs that are there already" the runs are
real ones, not dry. `{{run}}`, `{{other}}` and `{{locked}}` are finished runs of two steps (another process writes into
the last), `{{things}}` is a folder of somebody's, `{{new}}` one that is not there."""


def main() -> int:
    """Type every row and write the table; 1 where a row is not answered as it must be."""
    table, failed, count, section = [], 0, 0, None
    with tempfile.TemporaryDirectory(prefix="mistakes_") as folder:
        place = make_place(Path(folder).resolve())
        whole = listing(place.base, deep=True)
        for row in rows():
            if row[0] != section:
                section = row[0]
                table += ["", f"## {section}", "", "| typed | exit code | last line |", "|---|---|---|"]
            outcome, wrong = answer(row, place)
            count, failed = count + 1, failed + (wrong is not None)
            if wrong is not None:
                print(f"{row[1]}: {wrong}: {outcome.error[-2000:]}", flush=True)
            table.append(f"| `{_cell(row[1])}` | {outcome.code} | {_cell(place.hidden(outcome.last))} |")
        kept = listing(place.base, deep=True) == whole
    head = HEAD.format(count=count, defaults=" ".join(f"{key}={value}" for key, value in DRY.items()))
    (ROOT / "benchmarks" / "results" / "mistakes.md").write_text("\n".join([head, *table]) + "\n")
    print(f"{count} rows, {failed} not answered as they must be; files {'as before' if kept else 'CHANGED'}")
    return 0 if not failed and kept else 1


def _cell(text: str) -> str:
    """Within a row of a table."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
