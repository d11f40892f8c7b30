"""Checkpoints of several ranks, also written while training continues."""

import logging
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_cp.checkpoint import save_load as checkpoint
from fsdp_cp.checkpoint.folder import find_resume, saved_steps, step_folder
from fsdp_cp.checkpoint.save_load import Checkpoints, load
from fsdp_cp.runtime.timeouts import set_timeout, timeout_of

SHAPE = (1027, 513)  # rows that neither 3 nor 4 ranks divide


def tensors(step: int) -> dict:
    """Return random tensors as DTensors over all ranks."""
    generator = torch.Generator().manual_seed(step)
    full = {name: torch.randn(SHAPE, generator=generator) for name in ("weights", "ema")}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"student": {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in full.items()}}


def holds(folder, step: int) -> bool:
    loaded = tensors(99)
    load(folder, loaded)
    wanted = tensors(step)["student"]
    return all(torch.equal(loaded["student"][name].to_local(), x.to_local()) for name, x in wanted.items())


HALFWAY = threading.Event()


def _slowly(self, path, mode):
    """Open a file in the second half of the collectives, later on each rank, so that the ranks are out of step."""
    assert HALFWAY.wait(timeout=60)
    time.sleep(0.01 * (1 + dist.get_rank()))
    return path.open(mode)


def _beside_the_training(folder):
    FileSystem.create_stream = _slowly
    checkpoints = Checkpoints(folder, keep=3, asynchronous=True)
    set_timeout(timedelta(seconds=50))  # training does so after its first steps
    kept = timeout_of(checkpoints._group)
    sums, during, state = [], 0, tensors(0)
    for step in (1, 2, 3):
        HALFWAY.clear()
        for name, x in tensors(step)["student"].items():
            state["student"][name].to_local().copy_(x.to_local())
        checkpoints.save(step, state, {"step": step})
        for x in state["student"].values():
            x.to_local().zero_()  # the copy has the old values
        for i in range(50):
            x = torch.full((257,), float(i * (dist.get_rank() + 1)))
            dist.all_reduce(x)
            sums.append(bool((x == i * 10).all()))
            if i == 25:
                during += not checkpoints._writing[1].done()
                HALFWAY.set()
        checkpoints.wait()
    return all(sums), saved_steps(folder), [holds(step_folder(folder, s), s) for s in (1, 2, 3)], kept, during


def _without_room(folder):
    """Save with a rank that lacks memory for a copy. Return the steps, the warnings, and the files at the renaming."""
    one_is_full = 0 if dist.get_rank() == 2 else 2**40
    checkpoint.available_host_memory = lambda: one_is_full
    records, renamed = [], []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("fsdp_cp.checkpoint.save_load").addHandler(handler)

    def note(event, arguments):
        if event == "os.rename" and str(arguments[1]) == str(step_folder(folder, 7)):
            names = {file.name for file in Path(arguments[0]).iterdir()}
            renamed.append(names)

    sys.addaudithook(note)  # from here on a run that is killed has a checkpoint of that name
    checkpoints = Checkpoints(folder, keep=1, asynchronous=True)
    checkpoints.save(7, tensors(7), {"step": 7})
    return saved_steps(folder), len(records), renamed


def _verified(folder):
    return find_resume("auto", folder)


@pytest.mark.slow
def test_collectives_of_the_training_go_on_beside_a_save(pools, tmp_path):
    for exact, steps, whole, kept, during in pools[4].run(_beside_the_training, tmp_path):
        assert exact and steps == [1, 2, 3] and whole == [True] * 3
        assert kept == timedelta(hours=2), "a step's timeout is not that of a slow disk"
        assert during == 3, "training waited for a save"


def test_a_checkpoint_is_published_whole_and_all_ranks_see_its_damage(pools, tmp_path):
    for number, (steps, warnings, renamed) in enumerate(pools[3].run(_without_room, tmp_path)):
        assert steps == [7], "without room for a copy training waits until it is written"
        assert warnings == (number == 0)
        for names in renamed:
            assert names == {"state.json", ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
        assert len(renamed) == (number == 0)
    assert set(pools[3].run(_verified, tmp_path)) == {step_folder(tmp_path, 7)}
    shutil.copytree(tmp_path / "step_00000007", tmp_path / "step_00000009")
    shard = tmp_path / "step_00000009" / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-200])
    assert set(pools[3].run(_verified, tmp_path)) == {step_folder(tmp_path, 7)}
