"""Every step of every sequence is in one fragment of one process, and chains of fragments are whole sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfla.ops.context_parallel.cuts import ORDERS, Placement, cut_dense, cut_packed


@st.composite
def packings(draw: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """The number of processes, the order, the lengths of spans, and offsets."""
    size, order = draw(st.integers(1, 4)), draw(st.sampled_from(ORDERS))
    count = size * (2 if order == "zigzag" else 1)
    lengths = tuple(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    total = sum(lengths)
    inner = draw(st.lists(st.integers(0, total), max_size=8))
    return size, order, lengths, (0, *sorted(inner), total)


@given(packings())
def test_fragments_are_all_steps(packing: Any) -> None:
    size, order, lengths, offsets = packing
    bounds = list(itertools.accumulate(lengths, initial=0))
    steps: dict[int, list[int]] = {s: [] for s in range(len(offsets) - 1)}  # global steps of each sequence
    chains: dict[int, list[int]] = {s: [] for s in steps}
    rows: dict[int, list[tuple[int, int | None]]] = {s: [] for s in steps}
    for rank in range(size):
        placement = Placement(rank, size, order, lengths)
        T = sum(lengths[p] for p in placement.positions)
        cut = cut_packed(placement, T, offsets)
        assert [f.start for f in cut.fragments][1:] == [f.stop for f in cut.fragments][:-1]
        assert cut.fragments[0].start == 0
        assert cut.fragments[-1].stop == T
        assert len(cut.additional) <= cut.additional_rows
        shift = 0
        for span in cut.spans:
            start, length = bounds[span.position], lengths[span.position]
            for f in span.fragments:
                steps[f.sequence] += range(start + f.start - shift, start + f.stop - shift)
                chains[f.sequence].append(span.position)
                first, last = start + f.start - shift, start + f.stop - shift
                assert f.begins == (first == offsets[f.sequence])
                assert f.ends == (last == offsets[f.sequence + 1])
            first, last = span.fragments[0], span.fragments[-1]
            assert (span.source is None) == first.begins
            assert (span.target is None) == last.ends
            if span.source is not None:
                assert cut.ends[first.sequence].source == span.source < span.position
            if span.target is not None:
                assert cut.ends[last.sequence].position == span.target > span.position
            elif cut.ends[last.sequence].row is None:
                rows[last.sequence].append((rank, None))
            shift += length
        for row, f in enumerate(cut.additional):
            assert f.ends
            assert cut.ends[f.sequence].row == row
            rows[f.sequence].append((rank, row))
    for s, (a, b) in enumerate(itertools.pairwise(offsets)):
        assert sorted(steps[s]) == list(range(a, b))
        end = cut.ends[s]
        if b > a:
            assert sorted(chains[s]) == list(range(end.source, end.position + 1))
        assert rows[s] == [(placement.owner(end.position)[0], end.row)]


@pytest.mark.parametrize("order", ORDERS)
def test_dense_sequences_go_through_all_spans(order: str) -> None:
    for rank in range(3):
        placement = Placement(rank, 3, order, ())
        cut = cut_dense(placement, 8)
        count = placement.spans
        packed = cut_packed(placement, 8, (0, 24))
        assert cut == packed
        assert [span.position for span in cut.spans] == list(placement.positions)
        assert all((span.target is None) == (span.position == count - 1) for span in cut.spans)


def test_owners_are_those_of_positions() -> None:
    for order, size in itertools.product(ORDERS, (1, 2, 3)):
        of = Placement(0, size, order, ())
        every = {p: (rank, j) for rank in range(size) for j, p in enumerate(of.positions_of(rank))}
        assert sorted(every) == list(range(of.spans))
        assert all(of.owner(p) == owner for p, owner in every.items())


def test_bad_cuts_are_named() -> None:
    with pytest.raises(ValueError, match=r"^q: got T = 7, expected an even number of steps"):
        cut_dense(Placement(0, 2, "zigzag", ()), 7)
    with pytest.raises(ValueError, match=r"^q: got T = 7, expected 5, the lengths of rank 1"):
        cut_dense(Placement(1, 2, "contiguous", (3, 5)), 7)
    with pytest.raises(ValueError, match=r"^cu_seqlens: goes from 0 to 8, expected from 0 to 16"):
        cut_packed(Placement(1, 2, "contiguous", ()), 8, (0, 8))
    with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0, 9, 8, 16\], expected values that never fall"):
        cut_packed(Placement(1, 2, "contiguous", ()), 8, (0, 9, 8, 16))
