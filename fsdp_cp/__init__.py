"""FSDP2 sharding and context parallelism on one device mesh, for any transformer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_cp.measure.phases import phase
    from fsdp_cp.mesh import Mesh, build_mesh
    from fsdp_cp.sharding.initialise import initialise
    from fsdp_cp.sharding.settings import ShardSettings
    from fsdp_cp.sharding.shard import discard_step, gather_first_block_early, materialise, microbatch, shard_module
    from fsdp_cp.sharding.state import frozen, resharded

__all__ = [
    "Mesh",
    "ShardSettings",
    "discard_step",
    "frozen",
    "build_mesh",
    "gather_first_block_early",
    "initialise",
    "materialise",
    "microbatch",
    "phase",
    "resharded",
    "shard_module",
]

_MODULES = {
    "measure.phases": ("phase",),
    "mesh": ("Mesh", "build_mesh"),
    "sharding.initialise": ("initialise",),
    "sharding.settings": ("ShardSettings",),
    "sharding.shard": ("discard_step", "gather_first_block_early", "materialise", "microbatch", "shard_module"),
    "sharding.state": ("frozen", "resharded"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: importing FSDP and DTensor takes half as long as importing torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"fsdp_cp.{module}"), name)
    raise AttributeError(f"module 'fsdp_cp' has no attribute {name!r}")
