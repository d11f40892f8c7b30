"""Sparse roles: whole networks against attention written out in one process, ramps, resume, and shared networks."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.config.schema import EmaSettings
from distill.methods.pdd import PddSettings
from fsdp_cp.mesh import build_mesh
from models import verify
from models.export import main as export
from models.families.registry import family_of
from models.families.wan import Wan
from models.lora.__main__ import main as extract
from models.lora.saved import find_adapters
from models.lora.settings import LoraSettings
from models.owner import is_gate
from models.roles.load import build_role, build_roles
from models.roles.role_plan import plan_role
from models.sparse import FILE, SparseSettings
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import METHODS, Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.sparse_networks import written_out
from tests.tiers import slow, slow_case
from tests.unit.refused import refused

SPARSE = SparseSettings(sparsity=0.6, tile=[2, 2, 2])
MESHES = [(1, 2), *(slow_case(*sizes) for sizes in ((1, 1), (2, 2), (1, 3), (1, 4)))]


def _check(pools, folder, family, grid, *, dp_shard=1, cp, optional=False):
    """Compare output, each gradient, norm, derivative and a round trip of the gates, with recomputation."""
    plan = verify.planned(folder, family)
    truth = written_out(plan, grid, optional=optional)
    case = verify.Case(
        folder=folder, family=family, dp_shard=dp_shard, cp=cp, grid=grid, checkpointing=True, optional=optional
    )
    ours, changed = pools[dp_shard * cp].run(verify.rank_result, case, folder.with_name("written"))[0]
    assert {name for name in truth.gradients if "to_gate_compress" in name} == {*plan.sparse.shapes}
    found, worst = verify.compare(ours, truth, changed)
    assert max(found.values()) < 1e-6, (found, worst)  # Wan norms in fp32


@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_wan_on_a_mesh_equals_attention_written_out(pools, tmp_path, dp_shard, cp):
    settings = replace(SPARSE, dense_layers=[1] if cp == 3 else [])
    example = {**Wan().examples()["t2v"], "num_attention_heads": 2}  # a ring of several ranks at cp = 3 and 4
    verify.write_example(tmp_path / "network", "wan", example, settings)
    for grid in verify.GRIDS[: 1 if (dp_shard, cp) == (1, 2) else 2]:
        _check(pools, tmp_path / "network", "wan", grid, dp_shard=dp_shard, cp=cp)


@pytest.mark.parametrize("cp", [2, *(slow_case(size) for size in (3, 4))])
@pytest.mark.parametrize(
    ("family", "name"), [("minimax_h3", "t2av"), ("ltx2", "2.3"), slow_case("ltx2", "2.0 of patches")]
)
def test_networks_with_sound_on_a_mesh_equal_attention_written_out(pools, tmp_path, family, name, cp):
    """Text, given frames and sound are dense rows; the video is in tile order on a ring."""
    example = {**family_of(family, "student").examples()[name], "num_attention_heads": 2}
    if family == "ltx2":
        example |= {"audio_num_attention_heads": 2, "cross_attention_dim": 24, "audio_cross_attention_dim": 16}
    verify.write_example(tmp_path / "network", family, example, SPARSE)
    for optional in (False, True):
        _check(pools, tmp_path / "network", family, verify.GRIDS[0], cp=cp, optional=optional)


def test_a_comparison_with_written_out_attention_can_fail(tmp_path):
    verify.write_example(tmp_path / "network", "wan", Wan().examples()["t2v"], SPARSE)
    plan = verify.planned(tmp_path / "network", "wan")
    verify.write_example(tmp_path / "other", "wan", Wan().examples()["t2v"], SparseSettings(sparsity=0.0))
    other = verify.planned(tmp_path / "other", "wan")
    truth, dense = (written_out(each, verify.GRIDS[0]) for each in (plan, other))
    assert max(verify.compare(dense, truth, 0)[0].values()) > 1e-3


RAMP = SparseSettings(sparsity=0.6, tile=[1, 2, 2], warmup=[0.25, 1])
METHODS_OF_RUNS = ["dmd2", "dmd2, own path", "rcm", "scm", "meanflow", "flow_matching", "pdd"]
PDD = PddSettings(grid_steps=8, steps=[2, 4], guidance_scale=2.0, shift=3.0)


def _record(setup, folder, run_dir, first=0, save_at=()):
    """Return losses and weights of a run from step ``first``, and the sparsity at its end."""
    trainer = make_trainer(setup, folder, make_config(setup, folder, run_dir), first)
    trace = trainer.record(save_at=save_at)
    network = trainer.roles["student"].networks[0]
    return trace.losses, trace.weights, network.sparse.sparsity, trainer.roles["student"].sparse_file


@slow
@pytest.mark.parametrize("lora", [{}, {"student": LoraSettings(rank=3), "fake": LoraSettings(rank=3)}])
def test_a_run_resumes_bit_by_bit_in_the_middle_of_a_ramp(pools, checkpoints, tmp_path, lora):
    """Gates train, are averaged and resumed; with adapters next to them on a base that the dense teacher shares."""
    setup = Setup(cp=2, micro_batch_size=2, steps=6, ema=EmaSettings(enabled=True), sparse={"student": RAMP}, lora=lora)
    losses, weights, sparsity, file = pools[2].run(_record, setup, checkpoints, tmp_path / "run", 0, (3,))[0]
    again, other, *_ = pools[2].run(_record, setup, checkpoints, tmp_path / "run", 3, (6,))[0]
    assert again == losses[3:] and sparsity == {"student": 0.6} and file["sparsity"] == 0.6
    for name in ("student", "average of student"):
        assert all(torch.equal(other[name][key], value) for key, value in weights[name].items())
        gates = [value for key, value in weights[name].items() if "to_gate_compress.weight" in key]
        assert len(gates) == 2 and all(gate.norm() > 0 for gate in gates)
    assert not any("to_gate_compress" in key for key in weights["fake"])
    if lora:
        out = tmp_path / "out"
        assert export([str(tmp_path / "run"), str(out), "--weights", "raw", "--format", "fastvideo-lora"]) == 0
        found = load_file(find_adapters(str(out)))
        for key in ("blocks.0.to_gate_compress.weight", "blocks.1.attn1.to_q.lora_A.weight"):
            assert torch.equal(found[key.replace("compress.", "compress.set_")], weights["student"][key])


@slow
@pytest.mark.parametrize("name", METHODS_OF_RUNS)
def test_methods_take_a_sparse_student_on_any_mesh(pools, checkpoints, tmp_path, name):
    """In fp64 no choice flips, so the losses are those of one rank, of DMD2 on five meshes and in a ramp; a dense run
    has others. Heads of PDD and gates train in one run."""
    method = PDD if name == "pdd" else METHODS[name]
    sparse = replace(SPARSE, warmup=[0.3, 1]) if name == "dmd2" else SPARSE
    setup = Setup(method=method, precision="fp64", steps=4, sparse={"student": sparse})
    truth, weights, *_ = pools[1].run(_record, setup, checkpoints, tmp_path / "one")[0]
    for dp_shard, cp in ((2, 1), (1, 2), (2, 2), (1, 4)) if name == "dmd2" else ((1, 4),):
        on_mesh = replace(setup, dp_shard=dp_shard, cp=cp, micro_batch_size=2)
        losses = pools[dp_shard * cp].run(_record, on_mesh, checkpoints, tmp_path / f"{dp_shard}x{cp}")[0][0]
        assert losses == pytest.approx(truth, rel=1e-9 if name == "dmd2" else 1e-6), (dp_shard, cp)  # norms in fp32
    assert all(torch.isfinite(torch.tensor(truth)))
    assert name != "pdd" or all(weights["student"][key].any() for key in weights["student"] if "additions" in key)


def _same_student(family, full, base, file):
    """Return the velocities and gates of a whole student and of adapters with gates on its base."""
    plans = [
        plan_role("student", family=family, checkpoint=str(full)),
        plan_role("student", family=family, checkpoint=str(base), lora=LoraSettings(), saved=file),
    ]
    x, t, condition, *_ = verify.inputs(plans[0], verify.GRIDS[0])
    parts, shapes = verify.sample_shapes(plans[0], verify.GRIDS[0])
    mesh, options = build_mesh(cp=2, heads=2), {"device": torch.device("cpu"), "precision": "fp64"}
    roles = [
        build_role(plan, trainable=True, mesh=mesh, shapes=parts, condition_shapes=shapes, **options) for plan in plans
    ]
    gates = [{name: w for name, w in full_tensors(role.weights()).items() if is_gate(name)} for role in roles]
    with torch.no_grad():
        return [role.velocity(x, t, condition).video for role in roles], gates


@pytest.mark.parametrize("family", ["wan", slow_case("minimax_h3"), slow_case("ltx2")])
def test_one_file_has_adapters_and_gates(pools, tmp_path, capsys, family):
    """Extracted from a whole student in FastVideo's names, and read as a role on its base."""
    full, base, out = (tmp_path / name for name in ("full", "base", "out"))
    example = next(iter(family_of(family, "student").examples().values()))
    verify.write_example(full, family, example, SPARSE)
    shutil.copytree(full, base)
    (base / FILE).unlink()
    (weights,) = base.glob("*.safetensors")
    tensors = {name: w for name, w in load_file(weights).items() if not is_gate(name)}
    for name in (name for name in tensors if name.endswith(("to_q.weight", "to_out.0.weight"))):
        tensors[name] += 0.1 * torch.randn(len(tensors[name]), 2) @ torch.randn(2, tensors[name].shape[1])
    save_file(tensors, weights)
    words = ["extract", str(full), str(base), str(out), "--rank", "2", "--family", family, "--format"]
    assert extract([*words, "diffusers-lora"]) == 2 and "fastvideo-lora" in capsys.readouterr().err
    assert extract([*words, "fastvideo-lora"]) == 0
    file = find_adapters(str(out))
    gates = {name for name in load_file(file) if is_gate(name)}
    assert (
        gates
        >= {
            "wan": {"blocks.0.to_gate_compress.set_bias", "blocks.0.to_gate_compress.set_weight"},
            "minimax_h3": {"transformer_blocks.1.attn.to_gate_compress.set_weight"},
            "ltx2": {"transformer_blocks.1.attn1.to_gate_compress.set_bias"},
        }[family]
    )
    (truth, ours), (whole, read) = pools[2].run(_same_student, family, full, base, file)[0]
    assert (ours - truth).norm() < 1e-5 * truth.norm()
    assert whole.keys() == read.keys() and all(torch.equal(read[name], whole[name]) for name in whole)
    (out / FILE).unlink()
    for settings, name in ((None, "sparsity"), (SparseSettings(sparsity=0.6, dense_layers=[0]), "dense_layers")):
        with refused(f"student.sparse_attention.{name}"):
            plan_role("student", family=family, checkpoint=str(base), lora=LoraSettings(), saved=file, sparse=settings)


