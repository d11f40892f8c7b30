"""flow_matching for a base whose guidance is built in, in fp64 against closed forms and written-out networks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distill.config import compose_config
from distill.methods import build_method
from distill.methods.common.expert_times import Times
from distill.methods.common.schedules import add_noise
from distill.methods.flow_matching import FlowMatching, FlowMatchingSettings
from distill.run.setup import plan_run
from models.causal import CausalSettings
from models.families.minimax_h3 import MiniMaxH3
from tests.oracles.samples import Stub
from tests.oracles.tiny_wan import text_condition
from tests.unit.method_roles import TEXT, Net, close, gradients, make_batch, null_text_of, random_at, text_of
from tests.unit.refused import refused, refuses_all

SCALE = 3.0
PLAIN = {"caption_dropout": 0.0, "guidance_scale": 1.0}


def fine_tuning(student, teacher, **settings):
    chosen = FlowMatchingSettings(**PLAIN | {"built_in_guidance": SCALE} | settings)
    roles = {"teacher": teacher, "student": student}
    return build_method(chosen, {name: roles[name] for name in FlowMatching.roles_needed(chosen)})


class Linear(Stub, nn.Module):
    """Velocity ``b + k text``: ``u`` is b for the empty text, 0, and ``c`` is b + k for the caption, 1."""

    def __init__(self, b, k):
        super().__init__()
        self.b, self.k = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (b, k))

    def of_video(self, x, t, condition, **_):
        return (self.b + self.k * condition.tensors["text"][:, 0, 0]).view(-1, 1, 1, 1, 1).expand_as(x)


@pytest.mark.parametrize(
    ("settings", "drifts"),
    [
        ({"null": "frozen"}, False),
        ({"null": "live"}, True),
        ({"null": "live", "anchor_weight": 0.5, "anchor_min_time": 0.0}, False),
    ],
    ids=["frozen", "live", "anchor"],
)
def test_the_optimum_keeps_the_guidance_unless_a_live_null_drifts(settings, drifts):
    u, k, count = 0.3, 1.5, 4
    student = Linear(u, k)
    method = fine_tuning(student, Linear(u, k), **settings)
    ones, zeros = (torch.full((*n, *TEXT), x, dtype=torch.float64) for n, x in (((count,), 1.0), ((), 0.0)))
    batch = replace(make_batch(), condition=text_condition(ones, zeros, zeros))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.4)
    for _ in range(400):  # the same draws, so that the optimum is known
        optimizer.zero_grad()
        for loss in method.losses(0, batch, random_at(0)):
            (loss.weight * loss.closure()).backward()
        optimizer.step()
    v = (batch.noise(random_at(0), "flow_matching/noise") - batch.latents).video.mean()
    drift = (SCALE * (v - u) - k) / (SCALE + 1) if drifts else 0.0  # b and k have the same gradient
    conditional = u + k + 2 * drift if drifts else u + SCALE * (v - u)
    assert abs(v - u - k / SCALE) > 0.1, "there is something to learn"
    assert (student.b + student.k).item() == pytest.approx(float(conditional), rel=1e-6)
    if settings["null"] == "live":
        assert student.b.item() == pytest.approx(float(u + drift), rel=1e-6)


@pytest.mark.parametrize(("null", "keep"), [("frozen", 0.25), ("live", 0.0)], ids=["frozen", "live"])
def test_a_step_equals_plain_networks_on_all_ranks(null, keep):
    held_at = {"anchor_weight": 0.5, "anchor_min_time": 0.8, "keep_weight": keep}
    settings = {"null": null, "guidance_min_time": 0.5, **held_at}
    student, base, batch, seen = Net(5), Net(6), make_batch(), set()
    method = fine_tuning(student, base, time="uniform", **settings)
    for step in range(16):
        random, kinds = random_at(step), []
        student.zero_grad(), student.calls.clear(), base.calls.clear()
        losses = [*method.losses(step, batch, random)]
        for loss in losses:
            (loss.weight * loss.closure()).backward()
        ours, (t, *_) = gradients(student), [call.t for call in student.calls]
        guided, anchored = t >= 0.5, t >= 0.8
        for part in ([0, 2], [3]):  # of other ranks
            few = [*method.losses(step, make_batch(part), random_at(step, part))]
            kinds.append([loss.name for loss in few])
        assert kinds == [[loss.name for loss in losses]] * 2 and guided.unique().numel() == 1
        assert ("anchor" in kinds[0]) == anchored.all() == anchored.any()
        is_guided, is_anchored, own = guided[0].item(), anchored[0].item(), null == "live"
        assert len(base.calls) == is_anchored + (is_guided and not own) + (keep > 0)
        assert len(student.calls) == 1 + is_anchored + (is_guided and own)

        student.zero_grad()
        noise, x0 = batch.noise(random, "flow_matching/noise"), batch.latents
        x, texts = add_noise(x0, noise, t).video, (text_of(batch), null_text_of(batch))
        v, u = (student.formula(x, t, text) for text in texts)
        kept, held = (base.formula(x, t, text).detach() for text in texts)
        branch = held if null == "frozen" else u.detach()
        fitted = (v + (SCALE - 1) * branch) / SCALE if is_guided else v
        total = (fitted - (noise - x0).video).square().mean() + 0.5 * (u - held).square().mean() * is_anchored
        (total + keep * (v - kept).square().mean()).backward()
        assert all(close(ours[name], g) for name, g in gradients(student).items()) and not gradients(base)
        seen.add((is_guided, is_anchored))
    assert len(seen) == 3, "each range is drawn"


def test_the_field_is_relative_to_the_bases_null():
    """A student whose conditional output is right has all of it, whatever its own unconditional branch became."""
    u, k, batch, times = 0.3, 1.5, make_batch(), Times(torch.full((4,), 0.7, dtype=torch.float64), 0.7)
    ones, zeros = (torch.full((*n, *TEXT), x, dtype=torch.float64) for n, x in (((4,), 1.0), ((), 0.0)))
    condition = text_condition(ones, zeros, zeros)
    cases = [
        (0.9, 0.9, (1.0, 1.0, 0.0)),
        (0.6, 0.45, (0.5, 1.0, 0.5)),
        (0.3, 0.5, (1 / 3, 1.0, 2 / 3)),
        (0.3, -0.75, (0.5, -1.0, 1.5)),
    ]
    for b, own, wanted in cases:
        method = fine_tuning(Linear(b, own), Linear(u, k))
        found = method.guidance_field(batch.latents, times, condition)
        assert found.shape == (3, 4) and torch.allclose(found, torch.tensor(wanted, dtype=torch.float64)[:, None])


def test_settings_that_do_not_fit_are_refused():
    s = {"built_in_guidance": 3.0}
    refuses_all(
        FlowMatchingSettings,
        {"built_in_guidance": 0.5},
        {"anchor_weight": 1.0},
        {"null": "live"},
        {"anchor_min_time": 0.8},
        {"guidance_min_time": 0.5},
        {**s, **PLAIN, "anchor_min_time": 0.8},
        {**s, "guidance_scale": 1.0, "caption_dropout": 0.1},
        {**s, "caption_dropout": 0.0, "guidance_scale": 4.0},
        {**s, **PLAIN, "audio_guidance_scale": 4.0},
        {**s, **PLAIN, "null": "own"},
        {**s, **PLAIN, "guidance_min_time": 1.5},
    )
    settings = FlowMatchingSettings(**s, **PLAIN, null="live")
    assert FlowMatching.roles_needed(settings) == ("student",)
    for name, chosen in (("built_in_guidance", settings), ("keep_weight", FlowMatchingSettings(keep_weight=0.5))):
        with refused(f"method.{name}"):
            FlowMatching.check_causal(chosen, {"student": CausalSettings(chunk=1)})


def test_a_text_of_no_token_is_no_null():
    role = SimpleNamespace(family=MiniMaxH3(), boundaries=(), causal=None)

    def check(prompt, image=None, **settings):
        data = SimpleNamespace(negative_prompt=prompt, image=image)
        method = FlowMatchingSettings(**PLAIN, **settings)
        config = SimpleNamespace(method=method, data=data, student=SimpleNamespace(experts="both"))
        FlowMatching.check_roles(config, {"student": role})

    for fine in ({"prompt": " "}, {"prompt": "", "image": "first_frame"}):
        check(**fine, built_in_guidance=SCALE)
    check("")
    with refused("data.negative_prompt"):
        check("", built_in_guidance=SCALE)


GUIDED = ["method.built_in_guidance=3", "method.guidance_scale=1", "method.caption_dropout=0"]


@pytest.mark.parametrize(
    "needing",
    [
        ["method.null=frozen", *GUIDED],
        ["method.anchor_weight=0.5", "method.null=live", *GUIDED],
        ["method.keep_weight=0.5"],
    ],
)
def test_a_missing_base_is_refused_by_the_setting_that_needs_it(needing):
    with refused(needing[0]):
        plan_run(compose_config(["experiment=quickstart_teacher", "device=cpu", *needing]))
