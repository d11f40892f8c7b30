"""The second time of a network: no effect at first and at r = t; derivatives and gradients on meshes; its files."""

import shutil
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.autograd import forward_ad

from distill.config import Config
from distill.config.schema import SampleSettings, TrainedRoleSettings
from distill.data.settings import MovingShapesSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.sample import main as sample_command
from fsdp_cp import build_mesh
from fsdp_cp.checkpoint.save_load import Checkpoints
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import UserError
from models import export
from models.additions.base import additions_of
from models.export_folder import sharded, write_folder
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role
from tests.oracles.written_out import WrittenOut
from tests.tiers import long_case, slow, slow_case

MESHES = [slow_case(2, 1), (1, 2), (1, 3), long_case(2, 2)]
WIDTH = ARCHITECTURE["num_attention_heads"] * ARCHITECTURE["attention_head_dim"]
RATES = ARCHITECTURE["freq_dim"] // 2
W1, W2 = (f"additions.second_time.linear_{i}.weight" for i in (1, 2))
BATCH = 2
ROOT = Path(__file__).parents[2]


def _normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _trained(folder, **tensors):
    """Write the student's folder with a second time that has an effect."""
    folder = shutil.copytree(folder / "student", folder / "with_second_time", dirs_exist_ok=True)
    weights = {W1: _normal(WIDTH, 2 * RATES, seed=1).float(), W2: 0.3 * _normal(WIDTH, WIDTH, seed=2).float()}
    save_file(weights | tensors, folder / "additions.safetensors")
    return folder


@pytest.fixture(scope="module")
def trained(checkpoints):
    return _trained(checkpoints)


@lru_cache  # every mesh has process groups with threads
def _mesh(dp_shard, cp):
    return build_mesh(dp_shard=dp_shard, cp=cp, heads=4)


def _role(path, mesh, *, additions=("second_time",), precision="fp32"):
    plan = plan_role("student", checkpoint=str(path), additions=additions)
    return tiny_role(plan, mesh, precision=precision)


def _sample(dtype=torch.float32):
    """Return x, t, r and condition of the global batch; r is t in the first sample."""
    t = torch.tensor([0.4, 0.9])
    x, text = _normal(BATCH, *LATENT_SHAPE, seed=3), _normal(BATCH, *TEXT_SHAPE, seed=4)
    r = torch.tensor([0.4, 0.15])
    return *(tensor.to(dtype) for tensor in (x, t, r)), text_condition(text.to(dtype))


def _mine(mesh):
    return _slice(mesh.dp_rank, mesh.dp_size)


def _slice(dp_rank, dp_size):
    return slice(dp_rank * BATCH // dp_size, (dp_rank + 1) * BATCH // dp_size)


class Embedder(nn.Module):
    """diffusers' time embedder with the second time's embedding by its formula, on the module's weights."""

    def __init__(self, embedder, weights):
        super().__init__()
        self.embedder, self.interval = embedder, None
        self.w1, self.w2 = nn.Parameter(weights[W1].clone()), nn.Parameter(weights[W2].clone())

    def forward(self, projected):
        angles = self.interval[:, None] * 2 ** torch.linspace(-2, 5, RATES, dtype=self.interval.dtype)
        hidden = torch.cat([torch.cos(angles) - 1, torch.sin(angles)], 1) @ self.w1.T
        return self.embedder(projected) + (hidden * torch.sigmoid(hidden)) @ self.w2.T


def _plain(folder, dtype):
    network = WanTransformer3DModel.from_pretrained(folder)
    embedder = Embedder(network.condition_embedder.time_embedder, load_file(folder / "additions.safetensors"))
    network.condition_embedder.time_embedder = embedder
    network.set_attn_processor(WrittenOut())
    nn.Module.to(network, dtype)

    def velocity(x, t, r, condition):
        embedder.interval, text = t - r, condition.tensors["text"]
        return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]

    return network, velocity


# ---------------------------------------------------------------- values and gradients


def _values(checkpoints, trained, dp_shard, cp):
    mesh = _mesh(dp_shard, cp)
    plain, fresh, role = (
        _role(path, mesh, additions=additions)
        for path, additions in (
            (checkpoints / "student", ()),
            (checkpoints / "student", ("second_time",)),
            (trained, ("second_time",)),
        )
    )
    x, t, r, condition = (each[_mine(mesh)] for each in _sample())
    with torch.no_grad():
        truth = plain.velocity(video(x), t, condition).video
        same = torch.equal(fresh.velocity(video(x), t, condition, r).video, truth)
        at_t = torch.equal(role.velocity(video(x), t, condition, t).video, truth)
        apart = [
            relative_error(a, b) for a, b in zip(role.velocity(video(x), t, condition, r).video, truth, strict=True)
        ]
    first = fresh.weights()[W1].full_tensor()
    target = _normal(BATCH, *LATENT_SHAPE, seed=5).float()[_mine(mesh)]
    ((role.velocity(video(x), t, condition, r).video - target).square().mean() * len(x) / BATCH).backward()
    gradients = full_tensors({name: p.grad for name, p in role.named_parameters().items()})
    return mesh.dp_rank, same, at_t, apart, first, gradients


