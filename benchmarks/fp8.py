"""Accuracy of fp8: losses, gradients and bytes (``python -m benchmarks.fp8``), or students (``--distil``).

The default compares a step of the shipped teacher's network in fp8, which torchao or a stand-in for Transformer Engine
emulates on a CPU, with the same step in bf16, on meshes of one to four local ranks: for the whole network, and for
adapters on a frozen base. It takes minutes. ``--distil`` distills the quickstart's student (DMD2) with and without fp8
roles of ``--package``, three seeds each, and compares the students like :mod:`benchmarks.lora`; the same command
resumes it. ``--tiny`` is a short test of either.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_students
from benchmarks.distillation import CLIPS, ROOT, STUDENT_STEPS, Run, renders, table, train_all
from benchmarks.lora import students
from distill.config import compose_config
from distill.data.base import condition_of
from distill.data.shape_measures import MEASURES
from distill.methods.common.schedules import add_noise
from fsdp_cp import microbatch
from fsdp_cp.errors import UserError
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.mesh import build_mesh
from fsdp_cp.runtime.local_ranks import RankPool
from fsdp_cp.sharding.fp8 import require_fp8
from fsdp_cp.sharding.settings import ShardSettings
from models.lora.settings import LoraSettings
from models.roles.load import build_roles
from models.roles.role_plan import plan_role
from models.sample import VIDEO, Sample
from tests.oracles.full_tensors import full_tensors
from tests.oracles.transformer_engine import install

RECIPE = "quickstart"
MESHES = ((1, 1), (1, 2), (2, 2))
"""Sizes of the axes ``dp_shard`` and ``cp``."""
CASES = {
    "whole network, flow matching": ("flow_matching", False),
    "whole network, mean square": ("mean_square", False),
    "adapters, flow matching": ("flow_matching", True),
}
"""Loss, and whether adapters are trained. At the shipped teacher's weights, the gradient of flow matching is the small
remainder of larger terms that cancel, in any precision; the gradient of the output's mean square is not."""
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8": "torchao"},
    "fp8, gathered in fp8": {"fp8": "torchao", "fp8_gather": True},
    "fp8, Transformer Engine's recipe": {"fp8": "transformer_engine"},
}
LORA_RANK = 16
PROGRAMS = {"torchao": ("train.py",), "transformer_engine": ("-m", "tests.oracles.transformer_engine")}
"""Program that trains on a CPU, by the package of fp8. The second installs the stand-in, then runs ``train.py``."""
LARGEST_DIFFERENCE = 3.0
"""Limit of the difference between students with and without fp8 roles, in standard errors."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Results of one step, and the traffic of a rank."""

    loss: float
    gradient: Tensor
    """Full gradient of all parameters, fp64."""
    gathered: int
    """Bytes that a rank sends in all-gathers of weights."""


def step_of(dp_shard: int, cp: int, settings: dict[str, Any], case: str, count: int) -> Step:
    """Run a step of the shipped teacher on ``count`` clips. A collective."""
    kind, adapters = CASES[case]
    if settings.get("fp8") == "transformer_engine":  # on a CPU a stand-in casts like the package's recipe
        install()
    config = compose_config([f"experiment={RECIPE}", "run_dir=runs/fp8"])
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
    sharding = ShardSettings(**{"precision": "bf16", "activation_checkpointing": "full"} | settings)
    lora = LoraSettings(rank=LORA_RANK) if adapters else None
    plan = plan_role("student", checkpoint=str(ROOT / config.teacher.checkpoint), sharding=sharding, lora=lora)
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=plan.family.heads(plan.config), device_type="cpu")
    role = build_roles(
        [plan],
        trained=("student",),
        mesh=mesh,
        device=torch.device("cpu"),
        shapes=data.latent_shapes,
        condition_shapes=data.condition_shapes,
    )["student"]
    if adapters:  # an adapter's second factor begins at 0, which makes the gradient of the first factor 0
        with torch.no_grad():
            for parameter in role.parameters():
                parameter.add_(0.02)
    items = [data[i] for i in range(count)]
    named = {name: torch.stack([item[name] for item in items]) for name in ("latents", *data.condition_shapes)}
    x0 = Sample({VIDEO: named["latents"]})
    noise = x0.map(lambda part: torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    t = torch.linspace(0.05, 0.95, count)
    size = count // mesh.dp_size
    mine = slice(mesh.dp_rank * size, (mesh.dp_rank + 1) * size)
    x0, noise, t = x0[mine], noise[mine], t[mine]
    condition = condition_of({name: named[name][mine] for name in data.condition_shapes}, data)
    with CollectiveCounter() as sent, microbatch(role.network, is_first=True, is_last=True):
        wanted = noise - x0 if kind == "flow_matching" else 0
        loss = (role.velocity(add_noise(x0, noise, t), t, condition) - wanted).video.square().mean() / mesh.dp_size
        loss.backward()
    gathered = sum(size for (kind, group), size in sent.by_group.items() if kind == "all_gather" and group != "mesh_cp")
    total = loss.detach().clone() / mesh.cp_size  # all ranks of a cp group have the same loss
    torch.distributed.all_reduce(total)
    gradients = full_tensors({name: p.grad for name, p in role.named_parameters().items() if p.grad is not None})
    whole = torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])
    return Step(loss=float(total), gradient=whole, gathered=gathered)


