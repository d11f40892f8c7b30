"""The benchmarks run from end to end, in small; their verdicts can fail."""

from collections import Counter

import pytest

from benchmarks import distillation, experts, fp8, lora, modes, planning, weak_scaling
from distill.planning.simulation import Simulation, StepCost
from fsdp_cp.measure.memory import Peak
from fsdp_cp.mesh import MeshShape
from tests.e2e.launch import forked
from tests.tiers import long


@long
@pytest.mark.parametrize(
    ("main", "words"),
    [
        (distillation.main, ["--quick"]),
        (lora.main, ["--quick", "--ranks", "4"]),
        (experts.main, ["--quick"]),
        (modes.main, ["--quick"]),
        (fp8.main, ["--distil", "--tiny"]),
        (fp8.main, ["--distil", "--tiny", "--package", "transformer_engine"]),
    ],
)
def test_students_are_trained_once(tmp_path, capsys, main, words):
    """A second start trains nothing and prints the same tables."""
    assert main([*words, "--out", str(tmp_path / "students")]) == 0
    printed = capsys.readouterr().out
    assert " ± " in printed and "nan" not in printed
    ends = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finished")}
    assert ends and main([*words, "--out", str(tmp_path / "students")]) == 0 and capsys.readouterr().out == printed
    assert ends == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finished")}


@long
def test_a_student_of_other_settings_is_not_taken(tmp_path):
    out = ["--quick", "--out", str(tmp_path / "students")]
    assert distillation.main(out) == 0
    settings = tmp_path / "students_quick" / "dmd2" / "0" / "settings.yaml"
    settings.write_text(settings.read_text().replace("shift: ", "shift: 1"))
    with pytest.raises(distillation.UserError):
        distillation.main(out)


@long
@pytest.mark.parametrize(("main", "words"), [(planning.main, ["--quick"]), (fp8.main, ["--tiny"])])
def test_a_bound_is_kept_in_small(capsys, main, words):
    assert main(words) == 0
    assert "BROKEN" not in capsys.readouterr().out


@long
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("cp_attention", "--quick --world 2 --tokens 1024"),
        ("parity", "--steps 1"),
        ("sharding", "--world 2 --rounds 1"),
        ("phased", "--seeds 1 --updates 20 --start-updates 20"),
        ("projection", "--quick --out {out}"),
    ],
)
def test_a_benchmark_in_small(tmp_path, module, words):
    done = forked(0, f"benchmarks.{module}", *words.format(out=tmp_path / "runs").split()).wait()
    assert done.returncode == 0 and "|" in done.stdout, done


@long
def test_weak_scaling_in_small():
    """Two replicas, or another clip, predict the simulated values."""
    assert weak_scaling.main(["--quick"]) == 0
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


@pytest.mark.parametrize(("change", "kept"), [(1.0, True), (1.002, False)])
def test_a_plan_that_is_wrong_breaks_its_bound(change, kept):
    """On one rank a phase that differs by .2 % exceeds the bound; so do bytes that were not sent."""
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


@pytest.mark.parametrize("name", ["mesh_ulysses", "mesh_ring", "mesh_dp_shard_cp", "mesh_dp_replicate", "default_pg"])
def test_a_ring_loads_the_links_that_its_hops_cross(name):
    """The test counts each hop: 64 ranks in nodes of 8, each of which sends as many bytes to the next of its group."""
    mesh, node = MeshShape(dp_replicate=2, dp_shard=4, ring=2, ulysses=4), 8
    ranks, distance = weak_scaling.group_of(name, mesh)
    nvlink = network = 0.0
    firsts = [rank for rank in range(mesh.world) if rank % (ranks * distance) < distance]
    groups = [[first + i * distance for i in range(ranks)] for first in firsts]
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
