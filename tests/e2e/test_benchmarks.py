"""The benchmarks of the methods run from end to end, in small."""

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks import distillation, experts, fp8, lora, modes, overhead, planning, pooled, stability, weak_scaling
from distill.planning.hardware import load_hardware
from distill.planning.simulation import Simulation, StepCost
from distill.report.measures import HIGHER_IS_BETTER
from fsdp_cp.measure.attributed import Peak
from fsdp_cp.mesh import MeshShape


@pytest.mark.long
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


@pytest.mark.long
def test_lora_in_small(tmp_path, capsys):
    out = tmp_path / "students"
    assert lora.main(["--quick", "--ranks", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for row in ("teacher, 50 steps", "whole networks, 1 step", "rank 4, 4 steps"):
        assert f"| {row} | " in printed
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in printed.splitlines() if " | 0." in line}
    assert rows["rank 4"][2] == rows["whole networks"][2] == " 2 ", "as many updates of the student"
    assert "| rank 4, 1 step | colour accuracy | " in printed
    assert lora.main(["--quick", "--ranks", "4", "--out", str(out)]) == 0 and capsys.readouterr().out == printed
    with pytest.raises(lora.UserError, match="is of other settings"):
        lora.main(["--quick", "--ranks", "4", "--rate", "3", "--out", str(out)])


@pytest.mark.long
def test_experts_in_small(tmp_path, capsys):
    out = tmp_path / "students"
    assert experts.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for row in ("teacher, 1 step", "an expert on either side, 4 steps", "one network, 2 steps"):
        assert f"| {row} | " in printed
    assert "| 4 | colour accuracy | " in printed and "none worse by more than 3 standard errors: " in printed
    updates = re.search(r"Updates of the student: 2; of its experts (\d) and (\d)", printed)
    assert updates is not None and sum(map(int, updates.groups())) == 2
    folder = tmp_path / "students_quick"
    for kind, networks in (("experts", {"transformer", "transformer_2"}), ("one", set())):
        student = folder / kind / "0" / "export" / "student"
        assert {path.name for path in student.iterdir() if path.is_dir()} == networks
    assert experts.main(["--quick", "--out", str(out)]) == 0 and capsys.readouterr().out == printed


@pytest.mark.long
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


@pytest.mark.long
def test_stability_in_small(tmp_path, capsys):
    arguments = ["--steps", "4", "--out", str(tmp_path), "--methods", "meanflow", "dmd2 with a GAN"]
    assert stability.main(arguments) == 0 and "all finite" in capsys.readouterr().out
    metrics = tmp_path / "meanflow_bf16_4" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[2]["student/loss"] = None  # what a value that is not finite is in the file
    metrics.write_text("\n".join(map(json.dumps, lines)))
    assert stability.main(arguments) == 1 and "| meanflow | bf16 | 4 | 3 | 1 |" in capsys.readouterr().out


@pytest.mark.long
def test_planning_in_small(capsys):
    assert planning.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "| cp=2, bf16 | " in printed and "| equal |" in printed and "BROKEN" not in printed
    assert "planned against resident: " in printed


@pytest.mark.parametrize(("change", "kept"), [(1.0, True), (1.002, False)])
def test_a_plan_that_is_wrong_is_said_to_be(change, kept):
    """One rank: a phase that is off by .2 % breaks the bound, and so do bytes that were not sent."""
    peaks = {"": Peak(1000, {}), "student/update": Peak(round(2**20 * change), {})}
    cost = StepCost(flops=10.0, sent=Counter({("all_gather", "mesh_fsdp"): 3}))
    measured = planning.Measured(Simulation(resting={}, peaks=peaks, steps={"student": cost}), 10.0)
    plan = {
        "flops_per_step": 10.0,
        "phases": {
            "": {"gib": 1000 / 2**30, "of": {}},
            "student/update": {"gib": 2**-10 + 1, "of": {"student.workspace": 1, "fake.optimizer": 2**-10}},
        },
        "bytes_sent_per_step": {"student": {"all_gather, mesh_fsdp": 3}},
    }
    found = planning.compare(plan, measured)
    assert found.kept(1) == kept and found.kept(4) and found.counts
    assert not planning.compare({**plan, "flops_per_step": 11.0}, measured).counts
    plan["bytes_sent_per_step"]["student"]["all_gather, mesh_fsdp"] = 4
    assert not planning.compare(plan, measured).kept(4)
    with pytest.raises(RuntimeError, match="phases"):
        planning.compare({**plan, "phases": {"": {"gib": 0.0, "of": {}}}}, measured)


@pytest.mark.long
def test_pooled_in_small(capsys):
    assert pooled.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert "| 2 ranks, dp=2 | 32 to 64 | all | 48 | 16 | 0 | 2 | yes |" in printed and "all bounds kept" in printed


def test_ratios_are_of_rounds():
    """A round in which the machine was ten times as slow does not count for more."""
    assert overhead.paired([3.0, 40.0, 5.0], [2.0, 20.0, 5.0]) == 1.5


@pytest.mark.long
def test_overhead_in_small(capsys):
    flush = torch.set_flush_denormal(False)
    try:
        assert overhead.main(["--quick", "--rounds", "1", "--profile"]) == 0
    finally:
        torch.set_flush_denormal(not flush)
    printed = capsys.readouterr().out
    ways = ("plain module", "fully_shard by hand", "ours", "ours, 8 x 1", "ours, 1 x 8")
    for row in (*ways, "ours, 8 x 1, torch's attention", "ms a step more"):
        assert f"| {row} |" in printed


@pytest.mark.parametrize("name", ["mesh_ulysses", "mesh_ring", "mesh_dp_shard_cp", "mesh_dp_replicate", "default_pg"])
def test_a_ring_loads_the_links_that_its_hops_cross(name):
    """Hop by hop: of 64 ranks in nodes of 8, every rank sends as many bytes to the next of its group."""
    mesh, node = MeshShape(dp_replicate=2, dp_shard=4, ring=2, ulysses=4), 8
    ranks, distance = weak_scaling.group_of(name, mesh)
    nvlink = network = 0.0
    groups = [[first + i * distance for i in range(ranks)] for first in _first_ranks(mesh.world, ranks, distance)]
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        for here, there in zip(group, [*group[1:], group[0]], strict=True):
            if here // node == there // node:
                nvlink += 100
            else:
                network += 100
    found = weak_scaling.through_links(100, (ranks, distance), node)
    assert [x * mesh.world for x in found[:2]] == pytest.approx([nvlink, network])
    assert found[2] == (100 if network else 0)


def _first_ranks(world, ranks, distance):
    return [rank for rank in range(world) if rank % (ranks * distance) < distance]


@pytest.mark.long
def test_weak_scaling_in_small(tmp_path, capsys):
    """What is told from two replicas, and from another clip, is what is simulated; and the page is printed."""
    assert weak_scaling.main(["--quick", "--out", str(tmp_path / "picture.png")]) == 0
    printed = capsys.readouterr().out
    assert "| over all ranks | 16 | " in printed and "| inside 8 | 16 | " in printed
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    more = weak_scaling.tiny_networks()
    two, four = (weak_scaling.planned(world, 8, "480p", more) for world in (16, 32))
    told = weak_scaling.with_replicas(two, 4)
    assert told.mesh == four.mesh and told.shares == four.shares
    for name, cost in four.simulation.steps.items():
        assert told.simulation.steps[name].flops == cost.flops
        assert told.simulation.steps[name].sent == pytest.approx(cost.sent, rel=1e-6)
    large = weak_scaling.planned(16, 8, "720p", more)
    told = weak_scaling.with_clip(two, large)
    assert told.tokens == large.tokens > two.tokens and told.simulation.steps == large.simulation.steps
    slower = replace(load_hardware("h20"), network_gb_per_s=1e-6)
    seconds = weak_scaling.seconds_of(four, slower)
    assert seconds.limit == "network" and seconds.step == seconds.network + seconds.attention


@pytest.mark.long
def test_fp8_in_small(tmp_path, capsys):
    assert fp8.main(["--tiny"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(lines) == 9
    for name, largest, found in zip(fp8.CASES, (0.7, 0.1, 0.1), (lines[:3], lines[3:6], lines[6:]), strict=True):
        bf16, gathered_in_bf16, gathered_in_fp8 = found
        assert all(line[0] == f"| {name}" and line[1] == "(1, 2)" for line in found)
        for line in (gathered_in_bf16, gathered_in_fp8):
            norm, cosine = float(line[7]), float(line[8])
            assert abs(float(line[6])) < 0.05 and 0 < norm < largest and cosine > 1 - largest**2, line
        assert bf16[9] == gathered_in_bf16[9] and float(gathered_in_fp8[9].rstrip(" |")) < float(bf16[9].rstrip(" |"))


@pytest.mark.long
def test_students_of_fp8_roles_in_small(tmp_path, capsys):
    out = tmp_path / "fp8"
    assert fp8.main(["--distil", "--tiny", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for row in ("bf16, 1 step", "fp8 roles, 4 steps"):
        assert f"| {row} | " in printed
    assert "| 4 | colour accuracy | " in printed and "all within 3 standard errors: " in printed
    assert fp8.main(["--distil", "--tiny", "--out", str(out)]) == 0 and capsys.readouterr().out == printed
