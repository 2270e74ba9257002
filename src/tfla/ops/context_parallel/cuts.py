"""The cut of sequences among processes: which steps of which sequence a process has.

The steps of all sequences, one after another, are cut into spans, one for each process, or with the order "zigzag" two:
of the 2 R spans of R processes, process r then has spans r and 2 R - 1 - r. Attention needs this order for balance, and
the recurrence takes it.

The part of a sequence that lies in one span is a fragment. A fragment that ends before its sequence does is the last
one of its span and goes on in the next span. Each row of a dense batch is one sequence that goes through all spans.

Everything here is Python numbers, computed on the host from shapes and offsets.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)


class Placement(NamedTuple):
    """The order of spans over processes, the same on each but for the rank."""

    rank: int
    size: int  # the number of processes
    order: str  # one of ORDERS
    lengths: tuple[int, ...]  # steps of each span in the order of time; empty where all spans are equal

    @property
    def spans(self) -> int:
        """The number of spans."""
        return self.size * self.spans_here

    @property
    def spans_here(self) -> int:
        """The number of spans of one process."""
        return 2 if self.order == ZIGZAG else 1

    @property
    def positions(self) -> tuple[int, ...]:
        """The spans of this process by their place in time."""
        return self.positions_of(self.rank)

    def positions_of(self, rank: int) -> tuple[int, ...]:
        """Return the spans of a process by their place in time."""
        return (rank, self.spans - 1 - rank) if self.order == ZIGZAG else (rank,)

    def owner(self, position: int) -> tuple[int, int]:
        """Return (rank, index among its spans) of the process that has a span."""
        if position < self.size:
            return position, 0
        return self.spans - 1 - position, 1

    def own_lengths(self, T: int) -> tuple[int, ...]:
        """Return the steps of each span of this process, whose tensors have T steps.

        Raises:
            ValueError: T is not the sum of this process's lengths, or cannot be cut into equal spans.
        """
        if not self.lengths:
            if T % self.spans_here:
                raise ValueError(f"q: got T = {T}, expected an even number of steps with order 'zigzag' and no lengths")
            return (T // self.spans_here,) * self.spans_here
        found = tuple(self.lengths[p] for p in self.positions)
        if sum(found) != T:
            raise ValueError(f"q: got T = {T}, expected {sum(found)}, the lengths of rank {self.rank}: {found}")
        return found

    def bounds(self, T: int) -> tuple[int, ...]:
        """Return the first step of each span, and one past the last step of all."""
        lengths = self.lengths or self.own_lengths(T)[:1] * self.spans
        return tuple(itertools.accumulate(lengths, initial=0))


class Fragment(NamedTuple):
    """The steps of one sequence in one span."""

    sequence: int  # which of the packed sequences; 0 in a dense batch
    start: int  # first step in this process's tensors
    stop: int  # one past the last step
    begins: bool  # the sequence begins with the fragment
    ends: bool  # the sequence ends with the fragment


class SpanCut(NamedTuple):
    """The sequences in one span of this process."""

    position: int  # place in time among all spans
    fragments: tuple[Fragment, ...]  # never empty
    source: int | None  # the span in which the first fragment's sequence begins, None where that is this span
    target: int | None  # the span in which the last fragment's sequence ends, None where that is this span


class End(NamedTuple):
    """The place where a sequence ends."""

    source: int  # the span in which the sequence begins
    position: int  # the span in which it ends
    row: int | None  # its place among the additional rows of that span's process; None: the span's last fragment


class Cut(NamedTuple):
    """The part that one process has of all sequences."""

    spans: tuple[SpanCut, ...]  # those of this process
    ends: tuple[End, ...]  # of every sequence, in order
    additional: tuple[Fragment, ...]  # fragments of this process that end but are not the last ones of their spans
    additional_rows: int  # the largest number of them in any process

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments of this process in the order of its tensors; those without a step are left out."""
        return tuple(f for span in self.spans for f in span.fragments)

    def rows(self, final_state: bool) -> int:
        """Return the number of rows that a process gives to the others in a forward, the same on every process."""
        return len(self.spans) + (self.additional_rows if final_state else 0)

    def sent(self, final_state: bool) -> dict[int, Fragment]:
        """Return the fragments whose states other processes read, by the places of their rows.

        They are the last fragments of this process's spans; with final states all that end follow.
        """
        last = {s: span.fragments[-1] for s, span in enumerate(self.spans) if final_state or span.target is not None}
        return last | (dict(enumerate(self.additional, len(self.spans))) if final_state else {})


