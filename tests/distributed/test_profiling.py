"""``profile.*`` and the metrics of a step's time, in the trainer on two ranks."""

import gzip
import hashlib
import json
import logging
import signal
from functools import partial

import pytest
import torch

from distill.config.schema import CheckpointSettings, LogSettings, ProfileSettings
from distill.train.profiling import StepProfiler
from fsdp_cp.reduce import on_first_rank
from fsdp_cp.runtime.signals import Stopped, StopSignal
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.tiers import long, slow

SETUP = Setup(cp=2, micro_batch_size=4)


def _train(folder, run_dir, last, *, first=0, every=0, profile=None, stopped=False, fails_at=None):
    """Run steps ``first + 1`` to ``last`` as ``train.py`` does; return log messages, the error, and the weights."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("distill.train.profiling")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    config = make_config(SETUP, folder, run_dir)
    config.steps, config.log = last, LogSettings(every=1)
    config.checkpoint = CheckpointSettings(every=every, keep=0, at_end=False)
    config.profile = profile or ProfileSettings()
    trainer = make_trainer(SETUP, folder, config, first)
    if fails_at is not None:
        update = trainer._update

        def broken(*args):
            if trainer.step + 1 == fails_at:
                raise ZeroDivisionError
            update(*args)

        trainer._update = broken
    on_first_rank(trainer._open_log)
    stop = StopSignal()
    stop.received = signal.SIGTERM if stopped else None
    error = None
    try:
        profiler = StepProfiler(config.profile, device=trainer.device, run_dir=trainer.run_dir, step=trainer.step)
        with trainer.checkpoints.completed(), profiler:
            trainer._train(lambda: None, stop, profiler)
    except (Stopped, ZeroDivisionError) as raised:
        error = type(raised).__name__
    finally:
        logger.removeHandler(handler)
        if trainer.log is not None:
            trainer.log.close()
    weights = {
        (name, key): value.full_tensor().clone()
        for name, role in trainer.roles.items()
        for key, value in role.weights().items()
    }
    return messages, error, weights


def _on_ranks(pools, *args, **settings):
    return pools[2].run(partial(_train, **settings), *args)


def _lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _files(run_dir):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (run_dir / "profile").glob("*")}


def _trace(file):
    with gzip.open(file, "rt") as stream:
        return json.load(stream)


@pytest.fixture(scope="module")
def plain(pools, checkpoints, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("plain")
    return run_dir, _on_ranks(pools, checkpoints, run_dir, 4)[0]


@pytest.fixture(scope="module")
def profiled(pools, checkpoints, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("profiled")
    settings = ProfileSettings(steps=[2, 3], ranks="all")
    return run_dir, _on_ranks(pools, checkpoints, run_dir, 4, profile=settings)[0]


@slow
def test_the_phases_of_a_step_are_all_there_and_add_up_to_its_time(plain):
    """The remainder is a phase too. A little time passes between the clock's readings."""
    run_dir, _ = plain
    common = {"other", "data", "gradients", "clip", "update", "metrics"}
    wanted = {
        "student": common | {"dmd/forward", "dmd/backward"},
        "fake": common | {"fake_score/forward", "fake_score/backward"},
    }
    seen = set()
    for line in _lines(run_dir):
        (role,) = (name for name in wanted if f"{name}/loss" in line)
        seen.add(role)
        prefix = f"perf/seconds/{role}/"
        parts = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith("perf/seconds/")}
        assert parts.pop(f"perf/seconds/{role}") == line["perf/seconds_per_step"]
        assert set(parts) == wanted[role]
        assert all(value >= 0 for value in parts.values())
        assert 0 < sum(parts.values()) <= line["perf/seconds_per_step"] + 1e-9
        tokens = line["perf/tokens_per_second"] / line["perf/samples_per_second"]
        assert tokens == pytest.approx(round(tokens)) and round(tokens) > 1, "of one sample"
        assert line["perf/samples_per_second"] * line["perf/seconds_per_step"] == pytest.approx(SETUP.batch_size)
        assert "memory/reserved_gib" not in line and line["memory/peak_gib"] > 0
    assert seen == set(wanted)


