"""A role of several networks, and a network of several roles: the same numbers as each network alone."""

import pytest
import torch
import torch.distributed as dist

from fsdp_cp import build_mesh, microbatch
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.reduce import full_tensor
from fsdp_cp.sharding.state import fsdp_modules, gathered_units
from models.condition import Condition
from models.families.operations import count_flops
from models.roles.network import Network
from models.roles.role import Role
from models.roles.role_plan import plan_role
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role
from tests.outside.family import DEFAULTS, OutsideFamily
from tests.tiers import long_case, slow_case

BOUNDARIES = (0.8, 0.4)


def _alone(mesh, seed, trainable=True):
    plan = plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE))
    return tiny_role(plan, mesh, precision="fp64", trainable=trainable, seed=seed)


def _inputs():
    generator = torch.Generator().manual_seed(dist.get_world_size())
    x = torch.randn(2, *LATENT_SHAPE, generator=generator, dtype=torch.float64)
    return x, text_condition(torch.randn(2, *TEXT_SHAPE, generator=generator, dtype=torch.float64))


def _experts(dp_shard, cp):
    """Compare velocities and gradients in each range of times with those of the expert as a separate role."""
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=4)
    single = [_alone(mesh, seed) for seed in range(3)]
    networks = tuple(_alone(mesh, seed).networks[0] for seed in range(3))
    role = Role(name="student", networks=networks, boundaries=BOUNDARIES, trainable=True)
    x, condition = _inputs()
    for times, expert in (([1.0, 0.8], 0), ([0.79, 0.4], 1), ([0.39, 0.0], 2)):
        t = torch.tensor(times, dtype=torch.float64)
        with microbatch(networks[expert].module, is_first=True, is_last=True):
            ours = role.velocity(video(x), t, condition, at=times[0]).video
            ours.square().mean().backward()
        with microbatch(single[expert].network, is_first=True, is_last=True):
            truth = single[expert].velocity(video(x), t, condition).video
            truth.square().mean().backward()
        assert torch.equal(ours, truth)
        theirs = {f"{expert}.{name}": full_tensor(p.grad) for name, p in single[expert].network.named_parameters()}
        gradients = {name: p.grad for name, p in role.network.named_parameters() if p.grad is not None}
        assert gradients.keys() == theirs.keys(), "the others have none"
        assert all(torch.equal(full_tensor(gradients[name]), theirs[name]) for name in theirs)
        for parameter in (*role.parameters(), *single[expert].parameters()):
            parameter.grad = None
    assert len(role.weights()) == 3 * len(single[0].weights()) == len(role.parameters())
    with role.frozen():
        x.requires_grad_()
        role.velocity(video(x), torch.full((2,), 0.9, dtype=torch.float64), condition, at=0.9).video.sum().backward()
        assert x.grad.abs().sum() > 0 and all(p.grad is None for p in role.parameters())
    assert all(p.requires_grad for p in role.parameters())
    for times in ([0.9, 0.7], [0.8, 0.2], [0.41, 0.3999]):
        with pytest.raises(ValueError, match="at="):
            role.velocity(video(x), torch.tensor(times, dtype=torch.float64), condition, at=times[0])
    with pytest.raises(ValueError, match="at="):
        role.velocity(video(x), torch.full((2,), 0.9, dtype=torch.float64), condition)


@pytest.mark.parametrize(("dp_shard", "cp"), [slow_case(1, 2), long_case(2, 2)])
def test_each_expert_serves_its_times_and_trains_alone(pools, dp_shard, cp):
    pools[dp_shard * cp].run(_experts, dp_shard, cp)


