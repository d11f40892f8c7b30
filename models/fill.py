"""First values of a network: from a diffusers folder, or from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.errors import UserError
from fsdp_cp.reduce import local_shard, on_all_ranks
from fsdp_cp.sharding.initialise import initialise
from models.checkpoint_files import one_line
from models.names import owner
from models.network import Network
from models.role_plan import RolePlan


def fill(network: Network, plans: Sequence[RolePlan], seed: int) -> None:
    """First values of a network that roles have; a collective.

    Args:
        network: with memory.
        plans: of the roles; of experts, of the one that ``network`` is.
        seed: of random weights, and of what the folders have not: additions and adapters.

    Raises:
        UserError: on every rank, files that cannot be read, or weights that are not finite.
    """
    family, module = network.family, network.module
    if not plans[0].folders:
        # By public names: the base of adapters is the network of the same seed without any.
        initialise(module, seed=seed, special=family.fill_special, stream=_unless_adapter)
    else:
        base = {} if network.adapters else network.base_parameters()
        _load(network.base_parameters(), plans[0])
        for plan in plans:
            if plan.additions:
                initialise(module.get_submodule(f"additions.{plan.name}"), seed=seed)
            if plan.additions or plan.lora is not None:  # additions that were saved, copies of what is trained whole
                own = network.named_parameters(plan.name)
                _load({name: weight for name, weight in own.items() if name not in base}, plan)
    for plan in plans:
        if plan.lora is not None:
            plan.lora.fill(module, plan.name, seed)
            if plan.lora.saved is not None:
                own = network.named_parameters(plan.name)
                _require_finite(own, f"{plan.name}.checkpoint={plan.lora.saved.file.parent}")


def _unless_adapter(module_name: str) -> str | None:
    """Of whose random stream a module's first values come; an adapter's are drawn elsewhere."""
    return None if ".lora_" in module_name else owner(module_name)[1]


def _load(weights: Mapping[str, Tensor], plan: RolePlan) -> None:
    """What of ``weights`` the plan's folder holds, into them; a collective.

    Raises:
        UserError: on every rank, files that cannot be read, or weights that are not finite.
    """
    (folder,) = plan.folders
    saved = folder.shapes.keys() | folder.additions.keys()
    wanted = {folder.stored.get(name, name): weight.detach() for name, weight in weights.items() if name in saved}
    where = f"{plan.name}.checkpoint={folder.path}"
    if not wanted:
        return
    try:
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder.path)))
    except CheckpointException as error:  # of all ranks, whichever could not read
        reason = one_line(next(iter(error.failures.values()))[0])
        raise UserError(f"{where} cannot be read ({reason}); copy it again") from error
    _require_finite(wanted, where)


def _require_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity, which training would spread. Called by all ranks, each looks at its shards.

    Raises:
        UserError: on every rank the same, with the first such tensor.
    """
    mine = sorted(name for name, weight in weights.items() if not local_shard(weight).isfinite().all())
    broken = sorted({name for part in on_all_ranks(lambda: mine) for name in part})
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(f"{where}: {broken[0]}{more} holds numbers that are not finite; copy the checkpoint again")
