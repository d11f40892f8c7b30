"""Sweeps: several values of some settings, one torchrun job per combination, one table and picture of all."""
