"""Faults that the tests must catch, and a command that checks that they do: ``python -m tests.mutants``."""
