"""The spans of steps of a process, in numbers that torch.compile traces."""

from __future__ import annotations

from typing import Any

from tfla.ops.context_parallel.cuts import ZIGZAG
from tfla.ops.context_parallel.group import context_parallel_of


class Spans:
    """The spans of all processes that share the steps of sequences; see :mod:`tfla.ops.context_parallel.cuts`.

    Args:
        group: the argument `context_parallel` of :func:`tfla.mlstm`. Without lengths all spans count as equal.
        T: the steps of this process.

    Attributes:
        group: the name of the process group.
        size: the number of processes.
        zigzag: whether a process has two spans.
        positions: the places in time of the spans of this process.
        lengths: the steps of every span, in the order of time.
        bounds: the first step of every span, and the number of all steps.
        own: the steps of the spans of this process in its tensors.

    Raises:
        ValueError: T steps do not fit the order or the lengths of the group.
    """

    def __init__(self, group: Any, T: int) -> None:
        placement, self.group = context_parallel_of(group)
        rank, self.size, given = placement.rank, placement.size, placement.lengths
        self.zigzag = placement.order == ZIGZAG
        each = 2 if self.zigzag else 1
        count = self.size * each
        self.positions = [rank, count - 1 - rank] if self.zigzag else [rank]
        if given:
            self.lengths = [given[position] for position in range(count)]
        elif T % each:
            raise ValueError(f"x: got T = {T}, expected an even number of steps with order 'zigzag' and no lengths")
        else:
            self.lengths = [T // each] * count
        self.bounds = [0]
        for length in self.lengths:
            self.bounds.append(self.bounds[-1] + length)
        self.own, start = [], 0
        for position in self.positions:
            self.own.append(slice(start, start + self.lengths[position]))
            start += self.lengths[position]
        if start != T:
            raise ValueError(f"x: got T = {T}, expected {start}, the steps of rank {rank} by the lengths of the group")

    def of_rank(self, rank: int) -> list[int]:
        """Return the places in time of the spans of a process."""
        return [rank, len(self.lengths) - 1 - rank] if self.zigzag else [rank]
