"""``python -m benchmarks.real_size`` in small: a killed run that goes on, rCM, exports of adapters."""

import pytest

from benchmarks.real_size import STEPS, main


@pytest.mark.long
def test_in_small(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out"), "--tiny", "--precision", "fp32"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [row[0].strip() for row in rows]
    assert sum(name.startswith("DMD2, step") for name in names) == STEPS
    assert sum(name.startswith("rCM, step") for name in names) == 2
    assert sum(name.startswith("export") for name in names) == 3
    assert any("went on from step 2" in row[3] for row in rows)
    assert all(float(row[1]) > 0 for row in rows[1:])
    assert main(["--out", str(tmp_path / "out"), "--tiny"]) == 2 and "is not empty" in capsys.readouterr().err
