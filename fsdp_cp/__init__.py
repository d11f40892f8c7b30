"""FSDP2 sharding and context parallelism on one device mesh, for any transformer."""

from fsdp_cp.measure.phases import phase
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.sharding import gather_first_block_early, materialise, shard_module
from fsdp_cp.sharding.accumulation import discard_step, microbatch
from fsdp_cp.sharding.initialise import broadcast_from_rank0, initialise
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import set_trainable

__all__ = [
    "Mesh",
    "ShardSettings",
    "discard_step",
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
