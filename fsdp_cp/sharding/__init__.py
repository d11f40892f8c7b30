"""Sharding a network by blocks with FSDP2: what it takes, and what a step does with it."""
