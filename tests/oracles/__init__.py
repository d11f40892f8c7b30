"""Oracles for tests and benchmarks: computations in one process, written out or by the library itself.

``plain_run`` is the oracle of ``sharded_run``. ``attention``, ``attention_kernels`` and ``long_attention`` are
attention written out. Nothing here imports pytest or a benchmark.
"""
