"""FSDP2 sharding and context parallelism on one device mesh, for any transformer."""

from fsdp_cp.fsdp_state import set_trainable
from fsdp_cp.initialise import broadcast_from_rank0, initialise
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.microbatch import abandon_step, microbatch
from fsdp_cp.phases import phase
from fsdp_cp.shard_settings import ShardSettings
from fsdp_cp.sharding import gather_first_block_early, materialise, shard_module

__all__ = [
    "Mesh",
    "ShardSettings",
    "abandon_step",
    "broadcast_from_rank0",
    "build_mesh",
    "gather_first_block_early",
    "initialise",
    "materialise",
    "microbatch",
    "phase",
    "set_trainable",
    "shard_module",
]
