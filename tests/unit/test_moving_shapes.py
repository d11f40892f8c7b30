"""The rendered data set: contents of an item, choice of the item, and reports of mistakes."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from distill.data.encoders.words import COLORS, MOTIONS, PAD, SHAPES, WordTable
from distill.data.shape_measures import coverage, detect
from distill.data.shape_scenes import BACKGROUND, CAPTIONS, RGB, UNCOLORED_CAPTIONS, caption_parts, draw_scene, render
from models.sample import AUDIO, VIDEO, Sample
from tests.oracles.clips import moving_shapes
from tests.oracles.samples import video
from tests.unit.refused import refused

SHIPPED = Path(__file__).parents[2] / "assets" / "quickstart_teacher"


@pytest.fixture
def encoders() -> Path:
    return SHIPPED


def texts(data, captions):
    return data.condition(captions).tensors["text"]


def test_interface(encoders):
    data = moving_shapes(encoders, num_clips=200)
    assert len(data) == 200 and data.fps == 8.0
    assert data.latent_shapes == {"video": (3, 6, 16, 16)} and data.condition_shapes == {"text": (4, 32)}
    item = data[7]
    assert item["latents"].shape == (3, 6, 16, 16) and item["latents"].dtype == torch.float32
    assert item["text"].shape == data.condition_shapes["text"] and item["text"].dtype == torch.float32
    assert item["caption"] == data.captions()[7] == CAPTIONS[7]
    assert data.null["text"].shape == data.empty["text"].shape == data.condition_shapes["text"]
    assert -1 <= item["latents"].min() < item["latents"].max() <= 1
    with pytest.raises(IndexError):
        data[200]


def test_captions_are_balanced(encoders):
    data = moving_shapes(encoders, num_clips=128)
    captions = data.captions()
    assert len(captions) == len(set(captions)) == 64
    assert len(COLORS) >= 6 and len(MOTIONS) >= 4 and set(RGB) == set(COLORS)
    parts = [caption_parts(caption) for caption in captions]
    assert Counter(parts) == Counter((c, s, m) for c in COLORS for s in SHAPES for m in MOTIONS)
    assert set(Counter(data[i]["caption"] for i in range(128)).values()) == {2}


def test_item_is_a_function_of_seed_split_and_index(encoders):
    one, again = moving_shapes(encoders), moving_shapes(encoders)
    backward = [again[i]["latents"] for i in reversed(range(64))][::-1]
    assert all(torch.equal(one[i]["latents"], backward[i]) for i in range(64))
    for other in (moving_shapes(encoders).heldout(), moving_shapes(encoders, seed=1)):
        assert other.fingerprint != one.fingerprint
        assert not any(torch.equal(one[i]["latents"], other[i]["latents"]) for i in range(64))
    assert one.fingerprint == again.fingerprint
    assert not torch.equal(one[3]["latents"], one[3 + 64]["latents"])  # same caption, another clip


def test_fingerprint_covers_every_setting(encoders):
    changes = ({}, {"num_frames": 8}, {"height": 24}, {"num_clips": 99}, {"negative_prompt": "a"})
    assert len({moving_shapes(encoders, **change).fingerprint for change in changes}) == len(changes)


@pytest.mark.parametrize("size", [(6, 16, 16), (8, 16, 24)])
def test_shapes_stay_inside_and_fill_their_area(size):
    frames, height, width = size
    for i, caption in enumerate(CAPTIONS):
        scene = draw_scene(caption, np.random.default_rng(i), num_frames=frames, height=height, width=width)
        clip = render(scene, height=height, width=width)
        assert clip.shape == (3, *size) and clip.dtype == np.float32
        color = np.array(RGB[scene.color])
        channel = int(color.argmax())
        covered = ((clip[channel] - BACKGROUND) / (1 - BACKGROUND)).sum(axis=(1, 2))
        expected = np.pi * scene.radii**2 * scene.visible  # fails if a part of the shape is cut off by the frame
        assert np.allclose(covered, expected, rtol=0.05, atol=0.1), caption
        assert scene.visible.all() == (scene.motion != "blinking") and scene.visible.any()


def test_motions_move_as_told():
    def scene(motion, seed):
        rng = np.random.default_rng(seed)
        return draw_scene(f"a red circle {motion}", rng, num_frames=6, height=16, width=16)

    for seed in range(50):
        assert (np.diff(scene("growing", seed).radii) > 0.3).all()
        assert (np.diff(scene("shrinking", seed).radii) < -0.3).all()
        step = np.diff(scene("falling", seed).centres, axis=0)
        assert (step[:, 1] > 1.2).all() and np.allclose(step, step[0]) and (step[:, 0] == 0).all()
        for motion in ("growing", "shrinking", "blinking"):
            assert np.ptp(scene(motion, seed).centres, axis=0).max() == 0
        visible = scene("blinking", seed).visible
        assert visible.tolist() == [True, True, False, False, True, True]


SHARES = [0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03]


@pytest.mark.slow
def test_colors_that_captions_leave_open_have_the_given_shares(encoders):
    data = moving_shapes(encoders, color_shares=SHARES)
    assert data.captions() == list(UNCOLORED_CAPTIONS) and len(data.captions()) == 8
    for split in (data, data.heldout()):
        clips = split.clips(1500)
        colors = [color for color, _ in detect(clips.numpy())]
        assert None not in colors, "the detector knows every render"
        counts = [colors.count(color) for color in COLORS]
        assert stats.chisquare(counts, [share * len(clips) for share in SHARES]).pvalue > 1e-3
    item = data[11]
    assert item["caption"] == UNCOLORED_CAPTIONS[3] and torch.equal(item["text"], texts(data, [item["caption"]])[0])
    assert torch.equal(item["text"][3], WordTable(encoders).vectors[0]), "three words and a pad"
    others = (moving_shapes(encoders), moving_shapes(encoders, color_shares=[0.125] * 8))
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 3


def test_decode_inverts_the_scaling(encoders):
    data = moving_shapes(encoders)
    latents = video(torch.stack([data[i]["latents"] for i in range(4)]))
    clips = data.decode(latents)
    assert clips.shape == (4, 6, 16, 16, 3) and clips.dtype == torch.uint8
    assert torch.equal(clips, data.clips(4))
    assert (clips.permute(0, 4, 1, 2, 3) / 127.5 - 1 - latents.video).abs().max() < 1 / 255 + 1e-6
    assert torch.equal(data.decode(latents * 3), data.decode((latents * 3).map(lambda part: part.clamp(-1, 1))))


def test_wrong_settings_are_named(encoders):
    for named, value in (
        ("num_frames", 5),
        ("height", 8),
        ("fps", 0),
        ("num_clips", 10),
        ("negative_prompt", "blurry"),
        ("negative_prompt", "a red a red a"),
        ("color_shares", [0.5, 0.5]),
        ("color_shares", [0.1] * 8),
        ("color_shares", [1.5, -0.5, *[0.0] * 6]),
    ):
        with refused(named):
            moving_shapes(encoders, **{named: value})


def test_word_table_embeds(encoders):
    data = moving_shapes(encoders)
    table = WordTable(encoders)
    red, empty = texts(data, ["a red circle growing", ""])
    assert torch.equal(red[1], table.vectors[table.words.index("red")])
    assert torch.equal(empty, table.vectors[:1].expand(4, -1)) and torch.equal(empty, data.null["text"])
    assert torch.equal(texts(data, data.captions())[5], data[5]["text"])
    assert len({tuple(rows.flatten().tolist()) for rows in texts(data, data.captions())}) == 64
    with refused("purple"):
        data.condition(["a purple circle growing"])


def test_broken_word_tables_are_user_errors(tmp_path):
    with refused("words.safetensors"):
        moving_shapes(tmp_path)
    path = tmp_path / "words.safetensors"
    path.write_bytes(b"not safetensors")
    for vocabulary in (None, {}, {"vocabulary": json.dumps([PAD, "a", "b"])}, {"vocabulary": json.dumps(["a", "b"])}):
        if vocabulary is not None:
            save_file({"vectors": torch.zeros(2, 4)}, str(path), metadata=vocabulary)
        with refused(path.name):
            WordTable(tmp_path)


def test_the_tone_is_as_high_as_the_shape_and_as_loud_as_it_is_large(encoders):
    """The waveform of rendered sound, read by zero crossings, follows the picture; a blinked-off shape is silent."""
    data, silent = moving_shapes(encoders, sound=True), moving_shapes(encoders)
    assert data.fingerprint != silent.fingerprint
    heights, tones = [], []
    for i in range(48):
        item = data[i]
        sample = Sample({VIDEO: item["latents"][None], AUDIO: item["latents/audio"][None]})
        (wave,), rate = data.decode_sound(sample)
        assert wave.shape == (1, round(6 / 8 * rate)) and wave.abs().max() <= 1
        alpha = coverage(data.decode(sample).numpy())[0]
        area = alpha.sum((1, 2))
        for frame in range(6):
            middle = wave[0, round((frame + 0.4) * rate / 8) : round((frame + 0.6) * rate / 8)]
            loud = middle.square().mean().sqrt()
            assert (loud > 0.02) == (area[frame] > 4)
            if area[frame] > 4:
                crossings = (middle[1:] * middle[:-1] < 0).sum().item()
                tones.append(np.log2(crossings * rate / (2 * len(middle))))
                heights.append(-(alpha[frame].sum(1) * np.arange(16)).sum() / area[frame])
    assert np.corrcoef(heights, tones)[0, 1] > 0.97
    assert {name: tuple(x.shape) for name, x in item.items() if name in data.condition_shapes} == data.condition_shapes
    assert torch.equal(item["text"], silent[47]["text"]), "the caption is the same"
