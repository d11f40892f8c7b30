"""Does a rank ever hold more than its shards? ``python -m benchmarks.load_memory`` measures building a large Wan.

A random checkpoint is written file by file into a temporary folder and loaded by :func:`models.load.build_role` on
local gloo ranks; a second network is drawn from a seed. Measured per rank is the peak of anonymous resident memory
(``RssAnon``, sampled every 2 ms) over what the rank held before, imports and a first tiny network included. ``VmHWM``
is printed beside it: it counts the pages of the mapped checkpoint files too, which the kernel shares between ranks and
drops when it likes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import above_0, at_least_1
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from fsdp_cp.rng import stream_seed
from fsdp_cp.sharding.settings import ShardSettings
from models.export_folder import write_folder
from models.families.wan import Wan
from models.load import build_role
from models.role_plan import plan_role

WAN_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
}
WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
TINY = WAN_1_3B | {"num_attention_heads": 1, "attention_head_dim": 12, "text_dim": 8, "ffn_dim": 16, "num_layers": 1}
FILE_BYTES = 10**9
ALLOWANCE = 32 * 2**20
"""Bytes beyond shards and the piece in hand: plans of the checkpoint reader, what malloc keeps of freed pieces."""


def shapes_of(architecture: dict[str, Any]) -> dict[str, torch.Size]:
    """Shape of every tensor of a Wan, by name; builds it on the meta device."""
    with torch.device("meta"):
        return {name: x.shape for name, x in Wan().build(architecture, "architecture").state_dict().items()}


def architecture_of(parameters: float) -> dict[str, Any]:
    """Wan 1.3B with as many blocks as come nearest to ``parameters``."""
    one, two = (sum(s.numel() for s in shapes_of(WAN_1_3B | {"num_layers": n}).values()) for n in (1, 2))
    return WAN_1_3B | {"num_layers": max(1, round((parameters - one) / (two - one)) + 1)}


def largest_module(shapes: dict[str, torch.Size]) -> int:
    """Bytes in fp32 of the own parameters of the module that has most."""
    modules: dict[str, int] = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + 4 * shape.numel()
    return max(modules.values())


def write_random(folder: Path, architecture: dict[str, Any]) -> float:
    """A random checkpoint in fp32, one file in memory at a time; the sum of all absolute values."""
    shapes, total = shapes_of(architecture), 0.0

    def draw(name: str) -> Tensor:
        nonlocal total
        generator = torch.Generator().manual_seed(stream_seed("load_memory", name))
        x = torch.empty(shapes[name]).uniform_(-0.05, 0.05, generator=generator)
        total += x.abs().sum(dtype=torch.float64).item()
        return x

    sizes = {name: 4 * shape.numel() for name, shape in shapes.items()}
    write_folder(folder, [(sizes, draw)], architecture, FILE_BYTES)
    return total


def _status(field: str) -> int:
    """A size from ``/proc/self/status``, bytes."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field + ":"))


class AnonymousPeak:
    """Peak of this process's anonymous resident memory inside the context, over what it was on entering."""

    def __init__(self, every: float = 0.002):
        self.every = every
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but not given back, would hide as much of what comes
        self._start = _status("RssAnon")
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self.bytes = max(self.bytes, _status("RssAnon") - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, _status("RssAnon") - self._start)


@dataclass(frozen=True)
class Measure:
    """One rank's figures, bytes and seconds."""

    shards: int
    peak: int
    vm_hwm: int
    seconds: float
    absolute_sum: float
    """Of the values in this rank's shards."""


def _plan(folder: str | None, architecture: dict[str, Any], precision: str) -> Any:
    source = {"checkpoint": folder} if folder else {"checkpoint": None, "architecture": architecture}
    return plan_role("teacher", **source, sharding=ShardSettings(precision=precision))


