"""Block-wise sharding of a network with FSDP2: settings, wrapping, gradient accumulation and initialization."""
