"""Data whose rectified-flow velocity and flow map are known in closed form, as roles, in fp64.

Shapes: x is ``(B, *SHAPE)``, t and s are ``(B,)``. Flow maps are made of differentiable operations, forward mode too.
"""

import torch
from torch import Tensor, nn

from distill.methods import Batch
from distill.methods.common.schedules import widen
from fsdp_cp.rng import StepRandom, stream
from models.condition import Condition
from tests.oracles.samples import Stub, video
from tests.oracles.tiny_wan import text_condition

TEXT = (1, 2)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def marginal_variance(variance: Tensor, t: Tensor) -> Tensor:
    """Return the variance of ``x_t`` where data have ``variance``."""
    return (1 - t) ** 2 * variance + t**2


class Gaussian(Stub):
    """Data distributed as N(mean, covariance) over all N elements of a sample, with a full covariance matrix."""

    def __init__(self, shape=(2, 2, 2, 2), seed=0):
        self.shape = shape
        n = torch.Size(shape).numel()
        self.basis, _ = torch.linalg.qr(normal(n, n, seed=seed))
        self.variance = 0.1 + normal(n, seed=seed + 1) ** 2
        self.mean = normal(n, seed=seed + 2)

    def sample(self, count: int, seed: int) -> Tensor:
        z = normal(count, len(self.mean), seed=seed) * self.variance.sqrt()
        return (self.mean + z @ self.basis.T).view(count, *self.shape)

    def of_video(self, x, t, condition, **_):
        t = t[:, None]
        z = (x.flatten(1) - (1 - t) * self.mean) @ self.basis
        slope = (t - (1 - t) * self.variance) / marginal_variance(self.variance, t)
        return ((slope * z) @ self.basis.T - self.mean).view_as(x)

    def flow_map(self, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Return the point at time ``s`` of the trajectory through ``x`` at time ``t``."""
        t, s = t[:, None], s[:, None]
        z = (x.flatten(1) - (1 - t) * self.mean) @ self.basis
        z = z * (marginal_variance(self.variance, s) / marginal_variance(self.variance, t)).sqrt()
        return ((1 - s) * self.mean + z @ self.basis.T).view_as(x)


class Mixture(Stub):
    """Data whose elements are all drawn from one mixture of Gaussians in one dimension."""

    def __init__(self, shape=(2, 2, 2, 2), weights=(0.3, 0.7), means=(-1.2, 0.8), stds=(0.3, 0.5)):
        self.shape = shape
        self.weights, self.means, self.stds = (torch.tensor(x, dtype=torch.float64) for x in (weights, means, stds))

    def sample(self, count: int, seed: int) -> Tensor:
        which = torch.rand(count, *self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        which = torch.bucketize(which, self.weights.cumsum(0)[:-1])
        return self.means[which] + self.stds[which] * normal(count, *self.shape, seed=seed + 1)

    def _standardized(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``x_t`` standardized by each component (components last), the deviations, and ``t``."""
        t = widen(t, x)[..., None]
        deviation = marginal_variance(self.stds**2, t).sqrt()
        return (x[..., None] - (1 - t) * self.means) / deviation, deviation, t

    def _log_density(self, x: Tensor, t: Tensor) -> Tensor:
        z, deviation, _ = self._standardized(x, t)
        return torch.logsumexp(self.weights.log() - 0.5 * z**2 - deviation.log(), -1) - 0.5 * torch.log(
            torch.tensor(2 * torch.pi)
        )

    def _log_below(self, x: Tensor, t: Tensor, sign: float = 1.0) -> Tensor:
        """Return the logarithm of the probability below ``x``, or above it for ``sign = -1``."""
        z, _, _ = self._standardized(x, t)
        return torch.logsumexp(self.weights.log() + torch.special.log_ndtr(sign * z), -1)

    def of_video(self, x, t, condition, **_):
        z, deviation, t = self._standardized(x, t)
        posterior = torch.softmax(self.weights.log() - 0.5 * z**2 - deviation.log(), -1)
        return (posterior * ((t - (1 - t) * self.stds**2) / deviation * z - self.means)).sum(-1)

    def flow_map(self, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Transport ``x`` monotonically: return the quantile at ``s`` of the probability below ``x`` at ``t``."""
        below, above = self._log_below(x, t), self._log_below(x, t, -1.0)
        lower = below < above

        def excess(y):
            """Return a function that increases in ``y`` and is 0 at the answer, in logarithms of the smaller tail."""
            return torch.where(lower, self._log_below(y, s) - below, above - self._log_below(y, s, -1.0))

        low, high = torch.full_like(x, -40.0), torch.full_like(x, 40.0)
        for _ in range(50):
            middle = (low + high) / 2
            too_high = excess(middle) > 0
            low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
        y = (low + high) / 2
        for _ in range(2):  # Newton steps give the derivatives that bisection does not
            tail = torch.where(lower, self._log_below(y, s), self._log_below(y, s, -1.0))
            y = y - excess(y) / (self._log_density(y, s) - tail).exp()
        return y


PROBLEMS = [Gaussian(), Mixture()]
TO_LEARN = [Gaussian(shape=(1, 1, 2, 2)), Mixture(shape=(1, 4, 4, 4), means=(-0.8, 0.6), stds=(0.4, 0.4))]
"""Milder problems, which a small network learns in seconds."""


class ExactStudent(Stub, nn.Module):
    """Mean velocity of ``problem`` between t and r, or down to the clean sample without r. Its parameters are 0."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros(problem.shape, dtype=torch.float64))

    def of_video(self, x, t, condition, r=None, **_):
        return (1 + self.scale) * self.exact(x, t, condition, torch.zeros_like(t) if r is None else r) + self.offset

    def exact(self, x, t, condition, r):
        instant = r == t
        interval = widen(torch.where(instant, 1.0, t - r), x)
        u = (x - self.problem.flow_map(x, t, torch.where(instant, t / 2, r))) / interval
        return torch.where(widen(instant, x), self.problem.velocity(x, t, condition), u)


class SmallNet(Stub, nn.Module):
    """Velocity of ``problem`` plus a network, zero at first: a student that starts as its teacher, of any mode.

    The network sees each element with the time, and the whole sample if the elements of ``problem`` depend on each
    other.
    """

    def __init__(self, problem, width=48, seed=0):
        super().__init__()
        self.problem = problem
        self.joint = isinstance(problem, Gaussian)
        n = torch.Size(problem.shape).numel() if self.joint else 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(n + 3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, n)
            ).double()
            self.slope = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, n * n)).double()
        for last in (self.body[-1], self.slope[-1]):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def of_video(self, x, t, condition, **_):
        features = torch.stack([t, (2 * t).cos(), (4 * t).cos()], -1)
        rows = x.flatten(1) if self.joint else x.reshape(-1, 1)
        features = features if self.joint else features.repeat_interleave(len(rows) // len(x), 0)
        slope = self.slope(features).unflatten(-1, (rows.shape[1], rows.shape[1]))
        correction = self.body(torch.cat([rows, features], -1)) + (slope @ rows[..., None])[..., 0]
        return self.problem.velocity(x, t, condition) + correction.view_as(x)


def nothing(count: int) -> Condition:
    """Return ``count`` captions of zeros."""
    text = torch.zeros(count, *TEXT, dtype=torch.float64)
    return text_condition(text, text[0], text[0])


def make_batch(problem, count: int, seed: int = 1) -> Batch:
    """Return ``count`` samples of ``problem`` with captions of zeros."""
    return Batch(latents=video(problem.sample(count, seed)), condition=nothing(count))


def train(method, problem, steps: int, lr: float, count: int = 16, kind: type[StepRandom] = StepRandom) -> None:
    """Take ``steps`` steps of ``method`` as the trainer does; the learning rate falls to a hundredth."""
    optimizers = {
        name: torch.optim.Adam(method.roles[name].parameters(), lr=lr, betas=(0.9, 0.99))
        for name in method.trained_roles
    }
    for step in range(steps):
        optimizer = optimizers[method.trained_role(step)]
        optimizer.param_groups[0]["lr"] = lr * 0.01 ** (step / steps)
        optimizer.zero_grad()
        random = kind(seed=5, step=step, positions=range(count))
        for loss in method.losses(step, make_batch(problem, count, seed=1000 + 2 * step), random):
            (loss.weight * loss.closure()).backward()
        optimizer.step()


@torch.no_grad()
def flow_map_error(problem, student, times=(1.0, 0.934, 0.853, 0.609), count: int = 256) -> float:
    """Return the RMS error of the student's ``x_t -> x_0`` over ``times``, relative to the data's deviation."""
    errors = []
    for i, time in enumerate(times):
        t = torch.full((count,), time, dtype=torch.float64)
        x = (1 - time) * problem.sample(count, 70 + 2 * i) + time * normal(count, *problem.shape, seed=90 + i)
        ours = x - time * student.velocity(x, t, nothing(count))
        errors.append((ours - problem.flow_map(x, t, torch.zeros_like(t))).square().mean())
    return float(torch.stack(errors).mean().sqrt() / problem.sample(4096, 99).std())


class BatchRandom(StepRandom):
    """Draws for all samples at once: a stream for each would take most of a test's time."""

    def normal(self, purpose, shape, dtype=torch.float32):
        generator = stream(self.seed, purpose, self.step, 0)
        return torch.randn(len(self.positions), *shape, generator=generator, dtype=dtype)

    def uniform(self, purpose, dtype=torch.float32):
        return torch.rand(len(self.positions), generator=stream(self.seed, purpose, self.step, 0), dtype=dtype)
