"""Derivatives along a direction: exact, and by finite differences, on a small network and on a real Wan."""

import torch

from distill.derivatives import MODES, directional_derivative
from distill.methods.scm import ScmSettings
from distill.methods.trigflow import add_trig_noise, trig_field
from fsdp_cp.local_ranks import RankPool
from fsdp_cp.mesh import build_mesh
from models.condition import text_condition
from models.load import build_role
from models.role_plan import plan_role
from tests.unit.method_roles import SHAPE, Net, close, make_batch, normal, wide


def test_modes_of_the_derivative():
    net, condition = Net(3), make_batch().condition
    x, t, dx = normal(4, *SHAPE, seed=1), torch.tensor([0.1, 0.5, 1.0, 1.5]), normal(4, *SHAPE, seed=2)
    primals, tangents = (x, t.double()), (dx, torch.ones(4, dtype=torch.float64))

    def field(x, t):
        return trig_field(net, x, t, condition)

    truth = torch.func.jvp(field, primals, tangents)[1]
    exact = directional_derivative(field, primals, tangents, mode="exact", step=0.1)
    assert close(exact, truth, 1e-12) and not exact.requires_grad
    errors = [
        (directional_derivative(field, primals, tangents, mode="finite_difference", step=step) - truth).norm()
        for step in (0.02, 0.01)
    ]
    assert 3.8 < errors[0] / errors[1] < 4.2, "central differences are of second order"


def _errors_of_finite_differences(precisions):
    """Of J of the shipped teacher, whose fp64 is the truth: per precision, over all samples and the worst."""
    mesh = build_mesh(cp=1, heads=4)
    latents, text_shape, count = (3, 6, 16, 16), (4, 32), 8
    x0, noise = normal(count, *latents, seed=1).sign() / 2, normal(count, *latents, seed=2)
    text, t = normal(count, *text_shape, seed=3), torch.atan(torch.exp(0.7 + 1.6 * normal(count, seed=4)))
    results = {}
    for precision in precisions:
        plan = plan_role("student", checkpoint="assets/quickstart_teacher")
        role = build_role(
            plan, mesh=mesh, device=torch.device("cpu"), precision=precision, trainable=True, latent_shape=latents,
            condition_shapes={"text": text_shape},
        )  # fmt: skip
        dtype = torch.float64 if precision == "fp64" else torch.float32
        where = (add_trig_noise(x0, noise, t).to(dtype), t.to(dtype))

        def field(x, t, role=role, dtype=dtype):
            return trig_field(role, x, t, text_condition(text.to(dtype)))

        with torch.no_grad():
            along = (field(*where), torch.ones_like(where[1]))
        rate = wide(torch.cos(t) * torch.sin(t))
        for mode in MODES:
            derivative = directional_derivative(field, where, along, mode=mode, step=ScmSettings().jvp_step)
            results[precision, mode] = (rate * derivative).flatten(1)
    truth = results["fp64", "exact"]
    return {
        key: (float((j - truth).norm() / truth.norm()), float(((j - truth).norm(dim=1) / truth.norm(dim=1)).max()))
        for key, j in results.items()
    }


def test_error_of_the_finite_difference_on_wan():
    """diffusers casts times to fp32 even in an fp64 network; in bf16 a difference drowns, which is refused."""
    with RankPool(1) as pool:
        (errors,) = pool.run(_errors_of_finite_differences, ("fp64", "fp32", "bf16"))
    for precision in ("fp64", "fp32"):
        total, worst = errors[precision, "finite_difference"]
        assert total < 3e-3 and worst < 1.5e-2
    assert errors["fp32", "exact"][0] < 1e-4 and errors["bf16", "exact"][0] < 0.05
    assert errors["bf16", "finite_difference"][0] > 1
