"""Overhead of a training step beyond its arithmetic: ``python -m benchmarks.overhead``.

Compares ways to train the same small Wan (forward, backward, clipping, AdamW): the plain diffusers network, the same
network with ``fully_shard`` called by hand on every block, and a role of this project. The first comparison runs in one
process, on a mesh of (1, 1), also with our role without FSDP; all ways must produce the same losses and norms. It
shows the cost of sharding where nothing is sharded. The second runs rank 0 of 8 with collectives that return at once.
Its networks are as deep as Wan 1.3B (30 blocks) and 14B (40), but so narrow that only the host's work is left: Python,
FSDP2's bookkeeping and operator calls.

Times are CPU times of the process, which never waits: medians over rounds in which every way takes a turn. Ratios are
medians of the ratios within rounds, since a busy machine slows a whole round down.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.arguments import at_least_1
from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from fsdp_cp import microbatch
from fsdp_cp.measure.fake_world import fake_world
from fsdp_cp.mesh import Mesh, MeshShape, mesh_of_shape
from fsdp_cp.reduce import full_tensor, grad_norm, scale_grads, squared_norms
from models.condition import Condition
from models.families import wan_attention
from models.families.wan import Wan
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from tests.pools import run_ranks

COMPUTES = {
    "num_layers": 8, "num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024, "freq_dim": 64,
    "text_dim": 64, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
"""Architecture of a network whose step is mostly arithmetic."""
NARROW = COMPUTES | {"num_attention_heads": 8, "attention_head_dim": 2, "ffn_dim": 16, "freq_dim": 16, "text_dim": 8}
"""Architecture of a network whose step is mostly operator calls."""
LARGE_LATENTS = {320: (16, 5, 16, 16), 1280: (16, 5, 32, 32)}
"""Latent shapes by number of tokens."""
LARGE_TEXT = (32, 64)
SMALL_LATENTS, SMALL_TEXT = (16, 2, 8, 8), (8, 8)  # 32 tokens, 4 on each of 8 ranks
WORLD = 8
CLIP = 1e-3
"""Maximum gradient norm, so low that every step is clipped."""
SETTINGS = OptimizerSettings(lr=1e-4)
PHASES = ("forward", "backward", "clip", "optimizer")
PLAIN, BY_HAND, OURS, NOT_SHARDED = "plain module", "fully_shard by hand", "ours", "ours without FSDP"

Data = tuple[Tensor, Tensor, Tensor]
Clock = Callable[[str], None]


def data_of(latents: tuple[int, ...], text: tuple[int, ...]) -> Data:
    """Return seeded latents ``(1, C, T, H, W)``, time ``(1,)`` in [0, 1] and text ``(1, L, D)`` of one sample."""
    generator = torch.Generator().manual_seed(0)
    x, words = (torch.randn(1, *shape, generator=generator) for shape in (latents, text))
    return x, torch.full((1,), 0.4), words


class Plain:
    """Diffusers network with torch's clipping and AdamW."""

    def __init__(self, network: nn.Module, data: Data):
        self.network, self.data = network, data
        self.parameters = list(network.parameters())
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=SETTINGS.lr, betas=tuple(SETTINGS.betas), eps=SETTINGS.eps,
            weight_decay=SETTINGS.weight_decay, foreach=True,
        )  # fmt: skip

    def step(self, clock: Clock) -> tuple[float, float]:
        """Make one update. Call ``clock`` after each phase. Return loss and gradient norm before clipping."""
        x, t, text = self.data
        out = self.network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]
        loss = out.square().mean()
        clock("forward")
        loss.backward()
        clock("backward")
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self.parameters, CLIP)))
        clock("clip")
        self.adamw.step()
        self.adamw.zero_grad()
        clock("optimizer")
        return float(loss.detach()), norm


class ByHand(Plain):
    """Diffusers network that plain FSDP2 calls shard."""

    def __init__(self, network: nn.Module, data: Data, mesh: DeviceMesh):
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        super().__init__(network, data)


class Ours:
    """Role on the mesh, with the trainer's steps."""

    def __init__(self, network: nn.Module, data: Data, mesh: Mesh):
        x, _, text = data
        plan = plan_role("student", checkpoint=None, architecture=dict(network.config))
        self.role = build_role(
            plan,
            mesh=mesh,
            device=torch.device("cpu"),
            trainable=True,
            latent_shape=tuple(x.shape[1:]),
            condition_shapes={"text": tuple(text.shape[1:])},
        )
        if mesh.world.size() == 1:  # otherwise gathered weights have no meaningful values
            values = network.state_dict()
            for name, weight in self.role.weights().items():
                weight.to_local().copy_(values[name])
        self.optimizer = RoleOptimizer(self.role, SETTINGS)
        self.data, self.condition = data, Condition({"text": text})

    def step(self, clock: Clock) -> tuple[float, float]:
        """Make one update, like :meth:`Plain.step`."""
        x, t, _ = self.data
        with microbatch(self.role.network, is_first=True, is_last=True):
            loss = self.role.velocity(x, t, self.condition).square().mean()
            clock("forward")
            loss.backward()
        clock("backward")
        norm = grad_norm(self.role.parameters())
        scale_grads(self.role.parameters(), CLIP / (norm + 1e-6))  # as torch does it
        clock("clip")
        self.optimizer.step(SETTINGS.lr)
        clock("optimizer")
        return float(loss.detach()), norm


