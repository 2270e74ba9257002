"""The division of a call into spans of sequences, groups of heads, and blocks of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import Sequences, first_chunk_row, sequence_bounds

MAX_TILES = 16  # of one block
STATE_BYTES = 1 << 19  # of the states that are computed together, so that they stay in the caches of the cores


class Span(NamedTuple):
    """The sequences that are computed together: all rows of a dense batch, or one packed sequence."""

    rows: slice  # of the batch
    start: int
    stop: int
    states: slice  # rows of the state
    chunk_rows: list[int]  # row in `Outputs.chunk_C` of the first chunk of each sequence


class Part(NamedTuple):
    """The block of n tiles of L steps that starts at step t."""

    t: int
    n: int
    L: int

    @property
    def stop(self) -> int:
        """The step after the last one of the block."""
        return self.t + self.n * self.L


def spans(x: Sequences, chunk_size: int) -> list[Span]:
    """Return one span for each packed sequence that is not empty, or one for a whole dense batch."""
    bounds = sequence_bounds(x)
    chunk_rows = [first_chunk_row(x, chunk_size, s, a) for s, (_, a, _) in enumerate(bounds)]
    if x.cu_seqlens is None:
        return [Span(slice(0, len(bounds)), 0, x.v.shape[1], slice(0, len(bounds)), chunk_rows)] if bounds else []
    return [
        Span(slice(0, 1), a, b, slice(s, s + 1), chunk_rows[s : s + 1]) for s, (_, a, b) in enumerate(bounds) if b > a
    ]


def parts(start: int, stop: int, tile: int) -> Iterator[Part]:
    """Yield the blocks of a chunk: as many whole tiles as fit, then the remaining steps as one shorter tile."""
    tile = min(tile, stop - start)
    while stop - start >= tile:
        n = min(MAX_TILES, (stop - start) // tile)
        yield Part(start, n, tile)
        start += n * tile
    if start < stop:
        yield Part(start, 1, stop - start)


class Group(NamedTuple):
    """The heads that are computed together: all heads of some rows, or some heads of one row.

    Heads of v that share a head of q and k are always in the same group. N is the number of heads of v times that of
    rows. Block tensors are (n, N, L, d), as in :class:`Part`.
    """

    rows: slice
    heads: slice
    qk_heads: slice
    share: int  # heads of v for each head of q and k

    def qk(self, x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """Return q or k of a block, (n, N, L, dqk); a view where no heads share one and there is one row."""
        tiles = _tiles(x[self.rows, part.t : part.stop, self.qk_heads], part).to(dtype)
        return tiles if self.share == 1 else tiles.repeat_interleave(self.share, 1)

    def v(self, x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """Return v, h or a cotangent of it, (n, N, L, dhv)."""
        return _tiles(x[self.rows, part.t : part.stop, self.heads], part).to(dtype)

    def state(self, states: Tensor, chunk_rows: list[int]) -> Tensor:
        """Load the stored states (N, ...) of one chunk of each row."""
        return states[chunk_rows[self.rows], self.heads].flatten(0, 1)

    def store_state(self, states: Tensor, chunk_rows: list[int], x: Tensor) -> None:
        """Store the states (N, ...) of one chunk of each row."""
        x = x.view(-1, self.heads.stop - self.heads.start, *x.shape[1:])
        states[chunk_rows[self.rows], self.heads] = x.to(states.dtype)

    def store(self, out: Tensor, part: Part, x: Tensor, divisor: Tensor | None = None) -> None:
        """Store a block (n, N, L, d) of h or of a gradient, divided by ``divisor`` (n, N, L, 1) if there is one."""
        _store(out[self.rows, part.t : part.stop, self.heads], part, x, divisor)

    def store_qk(self, out: Tensor, part: Part, x: Tensor) -> None:
        """Store a block (n, N, L, dqk) of the gradient of q or k, summed over the heads that share one."""
        if self.share > 1:
            x = x.unflatten(1, (-1, self.share)).sum(2)
        _store(out[self.rows, part.t : part.stop, self.qk_heads], part, x, None)


def _tiles(x: Tensor, part: Part) -> Tensor:
    """Return (B, n L, H, d) as (n, B H, L, d)."""
    return x.unflatten(1, (part.n, part.L)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _store(out: Tensor, part: Part, x: Tensor, divisor: Tensor | None) -> None:
    """Store (n, B H, L, d), divided by (n, B H, L, 1), to (B, n L, H, d)."""
    out = out.unflatten(1, (part.n, part.L)).permute(1, 0, 3, 2, 4)
    x = x.unflatten(1, out.shape[1:3])
    if divisor is None:
        out.copy_(x)
    else:
        torch.div(x, divisor.unflatten(1, out.shape[1:3]), out=out)


def groups(rows: int, x: Sequences) -> list[Group]:
    """Return the groups of heads, as large as the caches allow.

    A group has all heads of as many rows as fit, or some heads of one row where not even one row fits.
    """
    H, share = x.v.shape[2], x.v.shape[2] // x.q.shape[2]
    state = x.q.shape[3] * x.v.shape[3] * x.acc_dtype.itemsize
    sets = H // share
    each = max(1, min(STATE_BYTES // state // share, rows * sets))
    if each >= sets:
        step = each // sets
        found = [(slice(r, min(r + step, rows)), 0, sets) for r in range(0, rows, step)]
    else:
        found = [(slice(r, r + 1), a, min(a + each, sets)) for r in range(rows) for a in range(0, sets, each)]
    return [Group(row, slice(a * share, b * share), slice(a, b), share) for row, a, b in found]
