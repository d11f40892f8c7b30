"""The data order: which clip is at which position, on every mesh."""

from collections import Counter

import pytest

from distill.data.order import Batching, Order, clip_at, clips_of_micro_batches

SPLITS = [(1, 8), (1, 2), (2, 1), (4, 2), (8, 1)]  # (dp_size, micro)


def batchings(dp_size, micro, global_size=8):
    sizes = {"global_size": global_size, "micro_batch_size": micro, "dp_size": dp_size}
    return [Batching(**sizes, dp_rank=r) for r in range(dp_size)]


def stream(dp_size, micro, *, clips=11, first=0, steps=7, seed=5, global_size=8, buckets=None):
    """Return the clip per (step, position in the global batch), put together from all ranks' samplers."""
    buckets = buckets or [range(clips)]
    seen = {}
    for batching in batchings(dp_size, micro, global_size):
        how = {"seed": seed, "buckets": buckets, "first_sample": first, "steps": steps}
        micro_batches = list(clips_of_micro_batches(**how, batching=batching))
        assert len(micro_batches) == steps * batching.accumulation
        for i, (bucket, indices) in enumerate(micro_batches):
            assert set(indices) <= set(buckets[bucket])
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


SIZES = [range(13), range(13, 16), range(16, 36)]
"""Three buckets, none of which fills whole batches of eight."""


@pytest.mark.parametrize(("dp_size", "micro"), SPLITS)
def test_a_batch_is_of_one_bucket_on_every_mesh_and_after_a_resume(dp_size, micro):
    whole = stream(1, 8, buckets=SIZES, steps=27)
    batches = [set(whole[i : i + 8]) for i in range(0, len(whole), 8)]
    assert all(sum(bool(batch & set(bucket)) for bucket in SIZES) == 1 for batch in batches)
    assert stream(dp_size, micro, buckets=SIZES, steps=27) == whole
    assert whole[: 5 * 8] + stream(dp_size, micro, buckets=SIZES, first=5 * 8, steps=22) == whole
    assert stream(1, 8, buckets=SIZES, steps=27, seed=6) != whole


def test_every_clip_of_every_bucket_comes_equally_often():
    """Eight epochs of 36 clips are 36 batches, also of the bucket that fills one in three epochs."""
    counts = Counter(stream(1, 8, buckets=SIZES, steps=36))
    assert counts == Counter({clip: 8 for bucket in SIZES for clip in bucket})
    order = Order(seed=5, buckets=(13, 3, 20), batch_size=8)
    places = [order.place(8 * n) for n in range(36)]
    for bucket in range(3):
        starts = [start for here, start in places if here == bucket]
        assert starts == list(range(0, 8 * len(starts), 8)), "a bucket's stream has no gap"
    assert len({tuple(bucket for bucket, _ in places[i : i + 9]) for i in (0, 9, 18, 27)}) == 4, "in no fixed turns"
    assert [Order(seed=5, buckets=(3,), batch_size=8).place(n) for n in (0, 8, 21)] == [(0, 0), (0, 8), (0, 21)]


def test_each_epoch_has_an_order_of_its_own_of_the_buckets():
    order = Order(seed=5, buckets=(80, 80), batch_size=8)
    epochs = [tuple(order.place(8 * (20 * epoch + i))[0] for i in range(20)) for epoch in range(3)]
    assert len({*epochs}) == 3 and all(epoch.count(0) == 10 for epoch in epochs)
