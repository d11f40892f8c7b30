"""The teacher's clips that are stored with it: they equal the report's, and are used only for the same settings."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from benchmarks.steps import open_trainer
from distill.config import compose_config
from distill.evaluate.evaluator import SAMPLE_SEED
from distill.evaluate.sampling import decode, sample_captions, sampling_batch
from distill.evaluate.stored_clips import read_clips
from fsdp_cp.launch import process_group
from tests.tiers import parametrize, slow

ASSET = Path(__file__).parents[2] / "assets" / "quickstart_teacher"
CPU = torch.device("cpu")
CLIPS = 3


def stored(*words, first=CLIPS, seed=SAMPLE_SEED, steps=50, skip=0):
    config = compose_config(["experiment=quickstart", "mesh.cp=1", *words])
    data = config.data.build(seed=7, device=CPU, run_dir=None)
    captions = sample_captions(data, first + skip)[skip:]
    found = read_clips(config, data, steps=steps, captions=captions, seed=seed)
    return None if found is None else found[0]


@slow
def test_stored_clips_are_what_the_teacher_makes():
    with process_group(CPU):
        trainer = open_trainer(["experiment=quickstart", "mesh.cp=1"], CPU)
        assert sampling_batch(trainer.method.roles.values(), trainer.data.latent_shapes, trainer.mesh, CPU) > 1
        captions = sample_captions(trainer.data, CLIPS)
        latents = trainer.evaluator.generate("teacher", captions, steps=50, seed=SAMPLE_SEED, batch=CLIPS)
        made = decode(trainer.data, latents).frames.astype(int)
    assert np.abs(stored() - made).max() <= 1, "rounded to 256 levels"
    assert len(stored(first=compose_config([]).sample.report_clips)) == 256, "as many as the report wants"


@parametrize(
    "other",
    [
        {"words": ["method.guidance_scale=1.5"]},
        {"words": ["method.shift=2.0"]},
        {"words": ["method.teacher_sampler=unipc"]},
        {"words": ["data.negative_prompt=blue"]},
        {"words": ["data.num_frames=7"]},
        {"words": ["teacher.precision=bf16"]},
        {"seed": SAMPLE_SEED + 1},
        {"steps": 4},
        {"first": 257},
        {"skip": 1},
    ],
    ids=json.dumps,
    quick=5,
)
def test_what_defines_the_clips_must_agree(other):
    assert stored(*other.pop("words", []), **other) is None


def test_other_weights_or_a_damaged_file_are_sampled(tmp_path):
    shutil.copytree(ASSET, tmp_path / "teacher")
    word = f"teacher.checkpoint={tmp_path / 'teacher'}"
    assert stored(word) is not None
    weights = next((tmp_path / "teacher" / "transformer").glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert stored(word) is None
    (tmp_path / "teacher" / "clips_50steps.safetensors").write_bytes(b"nothing")
    assert stored(word) is None
