"""dmd2's GAN head: the same addition on plain networks in one process is the oracle."""

from dataclasses import replace

import pytest
import torch

from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.sharding.state import fsdp_modules, gathered_units, has_gradients, param_groups
from tests.oracles.difference import check_run
from tests.oracles.full_tensors import full_tensors
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.sharding_memory import ShardingMemory
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition
from tests.tiers import long, long_case, slow

METHOD = Dmd2Settings(
    fake_updates_per_student_update=1,
    step_list=[1.0, 0.8, 0.5],
    guidance_scale=3.0,
    shift=2.0,
    # Far larger than published: each term must show in every gradient.
    gan_weight_student=0.5,
    gan_weight_head=0.5,
    gan_r1_weight=20.0,
    gan_blocks=[0, 1],
)
UNEVEN = (4, 3, 6, 10)  # 45 tokens, which neither 2 nor 4 ranks divide
BOUND = 1e-6


def gan(**changes) -> Setup:
    """Return a setup in fp64, except for diffusers' norms.

    In fp32 the gradients of the heads' last biases nearly cancel, and differ by up to 2.2e-5.
    """
    return Setup(**{"method": METHOD, "steps": 4, "precision": "fp64", "latent_shape": UNEVEN} | changes)


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(gan(), checkpoints)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        long_case({"dp_shard": 2, "cp": 2, "micro_batch_size": 2}),
        {"cp": 3, "micro_batch_size": 2, "activation_checkpointing": True},
        long_case({"dp_replicate": 2, "cp": 2, "micro_batch_size": 2}),
    ],
    ids=str,
)
def test_one_process_is_the_oracle(pools, checkpoints, oracle, changes):
    setup = gan(**changes)
    trace = check_run(pools, setup, checkpoints, oracle, BOUND)
    assert trace.roles == ["student", "fake"] * 2
    heads = [any(name.startswith("additions.gan_head.") for name in gradients) for gradients in trace.gradients]
    assert heads == [False, True] * 2


def test_the_gan_is_felt(checkpoints, oracle):
    """Each term changes the gradients that it should, so a comparison without the term would fail."""
    plain = replace(METHOD, gan_weight_student=1e-9)
    no_r1 = replace(METHOD, gan_r1_weight=0.0)
    for method, step in ((plain, 0), (no_r1, 1)):
        other = oracle_trace(gan(method=method, steps=step + 1), checkpoints)
        ours, theirs = oracle.gradients[step], other.gradients[step]
        moved = {name: relative_error(theirs[name], g) for name, g in ours.items()}
        # The heads do not read layers after the last block; their last biases cancel in R1's difference.
        unread = {"proj_out", "scale_shift_table", *(f"additions.gan_head.heads.{k}.out.bias" for k in (0, 1))}
        unread = unread if step else set()
        for name, share in moved.items():
            assert share > 1e-4 or any(name.startswith(prefix) for prefix in unread), (step, name, share)


@long
def test_another_block(pools, checkpoints):
    setup = gan(cp=2, micro_batch_size=4, method=replace(METHOD, gan_blocks=[0]), steps=2)
    oracle = oracle_trace(setup, checkpoints)
    check_run(pools, setup, checkpoints, oracle, BOUND)
    both = oracle_trace(gan(steps=2), checkpoints)
    assert abs(oracle.losses[1] - both.losses[1]) > 1e-4


def _student_step(folder, setup):
    """Return what the fake score's network holds while the student trains through it, and afterwards."""
    trainer = make_trainer(setup, folder)
    data = trainer._steps_of_data()
    fake = trainer.roles["fake"]
    for _ in range(2):  # the fake score's own step too: its gradients must be seen
        trainer._train_step(data)
    before = full_tensors(fake.weights())
    with ShardingMemory(fake.network) as memory:
        assert trainer.method.trained_role(trainer.step) == "student"
        trainer._train_step(data)
        frozen = memory.peak_gradients
        after = full_tensors(fake.weights())
        state = (
            has_gradients(fake.network),
            any(p.grad is not None for p in fake.parameters()),
            all(p.requires_grad for p in fake.parameters()) and fake.trainable,
            bool(gathered_units(fake.network)),
        )
        memory.reset_peak()
        trainer._train_step(data)
        trained = memory.peak_gradients
    reduced = {group._reduce_dtype for unit in fsdp_modules(fake.network) for group in param_groups(unit)}
    return frozen, trained, state, all(torch.equal(before[n], after[n]) for n in before), reduced


