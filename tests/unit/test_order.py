"""The data order: which clip is at which position, on every mesh."""

from collections import Counter

import pytest

from distill.data.order import Batching, clip_at, clips_of_micro_batches

SPLITS = [(1, 8), (1, 2), (2, 1), (4, 2), (8, 1)]  # (dp_size, micro)


def batchings(dp_size, micro, global_size=8):
    sizes = {"global_size": global_size, "micro_batch_size": micro, "dp_size": dp_size}
    return [Batching(**sizes, dp_rank=r) for r in range(dp_size)]


def stream(dp_size, micro, *, clips=11, first=0, steps=7, seed=5, global_size=8):
    """Return the clip per (step, position in the global batch), put together from all ranks' samplers."""
    seen = {}
    for batching in batchings(dp_size, micro, global_size):
        how = {"seed": seed, "clips": clips, "first_sample": first, "steps": steps}
        micro_batches = list(clips_of_micro_batches(**how, batching=batching))
        assert len(micro_batches) == steps * batching.accumulation
        for i, indices in enumerate(micro_batches):
            step, micro_batch = divmod(i, batching.accumulation)
            for position, clip in zip(batching.positions(micro_batch), indices, strict=True):
                assert (step, position) not in seen, "two ranks hold the same sample"
                seen[step, position] = clip
    return [seen[key] for key in sorted(seen)]


@pytest.mark.parametrize(("dp_size", "micro"), SPLITS)
def test_ranks_and_micro_batches_together_are_one_stream_on_every_mesh(dp_size, micro):
    shares = batchings(dp_size, micro)
    assert all(b.accumulation == 8 // (dp_size * micro) for b in shares)
    positions = [b.positions(i) for b in shares for i in range(b.accumulation)]
    assert all(len(p) == micro for p in positions)
    assert sorted(sum(positions, [])) == list(range(8))
    assert stream(dp_size, micro) == [clip_at(5, 11, position) for position in range(7 * 8)]


@pytest.mark.parametrize("clips", [1, 8, 30])
def test_every_clip_comes_once_an_epoch(clips):
    epochs = [[clip_at(3, clips, epoch * clips + i) for i in range(clips)] for epoch in range(4)]
    for order in epochs:
        assert Counter(order) == Counter(range(clips))
    if clips > 5:
        assert len({tuple(order) for order in epochs}) == 4, "each epoch has an order of its own"
        assert epochs[0] != [clip_at(4, clips, i) for i in range(clips)], "the order depends on the seed"


@pytest.mark.parametrize(("stop", "dp_size", "micro"), [(1, 4, 1), (3, 1, 8), (6, 2, 2)])
def test_resume_goes_on_by_position_on_another_mesh(stop, dp_size, micro):
    whole = stream(2, 4)
    assert whole[: stop * 8] + stream(dp_size, micro, first=stop * 8, steps=7 - stop) == whole


def test_resume_with_another_batch_size_repeats_and_skips_nothing():
    clips = 48
    used = stream(1, 8, clips=clips, steps=3) + stream(2, 3, clips=clips, first=24, steps=4, global_size=6)
    assert Counter(used) == Counter(range(clips))
