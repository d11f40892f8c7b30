"""FSDP2 sharding and context parallelism on one device mesh, for any transformer."""

from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.microbatch import microbatch
from fsdp_cp.sharding import shard_module

__all__ = ["Mesh", "build_mesh", "microbatch", "shard_module"]
