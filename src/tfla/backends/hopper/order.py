"""Pieces of packed sequences in the order in which programs take them: the longest first, so that they end together.

A piece is a sequence or a segment of one. The kernel writes a row of FIELDS int32 for each, which the walks read.
"""

import triton
import triton.language as tl

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
