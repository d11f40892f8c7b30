"""Roles whose shards live in CPU memory, and runs that resume under another strategy, against runs that never changed.

The device is the CPU as well, so the arithmetic must be equal bit by bit; the last test is for a GPU.
"""

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch.distributed.fsdp import CPUOffloadPolicy

from distill.config.schema import EmaSettings, OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from fsdp_cp import build_mesh
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.checkpoint.save_load import Checkpoints, load
from fsdp_cp.launch import process_group
from fsdp_cp.reduce import grad_norm
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import fsdp_modules, param_groups
from models.export_folder import sharded, write_folder
from models.roles.ema import Ema
from models.roles.role_plan import plan_role
from tests.oracles.difference import check_trace
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, make_config
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role
from tests.tiers import long, long_case, slow

WORLD = 2
STEPS, STOP = 4, 2


def _run(setup, folder, run_dir, first, last):
    """Run steps ``first`` to ``last``, from the checkpoint of ``first`` if that is not 0; save at ``last``."""
    config = make_config(setup, folder, run_dir)
    config.steps = last
    config.student.ema = EmaSettings(enabled=True, decay=0.7, start=0)
    trainer = make_trainer(setup, folder, config, first)
    assert trainer.step == first
    trace = trainer.record()
    trainer._save()
    trainer.checkpoints.wait()
    average = full_tensors(trainer.trained["student"].average.weights)
    trace.weights["ema"] = average
    return trace if dist.get_rank() == 0 else (trace.losses, trace.norms)


@pytest.fixture(scope="module")
def straight(pools, checkpoints, tmp_path_factory):
    """Return the trace of a run that is never stopped, with all states sharded."""
    return pools[WORLD].run(_run, Setup(dp_shard=2), checkpoints, tmp_path_factory.mktemp("straight"), 0, STEPS)[0]


SHARDED = Setup(dp_shard=2)
COPIES = Setup(dp_shard=2, changes={"all": {"offload": "cpu"}, "student": {"strategy": "no_shard"}})
REPLICAS = Setup(dp_replicate=2, cp=2, changes={"all": {"strategy": "optim"}, "fake": {"strategy": "no_shard"}})


@long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SHARDED, COPIES),
        long_case(COPIES, SHARDED),
        long_case(SHARDED, REPLICAS),
    ],
)
def test_a_run_resumes_under_another_strategy(pools, checkpoints, straight, tmp_path, before, after):
    """The checkpoint is written after one update of each role."""
    pools[before.world_size].run(_run, before, checkpoints, tmp_path, 0, STOP)
    resumed = pools[after.world_size].run(_run, after, checkpoints, tmp_path, STOP, STEPS)[0]
    check_trace(resumed, straight.after(STOP))


def _student(folder, device="cpu", trainable=True, mesh=None, **settings):
    plan = plan_role("student", checkpoint=folder and str(folder / "student"), sharding=ShardSettings(**settings),
                     architecture=None if folder else ARCHITECTURE)  # fmt: skip
    return tiny_role(plan, mesh or build_mesh(heads=4), device=device, trainable=trainable)


def _backward(role, device="cpu"):
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, text = torch.randn(1, *LATENT_SHAPE, generator=generator), torch.randn(1, *TEXT_SHAPE, generator=generator)
    x, text, t = x.to(device), text.to(device), torch.tensor([0.3], device=device)
    role.velocity(video(x), t, text_condition(text)).video.square().mean().backward()