@slow
@pytest.mark.parametrize(("strategy", "precision"), [("optim_grads_params", "bf16"), ("optim", "fp32")])
def test_the_fake_score_gets_no_gradient_from_the_student(pools, checkpoints, strategy, precision):
    setup = gan(cp=2, micro_batch_size=4, precision=precision, changes={"all": {"strategy": strategy}})
    for frozen, trained, state, same, reduced in pools[2].run(_student_step, checkpoints, setup):
        assert frozen == 0 and trained > 0, "none is allocated"
        assert state == (False, False, True, False) and same
        assert reduced <= {torch.float32, None}


def _in_bf16(folder, setup):
    trainer = make_trainer(setup, folder)
    seen = []
    head = trainer.roles["fake"].network.get_submodule("additions.fake.gan_head")
    head.register_forward_hook(
        lambda module, args, output: seen.append((module.heads[1].out.weight.dtype, args[0][1].dtype, output.dtype))
    )
    trace = trainer.record()
    saved = trainer.saved_tensors()["fake"]
    names = [[n for n in saved[of] if n.startswith("additions.")] for of in ("weights", "adamw")]
    masters = {w.dtype for n, w in trainer.roles["fake"].weights().items() if n.startswith("additions.")}
    return set(seen), masters, names, trace.losses, trace.gradients[1]


@slow
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_the_head_computes_in_fp32_under_bf16(pools, checkpoints, oracle, strategy):
    """The head's R1 penalty is a difference of nearly equal logits. ``optim`` reduces the two losses at once."""
    setup = gan(cp=2, micro_batch_size=4, precision="bf16", steps=2, changes={"fake": {"strategy": strategy}})
    for seen, masters, saved, losses, gradients in pools[2].run(_in_bf16, checkpoints, setup):
        assert seen == {(torch.float32, torch.bfloat16, torch.float32)} and masters == {torch.float32}
        assert saved[0] == saved[1] and len(saved[0]) == 8, "a checkpoint holds the head and its moments"
        assert losses == pytest.approx(oracle.losses[:2], rel=0.03)
        for name, gradient in gradients.items():
            if name.startswith("additions."):
                assert relative_error(gradient, oracle.gradients[1][name]) < 0.1, name


def _logits(folder, setup):
    """Return D of the role, and D written out from the features of the blocks that it reads."""
    trainer = make_trainer(setup, folder)
    role, kept = trainer.roles["fake"], []
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, *LATENT_SHAPE, generator=generator)
    condition = text_condition(torch.randn(2, *TEXT_SHAPE, generator=generator))
    t = torch.tensor([0.2, 0.7])
    assert ARCHITECTURE["num_layers"] == 2
    for block in (0, 1):
        role.network.blocks[block].register_forward_hook(lambda _m, _a, out: kept.append(out.detach().clone()))
    with torch.no_grad():
        d, v = role.logits(video(x), t, condition), role.velocity(video(x), t, condition).video
    weights = {n.removeprefix("additions.gan_head."): w for n, w in role.weights().items() if "gan_head" in n}
    full = full_tensors(weights)
    written_out = []
    for k, h in enumerate(kept[:2]):
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        hidden = h @ full[f"heads.{k}.hidden.weight"].T + full[f"heads.{k}.hidden.bias"]
        logits = (hidden * hidden.sigmoid()) @ full[f"heads.{k}.out.weight"].T + full[f"heads.{k}.out.bias"]
        written_out.append(logits.mean((1, 2)))
    return d, torch.stack(written_out, 1), v.shape


def test_logits_are_the_means_over_tokens_of_small_networks(pools, checkpoints):
    ((d, written_out, shape),) = pools[1].run(_logits, checkpoints, gan(precision="fp32", latent_shape=LATENT_SHAPE))
    torch.testing.assert_close(d, written_out, rtol=1e-5, atol=1e-6)
    assert shape == (2, *LATENT_SHAPE) and d.shape == (2, 2) and (d[0] - d[1]).abs().min() > 1e-4
