"""Sampling of the clips that are stored with the quickstart's teacher: ``python -m benchmarks.teacher_clips``.

Samples the teacher as the quickstart's report does and writes ``assets/quickstart_teacher/clips_50steps.safetensors``.
Run it again after a change of the teacher, its guidance or its sampler. Until then, reports sample the teacher.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import diffusers
import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.steps import open_trainer
from distill.evaluate.evaluator import SAMPLE_SEED
from distill.evaluate.sampling import decode, sample_captions
from distill.evaluate.stored_clips import definition, stored_file
from fsdp_cp.launch import process_group


def main(argv: list[str] | None = None) -> int:
    """Write the file, and return exit code 0."""
    argparse.ArgumentParser(prog="python -m benchmarks.teacher_clips", description=__doc__.splitlines()[0]).parse_args(
        argv
    )
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        trainer = open_trainer(["experiment=quickstart", "mesh.cp=1", f"run_dir={folder}"], device)
        config, data, steps = trainer.config, trainer.data, max(trainer.config.sample.teacher_steps)
        captions = sample_captions(data, config.sample.report_clips)
        options = {"steps": steps, "captions": captions, "seed": SAMPLE_SEED}
        latents = trainer.evaluator.generate("teacher", captions, steps=steps, seed=SAMPLE_SEED, batch=32)
        file = stored_file(config, steps)
        made_with = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
        about = definition(config, data, **options) | {"made with": made_with}
        save_file({"clips": np.ascontiguousarray(decode(data, latents).frames)}, file, about)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
