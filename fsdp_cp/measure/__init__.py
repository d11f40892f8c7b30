"""What a step takes: memory, traffic, phases, norms."""