class NotSharded(Plain):
    """Our attention, norm and clipping on plain tensors, without FSDP2, and torch's AdamW."""

    def __init__(self, network: nn.Module, data: Data, mesh: Mesh):
        self.family = Wan()
        self.family.parallelize(network, mesh)
        super().__init__(network, data)

    def step(self, clock: Clock) -> tuple[float, float]:
        """Make one update, like :meth:`Plain.step`."""
        x, t, text = self.data
        loss = self.family.outputs(self.network, x, t, Condition({"text": text}))[0].square().mean()
        clock("forward")
        loss.backward()
        clock("backward")
        with torch.no_grad():
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            norm = float(squared_norms(grads).sum().sqrt())
            torch._foreach_mul_(grads, CLIP / (norm + 1e-6))
        clock("clip")
        self.adamw.step()
        self.adamw.zero_grad()
        clock("optimizer")
        return float(loss.detach()), norm


class TorchsAttention(Ours):
    """Role with torch's attention in place of ours. The difference to :class:`Ours` is the cost of our attention."""

    def step(self, clock: Clock) -> tuple[float, float]:
        """Make one update, like :meth:`Plain.step`."""
        names = ("context_parallel_attention", "cross_attention")
        with mock.patch.multiple(wan_attention, **dict.fromkeys(names, _torchs_attention)):
            return super().step(clock)


def _torchs_attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


Way = Plain | Ours


def timed(ways: dict[str, Way], rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, list]]:
    """Run the ways in turn. Return CPU seconds by way and phase, and the results of the steps by way."""
    seconds: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in ways}
    results: dict[str, list] = {name: [] for name in ways}
    for i in range(rounds + 2):  # the first two steps allocate
        for name in list(ways)[:: 1 if i % 2 else -1]:
            latest = time.process_time()

            def clock(phase: str, name: str = name) -> None:
                nonlocal latest
                now = time.process_time()
                seconds[name][phase].append(now - latest)
                latest = now

            results[name].append(ways[name].step(clock))
    return {name: {phase: times[2:] for phase, times in phases.items()} for name, phases in seconds.items()}, results


def network_of(architecture: dict, blocks: int) -> nn.Module:
    """Build a network with seeded weights."""
    torch.manual_seed(0)
    return Wan().build(architecture | {"num_layers": blocks}, "architecture")


# --- one process ---


