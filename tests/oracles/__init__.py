"""What tests and benchmarks compare: a computation in one process, written out or by the library itself, and its like.

``plain_run`` is the truth of ``sharded_run``; ``attention``, ``attention_kernels`` and ``long_attention`` are attention
written out. Nothing here imports pytest or a benchmark.
"""
