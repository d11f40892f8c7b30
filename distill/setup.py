"""Everything that can be refused before a process group, data or a network exists; and the run's folder."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill.config import Config, micro_batch_size
from distill.data import latent_shape
from distill.methods import METHODS, Method
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank, world_size
from fsdp_cp.mesh import resolve_mesh
from fsdp_cp.reduce import barrier
from fsdp_cp.sequence import local_token_count
from models.load import RolePlan, plan_role

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A configuration that fits the world and its checkpoints."""

    run_dir: Path
    method: type[Method]
    roles: list[RolePlan]
    heads: int
    """Greatest common divisor of the heads of all roles, which share the mesh."""
    mesh_settings: dict[str, Any]
    micro: int
    """Samples per data-parallel rank and forward."""


def plan_run(config: Config) -> RunPlan:
    """Check ``config`` against the world and the files it names.

    Raises:
        UserError: whatever does not fit, in one line.
    """
    for service in ("wandb", "tensorboard"):
        if getattr(config.log, service) and importlib.util.find_spec(service) is None:
            raise UserError(f"log.{service}=true needs {service}; pip install 'fsdp-cp[{service}]'")
    method, _ = METHODS[config.method.name]
    roles = [
        plan_role(
            name,
            checkpoint=settings.checkpoint,
            architecture=settings.architecture,
            family=settings.family,
            activation_checkpointing=settings.activation_checkpointing,
            strategy=settings.strategy,
        )
        for name, settings in ((name, getattr(config, name)) for name in method.required_roles)
    ]
    patches = {tuple(role.config["patch_size"]) for role in roles}
    if len(patches) > 1:
        raise UserError(f"the roles have patch sizes {sorted(patches)}; checkpoints on one mesh must share theirs")
    latents = latent_shape(config.data)
    tokens = {role.family.tokens(role.config, latents, f"{role.name}.checkpoint") for role in roles}
    assert len(tokens) == 1
    heads = math.gcd(*(role.family.heads(role.config) for role in roles))
    mesh_settings = asdict(config.mesh)
    shape = resolve_mesh(world_size=world_size(), heads=heads, **mesh_settings)
    local_token_count(tokens.pop(), shape.cp)
    return RunPlan(
        run_dir=Path(config.run_dir),
        method=method,
        roles=roles,
        heads=heads,
        mesh_settings=mesh_settings,
        micro=micro_batch_size(config, shape.dp),
    )


def write_config(config: Config, run_dir: Path) -> None:
    """``config.yaml``, once nothing is left that could refuse the run: a refused one must not change another's."""
    if rank() == 0:
        OmegaConf.save(OmegaConf.create(asdict(config)), run_dir / "config.yaml")


def prepare_run_dir(config: Config, run_dir: Path) -> None:
    """Make the run's folder; with ``resume=never``, move an earlier run's output aside.

    Called by all ranks, on a file system that they share; rank 0 writes.
    """
    if rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.checkpoint.resume == "never":
            _move_aside(run_dir)
    barrier()


def _move_aside(run_dir: Path) -> None:
    """Nothing is deleted: an earlier run's files go to ``previous/N/``. The latent cache stays, it is keyed."""
    names = (
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "samples",
        "export",
        "report.html",
        "report.json",
        "report.png",
    )
    found = [run_dir / name for name in names if (run_dir / name).exists()]
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists():
        return
    previous = run_dir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    target = previous / str(number)
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    log.info("checkpoint.resume=never: moved the earlier run's files to %s", target)
