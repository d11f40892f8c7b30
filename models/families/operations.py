"""Floating-point operations of a network's forward: for a plan's time, and the utilization (MFU) of a run."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fsdp_cp.measure.fake_world import fake_tensors
from fsdp_cp.mesh import Mesh, OneRank
from models.condition import Condition
from models.families.base import Family, NetworkConfig, Shapes
from models.files.checkpoint_files import defining
from models.sample import VIDEO, PartShapes, Sample


class Flops(NamedTuple):
    """Floating-point operations of one forward of one sample: matrix products and attention only."""

    forward: int
    """Operations without tangents."""
    tangent: int
    """Additional operations of the forward-mode tangent: of a product once for each factor that has one."""
    attention: int
    """Operations of attention within ``forward``, which selective recomputation does not repeat."""
    sparse: int = 0
    """Operations of sparse attention within ``attention``, whose kernels are slower."""

    def without(self, self_attention: int) -> Flops:
        """Return the operations without these of self-attention, all of whose factors have tangents."""
        forward, tangent, attention, sparse = self
        return Flops(forward - self_attention, tangent - 2 * self_attention, attention - self_attention, sparse)


def count_flops(
    family: Family, config: NetworkConfig, shapes: PartShapes, condition: Shapes, *, frame_times: bool = False
) -> Flops:
    """Return the operations of one forward of one sample, in which all tokens attend to all.

    A network is counted on fake tensors. If all of its blocks are alike, one with one block and one with two suffice.
    ``frame_times`` counts times per latent frame, if the family has these.
    """
    config, more = defining(config), family.layers(config) - 1
    depths = [family.planning.with_layers(config, layers) or config for layers in (1, 2)]
    sizes = [json.dumps({**named}) for named in (shapes, condition)]
    one, two = (_count(family, json.dumps(depth), *sizes, frame_times) for depth in depths)
    return Flops(*(first + more * (second - first) for first, second in zip(one, two, strict=True)))


@lru_cache(maxsize=4096)
def _count(family: Family, config: str, shapes: str, condition: str, frame_times: bool) -> Flops:
    """Count one call of a network. Dispatch modes of the caller, as those of a plan, do not see it."""
    with _disable_current_modes(), torch.device("meta"):
        network = family.build(json.loads(config), "the network to count")
    with _disable_current_modes(), fake_tensors(), torch.no_grad():
        network.to_empty(device="cpu")
        family.restore_buffers(network, torch.device("cpu"))
        family.parallelize(network, cast(Mesh, OneRank()), "auto", 1)
        parts, given = (
            {name: torch.zeros(1, *size) for name, size in json.loads(named).items()} for named in (shapes, condition)
        )
        t = torch.zeros((1, parts[VIDEO].shape[2]) if frame_times else 1)
        noisy = Condition(given).with_noise(lambda _, size: torch.zeros(1, *size))
        with _Counter(t, *parts.values()) as counter:
            family.outputs(network, Sample(parts, family.parts), t, noisy)
    return Flops(counter.forward, counter.tangent, counter.attention)


class _Counter(TorchDispatchMode):
    """Counter of operations. It follows the tensors that depend on ``moving`` ones: these have tangents.

    ``flop_registry`` has the formulas of :class:`torch.utils.flop_counter.FlopCounterMode`. Like the two names of
    ``torch.utils._python_dispatch``, it is not public (torch 2.11 to 2.13).
    """

    def __init__(self, *moving: Tensor):
        super().__init__()
        self.forward = self.tangent = self.attention = 0
        _mark(moving)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        q, k, v, *_ = (*(hasattr(tensor, "moves") for tensor in inputs), False, False, False)
        if func.namespace == "fsdp_cp":  # an operator of fsdp_cp.attention: products with keys, and with values
            product = 2 * inputs[0].numel() * inputs[1].shape[1]
            self.forward += 2 * product
            self.tangent += product * (q + k + (q or k) + v)
            self.attention += 2 * product
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            product = formula(*args, **(kwargs or {}), out_val=out)
            self.forward += product
            self.tangent += product * (k + v if func.overloadpacket is torch.ops.aten.addmm else q + k)
        if any(hasattr(tensor, "moves") for tensor in inputs):
            _mark(tree_leaves(out))
        return out


def _mark(leaves) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            vars(leaf)["moves"] = True
