"""MiniMax-H3 with keyframes or references from a table to an evaluation and to diffusers, from another folder."""

import json

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from PIL import Image

from distill.data.videos.references import with_files
from distill.encode import main as encode
from distill.evaluate.command import main as evaluate
from distill.sample import main as sample
from tests.e2e.families import weights
from tests.e2e.launch import forked, losses, train_killed
from tests.e2e.test_families import MINIMAX_H3
from tests.noisy_media import write_clip, write_sound
from tests.tiny_minimax_h3_pipeline import build_tiny_minimax_h3_pipeline

pytestmark = pytest.mark.slow
CAPTIONS = ("a red square", "a red square", "a blue square")
REFERENCES = ["--references", "image,clip,sound", "--reference-image-edge", "64", "--reference-video-edge", "32"]
KINDS = {"both": ["--image", "both"], "references": REFERENCES}
SIZES = {"height": 32, "width": 32, "fps": 24, "num_frames": 124, "max_text_tokens": 160}


def _table(folder, kind):
    """Write three rows of a first and a last image, or of references, two of which have one caption; return the table
    and the values of ``--image`` of two rows."""
    folder.mkdir()
    images = [folder / f"{i}.png" for i in range(3)]
    for i, file in enumerate(images):
        levels = torch.randint(256, (5, 7, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(levels.numpy()).resize((50 + 20 * i, 60), Image.Resampling.BILINEAR).save(file)
    table = folder / "table.csv"
    if kind == "both":
        rows = [f"{i}.png,{(i + 1) % 3}.png,{caption}" for i, caption in enumerate(CAPTIONS)]
        table.write_text("\n".join(["image,last_image,caption", *rows]))
        return table, [[str(file) for file in images[:2]], [str(file) for file in images[1::-1]]]
    write_clip(folder / "a.mkv", 30, (50, 40), sound=0.1 * torch.randn(2, 9000))
    write_sound(folder / "b.wav", 0.1 * torch.randn(2, 5000))
    given = ["image:0.png", "clip:a.mkv;image:1.png;sound:b.wav", "sound:b.wav;image:2.png"]
    rows = [f"{references},{caption}" for references, caption in zip(given, CAPTIONS, strict=True)]
    table.write_text("\n".join(["references,caption", *rows]))
    return table, [[with_files(text, lambda file: str(folder / file))] for text in given[:2]]


@pytest.mark.parametrize("kind", ["both", "references"])
def test_from_a_table_of_images_to_diffusers(tmp_path, monkeypatch, kind):
    pipeline = build_tiny_minimax_h3_pipeline(tmp_path / "pipeline")
    table, images = _table(tmp_path / "images", kind)
    monkeypatch.chdir(tmp_path)
    options = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [str(table), "set", "--encoders", str(pipeline), *KINDS[kind], "--device", "cpu", *options]
    assert encode(words) == 0
    settings = [word for word in MINIMAX_H3.words(pipeline, tmp_path) if not word.startswith(("data", "sample.cap"))]
    settings += ["data=encoded", f"data.path={tmp_path / 'set'}", "adapters=lora", "steps=4", "checkpoint.every=1"]
    settings += ["student.lora.rank=4", "fake.lora.rank=4"]
    if kind == "references":
        (pipeline / "transformer").rename(pipeline / "transformer_ref")
        folder = pipeline / "transformer_ref"
        settings = [word for word in settings if ".checkpoint=" not in word]
        settings += [f"{role}.checkpoint={folder}" for role in ("teacher", "student", "fake")]
    settings += ["sample.at_end=false", "device=cpu", "log.every=1"]

    def start(name):
        return forked(2, "train", *settings, f"run_dir={tmp_path / name}", cwd=tmp_path)

    train_killed(2, tmp_path / "killed", 1, *settings, cwd=tmp_path)
    for name in ("killed", "whole"):
        done = start(name).wait(300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 4

    for out, files in zip(("sampled", "turned"), images, strict=True):
        chosen = [word for file in files for word in ("--image", file)]
        assert sample(["killed", "--caption", "my own", *chosen, "--steps", "2", "--out", out, "--device", "cpu"]) == 0
    frames = [(tmp_path / out / "0.mp4").read_bytes() for out in ("sampled", "turned")]
    assert frames[0] != frames[1], "first and last frame, or references, differ"
    words = ["killed@2", "--prompts", str(table), "--seeds", "1", "--out", "evaluation", "--device", "cpu"]
    assert evaluate(words) == 0
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert (
        found["captions"] == list(CAPTIONS)
        and len(found["images"]) == (6 if kind == "both" else 3)
        and len(set(found["prompts"])) == 3
    )

    network = MiniMaxH3Transformer3DModel.from_pretrained(next(pipeline.glob("transformer*")))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.load_lora_adapter(weights(tmp_path / "killed" / "export" / "student_lora"), prefix="transformer")
    assert len(network.state_dict()) > len(before), "diffusers loads the adapters"
