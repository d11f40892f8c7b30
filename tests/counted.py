"""Counters of computation, kept tensors and compilation, for use in the process that computes."""

from collections import Counter
from functools import partial

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_cp.attention.operators as operators
from fsdp_cp.sharding import activations


class Counted:
    """Context that counts compiled graphs (by ``backend``), calls of ring attention, and bytes copied to CPU memory."""

    def __init__(self, backend="aot_eager"):
        self.graphs = self.rings = self.host_bytes = 0
        self.copies = []
        self._backend, self._takes_options = lookup_backend(backend), backend == "inductor"
        self._saved = torch.compile, operators.attend_in_ring.forward, activations.host_buffer

    def _compile(self, graph, inputs, options=None):
        self.graphs += 1
        return self._backend(graph, inputs, **({"config_patches": options} if self._takes_options else {}))

    def __enter__(self):
        compile_, ring, copy = self._saved

        def counted_ring(*args, **kwargs):
            self.rings += 1
            return ring(*args, **kwargs)

        def counted_copy(like, pinned):
            self.copies.append(like.nbytes)
            return copy(like, pinned)

        torch._dynamo.reset()
        torch.compile = partial(compile_, backend=self._compile)
        operators.attend_in_ring.forward, activations.host_buffer = counted_ring, counted_copy
        return self

    def __exit__(self, *_):
        torch.compile, operators.attend_in_ring.forward, activations.host_buffer = self._saved
        torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Context that counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func] += 1
        return func(*args, **(kwargs or {}))
