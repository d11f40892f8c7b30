"""Predicted weak scaling from 8 to 1,024 ranks: ``python -m benchmarks.weak_scaling``. Nothing is measured.

Plans the distillation of Wan 14B with DMD2 by its recipe, on fake tensors, with one sample per data-parallel rank. The
planner (distill/planning/) counts the operations and the bytes that rank 0 sends. The times are these counts divided by
the rates of ``configs/hardware/``.

A collective is a ring. If its group has ``m`` ranks in each node, one of ``m`` hops leaves the node, and the network
cards of all ``m`` ranks share the ring: of the ``s`` bytes that a rank sends, ``s / m`` go through its card and
``s (m - 1) / m`` through NVLink. This is NCCL's best case. With one ring over one card, the card carries ``s``, as the
planner assumes. Latencies are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distill.config import compose_config
from distill.planning.command import plan_without_gpus
from distill.planning.extrapolation import simulate_any_depth
from distill.planning.prediction import Hardware, Prediction, load_hardware, predict
from distill.planning.simulation import StepCost
from fsdp_cp.mesh import MeshShape

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES: dict[str, int | None] = {"over all ranks": None, "inside 8": 8, "inside 32": 32}
"""Number of ranks in a shard group; the groups are replicas (``mesh.dp_replicate``). ``None`` shards over all ranks."""
EXPERIMENT = "wan2_1_t2v_14b_dmd2"
CLIPS = {"480p": "video_folder_480p", "720p": "video_folder_720p"}
HARDWARE = ("h20", "h200")
REPLICAS = "mesh_dp_replicate"
WITHIN_SAMPLE = ("mesh_cp", "mesh_ulysses", "mesh_ring")
"""Groups of the ranks that share a sample's tokens."""
QUICK = {
    "num_layers": 1, "num_attention_heads": 8, "attention_head_dim": 16, "ffn_dim": 64, "freq_dim": 32,
    "text_dim": 4096, "in_channels": 16, "out_channels": 16,
}  # fmt: skip


# --- predictions of the planner ---


def planned(world: int, shard: int | None, clip: str, more: Sequence[str] = ()) -> Prediction:
    """Return the prediction for the recipe on ``world`` ranks, one sample per data-parallel rank, without hardware.

    Args:
        world: number of ranks.
        shard: number of ranks in a shard group; ``None`` for all ranks.
        clip: key of :data:`CLIPS`.
        more: additional settings.
    """
    words = [f"experiment={EXPERIMENT}", f"data={CLIPS[clip]}", "plan=true", f"world={world}", *more]
    cp = compose_config(words).mesh.cp
    words += [f"batch_size={world // cp}", f"mesh.dp_replicate={1 if shard is None else world // shard}"]
    config, plan = plan_without_gpus(compose_config(words))
    simulation = simulate_any_depth(config, plan)
    return predict(config, plan, simulation, None)


def with_replicas(two: Prediction, replicas: int) -> Prediction:
    """Return the prediction for ``replicas`` from the prediction for two. Only the all-reduce over replicas grows.

    To reduce ``n`` bytes in a ring of ``R`` ranks, a rank sends ``2 n (R - 1) / R`` bytes: ``n`` for two replicas.
    """
    factor = 2 * (replicas - 1) / replicas
    return _with_steps(
        replace(two, mesh=replace(two.mesh, dp_replicate=replicas)),
        lambda _, cost: replace(
            cost,
            sent=Counter({key: round(size * (factor if key[1] == REPLICAS else 1)) for key, size in cost.sent.items()}),
        ),
    )


def with_clip(large: Prediction, clip: Prediction) -> Prediction:
    """Return ``large`` with the operations of ``clip`` and its exchanges of tokens.

    Traffic of shards and replicas does not depend on a sample's tokens. Exchanges of tokens do not depend on the world.
    """

    def changed(name: str, cost: StepCost) -> StepCost:
        of_clip = clip.simulation.steps[name]
        sent = Counter({key: size for key, size in cost.sent.items() if key[1] not in WITHIN_SAMPLE})
        sent.update({key: size for key, size in of_clip.sent.items() if key[1] in WITHIN_SAMPLE})
        return replace(of_clip, sent=sent, copied=0.0)

    return _with_steps(replace(large, tokens=clip.tokens), changed)


