"""The first steps of a run on its own mesh and on another one: the results must not depend on the mesh."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from distill.config import Config
from distill.data import ClipDataset
from distill.setup import RunPlan, plan_run
from distill.trainer import build_trainer
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import mesh_of_shape

log = logging.getLogger(__name__)


def check_meshes(config: Config, plan: RunPlan, *, device: torch.device, data: ClipDataset) -> dict[str, str]:
    """Compute the first step of each trained role on the run's mesh and on another one, before the run. A collective.

    The other mesh has all ranks on its ``cp`` axis, or on ``dp_shard`` if the run's own mesh is that one. Each mesh
    gets its own networks, which start as the run's and are freed.

    Returns:
        Loss and gradient norm by step, role and mesh, in words; empty for a run of one rank, and if its settings do not
        fit the other mesh.
    """
    world = plan.mesh.world
    if world == 1:
        return {}
    cp = 1 if plan.mesh.cp == world else world
    mesh = replace(config.mesh, dp_replicate=1, dp_shard=-1, cp=cp, ulysses="auto", ring="auto")
    other = replace(config, mesh=mesh)
    try:
        plans = [(config, plan), (other, plan_run(other))]
    except UserError as error:
        if rank() == 0:
            log.info("log.mesh_check: cannot compare with cp=%d: %s", cp, error)
        return {}
    found = {}
    for settings, planned in plans:
        shape = planned.mesh
        on_mesh = mesh_of_shape(shape, device_type=device.type)
        trainer = build_trainer(settings, planned, mesh=on_mesh, device=device, data=data)
        for name, (loss, norm) in trainer.first_steps().items():
            found[f"{name}, dp_shard={shape.dp_shard} x cp={shape.cp}"] = f"loss {loss:.7g}, gradient norm {norm:.7g}"
    if rank() == 0:
        for name, values in sorted(found.items()):
            log.info("%s: %s", name, values)
    return dict(sorted(found.items()))
