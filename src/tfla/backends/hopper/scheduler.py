"""The order in which programs take work tiles: a sequence, or a segment of one, of one head."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIELDS = tl.constexpr(8)
SLOT = tl.constexpr(0)  # where its states are
FIRST = tl.constexpr(1)  # token
STEPS = tl.constexpr(2)
TILE = tl.constexpr(3)  # the first of its gate vectors
BEGINS = tl.constexpr(4)  # whether a sequence begins, or ends, with it
ENDS = tl.constexpr(5)

CUT = tl.constexpr(1 << 30)  # rows of a tensor descriptor for packed sequences


@triton.jit
def _bounds(cu, s, inside):
    first = tl.load(cu + s, mask=inside, other=0).to(tl.int64)
    return first, tl.load(cu + s + 1, mask=inside, other=0).to(tl.int64) - first


@triton.jit(do_not_specialize=["sequences", "steps", "slots"])
def order(cu, out, sequences, steps, slots, L: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Segments have `steps` steps, or sequences are no longer than that less one. One program has BLOCK slots, each
    against WIDE sequences at a time: its row is the number of pieces that come before it, those of no steps last."""
    slot = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    s = tl.full([BLOCK], -1, tl.int64)
    for a in range(0, sequences, WIDE):
        j = a + tl.arange(0, WIDE)
        first, _ = _bounds(cu, j, j < sequences)
        s += tl.sum(((first // steps + j)[None, :] <= slot[:, None]) & (j < sequences)[None, :], 1)
    first, length = _bounds(cu, s, slot < slots)
    start = (slot - first // steps - s) * steps
    mine = tl.maximum(tl.minimum(length - start, steps), 0)
    before = tl.where(mine == steps, start // steps, tl.where(mine > 0, 0, slot))
    for a in range(0, sequences, WIDE):
        j = a + tl.arange(0, WIDE)
        _, other = _bounds(cu, j, j < sequences)
        whole = (other // steps)[None, :]
        rest = (other % steps)[None, :]
        earlier = j[None, :] < s[:, None]
        size = mine[:, None]
        longer = whole + ((rest > size) | ((rest == size) & earlier)).to(tl.int64)
        used = tl.where(j[None, :] > s[:, None], whole + (rest > 0).to(tl.int64), 0)
        before += tl.sum(tl.where(size == steps, tl.where(earlier, whole, 0), tl.where(size > 0, longer, used)), 1)
    row = out + before * FIELDS
    inside = slot < slots
    tl.store(row + SLOT, slot.to(tl.int32), mask=inside)
    tl.store(row + FIRST, (first + start).to(tl.int32), mask=inside)
    tl.store(row + STEPS, mine.to(tl.int32), mask=inside)
    tl.store(row + TILE, (first // L + s + start // L).to(tl.int32), mask=inside)
    tl.store(row + BEGINS, (start == 0).to(tl.int32), mask=inside)
    tl.store(row + ENDS, (start + mine >= length).to(tl.int32), mask=inside)


# Arguments of the walks, beside tensors: numbers that one kernel serves whatever they are.
NUMBERS = [
    "T", "tiles_of_head", "H", "GROUP", "length", "pieces", "ib", "it", "ih", "fb", "ft", "fh", "scale", "log_scale"
]  # fmt: skip


class Work(NamedTuple):
    """What there is to walk."""

    T: Any  # tokens of a batch row
    H: Any  # heads
    length: Any  # steps of a segment
    pieces: Any  # sequences, or segments of them, of a head each
    order: Any  # what :mod:`.order` wrote of packed sequences, or None


@gluon.jit
def anew(x):
    """x, read where it is used. What consumers need once a piece they have no register for: it is spilled, and memory
    that nobody has asked for during a piece is far. Two such words take 2,600 clocks, a tile 6,300."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_piece(index):
    """That a program takes after the index-th."""
    return index + anew(gl.num_programs(0))


@gluon.jit
def piece(index, work, L: gl.constexpr, SEGMENTED: gl.constexpr, ANEW: gl.constexpr = False):
    """The index-th piece of work: batch row, head, first step, how many steps, its first tile of those of a head.

    ANEW: of numbers that :func:`anew` has read.
    """
    T, H, length = work.T, work.H, work.length
    if ANEW:
        T, H, length = anew(T), anew(H), anew(length)
    slot = index // H
    if work.order is not None:
        row = work.order + slot * FIELDS
        start = gl.load(row + FIRST)
        return slot * 0, index % H, start, gl.load(row + STEPS), gl.load(row + TILE)
    elif SEGMENTED:
        count = (T + length - 1) // length
        start = slot % count * length
        tile0 = slot // count * ((T + L - 1) // L) + start // L
        return slot // count, index % H, start, gl.minimum(T - start, length), tile0
    else:
        return slot, index % H, 0, T, slot * ((T + L - 1) // L)


@gluon.jit
def state_of(index, work, inside=True):
    """Where the states of the index-th piece of work are among those of all."""
    if work.order is not None:
        H = work.H
        return gl.load(work.order + index // H * FIELDS + SLOT, mask=inside) * H + index % H
    else:
        return index


@gluon.jit
def tiles_of(index, start, steps, work, L: gl.constexpr, BACK: gl.constexpr, SKIP: gl.constexpr):
    """How many a walk takes of a piece; with SKIP none of the last of a sequence, what is behind which nobody wants."""
    tiles = (steps + L - 1) // L
    if not SKIP:
        return tiles
    elif work.order is not None:
        row = work.order + index // work.H * FIELDS
        return gl.where(gl.load(row + (BEGINS if BACK else ENDS)) != 0, 0, tiles)
    else:
        return gl.where(start == 0 if BACK else start + steps == work.T, 0, tiles)


@gluon.jit
def coordinates(b, h, t, column, end, work):
    """Of a tile in tensors as :func:`~tfla.backends.hopper.launch.described` has them. Of packed sequences no row from
    `end` on is read, which gives zeros, or written."""
    if work.order is not None:
        return CUT, end, h, CUT - end + t, column
    else:
        return b, h, t, column
