"""Generated damage to tables, clips, encoders and caches, as a user's run reads them.

Each example must give what it would have given, or one line (``UserError``): no other exception, no hang, and no change
outside the folder that the command writes. The examples are the same in every run.
"""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec
from distill.data.videos.decode import ClipError, ClipFormat, read_clip
from distill.data.videos.table import read_captions
from distill.data.videos.video_folder import read_metadata
from tests.tiny_pipeline import render_clips
from tests.unit.damage import BYTES, CHANGES, changed_json, damaged, examples, refusal, snapshot

CPU = torch.device("cpu")
CLIP = ClipFormat(num_frames=5, height=32, width=48, fps=8)
SIZES = {"num_frames": 5, "height": 32, "width": 48, "fps": 8.0, "max_text_tokens": 24}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return render_clips(tmp_path_factory.mktemp("videos"), 2)


# ---------------------------------------------------------------- tables of captions


CAPTIONS = st.sampled_from(["a red square", "a green square, drifting", "two\nlines", 'said "no"', " "])
NAMES = st.sampled_from(["clip_0.mp4", "clip_1.mp4", "nowhere.mp4", "./clip_1.mp4"])
WHOLE = st.builds(
    lambda rows: "".join(
        f'{name},"{caption}"\n'
        for name, caption in [("file_name", "caption"), *((a, b.replace('"', '""')) for a, b in rows)]
    ).encode(),
    st.lists(st.tuples(NAMES, CAPTIONS), min_size=1, max_size=4),
)


def test_tables_are_read_or_refused(tmp_path):
    def captions(path):
        assert all(caption.strip() for caption in read_captions(path))

    @examples(80)
    @given(table=WHOLE, steps=st.none() | BYTES, encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    def run(table, steps, encoding):
        table = table.decode().encode(encoding)
        for name in ("metadata.csv", "a.csv", "a.txt"):
            (tmp_path / name).write_bytes(table if steps is None else damaged(table, steps))
        refusal(lambda: read_metadata(tmp_path))
        refusal(lambda: captions(tmp_path / "a.csv"))
        refusal(lambda: captions(tmp_path / "a.txt"))

    run()


# ---------------------------------------------------------------- clips


def test_clips_are_read_or_refused(tmp_path, videos):
    whole, file = (videos / "clip_0.mp4").read_bytes(), tmp_path / "a.mp4"
    tail = len(whole) - whole.rindex(b"moov")  # the index, where damage does most, lies last
    refused = []

    @examples(60)
    @given(steps=BYTES, index=st.booleans())
    def run(steps, index):
        cut = len(whole) - tail if index else 0
        file.write_bytes(whole[:cut] + damaged(whole[cut:], steps))
        try:
            clip = read_clip(file, CLIP)
        except ClipError as error:
            assert str(error) and "\n" not in str(error)
            refused.append(str(error))
        else:
            assert clip.shape == (3, 5, 32, 48) and clip.isfinite().all() and clip.abs().max() <= 1

    run()
    assert len(set(refused)) > 3


# ---------------------------------------------------------------- encoders


@pytest.mark.slow
def test_encoders_are_loaded_or_refused(tmp_path, tiny, around):
    folder, before = tmp_path / "pipeline", snapshot(around, tiny)
    parts = ("vae", "text_encoder", "tokenizer")
    files = sorted(str(p.relative_to(tiny)) for part in parts for p in (tiny / part).iterdir())

    def load():
        found = choose_encoders(folder)
        assert min(found.latent_shape(CLIP)) >= 1
        options = {"device": CPU, "dtype": torch.float32}
        VideoCodec(found, **options)
        text = TextEncoder(found, max_tokens=8, **options).encode("a red square")
        assert text.ndim == 2 and text.shape[1] == found.text_width

    @examples(30)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny, folder)
        file = folder / name
        if text and name.endswith(".json"):
            file.write_text(changed_json(file.read_text(), changes))
        else:
            file.write_bytes(damaged(file.read_bytes(), steps, head=1000))
        inside = snapshot(folder)
        refusal(load)
        assert snapshot(folder) == inside and snapshot(around, tiny) == before

    run()