def one_process(blocks: int, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time all ways in a process group of one rank.

    Raises:
        RuntimeError: the losses or norms of the ways differ.
    """
    network, data = network_of(COMPUTES, blocks), data_of(LARGE_LATENTS[tokens], LARGE_TEXT)
    mesh = mesh_of_shape(MeshShape(dp_replicate=1, dp_shard=1, ring=1, ulysses=1))
    ways: dict[str, Way] = {
        PLAIN: Plain(deepcopy(network), data),
        BY_HAND: ByHand(deepcopy(network), data, init_device_mesh("cpu", (1,))),
        OURS: Ours(network, data, mesh),
        NOT_SHARDED: NotSharded(deepcopy(network), data, mesh),
    }
    seconds, results = timed(ways, rounds)
    wanted = torch.tensor(results[PLAIN], dtype=torch.float64)
    for name, values in results.items():
        error = float((torch.tensor(values, dtype=torch.float64) / wanted - 1).abs().max())
        if not error < 1e-4:  # rounding differences, which the updates amplify
            raise RuntimeError(f"{name}: losses or norms differ from the plain module's by {error:.1e}")
    return seconds


# --- the host's time ---


def host(depths: list[int], rounds: int, profiled: bool) -> dict[int, dict[str, dict[str, list[float]]]]:
    """Time the ways as rank 0 of 8. Return seconds by number of blocks."""
    torch.set_flush_denormal(True)  # buffers that nothing was received into may hold denormals, which are slow
    seconds = {}
    for blocks in depths:
        with fake_world(WORLD):
            data = data_of(SMALL_LATENTS, SMALL_TEXT)
            meshes = {
                "8 x 1": mesh_of_shape(MeshShape(dp_replicate=1, dp_shard=WORLD, ring=1, ulysses=1)),
                "1 x 8": mesh_of_shape(MeshShape(dp_replicate=1, dp_shard=1, ring=1, ulysses=WORLD)),
            }
            network = network_of(NARROW, blocks)
            ways: dict[str, Way] = {
                PLAIN: Plain(deepcopy(network), data),
                BY_HAND: ByHand(deepcopy(network), data, init_device_mesh("cpu", (WORLD,))),
            }
            ways |= {f"{OURS}, {label}": Ours(network, data, mesh) for label, mesh in meshes.items()}
            ways[f"{OURS}, 8 x 1, torch's attention"] = TorchsAttention(network, data, meshes["8 x 1"])
            seconds[blocks], _ = timed(ways, rounds)
            if profiled and blocks == depths[-1]:
                print(difference(ways[f"{OURS}, 8 x 1"], ways[BY_HAND]))
    return seconds


def difference(ours: Way, by_hand: Way, steps: int = 10, rows: int = 25) -> str:
    """Return the functions in which a step of ``ours`` spends the most additional own time, by cProfile."""
    spent: list[dict] = []
    for way in (ours, by_hand):
        profile = cProfile.Profile(time.process_time)
        profile.enable()
        for _ in range(steps):
            way.step(lambda phase: None)
        profile.disable()
        spent.append(pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    mine, theirs = spent
    more = {
        where: (values[2] - theirs.get(where, (0, 0, 0.0))[2], values[1] - theirs.get(where, (0, 0, 0.0))[1], values[3])
        for where, values in mine.items()
    }
    lines = ["| ms a step more | calls more | with what it calls, ms | function |", "|---|---|---|---|"]
    for (file, line, name), (total, calls, inside) in sorted(more.items(), key=lambda item: -item[1][0])[:rows]:
        where = f"{'/'.join(file.split('/')[-3:])}:{line} {name}" if line else name
        lines.append(f"| {1e3 * total / steps:.2f} | {calls / steps:.0f} | {1e3 * inside / steps:.2f} | {where} |")
    return "\n".join(lines)


# --- the report ---


def medians(phases: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each phase and of the whole step, in seconds."""
    whole = [sum(values) for values in zip(*phases.values(), strict=True)]
    return {phase: statistics.median(values) for phase, values in phases.items()} | {"step": statistics.median(whole)}


def paired(times: list[float], others: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def table(seconds: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table: ms of each phase, and the ratios of the step to the first and the second way's step."""
    by_name = {name: medians(phases) for name, phases in seconds.items()}
    steps = {name: [sum(values) for values in zip(*phases.values(), strict=True)] for name, phases in seconds.items()}
    lines = [
        f"| | {' | '.join(f'{phase}, ms' for phase in PHASES)} | step, ms | / plain | / by hand |",
        "|" + "---|" * (len(PHASES) + 4),
    ]
    for name, times in by_name.items():
        phases = " | ".join(f"{1e3 * times[phase]:.1f}" for phase in PHASES)
        to = [f"{paired(steps[name], steps[other]):.3f}" for other in (PLAIN, BY_HAND)]
        lines.append(f"| {name} | {phases} | {1e3 * times['step']:.1f} | {' | '.join(to)} |")
    return "\n".join(lines)


def per_block(seconds: dict[int, dict[str, dict[str, list[float]]]]) -> str:
    """Return a Markdown table: the time per block, from two depths, and the time that does not depend on depth."""
    (few, at_few), *_, (many, at_many) = seconds.items()
    lines = ["| | ms a block | the rest of a step, ms |", "|---|---|---|"]
    for name in at_few:
        first, last = medians(at_few[name])["step"], medians(at_many[name])["step"]
        slope = (last - first) / (many - few)
        lines.append(f"| {name} | {1e3 * slope:.2f} | {1e3 * (first - few * slope):.1f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_1, default=25, help="timed steps of each way")
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--profile", action="store_true", help="which functions the difference to fully_shard is in")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, medians of {args.rounds} rounds")
    blocks, depths = (1, [1, 2]) if args.quick else (COMPUTES["num_layers"], [30, 40])
    preload = ("torch", "models.roles.load", "distill.train.optimizers")
    for tokens in list(LARGE_LATENTS)[: 1 if args.quick else None]:
        seconds = run_ranks(1, one_process, blocks, tokens, args.rounds, timeout=1800, preload=preload)[0]
        print(f"\n## One process: {blocks} blocks of width 256, {tokens} tokens; the same losses and norms\n")
        print(table(seconds))
        step = {
            name: [sum(values) for values in zip(*phases.values(), strict=True)] for name, phases in seconds.items()
        }
        print(f"\nOurs over ours without FSDP: {paired(step[OURS], step[NOT_SHARDED]):.3f}.")
    by_depth = host(depths, args.rounds, args.profile)
    for count, seconds in by_depth.items():
        print(f"\n## Host time of rank 0 of {WORLD}, collectives faked: {count} blocks of width 16\n\n{table(seconds)}")
    print(f"\n{per_block(by_depth)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
