"""Non-finite gradients: all ranks skip and count the update, and the state stays unchanged."""

import math

import pytest
import torch
import torch.distributed as dist

from fsdp_cp.checkpoint.folder import read_state, saved_steps, step_folder
from fsdp_cp.errors import UserError
from fsdp_cp.reduce import first_non_finite, local_shard
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.tiers import slow


def _poisoned(folder, run_dir, in_a_row):
    setup = Setup(dp_shard=2)
    config = make_config(setup, folder, run_dir)
    config.optim.max_skipped = 3
    config.optim.student.schedule = "cosine"
    trainer = make_trainer(setup, folder, config)
    losses = trainer.method.losses

    def poisoned(step, batch, random):
        for loss in losses(step, batch, random):
            # One sample, on one data-parallel rank: the other ranks' own gradients are fine.
            bad = step in in_a_row and 0 in random.positions
            yield loss._replace(closure=lambda c=loss.closure, b=bad: c() * (float("nan") if b else 1.0))

    trainer.method.losses = poisoned
    states, rates, error = [], [], None
    try:
        data = trainer._steps_of_data()
        while trainer.step < config.steps:
            before = {name: w.clone() for name, w in trainer.roles["student"].weights().items()}
            metrics = trainer._train_step(data)
            rates += [metrics["student/lr"]] if "student/lr" in metrics else []
            after = trainer.roles["student"].weights()
            states.append(all(torch.equal(before[n].to_local(), after[n].to_local()) for n in before))
    except UserError as caught:
        error = str(caught)
    leftover = any(p.grad is not None for role in trainer.roles.values() for p in role.parameters())
    saved = saved_steps(run_dir / "checkpoints")
    if saved:  # the last good state; the fake score, which did not learn, has that of the run's start
        numbers = read_state(step_folder(run_dir / "checkpoints", saved[-1]))
        assert numbers["skipped"] == trainer.skipped and numbers["updates"] == trainer.updates
        kept = make_trainer(setup, folder, config, saved[-1]).saved_tensors()
        for role, state in trainer.saved_tensors().items():
            for kind, tensors in state.items():
                for name, tensor in tensors.items():
                    pairs = zip(flat(tensor), flat(kept[role][kind][name]), strict=True)
                    assert all(torch.equal(a, b) for a, b in pairs), (role, kind, name)
    return trainer.skipped, trainer.updates, states, rates, error, leftover, saved


def flat(x):
    return [part for each in x.values() for part in flat(each)] if isinstance(x, dict) else [local_shard(x)]


@slow
def test_one_bad_step_is_skipped_on_all_ranks(pools, checkpoints, tmp_path):
    results = pools[2].run(_poisoned, checkpoints, tmp_path, (2,))
    for skipped, updates, unchanged, rates, error, leftover, saved in results:
        assert skipped == {"student": 1, "fake": 0} and updates == {"student": 2, "fake": 3}
        assert unchanged == [False, True, True, True, False, True]  # the student trains at steps 0, 2 (bad) and 4
        assert error is None and not leftover and not saved
        # The cosine spans the three updates that are planned for the student; a skipped one does not count.
        cosine = [0.5 * (1 + math.cos(math.pi * update / 3)) for update in (0, 1, 1)]
        assert rates == pytest.approx([1e-4 * share for share in cosine], rel=1e-12)


@slow
def test_bad_steps_in_a_row_stop_the_run(pools, checkpoints, tmp_path):
    for skipped, updates, *_, error, leftover, saved in pools[2].run(_poisoned, checkpoints, tmp_path, (1, 2, 3, 5)):
        # The student's good update at step 4 does not count for the fake score. The checkpoint of step 5 does not
        # count the skipped update of step 6, since a resumed run repeats step 6.
        assert skipped == {"student": 1, "fake": 2} and updates == {"student": 2, "fake": 0}
        assert "optim.max_skipped" in error and "\n" not in error and not leftover
        assert saved == [5]


def _bad_on_one_rank(folder):
    trainer = make_trainer(Setup(dp_shard=2, cp=2), folder)
    named, world = trainer.roles["student"].named_parameters(), trainer.mesh.world
    found = [first_non_finite(named, world)]
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    found.append(first_non_finite(named, world))
    for name, rank in (("blocks.1.attn1.to_q.weight", 1), ("blocks.1.attn1.to_k.weight", 2)):
        if dist.get_rank() == rank:
            local_shard(named[name].grad).view(-1)[-1] = math.inf if rank == 1 else math.nan
    return [*found, first_non_finite(named, world)]


@slow
def test_the_first_bad_parameter_is_named_alike_on_all_ranks(pools, checkpoints):
    for found in pools[4].run(_bad_on_one_rank, checkpoints):
        assert found == ["no parameter", "no parameter", "blocks.1.attn1.to_q.weight"]
