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
        placement, name = context_parallel_of(group)
        rank, size, given = placement.rank, placement.size, placement.lengths
        zigzag = placement.order == ZIGZAG
        each = 2 if zigzag else 1
        count = size * each
        if given:
            lengths = [given[position] for position in range(count)]
        elif T % each:
            raise ValueError(f"x: got T = {T}, expected an even number of steps with order 'zigzag' and no lengths")
        else:
            lengths = [T // each] * count
        self._place(name, rank, size, zigzag, lengths)
        start = self.own[-1].stop
        if start != T:
            raise ValueError(f"x: got T = {T}, expected {start}, the steps of rank {rank} by the lengths of the group")

    @classmethod
    def placed(cls, group: str, rank: int, zigzag: bool, lengths: list[int]) -> Spans:
        """Return the spans of a process from the attributes of others."""
        found = cls.__new__(cls)
        found._place(group, rank, len(lengths) // (2 if zigzag else 1), zigzag, lengths)
        return found

    def _place(self, group: str, rank: int, size: int, zigzag: bool, lengths: list[int]) -> None:
        """Set the attributes."""
        self.group, self.size, self.zigzag, self.lengths = group, size, zigzag, lengths
        self.positions = [rank, len(lengths) - 1 - rank] if zigzag else [rank]
        self.bounds = [0]
        for length in lengths:
            self.bounds.append(self.bounds[-1] + length)
        self.own: list[slice] = []
        start = 0
        for position in self.positions:
            self.own.append(slice(start, start + lengths[position]))
            start += lengths[position]

    def of_rank(self, rank: int) -> list[int]:
        """Return the places in time of the spans of a process."""
        return [rank, len(self.lengths) - 1 - rank] if self.zigzag else [rank]