def _plain_gradients(trained):
    network, velocity = _plain(trained, torch.float32)
    x, t, r, condition = _sample()
    (velocity(x, t, r, condition) - _normal(BATCH, *LATENT_SHAPE, seed=5).float()).square().mean().backward()
    renamed = {"condition_embedder.time_embedder.w1": W1, "condition_embedder.time_embedder.w2": W2}
    return {
        renamed.get(name, name.replace("embedder.embedder", "embedder")): parameter.grad
        for name, parameter in network.named_parameters()
    }


@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_values_and_gradients(pools, checkpoints, trained, dp_shard, cp):
    """A new network, and any network at r = t, equals the plain network."""
    truth = _plain_gradients(trained)
    ranks = pools[dp_shard * cp].run(_values, checkpoints, trained, dp_shard, cp)
    for dp_rank, same, at_t, apart, first, gradients in ranks:
        assert same and at_t
        wanted = [0, 1][_slice(dp_rank, dp_shard)]
        assert [difference > 1e-2 for difference in apart] == [bool(i) for i in wanted], "r = t in the first sample"
        assert first.norm() > 0.1 and torch.equal(first, ranks[0][4])
        assert gradients.keys() == truth.keys()
        for name, gradient in gradients.items():
            assert relative_error(gradient, truth[name]) < 1e-5, name
        assert gradients[W1].norm() > 1e-6 and gradients[W2].norm() > 1e-6


# ---------------------------------------------------------------- derivatives


def _jvp(trained, dp_shard, cp):
    mesh = _mesh(dp_shard, cp)
    role = _role(trained, mesh, precision="fp64")
    x, t, r, condition = (each[_mine(mesh)] for each in _sample(torch.float64))
    dx = _normal(BATCH, *LATENT_SHAPE, seed=9)[_mine(mesh)]
    with torch.no_grad(), forward_ad.dual_level():
        duals = video(forward_ad.make_dual(x, dx)), forward_ad.make_dual(t, torch.ones_like(t))
        out = forward_ad.unpack_dual(role.velocity(*duals, condition, r).video)
    return mesh.dp_rank, out.primal, out.tangent, additions_of(role.network, "student")["second_time"].embedded


@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_jvp_along_v_0_1(pools, trained, dp_shard, cp):
    """The test runs in fp64, except for diffusers' time projection and norms, which are in fp32."""
    _, velocity = _plain(trained, torch.float64)
    x, t, r, condition = _sample(torch.float64)
    tangents = (_normal(BATCH, *LATENT_SHAPE, seed=9), torch.ones_like(t))
    out, tangent = torch.func.jvp(lambda x, t: velocity(x, t, r, condition), (x, t), tangents)
    for dp_rank, ours, our_tangent, left in pools[dp_shard * cp].run(_jvp, trained, dp_shard, cp):
        mine = _slice(dp_rank, dp_shard)
        assert relative_error(ours, out[mine]) < 1e-6 and relative_error(our_tangent, tangent[mine]) < 1e-6
        assert left is None
    still = torch.func.jvp(lambda x, t: velocity(x, t, r + (t - t.detach()), condition), (x, t), tangents)[1]
    assert relative_error(still, tangent) > 1e-3, "the interval grows with t"


# ---------------------------------------------------------------- dtypes, mistakes


def _dtypes(trained):
    role = _role(trained, _mesh(1, 2), precision="bf16")
    addition, seen = additions_of(role.network, "student")["second_time"], {}
    addition.register_forward_hook(
        lambda module, args, out: seen.update(
            interval=args[0].dtype, weight=module.linear_1.weight.dtype, embedding=out.dtype
        )
    )
    role.network.condition_embedder.time_proj.register_forward_pre_hook(
        lambda module, args: seen.update(projected=args[0].dtype)
    )
    x, t, r, condition = _sample()
    role.velocity(video(x), t, condition, r).video.square().mean().backward()
    return seen, addition.linear_2.weight.grad.dtype


def test_it_computes_in_fp32_under_bf16(pools, trained):
    for seen, gradient in pools[2].run(_dtypes, trained):
        assert seen == dict.fromkeys(("interval", "weight", "embedding"), torch.float32) | {"projected": torch.bfloat16}
        assert gradient == torch.float32


