"""The README's library program, as it stands, from another working directory: the same losses on 1, 2 and 4 ranks."""

import re
import subprocess
import sys

import pytest

from tests.e2e.launch import ROOT, environment


def _program() -> str:
    section = (ROOT / "README.md").read_text().partition("## As a library")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return block


def _losses(file, ranks: int) -> list[float]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(file)],
        cwd=file.parent,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},  # 4 ranks: more than this machine may have GPUs
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+): loss (\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [0, 1, 2], done.stdout
    return [float(loss) for _, loss in found]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("elsewhere") / "program.py"
    file.write_text(_program())
    return file


@pytest.fixture(scope="module")
def truth(program):
    return _losses(program, 0)


def test_it_learns_in_one_process(truth):
    assert truth[2] < truth[1] < truth[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_losses_on_more_ranks(program, truth, ranks):
    assert _losses(program, ranks) == pytest.approx(truth, rel=1e-5)


def test_it_is_short():
    assert sum(bool(line.strip()) for line in _program().splitlines()) <= 42
