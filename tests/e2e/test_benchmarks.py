"""The benchmarks of the methods run from end to end, in small."""

import json
import math

import pytest

from benchmarks import distillation, modes, stability
from distill.measures import HIGHER_IS_BETTER


@pytest.mark.slow
def test_distillation_in_small(tmp_path, capsys):
    out = tmp_path / "students"
    assert distillation.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "students_quick"
    for row in ("held-out renders", "teacher, 50 steps", "dmd2, 1 step", "dmd2, 4 steps", "rcm, 2 steps"):
        assert f"| {row} | " in printed
    assert "| 4 | spread/phase | " in printed and "times the smallest" in printed
    assert (folder / "distillation.png").stat().st_size > 10_000
    for method in ("dmd2", "rcm"):
        measures = json.loads((folder / method / "0" / "student_4.json").read_text())
        assert all(math.isfinite(measures[key]["value"]) for key in HIGHER_IS_BETTER)
        lines = (folder / method / "0" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 10 and all(json.loads(line)["perf/flops"] > 0 for line in lines)
    # What has ended is not trained again, and not taken for what other settings would have made.
    marker = folder / "dmd2" / "0" / "finished"
    before = marker.stat().st_mtime_ns
    assert distillation.main(["--quick", "--out", str(out)]) == 0 and marker.stat().st_mtime_ns == before
    assert capsys.readouterr().out == printed
    for part in ("dmd2/0", "teacher"):
        settings = folder / part / "settings.yaml"
        kept = settings.read_text()
        settings.write_text(kept.replace("shift: ", "shift: 1"))
        with pytest.raises(distillation.UserError, match=f"{part} is of other settings"):
            distillation.main(["--quick", "--out", str(out)])
        settings.write_text(kept)


@pytest.mark.slow
def test_modes_in_small(tmp_path, capsys):
    out = tmp_path / "modes"
    assert modes.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "modes_quick"
    for row in ("known shares", "teacher, 4 steps", "dmd2 + GAN, 1 step", "meanflow, 4 steps"):
        assert f"| {row} | " in printed
    assert (folder / "modes.png").stat().st_size > 10_000
    losses = [json.loads(line) for line in (folder / "dmd2_GAN" / "0" / "metrics.jsonl").read_text().splitlines()]
    assert any("fake/logit_real" in line for line in losses), "there is a discriminator"
    # What has ended is neither trained nor sampled again.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name in ("finished", "modes_4.json")}
    assert len(before) == 5 and modes.main(["--quick", "--out", str(out)]) == 0
    assert capsys.readouterr().out == printed and all(path.stat().st_mtime_ns == at for path, at in before.items())


def test_what_became_of_modes_is_measured():
    """Two students: one has the known shares and a tenth of its clips undecided, one the commonest colour alone."""
    kept = {colour: 0.9 * share for colour, share in zip(modes.COLOURS, modes.SHARES, strict=True)} | {None: 0.1}
    lost = dict.fromkeys(modes.COLOURS, 0.0) | {modes.COLOURS[0]: 1.0, None: 0.0}
    both = modes.over_students("both", [kept, lost])
    assert both.distance() == pytest.approx([0.0, 1 - modes.SHARES[0]]) and both.rare() == pytest.approx([1.0, 0.0])
    assert sum(modes.SHARES) == pytest.approx(1) and sorted(modes.SHARES, reverse=True) == list(modes.SHARES)
    assert 0.02 < modes.by_chance(1024) < 0.06 and modes.by_chance(10**6) < 0.002
    line = modes.table([both], 1024).splitlines()[-1]
    assert line.startswith("| both | 0.650 ± 0.350 | ") and line.endswith(" | 0.500 ± 0.500 |")


@pytest.mark.slow
def test_stability_in_small(tmp_path, capsys):
    arguments = ["--steps", "4", "--out", str(tmp_path), "--methods", "meanflow", "dmd2 with a GAN"]
    assert stability.main(arguments) == 0 and "all finite" in capsys.readouterr().out
    metrics = tmp_path / "meanflow_bf16_4" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[2]["student/loss"] = None  # what a value that is not finite is in the file
    metrics.write_text("\n".join(map(json.dumps, lines)))
    assert stability.main(arguments) == 1 and "| meanflow | bf16 | 4 | 3 | 1 |" in capsys.readouterr().out
