"""A faulty table is refused for its fault, also where the run directory holds a checkpoint of other data."""

import pytest

from tests.tiny_pipeline import build_tiny_pipeline
from train import main


@pytest.mark.slow
def test_the_tables_fault_is_named(tmp_path, capsys):
    run_dir, table = f"run_dir={tmp_path}/run", tmp_path / "prompts.csv"
    quick = ("experiment=quickstart", "device=cpu", "mesh.cp=1", "batch_size=2", "steps=1", run_dir)
    assert main([*quick, "sample.at_end=false", "export.at_end=false"]) == 0
    build_tiny_pipeline(tmp_path / "pipeline")
    table.write_text('caption\n"a bird\n')
    capsys.readouterr()
    for more in ("dry_run=true", "dry_run=false"):
        roles = [f"{role}.checkpoint={tmp_path}/pipeline" for role in ("teacher", "student", "fake")]
        words = ("data=captions", f"data.path={table}", f"data.encoders={tmp_path}/pipeline", "sample.report_clips=0")
        assert main([*quick, *words, *roles, more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(table) in line and "checkpoint.resume" not in line
    table.write_text("caption\na bird\n")
    assert main([*quick, *words, *roles, "dry_run=true"]) == 2
    assert "checkpoint.resume" in capsys.readouterr().err
