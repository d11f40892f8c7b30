"""The layout of tokens over ranks and the tiles of attention, against lists and matrices written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_cp.attention.layout import Layout


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


@settings(max_examples=60, deadline=None, derandomize=True)
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 40),
    ulysses=st.integers(1, 3),
    ring=st.integers(1, 5),
    block=st.one_of(st.none(), st.integers(1, 15)),
)
def test_tiles_are_what_queries_see(tokens, ulysses, ring, block):
    """Every visible pair is attended to once. K, V and gradients travel exactly as far as a rank needs them."""
    layout = Layout((tokens,), (tokens,), ulysses=ulysses, ring=ring, causal_block=block)
    number = torch.arange(tokens) // (block or tokens)
    visible = (number[:, None] >= number[None, :]).int()
    counted = torch.zeros_like(visible)
    needs = torch.zeros(ring, ring, dtype=torch.bool)
    for q_rank in range(ring):
        for k_rank in range(ring):
            rows = layout.chunk(q_rank).select(torch.arange(tokens)[None])[0]
            columns = layout.key_chunk(k_rank).select(torch.arange(tokens)[None])[0]
            for tile in layout.tiles(q_rank, k_rank):
                needs[q_rank, k_rank] = True
                counted[rows[slice(*tile.queries), None], columns[None, slice(*tile.keys)]] += 1
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
    for block in (None, 1, 11, 12, 13):
        layout = Layout((12,), (12,), ulysses=3, ring=ring, causal_block=block)
        assert layout.alone(0) == (ring == 1 and (block is None or block >= 12))
        if layout.alone(0):
            (tile,) = layout.tiles(0, 0)
            assert tile.queries == tile.keys == (0, 12), "a ring of one takes this tile without looking"