def measure(world: int, folder: str | None, tiny: str, architecture: dict[str, Any], precision: str) -> Measure:
    """Build the network on this rank: frozen in bf16, to be trained in fp32."""
    mesh = build_mesh(dp_shard=world)

    def build(plan: Any) -> Any:
        return build_role(
            plan,
            mesh=mesh,
            device=torch.device("cpu"),
            trainable=precision == "fp32",
            latent_shape=(16, 1, 4, 4),
            condition_shapes={"text": (1, plan.config["text_dim"])},
        )

    build(_plan(tiny if folder else None, TINY, precision))  # what is imported at the first use is no network's
    plan = _plan(folder, architecture, precision)
    started = time.perf_counter()
    with AnonymousPeak() as peak:
        role = build(plan)
    seconds = time.perf_counter() - started
    locals_ = [w.to_local() for w in role.weights().values()]
    return Measure(
        shards=sum(x.untyped_storage().nbytes() for x in locals_),
        peak=peak.bytes,
        vm_hwm=_status("VmHWM"),
        seconds=seconds,
        absolute_sum=sum(x.abs().sum(dtype=torch.float64).item() for x in locals_),
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=above_0, default=1e9)
    parser.add_argument("--world", type=at_least_1, default=4, help="ranks, all on this machine")
    args = parser.parse_args(argv)
    architecture = architecture_of(args.parameters)
    shapes = shapes_of(architecture)
    count = sum(shape.numel() for shape in shapes.values())
    print(f"{count / 1e9:.3f}e9 parameters, {args.world} ranks; sizes in GB (1e9 bytes), the worst rank\n")
    print("| network | full copy | shards | peak over start | beyond shards | one piece | VmHWM | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    beyond: dict[str, int] = {}
    failed = False
    with tempfile.TemporaryDirectory() as name:
        big, tiny = Path(name) / "big", Path(name) / "tiny"
        total = write_random(big, architecture)
        write_random(tiny, TINY)
        for what, source, precision in (
            ("loaded, fp32", str(big), "fp32"),
            ("loaded, frozen bf16", str(big), "bf16"),
            ("random, fp32", None, "fp32"),
        ):
            # A piece: the slice of a tensor that is copied into the shard, or the module that is drawn.
            piece = -(-4 * max(s.numel() for s in shapes.values()) // args.world) if source else largest_module(shapes)
            ranks = run_ranks(args.world, measure, args.world, source, str(tiny), architecture, precision, timeout=600)
            worst = max(ranks, key=lambda r: r.peak - r.shards)
            beyond[what] = worst.peak - worst.shards
            full = count * (2 if precision == "bf16" else 4)
            failed |= beyond[what] > piece + ALLOWANCE
            if source:
                loaded = sum(r.absolute_sum for r in ranks)
                failed |= abs(loaded / total - 1) > (1e-9 if precision == "fp32" else 1e-3)
            print(
                f"| {what} | {_gb(full)} | {_gb(worst.shards)} | {_gb(worst.peak)} | {_gb(beyond[what])} |"
                f" {_gb(piece)} | {_gb(worst.vm_hwm)} | {worst.seconds:.1f} |",
                flush=True,
            )
    _print_plan(beyond, shapes, args.world)
    bound = f"shards + one piece + {ALLOWANCE / 2**20:.0f} MiB"
    print(f"\nFAILED: {bound}, or other values than the file's" if failed else f"\nno rank held more than {bound}")
    return int(failed)


def _print_plan(beyond: dict[str, int], shapes: dict[str, torch.Size], world: int) -> None:
    """Wan 14B: its shards, its largest piece, and what was measured above beyond the piece."""
    large = shapes_of(WAN_14B)
    count, widest = (sum(s.numel() for s in large.values()), max(s.numel() for s in large.values()))
    piece = 4 * max(s.numel() for s in shapes.values()) // world
    loading = max(0, beyond["loaded, fp32"] - piece)
    drawing = max(0, beyond["random, fp32"] - largest_module(shapes))
    print(f"\nplanned for Wan 14B ({count / 1e9:.2f}e9 parameters; full copy {_gb(4 * count)} in fp32), per rank:\n")
    print("| ranks | shards, fp32 | peak, loaded | peak, random | shards, frozen bf16 | peak, loaded |")
    print("|---|---|---|---|---|---|")
    for ranks in (8, 64):
        fp32, bf16, slice_ = 4 * count // ranks, 2 * count // ranks, 4 * widest // ranks
        print(
            f"| {ranks} | {_gb(fp32)} | {_gb(fp32 + slice_ + loading)} |"
            f" {_gb(fp32 + largest_module(large) + drawing)} | {_gb(bf16)} | {_gb(bf16 + slice_ + loading)} |"
        )


if __name__ == "__main__":
    sys.exit(main())
