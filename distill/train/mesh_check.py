"""Check of a run's first steps on two meshes: the results must not depend on the mesh."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from distill.data import ClipDataset
from distill.run.open import Run
from distill.run.setup import plan_run
from distill.train.trainer import build_trainer
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import mesh_of_shape

log = logging.getLogger(__name__)


def check_meshes(run: Run, data: ClipDataset) -> dict[str, Any]:
    """Compute the first step of each trained role on the run's mesh and on a second one, with all ranks on ``cp``, or
    on ``dp_shard`` if the run's has that shape. Each gets its own networks with the run's initial weights, freed
    afterwards. Return a fact for the report, loss and gradient norm by step, role and mesh; empty for one rank or
    settings that do not fit the second mesh. A collective."""
    world = run.plan.mesh.world
    if world == 1:
        return {}
    cp = 1 if run.plan.mesh.cp == world else world
    settings = replace(run.config.mesh, dp_replicate=1, dp_shard=-1, cp=cp, ulysses="auto", ring="auto")
    config = replace(run.config, mesh=settings)
    try:
        plan = plan_run(config)
    except UserError as error:
        log.info("mesh_check: cannot compare with cp=%d: %s", cp, error)
        return {}
    rows: dict[str, str] = {}
    for other in (run, replace(run, config=config, plan=plan)):
        shape = other.plan.mesh
        trainer = build_trainer(replace(other, mesh=mesh_of_shape(shape, device_type=run.device.type)), data)
        for name, (loss, norm) in trainer.first_steps().items():
            rows[f"{name}, dp_shard={shape.dp_shard} x cp={shape.cp}"] = f"loss {loss:.7g}, gradient norm {norm:.7g}"
    if rank() == 0:
        for name, values in sorted(rows.items()):
            log.info("check    %-40s  %s", name, values)
    return {"first steps on two meshes": dict(sorted(rows.items()))}
