"""The states after every n steps of a call whose states are rows of a pool that kernels read and overwrite.

The parts of a call go from row to row: the first one reads the pool, each writes a state that is returned to its place
in the result, from which the next one reads it, and the steps after the last such state write the final state to the
pool. Nothing else holds a state, so that none is copied but those that a call both returns and leaves in the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tfla.backends.base import POOL_DTYPES, packed_bounds
from tfla.ops.state import State
from tfla.ops.state_pool import NotInKernels, OtherRows, rows_that_exist

Steps = slice | Tensor  # the steps of a part, or their indices

# The function that computes some steps from the states before them, of sequences with these offsets; the states may be
# rows, which the call then overwrites as it says.
Part = Callable[[Steps, State, Tensor | None, OtherRows | None], tuple[Tensor, State]]


class PartsInRows:
    """A call in parts from row to row.

    Args:
        part: the function that computes a part.
        pool: the pool of the initial and final states.
        indices: (sequences,), its rows.
        cu_seqlens: the offsets of packed sequences, or None for a batch.
        T: the number of steps.
        every: n.

    Raises:
        NotInKernels: no kernel takes such states.
    """

    def __init__(self, part: Part, pool: State, indices: Tensor, cu_seqlens: Tensor | None, T: int, every: int) -> None:
        # The parts of a batch of several sequences are no packed sequences without a copy.
        several = cu_seqlens is None and len(indices) != 1
        if several or any(t is not None and t.dtype not in POOL_DTYPES for t in pool):
            raise NotInKernels
        self.part, self.pool, self.indices, self.cu_seqlens, self.every = part, pool, indices, cu_seqlens, every
        self.bounds = [(0, T)] if cu_seqlens is None else list(itertools.pairwise(packed_bounds(cu_seqlens, T)))
        between = T // every

        def of_parts(t: Tensor) -> Tensor:
            return t.new_zeros(between, *t.shape[1:], dtype=torch.float32)  # only the pool's states are rounded

        self.between = State(*(None if t is None else of_parts(t) for t in pool))  # type: ignore[arg-type]
        self.hs: list[Tensor] = []
        self.taken: list[int] = []  # the steps in the order in which parts compute them

    def run(self) -> tuple[Tensor, State]:
        """Return h and the states between, and overwrite the rows of the pool.

        Raises:
            NotInKernels: no kernel takes the first part; nothing is written then.
        """
        every, counts = self.every, [(b - a) // self.every for a, b in self.bounds]
        for j in range(max(counts, default=0)):
            full = [s for s, count in enumerate(counts) if j < count]
            own = {s: (self.bounds[s][0] + j * every, self.bounds[s][0] + (j + 1) * every) for s in full}
            self._compute(
                own, self._between(full, [j - 1] * len(full)) if j else None, self._between(full, [j] * len(full))
            )
        for several in (False, True):
            rest = [s for s, (a, b) in enumerate(self.bounds) if (b - a) % every and bool(counts[s]) == several]
            own = {s: (self.bounds[s][0] + counts[s] * every, self.bounds[s][1]) for s in rest}
            self._compute(own, self._between(rest, [counts[s] - 1 for s in rest]) if several else None, None)
        if not self.hs:
            raise NotInKernels
        ended = [s for s, (a, b) in enumerate(self.bounds) if b > a and (b - a) % every == 0]
        if ended:
            found = self._between(ended, [counts[s] - 1 for s in ended])
            last = State(*(None if t is None else t[found] for t in self.between))  # type: ignore[arg-type]
            rows_that_exist(self._rows(ended), self.pool).write_state(self.pool, last)
        h = torch.cat(self.hs, 1)
        if self.cu_seqlens is not None:
            h = h[:, self._to_device(self.taken).argsort()]
        return h, State(*(None if t is None else t[None] for t in self.between))  # type: ignore[arg-type]

    def _compute(self, spans: dict[int, tuple[int, int]], start: Tensor | None, end: Tensor | None) -> None:
        """Compute the steps of some sequences, between states that are rows of those between, or None for the pool."""
        if not spans:
            return
        rows = self._rows(list(spans))
        source, read = (self.pool, rows) if start is None else (self.between, start)
        target, written = (self.pool, rows) if end is None else (self.between, end)
        own = OtherRows(read, target, written)
        steps: Steps
        offsets = None
        if self.cu_seqlens is None:
            ((a, b),) = spans.values()
            steps = slice(a, b)
        else:
            indices = [t for a, b in spans.values() for t in range(a, b)]
            self.taken += indices
            steps = self._to_device(indices)
            lengths = (b - a for a, b in spans.values())
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=self.cu_seqlens.device)
            offsets = offsets.to(self.cu_seqlens.dtype)
        try:
            h, _ = self.part(steps, source, offsets, own)
        except NotInKernels:
            if not self.hs:
                raise
            h, last = self.part(steps, rows_that_exist(read, source).read_state(source, torch.float32), offsets, None)
            rows_that_exist(written, target).write_state(target, last)
        self.hs.append(h)

    def _rows(self, sequences: list[int]) -> Tensor:
        """Return the rows of some sequences in the pool."""
        every = len(sequences) == len(self.indices)
        return self.indices if every else self.indices[self._to_device(sequences)]

    def _between(self, sequences: list[int], numbers: list[int]) -> Tensor:
        """Return where states of some sequences with these numbers are among those between."""
        starts = (self.bounds[s][0] // self.every for s in sequences)
        return self._to_device([start + j for start, j in zip(starts, numbers, strict=True)])

    def _to_device(self, numbers: list[int]) -> Tensor:
        """Return numbers on the device of the indices; a single one without a copy from the host."""
        if len(numbers) == 1:
            return torch.full((1,), numbers[0], dtype=torch.int64, device=self.indices.device)
        return torch.tensor(numbers, dtype=torch.int64, device=self.indices.device)
