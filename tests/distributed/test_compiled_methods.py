"""Methods that take a forward-mode derivative, on compiled blocks: plain networks' numbers, no graph after warm-up."""

import pytest
import torch

from distill.methods.dmd2 import Dmd2Settings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from models.condition import text_condition
from models.lora.settings import LoraSettings
from tests.counted import Counted
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, write_checkpoints

slow, long = pytest.mark.slow, pytest.mark.long
METHODS = {
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=3.0),
    "meanflow": MeanFlowSettings(tangent_warmup=2, interval_ratio=0.8, guidance_scale=3.0, step_list=[1.0, 0.8, 0.5]),
    "gan": Dmd2Settings(  # no derivative, but a forward that ends early and hooks on the blocks
        fake_updates_per_student_update=1, guidance_scale=3.0, step_list=[1.0, 0.8, 0.5], gan_weight_student=0.3,
        gan_r1_weight=0.2,
    ),
}  # fmt: skip
LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective", "activation_offload": True}
IMAGE_ARCHITECTURE = ARCHITECTURE | {"in_channels": 2 * LATENT_SHAPE[0] + 4, "image_dim": 14, "added_kv_proj_dim": 48}
CONDITION = {
    "text": (512, 10), "image_latents": LATENT_SHAPE, "image_mask": (4, *LATENT_SHAPE[1:]), "image_embeds": (5, 14),
}  # fmt: skip
WARM, EVALUATED, STEPS = 4, 8, 12


def _compiled_trace(setup, folder, backend):
    """What the steps of ``setup`` did, and how many graphs Dynamo had made behind each.

    Behind step ``EVALUATED`` the student is asked once for three samples without gradients, as for a report's clips.
    """
    made = []
    with Counted(backend) as counted:
        trainer = make_trainer(setup, folder, make_config(setup, folder))
        step = trainer._train_step
        torch._dynamo.utils.counters.clear()

        def counted_step(data):
            metrics = step(data)
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            assert made[-1] == counted.graphs > 0, "one graph at a call of the compiler"
            if len(made) == EVALUATED:
                with torch.no_grad():
                    condition = text_condition(torch.ones(3, *TEXT_SHAPE))
                    trainer.roles["student"].velocity(torch.ones(3, *LATENT_SHAPE), torch.full((3,), 0.5), condition)
            return metrics

        trainer._train_step = counted_step
        return trainer.record(), made


def _run(pools, folder, backend="eager", **given):
    """The ranks' graphs, behind every step; the numbers are compared with plain networks'."""
    changes = {"all": {"compile": True} | given.pop("changes", {})}
    setup = Setup(**{"cp": 1, "steps": 4, "changes": changes} | given)
    ranks = pools[setup.world_size].run(_compiled_trace, setup, folder, backend)
    oracle = oracle_trace(setup, folder)
    for trace, _ in ranks:
        difference = compare(trace, oracle)
        assert difference.largest < 1e-5, difference
        assert all(norm > 1e-3 for norm in trace.norms), "nothing to compare"
    return [made for _, made in ranks]


@slow
@pytest.mark.parametrize("cp", [1, 2])
def test_rcm(pools, checkpoints, cp):
    """Student, fake score and the frozen teacher are compiled; the derivative of the student runs uncompiled blocks.

    A graph to train, one of one sample without gradients, one of two (guidance): all made in the first steps. Forwards
    with tangents make none and invalidate none; an evaluation of three samples makes its own.
    """
    for made in _run(pools, checkpoints, "aot_eager", cp=cp, steps=STEPS, method=METHODS["rcm"]):
        assert made[WARM - 1 : EVALUATED] == [3] * (EVALUATED - WARM + 1), made
        assert made[EVALUATED:] == [4] * (STEPS - EVALUATED), made


@pytest.mark.parametrize(
    ("name", "cp"),
    [
        pytest.param(name, cp, marks=slow if (name, cp) == ("meanflow", 2) else long)
        for name in ("scm", "meanflow", "gan")
        for cp in (1, 2)
    ],
)
def test_other_methods(pools, checkpoints, name, cp):
    _run(pools, checkpoints, cp=cp, method=METHODS[name])


@long
def test_image_to_video(pools, tmp_path):
    """Of which the recipe's model= compiles the blocks too: the images' keys and values are a second attention."""
    write_checkpoints(tmp_path, IMAGE_ARCHITECTURE)
    image = {"architecture": IMAGE_ARCHITECTURE, "condition_shapes": CONDITION}
    _run(pools, tmp_path, cp=2, method=METHODS["rcm"], **image)


@long
@pytest.mark.parametrize("lora", [{}, LORA], ids=str)
@pytest.mark.parametrize("changes", [FULL, SELECTIVE, {}], ids=str)
def test_with_recomputation_and_adapters(pools, checkpoints, lora, changes):
    """A network with adapters has a graph for each role, and derives the role's that asks."""
    _run(pools, checkpoints, cp=2, method=METHODS["rcm"], lora=lora, changes=changes)


@long
def test_by_inductor(pools, checkpoints):
    """The default compiler, whose graphs lose tangents without a word."""
    changes = {"activation_checkpointing": "full"}
    for made in _run(pools, checkpoints, "inductor", cp=2, steps=EVALUATED, method=METHODS["rcm"], changes=changes):
        assert made[WARM - 1 : EVALUATED] == [made[EVALUATED - 1]] * (EVALUATED - WARM + 1), made
