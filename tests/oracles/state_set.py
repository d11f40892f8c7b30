"""A set of a teacher's clips with states, of random numbers, for the sizes of the rendered clips."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from distill.data.sets.write_set import SHARD_BYTES, SetWriter, texts_of
from distill.data.settings import MovingShapesSettings
from models.causal import CausalSettings

SHAPE = (3, 6, 16, 16)


def stored(number: int, times: Sequence[float]) -> dict[str, Tensor]:
    """Return the tensors of a clip of :func:`write_state_set`."""
    generator = torch.Generator().manual_seed(number)
    made = {"latents": torch.randn(SHAPE, generator=generator)}
    return made | ({"states": torch.randn(len(times), *SHAPE, generator=generator)} if times else {})


def write_state_set(
    path: Path, count: int, times: Sequence[float], per_shard: int = 2, causal: CausalSettings | None = None
) -> None:
    """Write a set of ``count`` clips with states at ``times``, of a teacher that is ``causal``."""
    settings = MovingShapesSettings().encoding()
    data = MovingShapesSettings().build(seed=0)
    teacher = {"states": list(times)} | ({"causal": asdict(causal)} if causal else {})
    about = {"clips": count, "rows": "", "teacher": teacher}
    writer = SetWriter(path, f"OUT={path}", settings.described() | about)
    rows = [(i, (data.caption(i), -1)) for i in range(count)]
    texts = texts_of(rows, "")
    with writer.begun():
        size = SHARD_BYTES // per_shard
        writer.write("clips", count, size, "clip", lambda ns, save, _: [save(n, stored(n, times), {}) for n in ns])
        writer.write(
            "texts", len(texts), 1, "text", lambda ns, save, _: [save(n, data.embeddings(texts[n][0]), {}) for n in ns]
        )
        writer.finish(rows, "", encoders=settings.encoders)