def _pieces(folder, out, offload, device="cpu", mesh=None):
    """Run all operations on shards: norm, clipping, AdamW, average, swapping, saving, loading, export."""
    role = _student(folder, device, mesh=mesh, offload=offload)
    optimizer = RoleOptimizer(role, OptimizerSettings(lr=1e-3, betas=[0.0, 0.99]))
    ema = Ema(role, decay=0.5, gamma=1.0, start=0)
    norms = []
    for update in range(2):
        _backward(role, device)
        norms.append(grad_norm(role.parameters()))
        optimizer.step(1e-3, 0.5)
        ema.update(update)
    tensors = {"student": {"weights": role.weights(), "adamw": optimizer.state, "ema": ema.weights}}
    Checkpoints(out / "checkpoints", keep=1).save(1, tensors, {"configs": {"student": role.config}})
    with ema.swapped_in():
        write_folder(out / "export", [sharded(role.weights())], role.config, dtype=torch.float32, max_bytes=20_000)
    raw = {name: w.to_local().clone() for name, w in role.weights().items()}
    with torch.no_grad():
        for w in role.weights().values():
            w.to_local().fill_(torch.nan)
    load(step_folder(out / "checkpoints", 1), tensors)
    for name, w in role.weights().items():
        assert torch.equal(w.to_local(), raw[name]), f"{name} was not restored where the network looks for it"
    _backward(role, device)
    norms.append(grad_norm(role.parameters()))
    devices = {
        "parameters": {p.to_local().device.type for p in role.parameters()},
        "gradients": {p.grad.to_local().device.type for p in role.parameters()},
        "adamw": {x.device.type for s in optimizer.state.values() for n, x in s.items() if n != "step"},
        "ema": {w.to_local().device.type for w in ema.weights.values()},
        "buffers": {b.device.type for b in role.network.buffers()},
    }
    return norms, devices, {name: w.cpu() for name, w in raw.items()}


def _same_export(one, other):
    ours, theirs = (dict(WanTransformer3DModel.from_pretrained(f / "export").named_parameters()) for f in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(p, theirs[name]) for name, p in ours.items())


@slow
def test_every_piece_works_on_offloaded_shards(pools, checkpoints, tmp_path):
    plain = pools[WORLD].run(_pieces, checkpoints, tmp_path / "plain", "none")
    offloaded = pools[WORLD].run(_pieces, checkpoints, tmp_path / "cpu", "cpu")
    for (norms, _, weights), (our_norms, _, our_weights) in zip(plain, offloaded, strict=True):
        assert our_norms == norms
        assert all(torch.equal(w, our_weights[name]) for name, w in weights.items())
    assert len({tuple(norms) for norms, _, _ in offloaded}) == 1, "ranks disagree about the gradient norm"
    assert _same_export(tmp_path / "plain", tmp_path / "cpu")
    assert len(list((tmp_path / "cpu" / "export").glob("*.safetensors"))) > 1


def _placement(folder, strategy):
    """Return where parameters and buffers are, and how units are offloaded; the meta device stands for a GPU."""
    role = _student(folder, "meta", offload="cpu", strategy=strategy)
    groups = [group for module in fsdp_modules(role.network) for group in param_groups(module)]
    assert len(groups) == ARCHITECTURE["num_layers"] + 1
    return (
        {p.to_local().device.type for p in role.parameters()},
        {b.device.type for b in role.network.buffers()},
        {(isinstance(g.offload_policy, CPUOffloadPolicy), g.offload_policy.pin_memory) for g in groups},
    )


@pytest.mark.parametrize(("random", "strategy"), [(True, "optim_grads_params"), (False, "no_shard")])
def test_parameters_are_on_the_cpu_and_buffers_on_the_device(pools, checkpoints, random, strategy):
    for parameters, buffers, policies in pools[2].run(_placement, None if random else checkpoints, strategy):
        assert parameters == {"cpu"} and buffers == {"meta"}
        assert policies == {(True, False)}, "no pinned memory without a GPU"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: CPU shards on a mesh of NCCL")
def test_offload_on_the_gpu(checkpoints, tmp_path):
    with process_group(torch.device("cuda", 0)):
        mesh = build_mesh(heads=4, device_type="cuda")
        plain = _pieces(checkpoints, tmp_path / "plain", "none", "cuda", mesh)
        norms, devices, weights = _pieces(checkpoints, tmp_path / "cpu", "cpu", "cuda", mesh)
    assert all(v == {"cuda"} for v in plain[1].values())
    assert devices.pop("buffers") == {"cuda"} and all(v == {"cpu"} for v in devices.values())
    assert norms == pytest.approx(plain[0], rel=1e-4)
    for name, w in plain[2].items():
        torch.testing.assert_close(weights[name], w, rtol=1e-4, atol=1e-5)
