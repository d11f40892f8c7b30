"""Sharding a network by blocks with FSDP2: what it takes, and what a step does with it."""

from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.shard import gather_first_block_early, materialise, settings_of, shard_module

__all__ = ["ShardSettings", "gather_first_block_early", "materialise", "settings_of", "shard_module"]
