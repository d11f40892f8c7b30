"""Sweeps: a run's settings at several values each, a torchrun job for every combination, one table and picture."""
