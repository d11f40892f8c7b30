"""From another project's data set to a trained student."""

import importlib.util

import pytest
from diffusers import WanTransformer3DModel

from distill.data.sets.encoded_set import EncodedSet
from tests.e2e.launch import forked, losses, train
from tests.oracles import outside_sets
from tests.tiny_pipeline import build_tiny_pipeline

FORMATS = (
    ("fastvideo", {}), ("rcm", {"merged": True}), ("lightx2v", {"ranks": 2}), ("lightx2v", {"text_only": True}),
    ("webdataset", {}),
)  # fmt: skip
"""Formats whose sets differ; those of the lists equal our own command's, byte by byte."""
SIZES = ("--num-frames", "9", "--height", "32", "--width", "48")


@pytest.mark.slow
def test_data_sets_of_other_projects_become_sets_that_a_student_trains_on(tmp_path):
    """Two ranks encode, and one trains: on latents and on captions alone, since all sets have our own format."""
    pipeline = build_tiny_pipeline(tmp_path / "pipeline")
    clips = outside_sets.encoded_clips(pipeline, tmp_path / "clips", 4)
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    roles = (f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake"))
    words = (
        "experiment=quickstart", "batch_size=2", "steps=1", "log.every=1", "sample.at_end=false",
        "method.fake_updates_per_student_update=1", "method.gan_weight_student=0", "sample.report_clips=0",
        "data=encoded", "mesh.cp=1", *roles,
    )  # fmt: skip
    for number, (kind, options) in enumerate(FORMATS):
        if kind == "fastvideo" and not has_pyarrow:
            continue
        source, made, run_dir = (tmp_path / f"{name}_{number}" for name in ("source", "set", "run"))
        getattr(outside_sets, kind)(clips, source, **options)
        sizes = SIZES if kind == "webdataset" or "text_only" in options else ()
        command = (str(source), str(made), "--encoders", str(pipeline), "--device", "cpu", "--fps", "8", *sizes)
        done = forked(2, "distill.encode", *command).wait()
        assert done.returncode == 0, (kind, done)
        if kind not in ("rcm", "fastvideo") and "text_only" not in options:
            encoded = EncodedSet(made, kind)
            assert [encoded.clip(i)["latents"].shape for i in range(len(encoded))] == 4 * [(16, 3, 4, 6)]
            continue
        train(0, *words, f"data.path={made}", f"run_dir={run_dir}")
        assert [line["step"] for line in losses(run_dir)] == [1], kind
        WanTransformer3DModel.from_pretrained(run_dir / "export" / "student")
