"""One command for one GPU: ``python -m benchmarks.gpu``; see :mod:`benchmarks.gpu.command`."""
