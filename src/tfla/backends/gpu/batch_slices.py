"""The batch rows that a backward computes at once, so that what it keeps between its kernels is that of a part of them.

The gradients of a call are allocated whole; each slice of batch rows writes its rows of them. What is alive only within
a backward, such as the states before all tiles, is allocated for one slice after the other.

In PyTorch a kernel gets the rows of a slice as views. Hosts of plans have no views: there a kernel gets the inputs, the
gradients and what lies in their memory whole, and the number of the first row of the slice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from tfla.backends.gpu.config import ceil_div, processors
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.replay import LaunchRecorder

SMALLEST = 1 << 28  # bytes between kernels below which the launches of further slices are not worth their memory
FEWEST_TOKENS = 1 << 14  # of a slice: the host takes longer to launch its kernels than a GPU takes to run them on fewer


def rounds(ctx: LaunchContext, rows: int, shared_by: int) -> int:
    """Return in how many rounds half of the multiprocessors compute the sequences of some batch rows.

    Memory bounds the scans, so that half of the multiprocessors take about as long as all of them.

    Args:
        ctx: The context of the call.
        rows: The number of batch rows.
        shared_by: How many programs of a scan share a head of a sequence.
    """
    return ceil_div(rows * ctx.H, max(1, processors(ctx.x.q.device) // 2 // shared_by))


def batch_slices(ctx: LaunchContext, shared_by: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each slice: as many slices as take the GPU no more rounds than one does.

    Packed sequences are one batch row, and short sequences share slices.

    Args:
        ctx: The context of the call.
        shared_by: How many programs of a scan share a head of a sequence; a multiprocessor has one program at a time.
        nbytes: The bytes of what is alive between the kernels of all rows.
    """
    B = ctx.B
    size = B
    if nbytes >= SMALLEST and not ctx.packed:
        whole = rounds(ctx, B, shared_by)
        fewest = min(B, ceil_div(FEWEST_TOKENS, ctx.T))
        size = next(n for n in range(fewest, B + 1) if ceil_div(B, n) * rounds(ctx, n, shared_by) <= whole)
    return [(start, min(start + size, B)) for start in range(0, B, size)]


class CallPart:
    """A part of a call: a view of each of its tensors.

    Args:
        recorder: The recorder of the call.
        whole: Whether the part is the whole call, whose views are the tensors themselves.
    """

    without: tuple[str, ...] = ()  # the fields of named tuples of tensors that have no dim of which this is a part

    def __init__(self, recorder: LaunchRecorder, whole: bool) -> None:
        self.recorder, self.whole = recorder, whole
        self.views: dict[int, Tensor] = {}  # by the id of the tensor, so that a tensor has one view

    def __call__(self, x: Tensor | None) -> Any:
        """Return the part of x, (B, T, ...), or None for None."""
        if x is None or self.whole:
            return x
        if id(x) not in self.views:
            self.views[id(x)] = self.view(x)
        return self.views[id(x)]

    def view(self, x: Tensor) -> Tensor:
        """Return a new view of the part of x."""
        raise NotImplementedError

    def fields(self, x: Any) -> Any:
        """Return a named tuple of tensors with the part of each; what has none stays as it is."""
        return x._replace(**{name: self(t) for name, t in x._asdict().items() if name not in self.without})

    def inputs(self, x: Any) -> Any:
        """Return the inputs of a call of this part; of those that are whole in a plan the shapes alone are read."""
        raise NotImplementedError

    def context(self, ctx: LaunchContext) -> LaunchContext:
        """Return the context of a call of this part."""
        if self.whole:
            return ctx
        x = self.inputs(ctx.x)
        return dataclasses.replace(ctx, x=x, segments=x.sequences, cu_seqlens=x.log_f, schedule=x.log_f)


class BatchSlice(CallPart):
    """Some of the batch rows of a call, of all of its tensors.

    A plan has to copy rows. Its kernels therefore get the rows of small tensors, and large tensors whole.

    Args:
        ctx: The context of the call.
        start, stop: The first row, and the one after the last.

    Attributes:
        first_row: The row at which tensors of tokens start that are whole, or None where all are rows.
    """

    without = ("A_log", "dt_bias")

    def __init__(self, ctx: LaunchContext, start: int, stop: int) -> None:
        super().__init__(ctx.recorder, (start, stop) == (0, ctx.B))
        self.start, self.stop = start, stop
        self.first_row = start if ctx.recorder.one_pointer_each and not self.whole else None

    def view(self, x: Tensor) -> Tensor:
        """Return the rows of x, (B, ...)."""
        return self.recorder.rows(x, self.start, self.stop)

    def tokens(self, x: Tensor | None) -> Any:
        """Return what kernels get of a tensor of tokens, (B, T, ...): its rows, or in a plan the whole tensor."""
        return self(x) if self.first_row is None else x

    def inputs(self, x: Any) -> Any:
        """Return the inputs of a call of these rows."""
        if self.first_row is None:
            return self.fields(x)
        q, k, v = (t[self.start : self.stop] for t in (x.q, x.k, x.v))
        return x._replace(q=q, k=k, v=v, log_f=self(x.log_f), C=self(x.C))
