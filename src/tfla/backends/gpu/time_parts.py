"""The parts in time that a backward computes one after the other, so that it keeps the cotangents of one part alone.

A scan with time stores the states of all parts, and a scan against time the cotangents of one part after the other. The
last kernel reads both, so that those of a part are given back before the next one. From part to part a scan hands on
its state in float32, the dtype in which it holds it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.backends.gpu.batch_slices import SMALLEST, CallPart
from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext

FEWEST_TILES = 16  # of a part: with fewer the launches of another part would count


def time_parts(ctx: LaunchContext, nbytes: int) -> list[tuple[int, int]]:
    """Return the first step and the end of each part: two halves of whole tiles, or all steps at once.

    Packed sequences are not cut, since their ends lie anywhere.

    Args:
        ctx: The context of the call.
        nbytes: The bytes of the states and the cotangents of all tiles. Below SMALLEST halves are not worth their
            launches.
    """
    tiles = ceil_div(ctx.T, ctx.L)
    if nbytes < SMALLEST or ctx.packed or tiles < 2 * FEWEST_TILES:
        return [(0, ctx.T)]
    middle = ceil_div(tiles, 2) * ctx.L
    return [(0, middle), (middle, ctx.T)]


class TimePart(CallPart):
    """Some of the steps of all batch rows of a call, which start and end with a tile.

    In a plan the part of a tensor is the tensor, see :mod:`.batch_slices`.

    Args:
        ctx: The context of the call.
        start, stop: The first step, and the one after the last.

    Attributes:
        first_step: The step at which this part starts in tensors that are whole, or None where all are views.
    """

    without = ("A_log", "dt_bias", "C", "n", "m", "cu_seqlens", "decays", "needs_levels")

    def __init__(self, ctx: LaunchContext, start: int, stop: int) -> None:
        super().__init__(ctx.recorder, (start, stop) == (0, ctx.T))
        self.start, self.stop = start, stop
        self.rows, self.L = ctx.B, ctx.L
        self.first_step = start if ctx.recorder.one_pointer_each and not self.whole else None

    def view(self, x: Tensor) -> Tensor:
        """Return the steps of x, (B, T, ...)."""
        if self.first_step is not None:
            return x
        start, stop = self.start, self.stop  # a recorded step outlives this object, whose recorder has all tensors
        found: Tensor = self.recorder.do(lambda t: t[:, start:stop], x)
        return found

    def inputs(self, x: Any) -> Any:
        """Return the inputs of a call of this part."""
        if self.first_step is None:
            return self.fields(x)
        q, k, v = (t[:, self.start : self.stop] for t in (x.q, x.k, x.v))
        return x._replace(q=q, k=k, v=v)

    def of_tiles(self, x: Tensor) -> Tensor:
        """Return a dense copy of what x, (H, tiles, ...), has of the tiles of this part."""
        if self.whole:
            return x
        return self.recorder.tiles(x, self.rows, self.start // self.L, ceil_div(self.stop, self.L))