def _mistakes(checkpoints, trained):
    role, plain = _role(trained, _mesh(1, 1)), _role(checkpoints / "student", _mesh(1, 1), additions=())
    x, t, r, condition = _sample()
    inputs = {"hidden_states": x, "timestep": 1000 * t, "encoder_hidden_states": condition.tensors["text"]}
    with torch.no_grad():
        role.velocity(video(x), t, condition, r)
        for refused in (
            lambda: role.velocity(video(x), t, condition),
            lambda: role.network(**inputs),
            lambda: plain.velocity(video(x), t, condition, r),
            lambda: role.velocity(video(x[:, :2]), t, condition, r),  # raises inside
            lambda: role.velocity(video(x), t, condition),
        ):
            with pytest.raises(RuntimeError):
                refused()
    return True


def test_a_stale_or_missing_second_time_is_refused(pools, checkpoints, trained):
    assert all(pools[1].run(_mistakes, checkpoints, trained))


# ---------------------------------------------------------------- files


def _export(trained, out):
    role = _role(trained, _mesh(2, 1))
    write_folder(out / "export", [sharded(role.weights())], role.config, dtype=torch.float32, max_bytes=20_000)
    tensors = {"student": {"weights": role.weights()}}
    Checkpoints(out / "checkpoints", keep=1).save(7, tensors, {"configs": {"student": role.config}})
    again = _role(out / "export", _mesh(2, 1))
    return {name: (w.full_tensor(), again.weights()[name].full_tensor()) for name, w in role.weights().items()}


@slow
def test_export_loads_in_diffusers_and_round_trips(pools, trained, tmp_path):
    for weights in pools[2].run(_export, trained, tmp_path):
        assert W1 in weights and all(torch.equal(*pair) for pair in weights.values())
    assert export.main([str(tmp_path), str(tmp_path / "by_command")]) == 0
    truth = WanTransformer3DModel.from_pretrained(trained)
    for folder in (tmp_path / "export", tmp_path / "by_command"):
        loaded, info = WanTransformer3DModel.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        for (name, p), (_, q) in zip(loaded.named_parameters(), truth.named_parameters(), strict=True):
            assert torch.equal(p, q), name
        ours, theirs = (load_file(path / "additions.safetensors") for path in (folder, trained))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(list((tmp_path / "export").glob("diffusion*.safetensors"))) > 1


def test_additions_that_do_not_fit_are_refused_and_unused_ones_named(trained, tmp_path, caplog):
    plan_role("student", checkpoint=str(trained))
    assert "second_time" in caplog.text
    folder = shutil.copytree(trained, tmp_path / "other")
    file, second = folder / "additions.safetensors", {W2: torch.zeros(WIDTH, WIDTH)}
    for write, name in (
        (lambda: save_file({W1: torch.zeros(3, 3)} | second, file), "linear_1"),
        (lambda: save_file(second, file), "linear_1"),
        (lambda: file.write_bytes(b"no"), "additions.safetensors"),
    ):
        write()
        with pytest.raises(UserError, match=name):
            plan_role("student", checkpoint=str(folder), additions=("second_time",))


def test_a_finished_student_is_sampled_with_its_second_time(tmp_path, capsys):
    run, export = tmp_path / "run", tmp_path / "run" / "export" / "student"
    config = Config(
        steps=1, batch_size=1, run_dir=str(run), device="cpu", method=MeanFlowSettings(), data=MovingShapesSettings(),
        student=TrainedRoleSettings(precision="fp32"), sample=SampleSettings(student_steps=[2]),
    )  # fmt: skip
    export.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "assets/quickstart_teacher/transformer", export)
    OmegaConf.save(OmegaConf.create(asdict(config)), run / "config.yaml")

    def sample(out):
        return sample_command([str(run), "--count", "1", "--out", str(tmp_path / out)])

    assert sample("none") == 2
    message = capsys.readouterr().err
    assert "additions.safetensors" in message and message.count("\n") == 1 and not (tmp_path / "none").exists()
    network = WanTransformer3DModel.load_config(export)
    width = network["num_attention_heads"] * network["attention_head_dim"]
    for out, size in (("plain", 0.0), ("with", 1.0)):
        weights = {W1: _normal(width, network["freq_dim"], seed=1).float(), W2: size * torch.eye(width)}
        save_file(weights, export / "additions.safetensors")
        assert sample(out) == 0
    assert (tmp_path / "plain" / "0.mp4").read_bytes() != (tmp_path / "with" / "0.mp4").read_bytes()
