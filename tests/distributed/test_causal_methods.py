"""A step of each method with a clean history, on every mesh, against its formula in fp64 in one process.

The truth is diffusers' network with dense masks; it shares only the named draws with the methods.
"""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from distill.methods import Batch, build_method
from distill.methods.dcm import DcmSettings
from distill.methods.ode_regression import OdeRegressionSettings
from distill.methods.scm import ScmSettings
from fsdp_cp import ShardSettings, build_mesh
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from models.roles.role_plan import plan_role
from tests.oracles.causal_wan import CausalWan
from tests.oracles.method_step import SEED, plain_step, step_errors, step_on_rank
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition, tiny_role
from tests.tiers import long_case, slow

pytestmark = slow
MESHES = [
    {"cp": 2},
    {"cp": 2, "ring": 2},
    *(long_case(mesh) for mesh in ({"dp_shard": 2, "cp": 2}, {"cp": 1}, {"dp_shard": 2})),
]
CHUNKS, SHAPE, TEXT = (1, 2, 2), (4, 5, 6, 10), (5, 10)
"""15 tokens a frame, so that chunks have 15 and 30."""
WINDOWS = {"teacher": None, "student": 1}
CONTEXT_TIME, STEP, GUIDANCE = 0.1, 2, 3.0
TIMES = [1.0, 0.8, 0.5]
METHODS = {
    "dcm": DcmSettings(grid_steps=6, guidance_scale=GUIDANCE, shift=3.0),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=GUIDANCE),
    "scm, finite difference": ScmSettings(tangent_warmup=3, guidance_scale=GUIDANCE, jvp="finite_difference"),
    "ode_regression": OdeRegressionSettings(step_list=TIMES),
}


