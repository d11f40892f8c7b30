"""Three ranks (gloo, real processes) write one cache together."""

import json
import logging
import os
import shutil
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distill.data import latent_cache, shares
from distill.data.encoders import TextEncoder, VideoCodec
from distill.data.video_folder import VideoFolder
from fsdp_cp.errors import UserError
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

WORLD = 3
SIZES = {"num_frames": 9, "height": 32, "width": 48, "fps": 8, "max_text_tokens": 24}
GOOD, ALL = 7, 10  # three clips are left out


def _count_encodes() -> dict[str, int]:
    """Calls of the real encoders in this process, counted where they happen."""
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


def _worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), GROUP_RANK=str(rank // 2))
    torch.set_num_threads(1)
    shares._ROUND = 2  # so that ten clips take two rounds
    root, report = Path(folder), {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("distill").addHandler(handler)
    # A rank that waits for one that has raised must end within this, not within the default of 30 minutes.
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    counts, loads = _count_encodes(), []
    load = TextEncoder.__init__
    TextEncoder.__init__ = lambda self, *arguments, **options: loads.append(load(self, *arguments, **options))

    def build(**changes):
        options = {"path": root / "videos", "encoders": root / "tiny", "cache": root / "cache"}
        return VideoFolder(**(options | SIZES | changes))

    data = build()
    report["first"], report["text_encoders"] = dict(counts), len(loads)
    report["log"] = list(lines)
    report["fingerprint"], report["items"] = data.fingerprint, data._items
    report["latents"] = [float(data[i]["latents"].double().sum()) for i in range(len(data))]
    again = build()
    report["second"] = {what: counts[what] - report["first"][what] for what in counts}
    assert again.fingerprint == data.fingerprint

    # One rank fails in the middle of its share, or sees other files: every rank must hear of it.
    read_clip = latent_cache.read_clip
    if rank == 1:
        latent_cache.read_clip = lambda *arguments: 1 / 0
    report["crash"] = _outcome(lambda: build(fps=4, num_frames=5))
    latent_cache.read_clip = read_clip
    report["mine_missing"] = _outcome(lambda: build(encoders=root / "nowhere") if rank == 2 else build())
    report["other_cache"] = _outcome(lambda: build(cache=root / f"cache_{rank}"))
    report["other_table"] = _outcome(lambda: build(path=root / ("other" if rank == 0 else "videos")))
    report["other_encoders"] = _outcome(lambda: build(encoders=root / ("tiny_2" if rank == 0 else "tiny")))
    # The same path on every rank, but another folder behind it on one: a disc that is not shared.
    if rank == 1:
        prepare = latent_cache.LatentCache._prepare

        def elsewhere(self):
            answer = prepare(self)
            self.folder = root / "not_shared"
            prepare(self)
            return answer

        latent_cache.LatentCache._prepare = elsewhere
    report["not_shared"] = _outcome(lambda: build(height=48))
    (root / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    build_tiny_pipeline(root / "tiny", seed=1)
    shutil.copytree(root / "tiny", root / "tiny_2")
    (root / "tiny_2" / "vae" / "more.json").write_text("{}")
    render_clips(root / "videos", GOOD, broken=True, short=True, missing=True)
    render_clips(root / "other", 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_worker, args=(port, str(root)), nprocs=WORLD)
    return root, [json.loads((root / f"report_{rank}.json").read_text()) for rank in range(WORLD)]


def test_the_ranks_share_the_work(run):
    _, reports = run
    # Rows 3..9 are good: rank 0 has rows 3 6 9, rank 1 has 4 7, rank 2 has 5 8.
    assert [report["first"]["clips"] for report in reports] == [3, 2, 2]
    # Seven clips share six captions; with the negative prompt seven texts. Ranks 0 and 1 are on one node, which has
    # one text encoder in its memory; rank 2 is on another.
    assert [report["first"]["captions"] for report in reports] == [4, 0, 3]
    assert [report["text_encoders"] for report in reports] == [1, 0, 1]


def test_the_ranks_agree_on_the_items(run):
    _, reports = run
    assert len(reports[0]["items"]) == GOOD
    for report in reports[1:]:
        for what in ("fingerprint", "items", "latents"):
            assert report[what] == reports[0][what]


def test_what_three_ranks_wrote_one_process_reads(run, monkeypatch):
    root, reports = run
    for encoder in (VideoCodec, TextEncoder):
        monkeypatch.setattr(encoder, "encode", lambda *arguments: pytest.fail("encoded again"))
    data = VideoFolder(path=root / "videos", encoders=root / "tiny", cache=root / "cache", **SIZES)
    assert data.fingerprint == reports[0]["fingerprint"]


def test_three_ranks_write_what_one_process_writes(run, tmp_path):
    root, reports = run
    data = VideoFolder(path=root / "videos", encoders=root / "tiny", cache=tmp_path, **SIZES)
    assert data.fingerprint == reports[0]["fingerprint"]
    sums = [float(data[i]["latents"].double().sum()) for i in range(GOOD)]
    assert sums == pytest.approx(reports[0]["latents"], rel=1e-5, abs=1e-3)
    assert len({round(value, 4) for value in sums}) == GOOD  # the sums tell the clips apart


def test_a_second_run_encodes_nothing_on_any_rank(run):
    _, reports = run
    assert [report["second"] for report in reports] == [{"clips": 0, "captions": 0}] * WORLD


def test_rank_0_alone_names_what_is_left_out(run):
    _, reports = run
    log = "\n".join(reports[0]["log"])
    assert f"3 of {ALL} clips left out" in log
    for name in ("broken.mp4", "short.mp4", "missing.mp4"):
        assert log.count(name) == 1
    assert not reports[1]["log"] and not reports[2]["log"]


def test_an_exception_on_one_rank_ends_all(run):
    _, reports = run
    assert reports[1]["crash"]["type"] == "ZeroDivisionError"
    for rank in (0, 2):
        assert reports[rank]["crash"]["type"] == "RuntimeError"
        assert "rank 1 failed: ZeroDivisionError" in reports[rank]["crash"]["message"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mine_missing", "data.encoders="),
        ("other_cache", "another folder on another rank"),
        ("other_table", "differs between ranks"),
        ("other_encoders", "differs between ranks"),
        ("not_shared", "is not shared by all ranks"),
    ],
)
def test_a_mistake_on_one_rank_is_told_on_all(run, case, words):
    _, reports = run
    for report in reports:
        assert report[case]["type"] == UserError.__name__ and words in report[case]["message"], report[case]
        assert "\n" not in report[case]["message"]
