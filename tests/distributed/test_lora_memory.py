"""Memory and traffic of adapters on one base, by the formulas of docs/models.md.

The formulas use only the network's shapes: ``n`` rows over ``W`` ranks are ``ceil(n / W)`` on each.
"""

import math

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.train.trainer import Trainer
from fsdp_cp.measure.traffic import CollectiveCounter
from models.lora.settings import LoraSettings
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.sharding_memory import storage_bytes
from tests.oracles.tiny_wan import ARCHITECTURE

WORLD, MICRO_BATCHES = 2, 2
RANKS = {"student": 8, "fake": 4}
BLOCKS = ARCHITECTURE["num_layers"]
UNITS = BLOCKS + 2  # the time embedder, which computes in fp32, and the root
FP32, BF16 = 4, 2
AVERAGED = "fake"


def _on_ranks(folder, strategy):
    """Return the bytes held after two updates of each role, and the traffic of two more steps by use."""
    setup = Setup(
        dp_shard=WORLD,
        precision="bf16",
        batch_size=MICRO_BATCHES * WORLD,
        lora={name: LoraSettings(rank=rank) for name, rank in RANKS.items()},
        changes={"all": {"strategy": strategy}},
        activation_checkpointing=True,
    )
    config = make_config(setup, folder)
    getattr(config, AVERAGED).ema.enabled = True
    trainer = make_trainer(setup, folder, config)
    trainer._update = lambda *args: Trainer._update(trainer, *args)  # the recording one gathers gradients
    data, network = trainer._steps_of_data(), trainer.roles["student"].networks[0]
    assert all(role.networks == (network,) for role in trainer.method.roles.values())
    for _ in range(4):
        trainer._train_step(data)
    held = {
        name: {
            "weights": storage_bytes(trainer.roles[name].parameters()),
            "optimizer": storage_bytes(
                x for state in network.optimizer.state.values() for x in state.values() if x.ndim
            ),
            "average": storage_bytes(network.average.weights.values()) if network.average is not None else 0,
        }
        for name, network in trainer.trained.items()
    }
    held["base"] = storage_bytes(network.base_parameters().values())
    held["all"] = storage_bytes(network.module.parameters())
    steps = {}
    for _ in range(2):
        role, uses = trainer.method.trained_role(trainer.step), []
        hook = network.module.register_forward_pre_hook(lambda *_, uses=uses: uses.append(torch.is_grad_enabled()))
        with CollectiveCounter() as counter:
            trainer._train_step(data)
        hook.remove()
        steps[role] = len(uses), sum(uses), dict(counter.calls), dict(counter.bytes)
    return held, steps


def _sizes():
    """Return the elements of a rank's padded shards: a block, the time embedder, the rest, and each role's adapters."""
    with torch.device("meta"):
        network = WanTransformer3DModel(**ARCHITECTURE)
    padded = lambda *shape: math.ceil(shape[0] / WORLD) * math.prod(shape[1:])  # noqa: E731
    layers = [m for m in network.blocks.modules() if isinstance(m, torch.nn.Linear)]
    of = lambda module: sum(padded(*p.shape) for p in module.parameters())  # noqa: E731
    blocks, embedder = of(network.blocks), of(network.condition_embedder.time_embedder)
    adapters = {
        name: sum(padded(rank, m.in_features) + padded(m.out_features, rank) for m in layers)
        for name, rank in RANKS.items()
    }
    return blocks, embedder, of(network) - blocks - embedder, adapters


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_bytes_and_calls(pools, checkpoints, strategy):
    blocks, embedder, rest, adapters = _sizes()
    with_adapters = blocks + sum(adapters.values())
    for held, steps in pools[WORLD].run(_on_ranks, checkpoints, strategy):
        assert held["base"] == BF16 * (blocks + rest) + FP32 * embedder
        for name, elements in adapters.items():
            average = FP32 * elements if name == AVERAGED else 0
            assert held[name] == {"weights": FP32 * elements, "optimizer": 2 * FP32 * elements, "average": average}
        assert held["all"] == held["base"] + sum(held[name]["weights"] for name in adapters), "and nothing else"
        for name, (forwards, with_gradient, calls, sent) in steps.items():
            assert with_gradient == MICRO_BATCHES and forwards >= 2 * MICRO_BATCHES
            stays = strategy == "optim"
            # In backward FSDP2 gathers the previous unit ahead. Before the first block that is the time embedder, which
            # is not used there; the next micro-batch's forward finds it gathered.
            uses, uses_of_embedder = (1, 1) if stays else (forwards + with_gradient, forwards + 1)
            assert calls["all_gather"] == uses * (UNITS - 1) + uses_of_embedder
            base = uses * BF16 * (with_adapters + rest) + uses_of_embedder * FP32 * embedder
            assert sent["all_gather"] == (WORLD - 1) * base
            reductions = 1 if stays else MICRO_BATCHES
            assert calls["reduce_scatter"] == reductions * BLOCKS, "elsewhere there are no adapters"
            assert sent["reduce_scatter"] == reductions * FP32 * (WORLD - 1) * adapters[name]
