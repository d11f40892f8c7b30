"""Measures discriminate: renders score at the noise floor of each measure, corrupted clips clearly worse."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from torch.utils.data import default_collate

from distill.data.base import Measure, sample_of
from distill.data.encoders.words import MOTIONS
from distill.data.shape_measures import (
    MEASURES,
    MOST_LATE,
    coverage,
    detect,
    features,
    geometry_of,
    heard,
    late_by_pitch,
    measure,
    measure_sound,
)
from distill.data.shape_scenes import CAPTIONS, caption_parts
from fsdp_cp.errors import UserError
from tests.oracles.clips import moving_shapes
from tests.tiers import slow

N = 256
ASKED = [CAPTIONS[i % len(CAPTIONS)] for i in range(N)]
EVERYTHING = set(MEASURES)
CATCHES = {
    "wrong caption": {"color_accuracy", "motion_accuracy"},
    "blurred": {"color_accuracy", "motion_accuracy", "distance/compactness", "distance/edge_sharpness"},
    "frames shuffled": {"motion_accuracy", "distance/displacement"},
    "mean clip": EVERYTHING,
    "caption's mean clip": EVERYTHING - {"distance/displacement"},  # the mean of falling clips falls
}


@pytest.fixture(scope="module")
def renders() -> dict[str, np.ndarray]:
    """Return the reference and two further, independent streams."""
    folder = "assets/quickstart_teacher"
    heldout = moving_shapes(folder).heldout()
    return {
        "reference": heldout.clips(1024).numpy(),
        "heldout": moving_shapes(folder, seed=1).heldout().clips(1024).numpy(),
        "train": moving_shapes(folder).clips(N).numpy(),
    }


def corrupt(renders: dict[str, np.ndarray], how: str) -> tuple[np.ndarray, list[str]]:
    """Return (clips, captions), corrupted."""
    clips, asked = renders["train"], list(ASKED)
    rng = np.random.default_rng(3)
    if how == "wrong caption":  # captions with another color and another motion
        asked = [CAPTIONS[(i + 8 * (1 + i % 7) + 2 * (1 + i % 3)) % len(CAPTIONS)] for i in range(N)]
    elif how == "blurred":
        clips = gaussian_filter(clips.astype(float), (0, 0, 0.7, 0.7, 0)).round().astype(np.uint8)
    elif how == "frames shuffled":
        clips = np.stack([clip[rng.permutation(len(clip))] for clip in clips])
    elif how == "mean clip":
        clips = np.repeat(renders["reference"].mean(axis=0, keepdims=True).astype(np.uint8), N, axis=0)
    else:
        per_caption = renders["reference"].reshape(-1, len(CAPTIONS), *clips.shape[1:]).mean(axis=0)
        clips = np.tile(per_caption.astype(np.uint8), (N // len(CAPTIONS), 1, 1, 1, 1))
    return clips, asked


@pytest.fixture(scope="module")
def clean(renders):
    return measure(renders["heldout"][:N], ASKED, renders["reference"])


@slow
def test_renders_score_at_the_noise_floor(renders, clean):
    one, other = measure(renders["train"], ASKED, renders["reference"]), clean
    few = measure(renders["train"][:64], ASKED[:64], renders["reference"])
    assert few == measure(renders["train"][:64], ASKED[:64], renders["reference"]), "measures are reproducible"
    assert all(one[key].standard_error < few[key].standard_error for key in one), "errors shrink"
    assert list(one) == list(MEASURES)
    for key in one:
        assert abs(one[key].worse_by(other[key])) < 3, key
        if key.startswith("distance/"):
            # a Wasserstein distance of two samples of one distribution is small, not 0
            assert 0 < one[key].value < 0.1 and 0 < one[key].standard_error < 0.05, key
        else:
            assert one[key].value >= 0.98 and 0 < one[key].standard_error < 0.02, key


@slow
@pytest.mark.parametrize("how", CATCHES)
def test_corrupted_clips_score_worse(renders, clean, how):
    found = measure(*corrupt(renders, how), renders["reference"])
    for key in CATCHES[how]:
        assert found[key].worse_by(clean[key]) > 5, (key, found[key], clean[key])


def test_detector_reads_renders_even_when_noisy(renders):
    asked = [caption_parts(caption) for caption in ASKED]
    for noise, share in ((0.0, 0.99), (0.1, 0.97)):
        clips = renders["heldout"][:N].astype(float)
        clips = (clips + np.random.default_rng(1).normal(0, noise * 255, clips.shape)).clip(0, 255).astype(np.uint8)
        found = detect(clips)
        assert np.mean([a[0] == f[0] for a, f in zip(asked, found, strict=True)]) >= share, f"colors, noise {noise}"
        assert np.mean([a[2] == f[1] for a, f in zip(asked, found, strict=True)]) >= share, f"motions, noise {noise}"


def test_detector_is_undecided_rather_than_wrong(renders):
    for how in ("blurred", "mean clip", "caption's mean clip"):
        clips, _ = corrupt(renders, how)
        assert np.mean([f == (None, None) for f in detect(clips)]) > 0.95, how
    black = np.full((3, 6, 16, 16, 3), 26, dtype=np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, black.shape, dtype=np.uint8)
    two = np.maximum(renders["train"][:1], renders["train"][:1, :, ::-1, ::-1])  # scattered over the frame
    grey = np.where(renders["train"][14:15] > 100, 140, renders["train"][14:15])
    for clips in (black, noise, two, grey):
        assert all(found == (None, None) for found in detect(clips))


def test_detector_tells_motion_from_another_order_of_frames(renders):
    growing = [i for i in range(N) if caption_parts(ASKED[i])[2] == "growing"]
    clips = renders["train"][growing]
    assert {motion for _, motion in detect(clips[:, ::-1])} == {"shrinking"}
    assert {motion for _, motion in detect(clips[:, [0, 3, 1, 4, 2, 5]])} == {None}
    still = np.repeat(clips[:, 3:4], 6, axis=1)
    assert {motion for _, motion in detect(still)} == {None}
    assert set(MOTIONS) == {motion for _, motion in detect(renders["train"]) if motion is not None}


def test_features_of_known_shapes():
    clips = np.full((2, 6, 16, 16, 3), 26, dtype=np.uint8)
    for t in range(6):
        clips[0, t, 4:8, 2 + t : 6 + t] = (255, 26, 26)  # a square of 4 x 4 pixels, one pixel a frame
    assert np.allclose(coverage(clips)[0].sum(axis=(1, 2)), 16, atol=0.6)  # 26 is not quite the background
    found = features(clips)
    assert np.allclose(found["area"][0], 16 / 256) and np.allclose(found["displacement"][0], 1 / 16)
    assert np.allclose(found["edge_sharpness"][0], 1, atol=0.01) and (0.7 < found["compactness"][0]).all()
    assert all((values[1] == 0).all() for values in found.values())  # an empty clip does not drop out


def test_worse_by_is_signed_and_in_standard_errors():
    for higher in (True, False):
        large, small = Measure(0.9, 0.03, higher), Measure(0.5, 0.04, higher)
        assert small.worse_by(large) == pytest.approx(8 if higher else -8)
        assert large.worse_by(small) == pytest.approx(-8 if higher else 8)
    assert Measure(1, 0, False).worse_by(Measure(0, 0, False)) == np.inf
    assert Measure(1, 0, False).worse_by(Measure(1, 0, False)) == 0


def test_an_unknown_caption_is_refused(renders):
    with pytest.raises(UserError):
        measure(renders["train"][:4], ["a purple circle growing"] * 4, renders["reference"])


@slow
def test_measures_of_sound_tell_what_follows_the_picture():
    """Renders are the floor; sound that is shuffled, silent, late or early is measured as that."""
    data = moving_shapes("assets/quickstart_teacher", sound=True).heldout()
    items = [data[i] for i in range(64)]
    sample = sample_of(default_collate(items), dict.fromkeys(data.latent_shapes, 1.0))
    clips, (waves, rate) = data.decode(sample).numpy(), data.decode_sound(sample)
    waves, captions = waves.numpy(), [item["caption"] for item in items]

    def shifted(frames):
        return np.roll(np.pad(waves, ((0, 0), (0, 0), (rate, rate))), round(frames * rate / 8), -1)[..., rate:-rate]

    def values(sounds):
        measured = measure_sound(clips, captions, sounds)
        assert [m.higher_is_better for m in measured.values()] == [True, False, False]
        return [m.value for m in measured.values()]

    floor = values(waves)
    assert floor[0] > 0.97 and floor[1] == 0 and floor[2] < 0.03
    mixed = values(waves[np.random.default_rng(0).permutation(64)])
    assert abs(mixed[0]) < 0.3 and mixed[1] > 0.5 and mixed[2] > 0.5
    assert values(0 * waves) == [0, MOST_LATE, MOST_LATE]
    for frames in (1, -0.5):
        correlation, *late = values(shifted(frames))
        assert correlation < floor[0] and all(abs(value - abs(frames)) < 0.06 for value in late), late
    heights, told = geometry_of(clips).centre[..., 1] / 16, heard(shifted(1), 6)
    falls = [i for i, caption in enumerate(captions) if caption.endswith("falling")]
    assert all(abs(late_by_pitch(heights[i], told[i]) - 1) < 0.1 for i in falls), "late is positive"
    assert data.measure(clips[:8], captions[:8], waves[:8]).keys() == {
        *MEASURES, "pitch_correlation", "lateness/loudness", "lateness/pitch",
    }  # fmt: skip
