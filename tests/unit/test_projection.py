"""PDMD: the part of an update that the projection takes out, and what it costs, on Gaussians in closed form."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.projection import particles, project_other
from distill.config import compose_config
from distill.methods import METHODS
from distill.methods.common.distribution_matching import MatchingSettings, project_out
from models.sample import Sample
from tests.unit.method_roles import SHAPE, N, Painter, close, dmd2, normal, run_loss
from tests.unit.refused import refused
from tests.unit.test_dmd2 import dmd_direction
from tests.unit.test_parts import parts


def inner(x, y):
    return (x.double() * y.double()).flatten(1).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_remains_is_orthogonal_no_longer_and_stays(dtype):
    d, r = parts(seed=1).to(dtype), (parts(seed=2) + 0.3 * parts(seed=1)).to(dtype)
    kept, share = project_out(d, r)
    for part in d.parts:
        before, direction, after = (x.parts[part] for x in (d, r, kept))
        lengths = (inner(before, before) * inner(direction, direction)).sqrt()
        assert (inner(after, direction).abs() < 1e-6 * lengths).all()
        assert torch.allclose(inner(after, after), (1 - share.parts[part].double()) * inner(before, before))
        assert (inner(after, after) <= inner(before, before)).all()
    again, taken = project_out(kept, r)
    assert close(again.video, kept.video, 1e-6) and (taken.video.abs() < 1e-9).all()


def test_samples_and_parts_do_not_change_each_other():
    d, r = parts(seed=1), parts(seed=2)
    kept, _ = project_out(d, r)
    one, _ = project_out(d[1:2], r[1:2])
    assert all(torch.equal(one.parts[part], kept.parts[part][1:2]) for part in d.parts)
    louder = replace(r, parts={**r.parts, "audio": 5 - r.parts["audio"]})
    assert torch.equal(project_out(d, louder)[0].video, kept.video)


def test_no_direction_takes_nothing_and_what_is_not_finite_shows():
    d = parts(seed=1)
    kept, share = project_out(d, d * 1e-9)
    assert close(kept.video, d.video, 1e-6) and (share.video < 1e-6).all()
    assert (project_out(d * 0, d)[1].video == 0).all()
    broken = Sample({part: x.clone() for part, x in d.parts.items()})
    for value in (math.inf, math.nan):
        broken.video[2, 0, 0, 0, 0] = value
        for found in (project_out(broken, parts(seed=2))[0], project_out(d, broken)[0]):
            assert not found.video[2].isfinite().all() and found.video[1].isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"student_input": "clips", "data_forcing": 1.0}], ids=["dmd2", "forced"])
def test_the_students_gradient_lacks_the_part_and_keeps_the_normaliser(settings):
    theta, found = normal(4, *SHAPE, seed=9), []
    for projection in (False, True):
        method = dmd2(Painter(theta.clone()), projection=projection, **settings)
        run_loss(method, 0).backward()
        found.append((method.roles["student"].theta.grad, method.observations.drain()))
    (plain, before), (projected, after) = found
    if not settings:
        assert close(plain, dmd_direction(method, theta), 1e-10)
    (fake,) = method.roles["fake"].calls
    r = theta - (fake.x - fake.t.view(-1, 1, 1, 1, 1) * fake.v)
    share = inner(plain, r) / inner(r, r)
    assert close(projected, plain - share.view(-1, 1, 1, 1, 1) * r, 1e-7)
    assert after["dmd_normaliser"] == before["dmd_normaliser"], "that of the update before"
    rms = (projected * 4 * N).flatten(1).square().mean(1).sqrt().sum()
    assert after["dmd_gradient"][0] == pytest.approx(rms.item()), "measured after the projection"
    taken = inner(plain, r).square() / inner(plain, plain) / inner(r, r)
    assert after["dmd_projected"] == (pytest.approx(taken.sum().item()), 4) and "dmd_projected" not in before


def test_every_method_with_a_fake_score_has_it_and_no_other():
    for name, (kind, settings) in METHODS.items():
        if "fake" in kind.required_roles:
            assert issubclass(settings, MatchingSettings) and not settings().projection
        else:
            with refused("method.projection"):
                compose_config([f"method={name}", "method.projection=true", "recipe=quickstart_dmd2"])


# ---------------------------------------------------------------- what goes, and what it costs


def test_particles_drift_less_from_an_error_and_come_slower_without_one():
    for error, updates, better in ((1.0, 100, True), (0.0, 10, False)):
        plain, projected = (particles(2, error, updates, projection=projection) for projection in (False, True))
        assert (projected < 0.7 * plain) if better else (projected > 1.3 * plain)


def test_the_benchmarks_other_arm_takes_the_same_share_elsewhere():
    d, r = parts(seed=1), parts(seed=2) + 0.5 * parts(seed=1)
    (own, share), (other, same) = project_out(d, r), project_other(d, r)
    for part in d.parts:
        assert torch.equal(share.parts[part], same.parts[part])
        assert torch.allclose(inner(other.parts[part], other.parts[part]), inner(own.parts[part], own.parts[part]))
        assert (inner(other.parts[part], r.parts[part]).abs() > 1e-3).all(), "its own r stays"