def _with_steps(prediction: Prediction, change: Callable[[str, StepCost], StepCost]) -> Prediction:
    steps = {name: change(name, cost) for name, cost in prediction.simulation.steps.items()}
    return replace(prediction, simulation=replace(prediction.simulation, steps=steps))


@dataclass(frozen=True)
class Row:
    """Prediction for the recipe on a mesh."""

    strategy: str
    prediction: Prediction


def all_rows(worlds: Sequence[int], clips: Sequence[str], more: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Return the rows by clip, from as few simulations as possible.

    Simulate each world that shards over all ranks, each strategy with replicas, and each further clip. Eight ranks are
    simulated as one of two replicas, where group names distinguish gathers of weights from exchanges of tokens.
    """
    first, *others = clips
    rows: list[Row] = []
    for strategy, shard in STRATEGIES.items():
        larger = [world for world in worlds if world > (shard or 8)]
        if shard is None:
            rows += [Row(strategy, planned(world, None, first, more)) for world in larger]
        elif larger:
            two = planned(2 * shard, shard, first, more)
            rows += [Row(strategy, with_replicas(two, world // shard)) for world in larger]
            if shard == 8 and 8 in worlds:
                rows.insert(0, Row(next(iter(STRATEGIES)), with_replicas(two, 1)))
        print(f"simulated: {strategy}", file=sys.stderr, flush=True)
    rows_by_clip = {first: rows}
    for name in others:
        clip = planned(16, None, name, more)
        rows_by_clip[name] = [replace(row, prediction=with_clip(row.prediction, clip)) for row in rows]
    return rows_by_clip


# --- division ---


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step, averaged over the run's steps."""

    compute: float
    attention: float
    """Time of exchanges of tokens through NVLink, for which compute waits."""
    nvlink: float
    """Time of weights and gradients through NVLink."""
    network: float
    """Time of weights and gradients through a rank's network card, if all cards of the node share the traffic."""
    one_card: float
    """Time of weights and gradients through one network card per node and group."""

    @property
    def step(self) -> float:
        """Seconds of compute or of the busiest link, whichever is longer, plus the exchanges of tokens."""
        return max(self.compute, self.nvlink, self.network) + self.attention

    @property
    def limit(self) -> str:
        """Name of the slowest of compute, NVLink and network."""
        times = {"compute": self.compute, "NVLink": self.nvlink, "network": self.network}
        return max(times, key=lambda name: times[name])


def group_of(name: str, mesh: MeshShape) -> tuple[int, int]:
    """Return a group's size and the distance between its neighbouring ranks. An unknown name is the whole world."""
    shard = mesh.dp_shard * mesh.cp
    known = {
        "mesh_ulysses": (mesh.ulysses, 1),
        "mesh_ring": (mesh.ring, mesh.ulysses),
        "mesh_cp": (mesh.cp, 1),
        "mesh_dp_shard_cp": (shard, 1),
        REPLICAS: (mesh.dp_replicate, shard),
        "mesh_dp": (mesh.dp, mesh.cp),
    }
    return known.get(name, (mesh.world, 1))


def through_links(size: float, group: tuple[int, int], node: int) -> tuple[float, float, float]:
    """Split ``size`` bytes that a rank sends into bytes through NVLink, through its network card, and through one card.

    The last number applies if one card per node carries all of the group's traffic.

    Args:
        size: number of bytes.
        group: result of :func:`group_of`.
        node: number of GPUs per node.
    """
    ranks, distance = group
    inside = min(ranks, max(1, node // distance))
    if inside == ranks:
        return size, 0.0, 0.0
    # With one rank of the group per node, the node's other cards carry the traffic of other groups.
    return size * (inside - 1) / inside, size / inside, size


def seconds_of(prediction: Prediction, hardware: Hardware) -> Seconds:
    """Divide bytes and operations by the rates of ``hardware``."""
    mesh, totals = prediction.mesh, Counter[str]()
    for role, share in prediction.shares.items():
        cost = prediction.simulation.steps[role]
        rate = hardware.sustained * hardware.bf16_tflops * 1e12
        totals["compute"] += share * cost.at_dense_rate / mesh.cp / rate
        for (_, group), size in cost.sent.items():
            nvlink, card, one = through_links(share * size, group_of(group, mesh), hardware.gpus_per_node)
            totals["attention" if group in WITHIN_SAMPLE else "nvlink"] += nvlink / (1e9 * hardware.nvlink_gb_per_s)
            totals["network"] += card / (1e9 * hardware.network_gb_per_s)
            totals["one_card"] += one / (1e9 * hardware.network_gb_per_s)
    return Seconds(**{name: totals[name] for name in ("compute", "attention", "nvlink", "network", "one_card")})


# --- the report ---


def links_table(rows: Sequence[Row], hardware: Hardware) -> str:
    """Return a Markdown table of memory and of each link's traffic per rank and step, in GB (1e9 bytes) and seconds."""
    lines = [
        "| sharded | ranks | NVLink, GB | card, GB | NVLink, s | network, s | the same by one card, s | GiB held |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = seconds_of(row.prediction, hardware)
        sizes = (seconds.nvlink * hardware.nvlink_gb_per_s, seconds.network * hardware.network_gb_per_s)
        lines.append(
            f"| {row.strategy} | {row.prediction.mesh.world:,} | {sizes[0]:.1f} | {sizes[1]:.1f} |"
            f" {seconds.nvlink:.3f} | {seconds.network:.3f} |"
            f" {seconds.one_card:.3f} | {row.prediction.allocated_gib:.1f} |"
        )
    return "\n".join(lines)


def limits_table(rows_by_clip: Mapping[str, Sequence[Row]], hardware: Mapping[str, Hardware]) -> str:
    """Return a Markdown table of compute and the busiest link in the largest world, by clip, GPU and strategy."""
    lines = [
        "| clip | GPU | sharded | ranks | compute, s | attention's exchanges, s | step, s | limit | rate per rank |"
        " compute / network | network is the limit below, GB/s a card | rate per rank by one card |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for clip, rows in rows_by_clip.items():
        for name, gpu in hardware.items():
            base = seconds_of(rows[0].prediction, gpu).step
            for strategy in STRATEGIES:
                of_strategy = [row.prediction for row in rows if row.strategy == strategy]
                if not of_strategy:
                    continue
                last = max(of_strategy, key=lambda prediction: prediction.mesh.world)
                seconds = seconds_of(last, gpu)
                one = replace(seconds, network=seconds.one_card)
                ratio = f"{seconds.compute / seconds.network:.0f}" if seconds.network else ""
                needed = gpu.network_gb_per_s * seconds.network / seconds.compute
                lines.append(
                    f"| {clip} | {name.upper()} | {strategy} | {last.mesh.world:,} |"
                    f" {seconds.compute:.2f} | {seconds.attention:.2f} | {seconds.step:.2f} | {seconds.limit} |"
                    f" {base / seconds.step:.3f} | {ratio} |"
                    f" {needed:.1f} | {base / one.step:.2f}{'' if one.limit == 'compute' else ', network'} |"
                )
    return "\n".join(lines)


def tiny_networks() -> list[str]:
    """Return the settings that give each role one narrow block."""
    architecture = "{" + ", ".join(f"{key}: {value}" for key, value in QUICK.items()) + "}"
    return [f"{role}.architecture={architecture}" for role in ("teacher", "student", "fake")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weak_scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny network on 8 and 16 ranks, one size of clips")
    args = parser.parse_args(argv)
    if args.quick:
        rows_by_clip = all_rows(WORLDS[:2], list(CLIPS)[:1], tiny_networks())
    else:
        rows_by_clip = all_rows(WORLDS, list(CLIPS))
    hardware = {name: load_hardware(name) for name in HARDWARE}
    rows = next(iter(rows_by_clip.values()))
    print("## What a step sends through each link: the same for clips of any size")
    for rates in {(gpu.nvlink_gb_per_s, gpu.network_gb_per_s): gpu for gpu in hardware.values()}.values():
        print(f"\nNVLink {rates.nvlink_gb_per_s:g} GB/s, a card {rates.network_gb_per_s:g} GB/s:\n")
        print(links_table(rows, rates))
    print(f"\n## Communication and compute, at the most ranks\n\n{limits_table(rows_by_clip, hardware)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
