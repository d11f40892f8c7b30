"""Batches of a run's steps, on this rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from distill.config import Config
from distill.data import ClipDataset
from distill.data.order import Batching, MicroBatchSampler
from distill.methods import Batch
from fsdp_cp.mesh import Mesh
from models.roles.condition import Condition


class StepBatches:
    """Micro-batches of each step. They depend only on the seed and on the number of samples before them.

    Args:
        config: the checked configuration.
        mesh: the mesh.
        device: this rank's device.
        data: the clips, with the conditions that guidance subtracts and that replace a dropped caption.
        training_data: the clips that the steps read; see :meth:`distill.methods.Method.training_data`.
        micro_batch_size: samples per data-parallel rank and forward.
    """

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        device: torch.device,
        data: ClipDataset,
        training_data: ClipDataset,
        micro_batch_size: int,
    ):
        self.seed, self.device, self.data, self.training_data = config.seed, device, data, training_data
        self.batching = Batching(
            global_size=config.batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            parts=config.expert_draws,
        )
        # Move them once: a copy with each micro-batch would stall the GPU.
        self.null, self.empty = (
            {name: value.to(device) for name, value in values.items()} for values in (data.null, data.empty)
        )

    def steps(self, count: int, *, first_sample: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each of the next ``count`` steps, after ``first_sample`` samples."""
        sampler = MicroBatchSampler(
            seed=self.seed,
            clips=len(self.training_data),
            batching=self.batching,
            first_sample=first_sample,
            steps=count,
        )
        loader = DataLoader(self.training_data, batch_sampler=sampler, pin_memory=self.device.type == "cuda")
        micro_batches = iter(loader)
        for _ in range(count):
            yield [self._to_batch(next(micro_batches)) for _ in range(self.batching.accumulation)]

    def _to_batch(self, items: dict[str, Any]) -> Batch:
        def moved(name: str) -> Tensor:
            return items[name].to(self.device, non_blocking=True)

        return Batch(
            latents=moved("latents") if "latents" in items else None,
            condition=Condition({name: moved(name) for name in self.data.condition_shapes}, self.null, self.empty),
            latent_shape=self.data.latent_shape,
            states=moved("states") if "states" in items else None,
        )
