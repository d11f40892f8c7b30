"""DMD2, and flow matching with built-in guidance, on samples of several parts, written out for float64: each part at
its own shifted time."""

import torch
from torch import Tensor

Parts = dict[str, Tensor]


def shifted(t: Tensor, shift: float) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)


class Dmd2OfParts:
    """Losses of one step. ``call(role, x, times, null)`` is the velocity of all parts at the parts' own times.

    ``ratios`` are the shifts from the video's time to each part's; ``settings`` are the method's, with
    ``time_limits=draw``.
    """

    def __init__(self, call, settings, random, shapes, ratios):
        self.call, self.settings, self.random, self.shapes, self.ratios = call, settings, random, shapes, ratios
        self.weights = {"video": 1.0, "audio": settings.audio_weight}
        self.normalisers: Parts = {}

    def noise(self, name: str) -> Parts:
        names = {part: name if part == "video" else f"{name}/{part}" for part in self.shapes}
        return {part: self.random.normal(names[part], shape, torch.float64) for part, shape in self.shapes.items()}

    def times(self, t: Tensor) -> Parts:
        return {part: shifted(t, self.ratios[part]) for part in self.shapes}

    def mixed(self, x0: Parts, noise: Parts, t: Tensor) -> Parts:
        return {part: torch.lerp(x0[part], noise[part], wide(time, x0[part])) for part, time in self.times(t).items()}

    def x0(self, role: str, x: Parts, t: Tensor, scale: Parts | None = None) -> Parts:
        times = self.times(t)
        v = self.call(role, x, times, False)
        if scale is not None:
            null = self.call(role, x, times, True)
            v = {part: null[part] + scale[part] * (v[part] - null[part]) for part in v}
        return {part: x[part] - wide(times[part], x[part]) * v[part] for part in x}

    def score_time(self, name: str) -> Tensor:
        low, high = self.settings.min_time, self.settings.max_time
        return shifted(low + (high - low) * self.random.uniform(name, torch.float64), self.settings.shift)

    def sample(self) -> Parts:
        """Return ``x_G``, with a gradient of the last step."""
        times = self.settings.step_list
        times = times[: self.random.shared_integer("dmd2/rollout_length", 1, len(times))]
        x = self.noise("dmd2/noise")
        count = len(x["video"])
        for k, time in enumerate(times, start=1):
            with torch.set_grad_enabled(k == len(times)):
                x0 = self.x0("student", x, torch.full((count,), time, dtype=torch.float64))
            if k < len(times):
                following = torch.full((count,), times[k], dtype=torch.float64)
                x = self.mixed(x0, self.noise(f"dmd2/renoise_{k}"), following)
        return x0

    def student_loss(self) -> Tensor:
        x0, t = self.sample(), self.score_time("dmd2/time")
        with torch.no_grad():
            x = self.mixed(x0, self.noise("dmd2/score_noise"), t)
            audio = self.settings.audio_guidance_scale
            real = self.x0("teacher", x, t, {"video": self.settings.guidance_scale, "audio": audio})
            fake = self.x0("fake", x, t)
        loss = torch.zeros((), dtype=torch.float64)
        for part in x0:
            q = (x0[part] - real[part]).abs().flatten(1).mean(1).detach()
            self.normalisers[part] = q
            d, r = fake[part] - real[part], x0[part].detach() - fake[part]
            if self.settings.projection:
                axes = tuple(range(1, d.ndim))
                d = d - (d * r).sum(axes, keepdim=True) / (r * r).sum(axes, keepdim=True) * r
            target = x0[part].detach() - d / wide(q, x0[part])
            loss = loss + self.weights[part] * 0.5 * (x0[part] - target).square().mean()
        return loss

    def fake_loss(self) -> Tensor:
        with torch.no_grad():
            x0 = self.sample()
        t, e = self.score_time("dmd2/fake_time"), self.noise("dmd2/fake_noise")
        v = self.call("fake", self.mixed(x0, e, t), self.times(t), False)
        return sum(self.weights[part] * (v[part] - (e[part] - x0[part])).square().mean() for part in x0)


class FitOfParts(Dmd2OfParts):
    """Flow matching of ``clips``, the parts' clean latents; ``settings`` have uniform times and a frozen null."""

    def __init__(self, *arguments, clips):
        super().__init__(*arguments)
        self.clips, self.redrawn = clips, 0

    def range_of(self, t: Tensor) -> Tensor:
        return (t >= self.settings.guidance_min_time).int() + (t >= self.settings.anchor_min_time).int()

    def drawn_time(self, name: str = "flow_matching/time") -> Tensor:
        """Draw times until all are in the range of the batch's own draw, 0 to 2."""

        def draw(random, name):
            return shifted(random.uniform(name, torch.float64), self.settings.shift)

        self.range = int(self.range_of(draw(self.random.shared, f"{name}/range")))
        t = draw(self.random, name)
        while (outside := self.range_of(t) != self.range).any():
            self.redrawn += 1
            t = torch.where(outside, draw(self.random, f"{name}/again_{self.redrawn}"), t)
        return t

    def student_loss(self) -> Tensor:
        s, t, noise = self.settings, self.drawn_time(), self.noise("flow_matching/noise")
        x, times = self.mixed(self.clips, noise, t), self.times(t)
        with torch.no_grad():
            base, null = (self.call("teacher", x, times, without) for without in (False, True))
        v, loss = self.call("student", x, times, False), torch.zeros((), dtype=torch.float64)
        own = self.call("student", x, times, True) if self.range == 2 else null
        for part, weight in self.weights.items():
            guided = (v[part] + (s.built_in_guidance - 1) * null[part]) / s.built_in_guidance
            fitted, target = guided if self.range else v[part], noise[part] - self.clips[part]
            errors = (fitted - target).square() + s.keep_weight * (v[part] - base[part]).square()
            loss = loss + weight * (errors + s.anchor_weight * (own[part] - null[part]).square()).mean()
        return loss


def wide(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.ndim - 1))