def _shared_base(family, folder, sparse):
    """Return the velocities of a dense teacher and fake score on the base of a student with adapters."""
    plans = [
        plan_role(name, family=family, checkpoint=folder, lora=lora, sparse=sparse if name == "student" else None)
        for name, lora in (("teacher", None), ("student", LoraSettings(rank=2)), ("fake", LoraSettings(rank=2)))
    ]
    parts, shapes = verify.sample_shapes(plans[0], verify.GRIDS[0])
    mesh, device = build_mesh(cp=2, heads=2, device_type="cpu"), torch.device("cpu")
    roles = build_roles(
        plans, trained=("student", "fake"), mesh=mesh, device=device, shapes=parts, condition_shapes=shapes
    )
    x, t, condition, *_ = verify.inputs(plans[0], verify.GRIDS[0])
    return {name: role.velocity(x, t, condition).video.detach() for name, role in roles.items()}


@pytest.mark.parametrize(("family", "example"), [("wan", "t2v"), slow_case("ltx2", "2.3")])
def test_other_roles_of_a_shared_base_stay_dense(pools, tmp_path, family, example):
    verify.write_example(tmp_path, family, family_of(family, "student").examples()[example])
    sparse, dense = (pools[2].run(_shared_base, family, str(tmp_path), chosen)[0] for chosen in (SPARSE, None))
    assert all(torch.equal(sparse[name], dense[name]) for name in ("teacher", "fake"))
    assert not torch.allclose(sparse["student"], dense["student"], rtol=1e-3)