@slow
def test_profiled_steps_compute_the_same(plain, profiled):
    (plain_dir, (_, _, expected)), (run_dir, (_, error, weights)) = plain, profiled
    assert error is None and weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    for ours, theirs in zip(_lines(run_dir), _lines(plain_dir), strict=True):
        for key in theirs.keys() - {"memory/peak_gib"}:
            assert key.startswith("perf/") or ours[key] == theirs[key], key
        assert ours.keys() == theirs.keys()


def _profiled_steps(trace):
    return {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")}


@slow
def test_the_traces_hold_the_steps_their_phases_and_the_collectives(profiled):
    run_dir, (messages, _, _) = profiled
    assert set(_files(run_dir)) == {f"steps_2_3_rank{r}.json.gz" for r in range(2)}, "and nothing half written"
    calls = []
    for r in range(2):
        trace = _trace(run_dir / "profile" / f"steps_2_3_rank{r}.json.gz")
        assert _profiled_steps(trace) == {"ProfilerStep#2", "ProfilerStep#3"}
        annotated = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        assert {"data", "student/dmd/forward", "fake/fake_score/backward", "student/update"} <= set(annotated)
        assert {"gloo:all_gather", "gloo:all_reduce", "gloo:all_to_all"} <= set(annotated)
        calls.append(sorted(name for name in annotated if name.startswith("gloo:")))
    assert calls[0] == calls[1], "each rank calls what the other calls"
    assert len(messages) == 1


@long
def test_only_the_chosen_ranks_are_profiled_and_an_earlier_start_s_files_stay(pools, checkpoints, tmp_path):
    """The test starts a run again from within and from after the profiled steps."""
    run_dir = tmp_path / "run"
    settings = {"profile": ProfileSettings(steps=[2, 3], ranks=[1]), "every": 1}
    _on_ranks(pools, checkpoints, run_dir, 3, **settings)
    before = _files(run_dir)
    assert set(before) == {"steps_2_3_rank1.json.gz"}
    _on_ranks(pools, checkpoints, run_dir, 3, first=1, **settings)
    assert set(_files(run_dir)) - set(before) == {"steps_2_3_rank1_2.json.gz"}
    assert before.items() <= _files(run_dir).items()
    before = _files(run_dir)
    _on_ranks(pools, checkpoints, run_dir, 4, first=3, **settings)
    assert _files(run_dir) == before


@long
def test_a_run_that_is_stopped_writes_the_steps_that_it_has(pools, checkpoints, tmp_path):
    settings = ProfileSettings(steps=[1, 4], ranks="all")
    for _, error, _ in _on_ranks(pools, checkpoints, tmp_path, 4, profile=settings, stopped=True):
        assert error == "Stopped"
    assert {f"steps_1_1_rank{r}.json.gz" for r in range(2)} <= set(_files(tmp_path))
    assert _profiled_steps(_trace(tmp_path / "profile" / "steps_1_1_rank0.json.gz")) == {"ProfilerStep#1"}


@long
def test_a_run_that_fails_fails_of_its_own_error_and_the_next_can_be_profiled(pools, checkpoints, tmp_path):
    profile = ProfileSettings(steps=[1, 2])
    for _, error, _ in _on_ranks(pools, checkpoints, tmp_path / "a", 2, profile=profile, fails_at=2):
        assert error == "ZeroDivisionError"
    assert not (tmp_path / "a" / "profile").exists()
    _on_ranks(pools, checkpoints, tmp_path / "b", 1, profile=ProfileSettings(steps=[1, 1]))
    assert set(_files(tmp_path / "b")) == {"steps_1_1_rank0.json.gz"}


@long
def test_a_profile_that_cannot_be_written_ends_no_run(pools, checkpoints, tmp_path):
    (tmp_path / "profile").write_text("somebody's")
    (messages, error, _), _ = _on_ranks(pools, checkpoints, tmp_path, 2, profile=ProfileSettings(steps=[1, 2]))
    assert error is None and len(messages) == 1
    assert _lines(tmp_path)[-1]["step"] == 2
    assert (tmp_path / "profile").read_text() == "somebody's"
