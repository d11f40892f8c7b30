"""Methods that take a forward-mode derivative, on compiled blocks: plain networks' numbers, no graph after warm-up."""

import pytest
import torch

from models.lora.settings import LoraSettings
from tests.counted import Counted
from tests.oracles.difference import check_trace
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import METHODS, Setup
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE, text_condition
from tests.tiers import long, long_case

LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}
FULL = {"activation_checkpointing": "full", "activation_offload": True}
SELECTIVE = {"activation_checkpointing": "selective"}
WARM, EVALUATED, STEPS = 4, 5, 7


def _compiled_trace(setup, folder, backend):
    """Return the trace of ``setup``, and how many graphs Dynamo had made after each step.

    After step ``EVALUATED`` the student is asked once for three samples without gradients, as for a report's clips.
    """
    made = []
    with Counted(backend) as counted:
        trainer = make_trainer(setup, folder)
        step = trainer._train_step
        torch._dynamo.utils.counters.clear()

        def counted_step(data):
            metrics = step(data)
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            assert made[-1] == counted.graphs > 0, "one graph at a call of the compiler"
            if len(made) == EVALUATED:
                with torch.no_grad():
                    condition = text_condition(torch.ones(3, *TEXT_SHAPE))
                    trainer.roles["student"].velocity(
                        video(torch.ones(3, *LATENT_SHAPE)), torch.full((3,), 0.5), condition
                    )
            return metrics

        trainer._train_step = counted_step
        return trainer.record(), made


def _run(pools, folder, backend="eager", **given):
    """Compare with plain networks; return the ranks' counts of graphs after every step."""
    changes = {"all": {"compile": True} | given.pop("changes", {})}
    setup = Setup(**{"cp": 2, "steps": 4, "micro_batch_size": 2, "changes": changes} | given)
    ranks = pools[setup.world_size].run(_compiled_trace, setup, folder, backend)
    oracle = oracle_trace(setup, folder)
    for trace, _ in ranks:
        check_trace(trace, oracle)
        assert all(norm > 1e-3 for norm in trace.norms), "nothing to compare"
    return [made for _, made in ranks]


@long
def test_rcm(pools, checkpoints):
    """Student, fake score and the frozen teacher are compiled. The student's derivative runs uncompiled blocks.

    The first steps make all graphs: one to train, one without gradients, one for guidance (twice the samples). Forwards
    with tangents make and invalidate none. An evaluation of three samples makes its own.
    """
    for made in _run(
        pools, checkpoints, "aot_eager", steps=STEPS, batch_size=2, micro_batch_size=1, method=METHODS["rcm"]
    ):
        assert made[WARM - 1 : EVALUATED] == [3] * (EVALUATED - WARM + 1), made
        assert made[EVALUATED:] == [4] * (STEPS - EVALUATED), made


@pytest.mark.parametrize("name", [long_case(name) for name in ("meanflow", "scm", "dmd2, GAN")])
def test_other_methods(pools, checkpoints, name):
    """The GAN takes no derivative; it has a forward that ends early and hooks on the blocks."""
    _run(pools, checkpoints, method=METHODS[name])


@long
@pytest.mark.parametrize("lora", [{}, LORA], ids=str)
@pytest.mark.parametrize("changes", [FULL, SELECTIVE, {}], ids=str)
def test_with_recomputation_and_adapters(pools, checkpoints, lora, changes):
    """A network with adapters has a graph for each role. A derivative uses the adapters of the calling role."""
    _run(pools, checkpoints, method=METHODS["rcm"], lora=lora, changes=changes)


@long
def test_by_inductor(pools, checkpoints):
    """The default compiler makes graphs that lose tangents silently."""
    for made in _run(pools, checkpoints, "inductor", steps=EVALUATED, method=METHODS["rcm"], changes=FULL):
        assert made[WARM - 1 :] == [made[-1]] * (EVALUATED - WARM + 1), made
