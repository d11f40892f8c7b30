"""A gradient that is not finite: decided on the reduced norm, the update skipped and counted, the state unchanged."""

import pytest
import torch

from benchmarks.parity import Setup, make_config, make_trainer, write_checkpoints
from fsdp_cp.errors import UserError
from fsdp_cp.local_ranks import run_ranks


def _poisoned(folder, in_a_row):
    setup = Setup(dp_shard=2, cp=2)
    config = make_config(setup, folder)
    config.optim.max_skipped = 3
    trainer = make_trainer(setup, folder, config)
    losses = trainer.method.losses

    def poisoned(step, batch, random):
        for loss in losses(step, batch, random):
            # One sample, on one data-parallel rank: the other ranks' own gradients are fine.
            bad = step in in_a_row and 0 in random.positions
            yield loss._replace(closure=lambda c=loss.closure, b=bad: c() * (float("nan") if b else 1.0))

    trainer.method.losses = poisoned
    states = []
    error = None
    try:
        data = trainer._steps_of_data()
        while trainer.step < config.steps:
            before = {name: w.clone() for name, w in trainer.roles["student"].weights().items()}
            trainer._train_step(data)
            after = trainer.roles["student"].weights()
            states.append(all(torch.equal(before[n].to_local(), after[n].to_local()) for n in before))
    except UserError as caught:
        error = str(caught)
    leftover = any(p.grad is not None for role in trainer.roles.values() for p in role.parameters())
    return trainer.skipped, trainer.updates, states, error, leftover


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nan")
    write_checkpoints(folder)
    return folder


def test_one_bad_step_is_skipped_on_all_ranks(folder):
    for skipped, updates, unchanged, error, leftover in run_ranks(4, _poisoned, folder, (2,)):
        assert skipped == {"student": 1, "fake": 0} and updates == {"student": 2, "fake": 3}
        assert unchanged == [False, True, True, True, False, True]  # the student trains at steps 0, 2 (bad) and 4
        assert error is None and not leftover


def test_bad_steps_in_a_row_stop_the_run(folder):
    for skipped, updates, _, error, leftover in run_ranks(4, _poisoned, folder, (1, 2, 3, 5)):
        # The student's good update at step 4 does not count for the fake score.
        assert skipped == {"student": 1, "fake": 3} and updates == {"student": 2, "fake": 0}
        assert "3 updates of fake in a row had a non-finite gradient" in error and not leftover