def data():
    """Return clips, states, captions and the negative prompt of two samples."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, *SHAPE), (2, len(TIMES), *SHAPE), (2, *TEXT), TEXT
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def draws(positions):
    return StepRandom(seed=SEED, step=STEP, positions=positions)


# On the ranks


def _role(name, folder, mesh):
    causal = CausalSettings(chunk=2, first_chunk=1, window=WINDOWS[name], context_time=CONTEXT_TIME)
    sharding = ShardSettings(activation_checkpointing="selective")
    plan = plan_role(name, checkpoint=str(folder / name), sharding=sharding, causal=causal)
    options = {"precision": "fp64", "trainable": name == "student"}
    return tiny_role(plan, mesh, latents=SHAPE, conditions={"text": TEXT}, **options)


def _steps(folder, sizes):
    """Return this rank's samples, and each method's loss of them, clip norm and gradients."""
    mesh = build_mesh(**sizes, heads=4, device_type="cpu")
    mine, found = torch.arange(2).chunk(mesh.dp_size)[mesh.dp_rank], {}
    roles = {name: _role(name, folder, mesh) for name in WINDOWS}
    clips, states, text, null = data()
    condition = text_condition(text[mine], null)
    batch = Batch(latents=video(clips[mine]), condition=condition, states=video(states[mine]))
    for name, settings in METHODS.items():
        found[name] = step_on_rank(build_method(settings, roles), STEP, batch, mine, 2)
    return mine, found


# The formulas


def per_frame(numbers):
    """Spread numbers ``(B,)`` of each chunk over its frames, ``(B, T)``."""
    return torch.cat([x[:, None].expand(-1, n) for x, n in zip(numbers, CHUNKS, strict=True)], 1)


def wide(t):
    return t[:, None, :, None, None]


class Truth:
    """Loss of each method by its formula."""

    def __init__(self, folder):
        self.folder, self.random = folder, draws([0, 1])
        self.clips, self.states, self.text, null = data()
        self.null = null.expand_as(self.text)

    def network(self, name):
        loaded = nn.Module.to(WanTransformer3DModel.from_pretrained(self.folder / name), torch.float64)
        return CausalWan(loaded, CHUNKS, WINDOWS[name])

    def noise(self, purpose):
        channels, _, *sizes = SHAPE
        parts = [
            self.random.normal(f"{purpose}/{i}", (channels, n, *sizes), torch.float64) for i, n in enumerate(CHUNKS)
        ]
        return torch.cat(parts, 2)

    def uniform(self, purpose):
        return [self.random.uniform(f"{purpose}/{i}", torch.float64) for i in range(len(CHUNKS))]

    def velocity(self, oracle, x, t, purpose, scale=1.0):
        history = torch.lerp(self.clips, self.noise(f"{purpose}/context"), CONTEXT_TIME)
        c, u = (oracle.clean_history(x, t, text, history, CONTEXT_TIME) for text in (self.text, self.null))
        return u + scale * (c - u)

    def dcm(self, student, settings):
        node = per_frame([(6 * u).long() for u in self.uniform("dcm/node")])
        grid = [3 * s / (1 + 2 * s) for s in (1 - j / 6 for j in range(7))]
        grid = torch.tensor(grid, dtype=torch.float64)
        t, after = grid[node], grid[node + 1]
        x = torch.lerp(self.clips, self.noise("dcm/noise"), wide(t))
        with torch.no_grad():
            followed = x + wide(after - t) * self.velocity(self.network("teacher"), x, t, "dcm", GUIDANCE)
            target = followed - wide(after) * self.velocity(student, followed, after, "dcm")
        return (x - wide(t) * self.velocity(student, x, t, "dcm") - target).square().mean()

    def scm(self, student, settings):
        z = [self.random.normal(f"scm/time/{i}", (), torch.float64) for i in range(len(CHUNKS))]
        t = per_frame([torch.atan(torch.exp(0.7 + 1.6 * each)) for each in z])
        cos, sin = torch.cos(wide(t)), torch.sin(wide(t))
        x = cos * self.clips + sin * self.noise("scm/noise")

        def field(oracle, x, t, scale=1.0):
            cos, sin = torch.cos(t), torch.sin(t)
            v = self.velocity(oracle, x / wide(cos + sin), sin / (cos + sin), "scm", scale)
            return (wide(cos - sin) * x + v) / wide(cos + sin)

        with torch.no_grad():
            theirs = field(self.network("teacher"), x, t, GUIDANCE)
            if settings.jvp == "exact":
                _, along = torch.func.jvp(lambda x, t: field(student, x, t), (x, t), (theirs, torch.ones_like(t)))
            else:
                h = settings.jvp_step
                along = field(student, x + h * theirs, t + h) - field(student, x - h * theirs, t - h)
                along = along / (2 * h)
        ours = field(student, x, t)
        fixed, r = ours.detach(), STEP / 3
        g = -(cos**2) * (fixed - theirs) - r * cos * sin * (x + along)
        parts = []
        for part in g.split(CHUNKS, 2):
            norms = part.square().sum((1, 2, 3, 4)).sqrt()
            parts.append(part * ((part[0].numel() ** 0.5) / (norms + 0.1)).view(-1, 1, 1, 1, 1))
        return (ours - fixed - torch.cat(parts, 2)).square().mean()

    def ode_regression(self, student, settings):
        step = per_frame([(3 * u).long() for u in self.uniform("ode_regression/step")])
        t = torch.tensor(TIMES, dtype=torch.float64)[step]
        x = torch.stack([
            torch.stack([self.states[b, step[b, f], :, f] for f in range(SHAPE[1])], 1) for b in range(2)
        ])  # fmt: skip
        return (x - wide(t) * self.velocity(student, x, t, "ode_regression") - self.clips).square().mean()


@pytest.fixture(scope="module")
def truth(checkpoints):
    """Return loss, clip norm and gradients of the whole batch, by method."""
    formulas, found = Truth(checkpoints), {}
    for name, settings in METHODS.items():
        student = formulas.network("student")
        loss = getattr(formulas, settings.name)(student, settings)
        found[name] = plain_step(loss, student.network)
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_step_equals_its_formula(pools, checkpoints, truth, sizes):
    """Losses, clip norms and all gradients."""
    ranks = pools[sizes.get("dp_shard", 1) * sizes.get("cp", 1)].run(_steps, checkpoints, sizes)
    errors = step_errors(ranks, truth)
    print(f"\n{sizes}:", {" ".join(key): f"{error:.0e}" for key, error in errors.items()})
    assert max(errors.values()) < 1e-5, errors
