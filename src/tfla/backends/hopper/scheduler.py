"""The order in which programs take work tiles: a sequence, or a segment of one, of one head."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIELDS = tl.constexpr(8)
SEGMENT_INDEX = tl.constexpr(0)  # where its states are
FIRST_TOKEN = tl.constexpr(1)  # token
NUM_STEPS = tl.constexpr(2)
FIRST_TILE = tl.constexpr(3)  # the first of its gate vectors
STARTS_SEQUENCE = tl.constexpr(4)  # whether a sequence begins, or ends, with it
ENDS_SEQUENCE = tl.constexpr(5)

VIRTUAL_ROWS = tl.constexpr(1 << 30)  # rows of a tensor descriptor for packed sequences


@triton.jit
def _bounds(cu_seqlens, sequence, inside):
    first = tl.load(cu_seqlens + sequence, mask=inside, other=0).to(tl.int64)
    return first, tl.load(cu_seqlens + sequence + 1, mask=inside, other=0).to(tl.int64) - first


@triton.jit(do_not_specialize=["num_sequences", "segment_steps", "num_segments"])
def schedule_packed(
    cu_seqlens,
    schedule,
    num_sequences,
    segment_steps,
    num_segments,
    L: tl.constexpr,
    SEGMENT_BLOCK: tl.constexpr,
    SEQUENCE_BLOCK: tl.constexpr,
):
    """Segments have `steps` steps, or sequences are no longer than that less one. One program has BLOCK slots, each
    against WIDE sequences at a time: its row is the number of pieces that come before it, those of no steps last."""
    segment = (tl.program_id(0) * SEGMENT_BLOCK + tl.arange(0, SEGMENT_BLOCK)).to(tl.int64)
    sequence = tl.full([SEGMENT_BLOCK], -1, tl.int64)
    for a in range(0, num_sequences, SEQUENCE_BLOCK):
        j = a + tl.arange(0, SEQUENCE_BLOCK)
        first, _ = _bounds(cu_seqlens, j, j < num_sequences)
        sequence += tl.sum(
            ((first // segment_steps + j)[None, :] <= segment[:, None]) & (j < num_sequences)[None, :], 1
        )
    first, sequence_steps = _bounds(cu_seqlens, sequence, segment < num_segments)
    start = (segment - first // segment_steps - sequence) * segment_steps
    num_steps = tl.maximum(tl.minimum(sequence_steps - start, segment_steps), 0)
    rank = tl.where(num_steps == segment_steps, start // segment_steps, tl.where(num_steps > 0, 0, segment))
    for a in range(0, num_sequences, SEQUENCE_BLOCK):
        j = a + tl.arange(0, SEQUENCE_BLOCK)
        _, other = _bounds(cu_seqlens, j, j < num_sequences)
        whole = (other // segment_steps)[None, :]
        rest = (other % segment_steps)[None, :]
        earlier = j[None, :] < sequence[:, None]
        size = num_steps[:, None]
        longer = whole + ((rest > size) | ((rest == size) & earlier)).to(tl.int64)
        used = tl.where(j[None, :] > sequence[:, None], whole + (rest > 0).to(tl.int64), 0)
        rank += tl.sum(
            tl.where(size == segment_steps, tl.where(earlier, whole, 0), tl.where(size > 0, longer, used)), 1
        )
    row = schedule + rank * FIELDS
    inside = segment < num_segments
    tl.store(row + SEGMENT_INDEX, segment.to(tl.int32), mask=inside)
    tl.store(row + FIRST_TOKEN, (first + start).to(tl.int32), mask=inside)
    tl.store(row + NUM_STEPS, num_steps.to(tl.int32), mask=inside)
    tl.store(row + FIRST_TILE, (first // L + sequence + start // L).to(tl.int32), mask=inside)
    tl.store(row + STARTS_SEQUENCE, (start == 0).to(tl.int32), mask=inside)
    tl.store(row + ENDS_SEQUENCE, (start + num_steps >= sequence_steps).to(tl.int32), mask=inside)


# Arguments of the walks, beside tensors: numbers that one kernel serves whatever they are.
RUNTIME_SCALARS = [
    "T", "tiles_per_head", "H", "group_size", "segment_steps", "num_work_tiles", "stride_ib", "stride_it", "stride_ih",
    "stride_fb", "stride_ft", "stride_fh", "scale", "log_scale"
]  # fmt: skip


class SchedulerParams(NamedTuple):
    """What there is to walk."""

    T: Any  # tokens of a batch row
    H: Any  # heads
    segment_steps: Any  # steps of a segment
    num_work_tiles: Any  # sequences, or segments of them, of a head each
    schedule: Any  # what :func:`schedule_packed` wrote of packed sequences, or None


@gluon.jit
def rematerialize(x):
    """x, read where it is used. What consumers need once a piece they have no register for: it is spilled, and memory
    that nobody has asked for during a piece is far. Two such words take 2,600 clocks, a tile 6,300."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_work_tile(index):
    """That a program takes after the index-th."""
    return index + rematerialize(gl.num_programs(0))


@gluon.jit
def get_work_tile(index, params, L: gl.constexpr, IS_SEGMENTED: gl.constexpr, REMATERIALIZE: gl.constexpr = False):
    """The index-th piece of work: batch row, head, first step, how many steps, its first tile of those of a head.

    ANEW: of numbers that :func:`rematerialize` has read.
    """
    T, H, segment_steps = params.T, params.H, params.segment_steps
    if REMATERIALIZE:
        T, H, segment_steps = rematerialize(T), rematerialize(H), rematerialize(segment_steps)
    slot = index // H
    if params.schedule is not None:
        row = params.schedule + slot * FIELDS
        start = gl.load(row + FIRST_TOKEN)
        return slot * 0, index % H, start, gl.load(row + NUM_STEPS), gl.load(row + FIRST_TILE)
    elif IS_SEGMENTED:
        count = (T + segment_steps - 1) // segment_steps
        start = slot % count * segment_steps
        tile0 = slot // count * ((T + L - 1) // L) + start // L
        return slot // count, index % H, start, gl.minimum(T - start, segment_steps), tile0
    else:
        return slot, index % H, 0, T, slot * ((T + L - 1) // L)


@gluon.jit
def state_index(index, params, inside=True):
    """Where the states of the index-th piece of work are among those of all."""
    if params.schedule is not None:
        H = params.H
        return gl.load(params.schedule + index // H * FIELDS + SEGMENT_INDEX, mask=inside) * H + index % H
    else:
        return index


@gluon.jit
def num_tiles(index, start, steps, params, L: gl.constexpr, REVERSE: gl.constexpr, SKIP_LAST: gl.constexpr):
    """How many a walk takes of a piece; with SKIP none of the last of a sequence, what is behind which nobody wants."""
    tiles = (steps + L - 1) // L
    if not SKIP_LAST:
        return tiles
    elif params.schedule is not None:
        row = params.schedule + index // params.H * FIELDS
        return gl.where(gl.load(row + (STARTS_SEQUENCE if REVERSE else ENDS_SEQUENCE)) != 0, 0, tiles)
    else:
        return gl.where(start == 0 if REVERSE else start + steps == params.T, 0, tiles)


@gluon.jit
def tile_coordinates(b, h, t, column, end, params):
    """Of a tile in tensors as :func:`~tfla.backends.hopper.launch.make_descriptor` has them. Of packed sequences no row from
    `end` on is read, which gives zeros, or written."""
    if params.schedule is not None:
        return VIRTUAL_ROWS, end, h, VIRTUAL_ROWS - end + t, column
    else:
        return b, h, t, column
