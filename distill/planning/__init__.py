"""Planner: predicts the memory, computation and traffic of a run without GPUs."""
