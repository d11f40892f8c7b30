"""What a checkpoint must not hold."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import all_reduce_scalars, local_shard
from models.role import Role


def refuse_broken_weights(roles: Mapping[str, Role], mesh: Mesh, step: int) -> None:
    """Refuse weights that are not finite: a checkpoint of them is what the run would go on from. Called by all ranks.

    Raises:
        UserError: on all ranks.
    """
    for name, role in roles.items():
        broken = sum(not local_shard(weight).isfinite().all() for weight in role.weights().values())
        if all_reduce_scalars([float(broken)], mesh.world)[0]:
            raise UserError(
                f"step {step}: weights of the {name} are not finite, and are not saved; lower optim.{name}.lr and go on"
                " from an earlier checkpoint, or begin again with checkpoint.resume=never"
            )
