"""Three ranks write one encoded set together, as one process writes it, killed or not."""

import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from distill.data import shares
from distill.data.encoders.wan import TextEncoder, VideoCodec
from distill.data.sets import encode as encoding
from fsdp_cp.errors import UserError
from tests.encoded import encode_source
from tests.pools import run_ranks
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

WORLD = 3
GOOD = 7  # three more clips are left out
pytestmark = pytest.mark.slow


def _count_encodes() -> dict[str, int]:
    """Count the calls of the real encoders in this process."""
    counts = {"clips": 0, "captions": 0}
    for encoder, what in ((VideoCodec, "clips"), (TextEncoder, "captions")):

        def encode(self, argument, inner=encoder.encode, what=what):
            counts[what] += 1
            return inner(self, argument)

        encoder.encode = encode
    return counts


def _outcome(build) -> dict[str, str]:
    try:
        build()
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": "none", "message": ""}


def _worker(root: Path) -> dict:
    rank = dist.get_rank()
    os.environ["GROUP_RANK"] = str(rank // 2)  # two nodes
    shares._ROUND = 2  # so that ten clips take two rounds
    report = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("distill").addHandler(handler)
    counts, loads = _count_encodes(), []
    load = TextEncoder.__init__
    TextEncoder.__init__ = lambda self, *arguments, **options: loads.append(load(self, *arguments, **options))

    build = partial(encode_source, path=root / "videos", encoders=root / "tiny")
    data = build()
    report["first"], report["text_encoders"] = dict(counts), len(loads)
    report["log"] = list(lines)
    report["fingerprint"], report["items"] = data.fingerprint, list(data.captions())
    report["latents"] = [float(data[i]["latents"].double().sum()) for i in range(len(data))]
    again = build()
    report["second"] = {what: counts[what] - report["first"][what] for what in counts}
    assert again.fingerprint == data.fingerprint

    # One rank fails in the middle of its share, or sees other files: every rank must hear of it.
    read_clip = encoding.read_clip
    if rank == 1:
        encoding.read_clip = lambda *arguments: 1 / 0
    report["crash"] = _outcome(lambda: build(fps=4, num_frames=5))
    encoding.read_clip = read_clip
    report["mine_missing"] = _outcome(lambda: build(encoders=root / "nowhere") if rank == 2 else build())
    report["other_cache"] = _outcome(lambda: build(cache=root / f"cache_{rank}"))
    report["other_table"] = _outcome(lambda: build(path=root / ("other" if rank == 0 else "videos")))
    report["other_encoders"] = _outcome(lambda: build(encoders=root / ("tiny_2" if rank == 0 else "tiny")))
    return report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    build_tiny_pipeline(root / "tiny", seed=1)
    shutil.copytree(root / "tiny", root / "tiny_2")
    (root / "tiny_2" / "vae" / "more.json").write_text("{}")
    render_clips(root / "videos", GOOD, broken=True, short=True, missing=True)
    render_clips(root / "other", 2)
    return root, run_ranks(WORLD, _worker, root, timeout=180.0)


def test_the_ranks_share_the_work_and_agree(run):
    _, reports = run
    # Good rows with a file are 2 to 8: rank 0 has 2, rank 1 has 3 to 5, rank 2 has 6 to 8.
    assert [report["first"]["clips"] for report in reports] == [1, 3, 3]
    # Seven clips share six captions; with the negative prompt seven texts. Ranks 0 and 1 are on one node, which has
    # one text encoder in its memory; rank 2 is on another.
    assert [report["first"]["captions"] for report in reports] == [3, 0, 4]
    assert [report["text_encoders"] for report in reports] == [1, 0, 1]
    assert [report["second"] for report in reports] == [{"clips": 0, "captions": 0}] * WORLD
    assert len(reports[0]["latents"]) == GOOD
    for report in reports[1:]:
        for what in ("fingerprint", "items", "latents"):
            assert report[what] == reports[0][what]
    log = "\n".join(reports[0]["log"])
    assert all(log.count(name) == 1 for name in ("broken.mp4", "short.mp4", "missing.mp4")), "what is left out"
    assert not reports[1]["log"] and not reports[2]["log"]


def test_one_process_reads_and_writes_the_same(run, tmp_path, monkeypatch):
    root, reports = run
    build = partial(encode_source, root / "videos", root / "tiny")
    data = build(cache=tmp_path)
    assert data.fingerprint == reports[0]["fingerprint"]
    for file in data.set.path.iterdir():
        if file.name != ".lock":
            assert file.read_bytes() == (root / "cache" / data.set.path.name / file.name).read_bytes(), file.name
    sums = [float(data[i]["latents"].double().sum()) for i in range(GOOD)]
    assert sums == reports[0]["latents"]
    assert len({round(value, 4) for value in sums}) == GOOD  # the sums tell the clips apart
    for encoder in (VideoCodec, TextEncoder):
        monkeypatch.setattr(encoder, "encode", lambda *arguments: pytest.fail("encoded again"))
    assert build().fingerprint == reports[0]["fingerprint"]


def test_a_failure_on_one_rank_is_told_on_all(run):
    _, reports = run
    assert [report["crash"]["type"] for report in reports] == ["RuntimeError", "ZeroDivisionError", "RuntimeError"]
    assert all("rank 1" in reports[rank]["crash"]["message"] for rank in (0, 2))
    for case, named in (
        ("mine_missing", "data.encoders"),
        ("other_cache", "cache"),
        ("other_table", ""),
        ("other_encoders", ""),
    ):
        for report in reports:
            outcome = report[case]
            assert outcome["type"] == UserError.__name__ and named in outcome["message"], (case, outcome)
            assert "\n" not in outcome["message"]
