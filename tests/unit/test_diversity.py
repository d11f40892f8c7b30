"""The spread of clips of one caption, against the scenes that were rendered."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from benchmarks.diversity import diversity
from distill.data.shape_scenes import CAPTIONS, draw_scene, render

CHOSEN = CAPTIONS[:6]
EACH = 40


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(5)
    return [draw_scene(c, rng, num_frames=6, height=16, width=16) for c in CHOSEN for _ in range(EACH)]


def clips_of(scenes):
    rendered = np.stack([render(scene, height=16, width=16) for scene in scenes])
    return (rendered * 255).round().astype(np.uint8).transpose(0, 2, 3, 4, 1)


ASKED = [caption for caption in CHOSEN for _ in range(EACH)]


def true_spread(scenes):
    position, phase = [], []
    for start in range(0, len(scenes), EACH):
        group = scenes[start : start + EACH]
        centres = np.array([scene.centres[scene.visible].mean(0) for scene in group]) / 16
        radii = [(s.radii[s.visible][0], s.radii[s.visible][-1], np.ptp(s.centres[s.visible, 1])) for s in group]
        position.append(np.var(centres, axis=0, ddof=1).mean())
        phase.append(np.var(np.array(radii) / 16, axis=0, ddof=1).mean())
    return np.sqrt(np.mean(position)), np.sqrt(np.mean(phase))


@pytest.mark.slow
def test_it_measures_the_spread_of_the_scenes(scenes):
    found = diversity(clips_of(scenes), ASKED)
    position, phase = true_spread(scenes)
    assert found["spread/position"].value == pytest.approx(position, rel=0.03)
    assert found["spread/phase"].value == pytest.approx(phase, rel=0.06)


def test_clips_that_nobody_understands_have_no_spread(scenes):
    blurred = gaussian_filter(clips_of(scenes[:8]).astype(float), (0, 0, 2, 2, 0)).astype(np.uint8)
    assert all(np.isnan(m.value) for m in diversity(blurred, ["one"] * 8).values())
