"""Self-forcing on every mesh against diffusers' network in one process, with lists as caches and one backward."""

import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch

from distill.methods.self_forcing import SelfForcingSettings
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.sharding.state import fsdp_modules, gathered_units
from models.causal import CausalSettings
from models.lora.settings import LoraSettings
from tests.oracles.difference import check_run
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import make_trainer, trace_on_ranks
from tests.oracles.tiny_wan import CONDITION_SHAPES
from tests.tiers import long_case, slow, slow_case

SHARED = SelfForcingSettings(
    fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0,
    fake_knows_last_step=True,
)  # fmt: skip
EACH = replace(
    SHARED, exit="each", step_list_first=[1.0, 0.9, 0.7, 0.3], student_sampler="ode", fake_knows_last_step=False,
    gan_weight_student=0.3,
)  # fmt: skip
WINDOW = CausalSettings(chunk=1, window=1, context_time=0.1)
FIRST = replace(SHARED, step_list_first=EACH.step_list_first, fake_rollout="full", fake_knows_last_step=False)
FRAME = CONDITION_SHAPES | {"first_frame": (4, 1, 8, 8)}
CASES = {
    "shared exit": Setup(
        steps=4, method=SHARED, causal=CausalSettings(chunk=2, first_chunk=1), causal_roles=("student",)
    ),
    "an exit each, GAN, window": Setup(steps=4, method=EACH, causal=WINDOW, causal_roles=("student",)),
    "first step list, sink": Setup(
        steps=2, method=FIRST, causal=replace(WINDOW, sink=1), causal_roles=("student",), latent_shape=(4, 4, 8, 8)
    ),
    "first frame, full rollout": Setup(
        steps=2,
        method=replace(SHARED, rollout="full", fake_knows_last_step=False),
        causal=CausalSettings(chunk=2, first_chunk=1),
        causal_roles=("student",),
        latent_shape=(4, 5, 8, 8),
        condition_shapes=FRAME,
    ),
}
REPLICAS = {"dp_replicate": 2, "cp": 2}
RING = {"cp": 3, "micro_batch_size": 4, "activation_checkpointing": True}
SELECTIVE = {"dp_shard": 2, "cp": 2, "changes": {"student": {"activation_checkpointing": "selective"}}}
MESHES = [
    ("first step list, sink", {}),
    long_case("first step list, sink", {"cp": 2}),
    slow_case("first frame, full rollout", {"cp": 2}),
    slow_case("shared exit", SELECTIVE),
    slow_case("an exit each, GAN, window", RING),
    slow_case("shared exit", {}),
    long_case("shared exit", {"cp": 2, "changes": {"all": {"strategy": "optim_grads"}}}),
    long_case("shared exit", {"cp": 4, "changes": {"all": {"strategy": "optim"}}}),
    slow_case("an exit each, GAN, window", {"dp_shard": 2, "changes": {"all": {"keep_gathered": True}}}),
    long_case("an exit each, GAN, window", REPLICAS),
]  # fmt: skip


@pytest.fixture(scope="module")
def truth(checkpoints):
    return cache(lambda case: oracle_trace(CASES[case], checkpoints))


@pytest.mark.parametrize(("case", "sizes"), MESHES, ids=str)
def test_a_mesh_computes_as_one_process(pools, checkpoints, truth, case, sizes):
    """Losses, all gradients, clip norms and weights: replayed backward is one backward of the whole rollout."""
    setup = replace(CASES[case], **sizes)
    assert check_run(pools, setup, checkpoints, truth(case)).roles[:2] == ["student", "fake"]


@slow
def test_adapters(pools, checkpoints):
    """Student and fake score are adapters on the teacher's network, on a ring."""
    lora = {name: LoraSettings(rank=2) for name in ("student", "fake")}
    setup = replace(CASES["shared exit"], steps=2, lora=lora, micro_batch_size=4)
    check_run(pools, replace(setup, cp=3), checkpoints, trace_on_ranks(setup, checkpoints, pools[1]))


class _Saved:
    """Tensor that a graph keeps for its backward."""

    def __init__(self, tensor):
        self.tensor = tensor


def _most_saved(folder, sizes):
    """Return the most bytes that the graphs of a student step keep at once."""
    alive, most = weakref.WeakSet(), 0

    def pack(tensor):
        nonlocal most
        saved = _Saved(tensor)
        alive.add(saved)
        storages = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage() for each in alive}
        most = max(most, sum(storage.nbytes() for storage in storages.values()))
        return saved

    setup = replace(CASES["an exit each, GAN, window"], steps=1, method=SHARED, latent_shape=sizes, batch_size=1)
    trainer = make_trainer(setup, folder)
    weights = sum(p.nbytes for p in trainer.roles["student"].parameters())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        trainer.record()
    return most - weights


@slow
def test_one_chunks_graph_is_alive(pools, checkpoints):
    """A clip of three times the chunks keeps as much for backward as a short one, except for its history."""
    ((short,), (long,)) = (pools[1].run(_most_saved, checkpoints, (4, frames, 8, 8)) for frames in (2, 6))
    assert 0 < long < 1.2 * short, (short, long)


def _gathers(folder, keep):
    """Return a fake step's calls of the student, its all-gathers, the student's units, and those gathered after it."""
    setup = replace(CASES["shared exit"], cp=2, micro_batch_size=4, changes={"student": {"keep_gathered": keep}})
    trainer = make_trainer(setup, folder)
    data, student, calls = trainer._steps_of_data(), trainer.roles["student"].network, []
    trainer._train_step(data)
    student.register_forward_pre_hook(lambda *_: calls.append(1))
    with CollectiveCounter() as sent:
        trainer._train_step(data)
    return len(calls), sent.calls["all_gather"], len(fsdp_modules(student)), len(gathered_units(student))


@slow
def test_weights_stay_gathered_in_the_rollout_of_a_fake_step(pools, checkpoints):
    """Each unit is gathered once with ``keep_gathered``, and freed after the rollout."""
    calls, gathers, units, _ = pools[2].run(_gathers, checkpoints, False)[0]
    kept_calls, kept, _, gathered = pools[2].run(_gathers, checkpoints, True)[0]
    assert kept_calls == calls > 2 and gathered == 0
    assert gathers - kept == (calls - 1) * units
