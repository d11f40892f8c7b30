"""Adapters on one shared, sharded base equal peft's own on three plain diffusers networks in one process."""

from dataclasses import replace

import pytest
from safetensors.torch import save_file

from distill.methods import METHODS as METHODS_BY_NAME
from models.lora.settings import LoraSettings
from tests.oracles.difference import check_run, compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import METHODS, Setup, random_adapter
from tests.pools import Pools
from tests.tiers import long_case, slow

pytestmark = slow
LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}
SPLIT = {"dp_shard": 2, "cp": 2, "micro_batch_size": 2}
REPLICAS = {"dp_replicate": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def pools():
    """Return pools as in conftest.py, with time to compile two roles on ranks that have compiled nothing before."""
    with Pools(timeout=600) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(Setup(lora=LORA, steps=3), checkpoints)


def _check(pools, checkpoints, oracle, **changes):
    setup = Setup(**{"lora": LORA, "steps": 3} | changes)
    return check_run(pools, setup, checkpoints, oracle)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (SPLIT, {}),
        # Replicas add the gradients of a unit by position.
        (REPLICAS, {"activation_checkpointing": "full", "activation_offload": True}),
        *(
            long_case(sizes, changes)
            for sizes, changes in (
                ({"dp_shard": 2}, {}),
                (SPLIT, {"activation_checkpointing": "full"}),
                ({"cp": 3, "micro_batch_size": 2}, {"activation_checkpointing": "full"}),
                ({"dp_shard": 2}, {"strategy": "no_shard"}),
                (REPLICAS, {"strategy": "optim"}),
                (REPLICAS, {"strategy": "optim_grads"}),
                ({"dp_shard": 2}, {"gather_stream": "compute"}),
                ({"dp_shard": 2}, {"offload": "cpu"}),
            )
        ),
        # Each role has a graph. Recomputation must run the adapters of its forward.
        long_case({"cp": 2}, {"compile": True, "activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_dmd2_with_a_shared_base(pools, checkpoints, oracle, sizes, changes):
    trace = _check(pools, checkpoints, oracle, changes={"all": changes}, **sizes)
    assert trace.roles == ["student", "fake", "student"]
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for step in trace.gradients for name in step)


@pytest.mark.parametrize("adapted", ["student", long_case("fake")])
def test_one_of_them_trains_its_whole_network(pools, checkpoints, adapted):
    lora = {adapted: LORA[adapted]}
    trace = _check(pools, checkpoints, oracle_trace(Setup(lora=lora, steps=3), checkpoints), **SPLIT, lora=lora)
    full = next(name for name in ("student", "fake") if name not in lora)
    assert "patch_embedding.weight" in trace.weights[full]


@pytest.mark.parametrize(
    "method",
    [
        *(long_case(name) for name in ("dmd2, GAN", "rcm", "scm", "meanflow", "flow_matching")),
        "flow_matching, built-in guidance",
    ],
)
def test_methods(pools, checkpoints, method):
    """Methods with forward-mode derivatives, and a loss through the fake score with its own heads and second time.

    With recomputation, backward of the student's loss runs the blocks again after the fake score's forward.
    """
    settings = {"method": METHODS[method], "steps": 3, "activation_checkpointing": True}
    settings["lora"] = {name: LORA[name] for name in METHODS_BY_NAME[METHODS[method].name][0].trained_roles}
    if "GAN" in method:  # in fp64, as in test_gan_head.py
        settings["precision"] = "fp64"
    _check(pools, checkpoints, oracle_trace(Setup(**settings), checkpoints), **SPLIT, **settings)


def test_a_training_adapter_is_the_students_alone(pools, checkpoints, tmp_path):
    """The fit is of the base with it, the terms that hold the student at the base are of the base without it."""
    tensors = {
        f"blocks.1.{layer}.lora_{matrix}.weight": random_adapter("training", f"{layer}{matrix}", shape)
        for layer, out in (("attn1.to_q", 48), ("ffn.net.0.proj", 64))
        for matrix, shape in (("A", (2, 48)), ("B", (out, 2)))
    }
    save_file(tensors, file := tmp_path / "adapter.safetensors")
    method = replace(METHODS["flow_matching, built-in guidance"], null="frozen", keep_weight=0.3)
    settings = {"method": method, "steps": 3, "lora": {"student": LORA["student"]}}
    setups = [Setup(**settings, training_adapter=given) for given in (str(file), None)]
    oracle, without = (oracle_trace(setup, checkpoints) for setup in setups)
    assert compare(oracle, without).largest > 1e-2, "nothing to compare"
    _check(pools, checkpoints, oracle, **SPLIT, **settings, training_adapter=str(file))
