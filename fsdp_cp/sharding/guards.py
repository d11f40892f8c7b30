"""Hooks of a sharded network that refuse gradient penalties on freed weights and allow a first inference forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import ShardedModule, never_gathered_units


def refuse_double_backward(model: nn.Module, settings: ShardSettings) -> None:
    """Raise if a backward with ``create_graph=True`` would free the weights that the second backward needs.

    Call it before FSDP2 registers its hooks, so that the check raises before any gather.
    """
    kind, keeps = type(model).__name__, settings.keeps_gathered

    def check(_grad: Tensor) -> None:
        if not torch.is_grad_enabled():  # in a backward: only with create_graph=True
            return
        open_contexts = getattr(model, "_open_microbatches", ())
        if keeps and open_contexts and open_contexts[-1] is False:
            return
        instead = (
            "put it into `with microbatch(model, is_first=False, is_last=False)`"
            if keeps
            else "use strategy='optim', 'optim_grads' or keep_gathered=True"
        )
        raise UserError(
            f"a backward with create_graph=True (a gradient penalty) through {kind}: under"
            f" strategy={settings.strategy!r} its weights are freed before the second backward needs them; take a"
            f" finite difference, or, without fsdp_cp.attention, {instead} (docs/gradients.md, 'Gradient penalties')"
        )

    def watch(_module: nn.Module, _args: tuple, output: Any) -> None:
        if torch.is_grad_enabled():
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(check)

    model.register_forward_hook(watch)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in the containers that FSDP2 looks through: mappings, lists, tuples, dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        yield from _tensors(part)


def allow_inference_mode(model: ShardedModule) -> None:
    """Allow a first forward under ``torch.inference_mode()`` without breaking later training.

    FSDP2 creates the tensors of full parameters in the first forward and keeps them. Inference tensors would make later
    gathers and backwards fail. This hook runs before FSDP2's hooks and creates the tensors outside inference mode: it
    gathers and frees each unit once.
    """

    def make(_module: nn.Module, _args: tuple) -> None:
        if not torch.is_inference_mode_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            for unit in never_gathered_units(model):
                unit.unshard()
                unit.reshard()

    model.register_forward_pre_hook(make, prepend=True)