def _shared():
    """Train one network as the student: the teacher, which shares it, must change too."""
    mesh = build_mesh(dp_shard=1, cp=2, heads=4)
    (network,) = _alone(mesh, 0).networks
    teacher = Role(name="teacher", networks=(network,), trainable=False)
    student = Role(name="student", networks=(network,), trainable=True)
    assert teacher.network is student.network
    x, condition = _inputs()
    t = torch.tensor([0.7, 0.2], dtype=torch.float64)
    with torch.no_grad():
        before = teacher.velocity(video(x), t, condition).video
    with microbatch(network.module, is_first=True, is_last=True):
        loss = (student.velocity(video(x), t, condition).video - before - 1).square().mean()
        loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= 0.1 * parameter.grad
        assert not gathered_units(network.module) and len(fsdp_modules(network.module)) > 2
        after = teacher.velocity(video(x), t, condition).video
        assert torch.equal(after, student.velocity(video(x), t, condition).video)
    of_sample = count_flops(
        network.family, network.config, video(x).shapes, {"text": condition.tensors["text"].shape[1:]}
    )
    assert teacher.flops == 2 * 2 * of_sample.forward, "two forwards of two samples"
    return float(loss), float((after - before - 1).square().mean())


def test_roles_share_a_network(pools):
    for loss, later in pools[2].run(_shared):
        assert 0 < later < loss


def test_ranges_that_leave_a_gap_or_have_no_network_are_refused():
    class Built:
        config, module = {}, torch.nn.Identity()

    for count, boundaries in ((1, (0.5,)), (2, ()), (2, (0.0,)), (2, (1.0,)), (3, (0.3, 0.6)), (3, (0.5, 0.5))):
        with pytest.raises(AssertionError):
            Role(name="teacher", networks=(Built(),) * count, boundaries=boundaries, trainable=False)
    other = Built()
    other.config = {"num_layers": 1}
    with pytest.raises(AssertionError):
        Role(name="teacher", networks=(Built(), other), boundaries=(0.5,), trainable=False)


def _frames(cp):
    """Return velocities at a time for each latent frame, with a first frame given."""
    torch.manual_seed(0)
    family, (batch, channels, frames, size) = OutsideFamily(), (2, 4, 3, 6)
    module = family.build({"first_frame": True}, "x").double()
    mesh = build_mesh(dp_shard=1, cp=cp, heads=6)
    family.parallelize(module, mesh)
    network = Network(
        family=family, config=DEFAULTS | {"first_frame": True}, module=module, mesh=mesh, precision="fp64"
    )
    role = Role(name="student", networks=(network,), trainable=True)
    x, text = torch.randn(batch, channels, frames, size, size).double(), torch.randn(batch, 5, 10).double()
    condition = Condition({"text": text, "first_frame": torch.randn(batch, channels, 1, size, size).double()})
    t = torch.tensor([0.9, 0.4]).double()
    by_sample = role.velocity(video(x), t, condition).video
    assert torch.equal(by_sample, role.velocity(video(x), t[:, None].expand(-1, frames), condition).video)
    held = (x - t.view(-1, 1, 1, 1, 1) * by_sample)[:, :, :1]
    assert (held - condition.tensors["first_frame"]).abs().max() < 1e-14
    with pytest.raises(ValueError):
        role.velocity(video(x), torch.rand(2, 4).double(), condition)
    return role.velocity(video(x), torch.linspace(0.1, 0.95, 6).double().view(2, 3), condition).video.detach()


def test_a_time_for_each_frame_and_a_frame_that_is_given(pools):
    (truth,) = pools[1].run(_frames, 1)
    for size in (2, 3):
        for velocity in pools[size].run(_frames, size):
            assert relative_error(velocity, truth) < 1e-13


def _raw_frame_times():
    role, (x, condition) = _alone(build_mesh(dp_shard=1, cp=2, heads=4), 0), _inputs()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError):
        patch.setattr(type(role.family), "frame_times", False)
        role.velocity(video(x), torch.rand(2, x.shape[2], dtype=torch.float64), condition)


def test_a_family_without_times_of_frames_refuses_them(pools):
    pools[2].run(_raw_frame_times)
