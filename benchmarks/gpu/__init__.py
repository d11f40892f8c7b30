"""All measurements for one GPU, as one command: ``python -m benchmarks.gpu``; see :mod:`benchmarks.gpu.command`."""
