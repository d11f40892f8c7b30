"""Captions as a data set: embeddings of the text encoder, and distillation from captions alone."""

import json
from functools import partial

import pytest
import torch

import train
from distill.config import load_config
from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec, pad_text
from distill.data.order import Order
from distill.data.settings import CaptionsSettings
from distill.data.videos.table import read_captions
from fsdp_cp.errors import UserError
from tests.encoded import SIZES, encode_source
from tests.oracles.samples import video
from tests.tiers import slow
from tests.tiny_pipeline import render_clips

TEXTS = ["a red square", "two green squares", "a red square", "a blue one, drifting"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "captions.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture
def make(tiny, file):
    return partial(encode_source, path=file, encoders=tiny)


def test_items_are_the_captions_through_the_text_encoder(make, tiny):
    data = make(negative_prompt="blurred")
    encoder = TextEncoder(choose_encoders(tiny), max_tokens=24, device=torch.device("cpu"), dtype=torch.float32)
    assert len(data) == 4 and list(data.captions()) == [TEXTS[0], TEXTS[1], TEXTS[3]]
    assert (
        data.latent_shapes == {"video": (16, 3, 4, 6)} and data.condition_shapes == {"text": (24, 32)} and data.fps == 8
    )
    for i, text in enumerate(TEXTS):
        item = data[i]
        assert set(item) == {"text", "caption"} and item["caption"] == text
        torch.testing.assert_close(item["text"], pad_text(encoder.encode(text), 24), rtol=1e-5, atol=1e-5)
    known = data.condition(["blurred", TEXTS[1], ""])
    assert torch.equal(known.tensors["text"][:2], torch.stack([data.null["text"], data[1]["text"]]))
    assert torch.equal(known.null.tensors["text"][1], data.null["text"])
    # The caption that takes the place of a dropped one is not the negative prompt.
    torch.testing.assert_close(data.empty["text"], pad_text(encoder.encode(""), 24), rtol=1e-5, atol=1e-5)
    assert torch.equal(known.tensors["text"][2], data.empty["text"])
    assert not torch.allclose(data.empty["text"], data.null["text"]) and "" not in data.captions()
    settings = CaptionsSettings(path="captions.txt", encoders=str(tiny), num_frames=9, height=32, width=48)
    assert settings.sample_shapes() == ({"video": (16, 3, 4, 6)}, {"text": (512, 32)}), "without encoding"
    with pytest.raises(UserError, match="a cat"):
        data.condition(["a cat"])
    assert data.decode(video(torch.zeros(2, *data.latent_shapes["video"]))).shape == (2, 9, 32, 48, 3)
    data.release()


def test_embeddings_are_cached_and_shared_with_a_video_folder(make, tiny, tmp_path, monkeypatch):
    first = make()
    monkeypatch.setattr(TextEncoder, "__init__", lambda *_, **__: pytest.fail("everything is in the cache"))
    monkeypatch.setattr(VideoCodec, "__init__", lambda *_, **__: pytest.fail("nothing to decode yet"))
    again = make()
    assert again.fingerprint == first.fingerprint and torch.equal(again[3]["text"], first[3]["text"])
    monkeypatch.undo()
    videos = render_clips(tmp_path / "videos", 2)
    folder = encode_source(videos, tiny)
    assert torch.equal(folder.null["text"], first.null["text"]) and folder.latent_shapes == first.latent_shapes


@slow
def test_the_fingerprint_is_of_all_that_decides_a_step(make, file):
    prints = {make().fingerprint, make(negative_prompt="blurred").fingerprint, make(num_frames=5).fingerprint}
    file.write_text("\n".join(TEXTS[::-1]))
    assert len(prints | {make().fingerprint}) == 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\ufeffone\r\n\r\n  two \nthree"),
        ("a.CSV", '\ufefffile_name,caption\nx.mp4,one\ny.mp4," "\nz.mp4,"two"\nw.mp4,three\n'),
    ],
)
def test_reading(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert read_captions(tmp_path / name) == ["one", "two", "three"]


@slow
def test_distilling_from_captions_alone(tmp_path, tiny, file):
    words = [
        "data=captions",
        "sample.report_clips=0",
        "device=cpu",
        "mesh.cp=1",
        f"run_dir={tmp_path / 'run'}",
        f"teacher.checkpoint={tiny}",
        f"data.path={file}",
        f"data.encoders={tiny}",
        *(f"data.{key}={value}" for key, value in SIZES.items()),
        "data.buckets=[[9,32,48],[5,32,48]]",
        "steps=6",
        "batch_size=2",
        "checkpoint.every=0",
        "method.fake_updates_per_student_update=1",
        "method.step_list=[1.0,0.5]",
        "method.rollout=full",
        "sample.every=0",
        "sample.prompts=2",
        "sample.student_steps=[2]",
        "sample.teacher_steps=[]",
    ]
    assert train.main(words) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["student/loss"] > 0 and records[1]["fake/loss"] > 0
    order = Order(seed=0, buckets=(len(TEXTS),) * 2, batch_size=2)  # captions alone are in both buckets
    tokens = [2 * (18, 12)[order.place(2 * step)[0]] for step in range(6)]
    assert [record["perf/tokens"] for record in records] == tokens and {*tokens} == {36, 24}
    assert not any("data_" in key for record in records for key in record)
    assert len(list((tmp_path / "run" / "samples").glob("*.mp4"))) == 2
    config = load_config(tmp_path / "run" / "config.yaml")
    assert isinstance(config.data, CaptionsSettings) and config.data.path == str(file)