def compared(step: Step, other: Step) -> list[str]:
    """Return table cells: relative difference of the loss, relative difference of the gradient by norm, and cosine."""
    norm = float((step.gradient - other.gradient).norm() / other.gradient.norm())
    cosine = float(torch.nn.functional.cosine_similarity(step.gradient, other.gradient, dim=0))
    return [f"{step.loss / other.loss - 1:+.1e}", f"{norm:.1e}", f"{cosine:.5f}"]


def errors(meshes: Sequence[tuple[int, int]], count: int) -> list[str]:
    """Return the lines of the first table."""
    lines = [
        "| | mesh (dp_shard, cp) | products | loss, against fp32 | gradient | cosine | loss, against bf16 | gradient |"
        " cosine | MB sent in all-gathers |",
        "|---" * 10 + "|",
    ]
    for dp_shard, cp in meshes:
        with RankPool(dp_shard * cp, timeout=600.0, preload=("torch", "models.roles.load")) as pool:
            for case in CASES:

                def step(settings, dp_shard=dp_shard, cp=cp, case=case, pool=pool):
                    return pool.run(step_of, dp_shard, cp, settings, case, count)[0]

                exact = step({"precision": "fp32"})
                steps = {name: step(settings) for name, settings in WAYS.items()}
                for name, measured in steps.items():
                    cells = [
                        case,
                        f"({dp_shard}, {cp})",
                        name,
                        *compared(measured, exact),
                        *(["", "", ""] if name == "bf16" else compared(measured, steps["bf16"])),
                        f"{measured.gathered / 1e6:.2f}",
                    ]
                    lines.append(f"| {' | '.join(cells)} |")
    return lines


def distil(args: argparse.Namespace) -> tuple[bool, list[str]]:
    """Train students with and without fp8 roles. Return whether they agree within three standard errors, and tables."""
    out, count = args.out.resolve(), CLIPS // 8 if args.tiny else CLIPS
    roles = tuple(f"{role}.fp8={args.package}" for role in ("teacher", "student", "fake"))
    kinds = {"bf16": ("bf16", (), ("train.py",)), "fp8 roles": (args.package, roles, PROGRAMS[args.package])}
    lines = {
        name: [
            Run(
                method="dmd2",
                recipe=RECIPE,
                folder=out / folder / str(seed),
                changes=("precision=bf16", *args.changes, *more),
                seed=seed,
                program=program,
            )
            for seed in range(args.seeds)
        ]
        for name, (folder, more, program) in kinds.items()
    }
    train_all([run for seed in zip(*lines.values(), strict=True) for run in seed], args.workers)
    torch.set_num_threads(args.workers)
    rows = {name: students(runs, name, count) for name, runs in lines.items()}
    config = compose_config([f"experiment={RECIPE}", f"run_dir={out}"])
    text = [table([renders(config, count), *(row for by_seed in rows.values() for row in by_seed.values())])]
    text += ["", "| steps | measure | fp8 roles less bf16 | standard errors |", "|---|---|---|---|"]
    good = True
    for steps in STUDENT_STEPS:
        for key in MEASURES:
            fp8, bf16 = (rows[name][steps].measures[key] for name in ("fp8 roles", "bf16"))
            error = math.hypot(fp8.standard_error, bf16.standard_error)
            distance = abs(fp8.value - bf16.value) / error
            good &= distance <= LARGEST_DIFFERENCE
            text.append(
                f"| {steps} | {key.replace('_', ' ')} | {fp8.value - bf16.value:+.3f} ± {error:.3f} | {distance:.1f} |"
            )
    text.append(f"\nall within {LARGEST_DIFFERENCE:g} standard errors: {'yes' if good else '**no**'}")
    return good, text


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Return exit code 0; 1 if students differ; 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--distil", action="store_true", help="compare students with and without fp8 roles")
    parser.add_argument("--package", choices=PROGRAMS, default="torchao", help="of the fp8 roles of --distil")
    add_students(parser, "runs/fp8", "kind of roles")
    parser.add_argument("--tiny", action="store_true", help="one mesh of two ranks and few clips; one seed, 10 steps")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="settings of all students, e.g. steps=250")
    args = parser.parse_args(argv)
    if args.tiny:
        args.out, args.seeds = args.out.with_name(args.out.name + "_tiny"), 1
        args.changes = [*args.changes, "steps=10", "batch_size=8"]
    require_fp8(ShardSettings(fp8="torchao"), "cpu")
    if not args.distil:
        print("\n".join(errors(MESHES[1:2] if args.tiny else MESHES, 4 if args.tiny else 16)))
        return 0
    good, lines = distil(args)
    print("\n".join(lines))
    return 0 if good or args.tiny else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
