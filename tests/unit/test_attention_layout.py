"""The layout of tokens over ranks and the rectangles of attention, against lists and matrices written out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.mask import BlockMask, block_causal, teacher_forcing
from tests.distributed.test_attention import block_masks
from tests.oracles.attention import dense_mask


def _local_sequences(layout):
    """Return the token numbers that each rank holds, with -1 for padding."""
    cp = layout.ring * layout.ulysses
    ranks = [[] for _ in range(cp)]
    base = 0
    for total in layout.segments:
        length = -(-total // cp)
        for rank in range(cp):
            tokens = range(rank * length, (rank + 1) * length)
            ranks[rank] += [base + t if t < total else -1 for t in tokens]
        base += total
    return ranks


_layouts = st.builds(
    lambda segments, ulysses, ring: Layout(tuple(segments), tuple(segments), ulysses=ulysses, ring=ring),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 4),
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layout=_layouts)
def test_chunks_hold_every_token_once(layout):
    ranks = _local_sequences(layout)
    seen = []
    for ring_rank in range(layout.ring):
        buffer = sum(ranks[ring_rank * layout.ulysses : (ring_rank + 1) * layout.ulysses], [])
        chunk = layout.chunk(ring_rank)
        assert chunk.padded == len(buffer)
        x = torch.tensor(buffer)[None, :, None]
        own = chunk.take(x)
        assert own.flatten().tolist() == [t for t in buffer if t >= 0]
        assert chunk.put(own + 1).flatten().tolist() == [t + 1 for t in buffer]
        bits = own.mul(13).sub(2**15).to(torch.int16)  # halves of fp32 numbers travel as bf16: -0 and NaN among them
        assert torch.equal(chunk.take(chunk.put(bits.view(torch.bfloat16))).view(torch.int16), bits)
        mask = torch.arange(sum(layout.segments))[None]
        assert chunk.select(mask).flatten().tolist() == own.flatten().tolist()
        added = torch.zeros_like(x)
        for start in range(own.shape[1]):
            chunk.add_into(added, own[:, start : start + 2] + 1, start)
        expected = torch.tensor([t + 1 for t in buffer])
        first = own[0, 0, 0] + 1 if own.numel() else 0
        assert added.flatten().tolist() == torch.where(expected == first, expected, 2 * expected).tolist()
        seen += own.flatten().tolist()
    assert sorted(seen) == list(range(sum(layout.segments)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layout=_layouts, data=st.data())
def test_tiles_are_what_queries_see(layout, data):
    """Every visible pair is attended to once. K, V and gradients travel exactly as far as a rank needs them."""
    tokens, ring = sum(layout.segments), layout.ring
    layout = replace(layout, mask=data.draw(st.one_of(st.none(), block_masks(tokens))))
    visible = torch.ones(tokens, tokens, dtype=torch.int32) if layout.mask is None else dense_mask(layout.mask).int()
    assert layout.mask is None or visible.sum() == layout.mask.pairs
    counted = torch.zeros_like(visible)
    needs = torch.zeros(ring, ring, dtype=torch.bool)
    for q_rank in range(ring):
        for k_rank in range(ring):
            rows = layout.chunk(q_rank).select(torch.arange(tokens)[None])[0]
            columns = layout.key_chunk(k_rank).select(torch.arange(tokens)[None])[0]
            for rectangle in layout.rectangles(q_rank, k_rank):
                needs[q_rank, k_rank] = True
                counted[rows[slice(*rectangle.queries), None], columns[None, slice(*rectangle.keys)]] += 1
    assert torch.equal(counted, visible)
    for chunk in range(ring):
        for hop in range(ring - 1):
            later = [(chunk + i) % ring for i in range(hop + 1, ring)]
            assert layout.keys_travel(chunk, hop) == needs[later, chunk].any()
            before = [(chunk + i) % ring for i in range(1, hop + 2)]
            assert layout.grads_travel(chunk, hop) == needs[before, chunk].any()


@pytest.mark.parametrize(
    ("tokens", "ring", "ulysses", "sizes"),
    [
        (32760, 4, 4, [8192, 8192, 8192, 8184]),  # 480p x 81 frames, 12 heads on 16 ranks
        (5, 4, 1, [2, 2, 1, 0]),
        (1, 3, 1, [1, 0, 0]),
    ],
)
def test_true_tokens_of_each_chunk(tokens, ring, ulysses, sizes):
    layout = Layout((tokens,), (tokens,), ulysses=ulysses, ring=ring)
    assert [layout.chunk(rank).size for rank in range(ring)] == sizes
    assert len({layout.chunk(rank).padded for rank in range(ring)}) == 1


@pytest.mark.parametrize("ring", [1, 2])
def test_alone_means_that_every_query_sees_every_key_at_once(ring):
    masks = (None, block_causal((12,)), block_causal((1,) * 12), block_causal((11, 1)), BlockMask((12,), (((0, 11),),)))
    for mask in masks:
        layout = Layout((12,), (12,), ulysses=3, ring=ring, mask=mask)
        assert layout.alone(0) == (ring == 1 and mask in masks[:2])
        if layout.alone(0):
            (rectangle,) = layout.rectangles(0, 0)
            assert rectangle.queries == rectangle.keys == (0, 12), "a ring of one takes this rectangle without looking"


CHUNKS = (3 * 1560,) * 7  # 21 latent frames of 480p


@pytest.mark.parametrize(
    ("mask", "calls"),
    [
        (block_causal(CHUNKS), (7, 5)),
        (block_causal(CHUNKS, window=2, sink=1), (7 + 1, 8)),
        (teacher_forcing(CHUNKS), (7 + 6 + 7, 13)),
        (teacher_forcing(CHUNKS, window=2, sink=1), (20 + 2, 14)),
        (teacher_forcing((1560,) * 21), (62, 41)),
    ],
)
def test_calls_of_a_kernel(mask, calls):
    """Runs of queries that see the same keys share a call, so a sink costs one for all of them."""
    for ring, most in zip((1, 2), calls, strict=True):
        layout = Layout((mask.tokens,), (mask.tokens,), ulysses=4, ring=ring, mask=mask)
        ranks = range(ring)
        assert max(sum(len(layout.rectangles(i, j)) for j in ranks) for i in ranks) == most, ring


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    blocks=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(0, 6)),
    sink=st.integers(0, 6),
)
def test_masks_of_causal_networks(blocks, window, sink):
    """Token by token: earlier blocks within the window or the sink; clean tokens their own block, noisy ones theirs."""
    number = torch.tensor([i for i, n in enumerate(blocks) for _ in range(n)])
    query, key = number[:, None], number[None, :]
    earlier = (key < query) & ((key < sink) | (key >= query - (len(blocks) if window is None else window)))
    same = query == key
    assert torch.equal(dense_mask(block_causal(blocks, window=window, sink=sink)), earlier | same)
    clean, noisy = torch.cat((earlier | same, torch.zeros_like(same)), 1), torch.cat((earlier, same), 1)
    assert torch.equal(dense_mask(teacher_forcing(blocks, window=window, sink=sink)), torch.cat((clean, noisy)))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("blocks", lambda: block_causal(())),
        ("blocks", lambda: block_causal((3, 0))),
        ("blocks", lambda: teacher_forcing((2.0,))),
        ("window", lambda: block_causal((3,), window=-1)),
        ("sink", lambda: teacher_forcing((3,), sink=None)),
        ("mask", lambda: BlockMask((), ())),
        ("mask", lambda: BlockMask((2, 1), (((0, 3),),))),
        ("mask", lambda: BlockMask((3,), (((0, 4),),))),
        ("mask", lambda: BlockMask((3,), (((1, 3), (0, 2)),))),
        ("mask", lambda: BlockMask((3,), (((1, 1),),))),
    ],
)
def test_masks_that_are_refused(name, make):
    with pytest.raises(ValueError, match=name) as raised:
        make()
    assert "\n" not in str(raised.value)
