"""Measurements of a step: memory, traffic, phases, norms."""