def cut_dense(placement: Placement, T: int) -> Cut:
    """Return the part of sequences that go through all spans, from the number of steps of this process.

    Raises:
        ValueError: as :meth:`Placement.own_lengths`.
    """
    last, start, spans = placement.spans - 1, 0, []
    for position, length in zip(placement.positions, placement.own_lengths(T), strict=True):
        fragment = Fragment(0, start, start + length, position == 0, position == last)
        source, target = (0 if position else None), (last if position < last else None)
        spans.append(SpanCut(position, (fragment,), source, target))
        start += length
    return Cut(tuple(spans), (End(0, last, None),), (), 0)


def check_offsets(offsets: Sequence[int], total: int, size: int) -> None:
    """Raise unless offsets are those of packed sequences with ``total`` steps on ``size`` processes."""
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"cu_seqlens: goes from {offsets[0]} to {offsets[-1]}, expected from 0 to {total}, the steps of all "
            f"{size} processes: with context_parallel the offsets are those of the whole sequence"
        )
    if any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens: got {list(offsets)}, expected values that never fall")


@functools.lru_cache(maxsize=64)
def cut_packed(placement: Placement, T: int, offsets: tuple[int, ...]) -> Cut:
    """Return the part of packed sequences, from their offsets among the steps of all processes.

    A sequence without steps belongs to the span that the step at its offset lies in, or to the last one.

    Raises:
        ValueError: as :meth:`Placement.own_lengths`, or the offsets do not go from 0 to the number of all steps, or
            decrease.
    """
    placement.own_lengths(T)
    bounds = placement.bounds(T)
    check_offsets(offsets, bounds[-1], placement.size)

    def holder(step: int) -> int:  # the span that has the step
        return min(bisect.bisect_right(bounds, step), len(bounds) - 1) - 1

    sequences = list(itertools.pairwise(offsets))
    # A span's last fragment is that of the sequence that has its last step.
    last_of = [max(bisect.bisect_left(offsets, stop) - 1, 0) for stop in bounds[1:]]
    ends, found = [], []
    counts: list[list[int]] = [[] for _ in range(placement.size)]  # sequences of the additional rows of each process
    for s, (a, b) in enumerate(sequences):
        position = holder(b - 1) if b > a else holder(a)
        row = None
        if b == a or last_of[position] != s:
            rank = placement.owner(position)[0]
            row = len(counts[rank])
            counts[rank].append(s)
        ends.append(End(holder(a), position, row))
    local = 0
    for position in placement.positions:
        start, stop = bounds[position : position + 2]
        first = bisect.bisect_right(offsets, start) - 1
        fragments = [
            Fragment(s, local + max(a, start) - start, local + min(b, stop) - start, a >= start, b <= stop)
            for s, (a, b) in enumerate(sequences[first : last_of[position] + 1], first)
            if max(a, start) < min(b, stop)
        ]
        source = None if fragments[0].begins else ends[fragments[0].sequence].source
        target = None if fragments[-1].ends else ends[fragments[-1].sequence].position
        found.append(SpanCut(position, tuple(fragments), source, target))
        local += stop - start
    by_sequence = {f.sequence: f for span in found for f in span.fragments if f.ends}
    additional = tuple(by_sequence.get(s, Fragment(s, 0, 0, True, True)) for s in counts[placement.rank])
    return Cut(tuple(found), tuple(ends), additional, max(map(len, counts)))
