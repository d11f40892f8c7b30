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

__all__ = ["Mesh", "ShardSettings", "build_mesh", "discard_step", "frozen", "gather_first_block_early", "initialise",
           "materialise", "microbatch", "phase", "resharded", "shard_module"]  # fmt: skip
_MODULES = ("measure.phases", "mesh", "sharding.initialise", "sharding.settings", "sharding.shard", "sharding.state")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: importing FSDP and DTensor takes half as long as importing torch."""
    for module in _MODULES if name in __all__ else ():
        if hasattr(imported := import_module(f"fsdp_cp.{module}"), name):
            return getattr(imported, name)
    raise AttributeError(f"module 'fsdp_cp' has no attribute {name!r}")
