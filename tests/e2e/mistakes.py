"""Helpers that type a command line in this process and check that it changes no file."""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import shlex
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusers import AutoencoderKLWan

import train
from tests.e2e.launch import QUICK, ROOT, TINY

DRY = {"dry_run": "true", "device": "cpu", "mesh.cp": "1", "run_dir": "{new}"}
"""Settings of every row of train.py that does not set them itself."""
TEACHER = ROOT / "assets" / "quickstart_teacher" / "transformer"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit code (or ``traceback``, ``hangs``) and stderr of a command."""

    code: int | str
    error: str


def make_place(base: Path) -> Path:
    """Fill ``base`` with a finished run of two steps, a copy of it, and damaged or foreign folders in ``things/``."""
    for name in ("things", "home", "work"):
        (base / name).mkdir(parents=True)
    with quiet():
        assert train.main([*QUICK, *TINY, "device=cpu", "mesh.cp=1", "steps=2", f"run_dir={base / 'run'}"]) == 0
    shutil.copytree(base / "run", base / "other")
    things = base / "things"
    (things / "file.txt").write_text("mine\n")
    (things / "metrics.jsonl").write_text("mine, and of no run\n")
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
    shutil.copytree(base / "run" / "export" / "student", things / "export_and_mine")
    (things / "export_and_mine" / "mine.txt").write_text("mine\n")
    shutil.copytree(base / "run", things / "damaged")
    (things / "damaged" / "checkpoints" / "step_00000002" / "state.json").write_text("{")
    return base


def filled(text: str, base: Path) -> str:
    """Replace ``{name}`` by the path of ``name`` in ``base``."""
    for name in ("things", "run", "other", "new", "home"):
        text = text.replace("{" + name + "}", str(base / name))
    return text


def hashes(folder: Path) -> dict[str, str]:
    """Return a hash of every file under ``folder``, and "folder" for every folder. Run locks are left out."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


def listing(folder: Path) -> dict[str, object]:
    """Return size, time of the last change and inode of everything under ``folder``, and the repository's entries.

    Those that begin with a dot are left out, as caches of tools and of Hypothesis appear at any time.
    """
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        if path.name != ".lock":
            found[str(path)] = path.is_dir() or (about.st_size, about.st_mtime_ns, about.st_ino)
    outside = (path for place in (ROOT, ROOT / "runs") if place.is_dir() for path in place.iterdir())
    return found | {str(path): None for path in outside if not path.name.startswith(".")}


def command_of(typed: str, base: Path, defaults: dict[str, str]) -> tuple[dict[str, str], str, list[str]]:
    """Return environment, module and words of a command line; words alone are train.py's, after the ``defaults``."""
    words = shlex.split(filled(typed, base))
    if words[:2] == ["python", "-m"]:
        return {}, words[2], words[3:]
    environment = {}
    if "train.py" in words:
        place = words.index("train.py")
        environment, words = dict(word.split("=", 1) for word in words[:place]), words[place + 1 :]
    keys = {word.partition("=")[0].lstrip("+~") for word in words}
    return environment, "train", [f"{k}={filled(v, base)}" for k, v in defaults.items() if k not in keys] + words


def attempt(typed: str, base: Path, defaults: dict[str, str]) -> Outcome:
    """Run a command line in ``base/work``, with the home folder ``base/home``."""
    environment, module, words = command_of(typed, base, defaults)
    main = importlib.import_module(module).main
    before = {key: os.environ.get(key) for key in [*environment, "HOME"]}
    directory = Path.cwd()
    os.environ |= {**environment, "HOME": str(base / "home")}
    os.chdir(base / "work")
    try:
        return called(main, words)
    finally:
        os.chdir(directory)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def called(main: Callable[[list[str]], int], words: list[str], seconds: int = 60) -> Outcome:
    """Call ``main(words)`` for at most ``seconds``."""

    def ring(*_) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    code: int | str = "traceback"
    previous = signal.signal(signal.SIGALRM, ring)
    with quiet() as error:
        signal.alarm(seconds)
        try:
            code = main(words) or 0
        except SystemExit as ended:  # argparse
            code = ended.code or 0
        except BaseException as failure:
            code = "hangs" if isinstance(failure, TimeoutError) else "traceback"
            traceback.print_exc()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
    return Outcome(code=code, error=error[0])


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Redirect output to files, since torch asks stderr for its number. The list holds stderr at the end."""
    root, kept = logging.getLogger(), [""]
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                yield kept
        finally:
            error.seek(0)
            kept[0] = error.read().strip("\n")
            root.handlers[:] = handlers
            root.setLevel(level)
