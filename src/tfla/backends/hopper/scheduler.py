"""The scheduler: which work tile a program takes next, and where a tile lies in its tensors.

A work tile is what a program computes from an initial to a final state: one head of one sequence, or of one segment of
a sequence. Programs are persistent: program p of P takes work tiles p, p + P, p + 2 P, ... Several may share a work
tile, with a part of the columns each: these are axis 0 of the grid, and P is the size of axis 1. Work tile `index` is
of head index % H and of sequence or segment index // H. Packed sequences have different lengths: there the second
number counts rows of a schedule. A Triton kernel, `schedule_packed`, writes it in a launch of its own, with the longest
work first, so that no program still has a long work tile when the others are done.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext

# The schedule of packed sequences is (segments, FIELDS), int32. The columns of a row:
FIELDS = tl.constexpr(8)
SEGMENT_INDEX = tl.constexpr(0)  # index of its states among those of all segments, (segments, H, dqk, dhv)
FIRST_TOKEN = tl.constexpr(1)
NUM_STEPS = tl.constexpr(2)
FIRST_TILE = tl.constexpr(3)  # index of its first tile among the gate vectors, (H, tiles, VECTORS, L)
STARTS_SEQUENCE = tl.constexpr(4)  # whether a sequence starts with this segment
ENDS_SEQUENCE = tl.constexpr(5)  # whether a sequence ends with this segment
POOL_INDEX = tl.constexpr(6)  # index of its sequence's row in a pool of states; -1: no row, -2: the pool lacks it
FINAL_POOL_INDEX = tl.constexpr(7)  # the same for the final state, whose pool may be another one

VIRTUAL_ROWS = tl.constexpr(1 << 30)  # extent of the rows in a TMA descriptor of packed sequences, see make_descriptor


@triton.jit
def _bounds(cu_seqlens, sequence, inside):
    """Return first token and length of the sequences of these numbers, zeros where there is none (not `inside`)."""
    first = tl.load(cu_seqlens + sequence, mask=inside, other=0).to(tl.int64)
    return first, tl.load(cu_seqlens + sequence + 1, mask=inside, other=0).to(tl.int64) - first


@triton.jit(do_not_specialize=["num_sequences", "segment_steps", "num_segments"])
def schedule_packed(
    cu_seqlens, schedule, num_sequences, segment_steps, num_segments, L: tl.constexpr, SEGMENT_BLOCK: tl.constexpr,
    SEQUENCE_BLOCK: tl.constexpr, INDEXED: tl.constexpr = False,
):  # fmt: skip
    """Write the schedule of packed sequences: segments by decreasing length, then by index, empty ones last.

    The row of a segment is its rank, which is the number of segments that come before it. One program ranks
    SEGMENT_BLOCK segments. It compares them with SEQUENCE_BLOCK sequences at a time.

    Args:
        cu_seqlens: Sequence boundaries, (num_sequences + 1).
        schedule: Output, (num_segments, FIELDS), int32.
        num_sequences: Number of sequences.
        segment_steps: Steps of a segment. Where sequences are not cut, a number above the longest possible sequence.
        num_segments: Number of segments, an upper bound that follows from the shapes alone. Sequence s, which starts at
            token f, has its segments at f // segment_steps + s and following; what is left over are empty segments.
            Tiles are numbered likewise, from f // L + s on.
        L: Steps of a tile.
        SEGMENT_BLOCK: Segments of one program.
        SEQUENCE_BLOCK: Sequences that are read at once.
        INDEXED: Whether POOL_INDEX and FINAL_POOL_INDEX are written. The indices of rows follow the boundaries
            (`bound_sequences`). Sequences are then not cut into segments.
    """
    segment = (tl.program_id(0) * SEGMENT_BLOCK + tl.arange(0, SEGMENT_BLOCK)).to(tl.int64)
    # (1) The sequence of each segment: the last one whose first segment is not after it.
    sequence = tl.full([SEGMENT_BLOCK], -1, tl.int64)
    for a in range(0, num_sequences, SEQUENCE_BLOCK):
        j = a + tl.arange(0, SEQUENCE_BLOCK)
        first, _ = _bounds(cu_seqlens, j, j < num_sequences)  # (SEQUENCE_BLOCK)
        sequence += tl.sum(
            ((first // segment_steps + j)[None, :] <= segment[:, None]) & (j < num_sequences)[None, :], 1
        )
    # (2) Its first step inside the sequence and its number of steps.
    exists = (segment < num_segments) & (sequence >= 0)  # segments before the first sequence have no steps
    first, sequence_steps = _bounds(cu_seqlens, sequence, exists)  # (SEGMENT_BLOCK)
    start = (segment - first // segment_steps - sequence) * segment_steps
    num_steps = tl.maximum(tl.minimum(sequence_steps - start, segment_steps), 0)
    # (3) Its rank: segments before it in its own sequence, plus those of each sequence j that come before it.
    #     a full segment:     the full segments of its own sequence before it, and all full ones of earlier sequences;
    #     a shorter segment:  all full segments, and the last segments of other sequences that are longer, or as long
    #                         and of an earlier sequence;
    #     an empty segment:   all segments of smaller index, and the segments with steps of later sequences.
    rank = tl.where(num_steps == segment_steps, start // segment_steps, tl.where(num_steps > 0, 0, segment))
    for a in range(0, num_sequences, SEQUENCE_BLOCK):
        j = a + tl.arange(0, SEQUENCE_BLOCK)
        _, other = _bounds(cu_seqlens, j, j < num_sequences)
        whole = (other // segment_steps)[None, :]  # full segments of sequence j
        rest = (other % segment_steps)[None, :]  # steps of its last, shorter segment
        earlier = j[None, :] < sequence[:, None]
        size = num_steps[:, None]
        before_shorter = whole + ((rest > size) | ((rest == size) & earlier)).to(tl.int64)
        before_empty = tl.where(j[None, :] > sequence[:, None], whole + (rest > 0).to(tl.int64), 0)
        rank += tl.sum(
            tl.where(
                size == segment_steps, tl.where(earlier, whole, 0), tl.where(size > 0, before_shorter, before_empty)
            ),
            1,
        )
    # (4) The row of the schedule.
    row = schedule + rank * FIELDS
    inside = segment < num_segments
    if INDEXED:
        places = cu_seqlens + num_sequences + 1 + segment
        place = tl.load(places, mask=inside, other=-1)
        tl.store(row + POOL_INDEX, place.to(tl.int32), mask=inside)
        final_place = tl.load(places + num_sequences, mask=inside, other=-1)
        tl.store(row + FINAL_POOL_INDEX, final_place.to(tl.int32), mask=inside)
    tl.store(row + SEGMENT_INDEX, segment.to(tl.int32), mask=inside)
    tl.store(row + FIRST_TOKEN, (first + start).to(tl.int32), mask=inside)
    tl.store(row + NUM_STEPS, num_steps.to(tl.int32), mask=inside)
    tl.store(row + FIRST_TILE, (first // L + sequence + start // L).to(tl.int32), mask=inside)
    tl.store(row + STARTS_SEQUENCE, (start == 0).to(tl.int32), mask=inside)
    tl.store(row + ENDS_SEQUENCE, (start + num_steps >= sequence_steps).to(tl.int32), mask=inside)


# Scalar arguments of the kernels that Triton must not specialize on, so that one compiled kernel serves all lengths.
RUNTIME_SCALARS = [
    "T", "tiles_per_head", "H", "group_size", "segment_steps", "num_work_tiles", "stride_ib", "stride_it", "stride_ih",
    "stride_fb", "stride_ft", "stride_fh", "scale", "log_scale"
]  # fmt: skip


class SchedulerParams(NamedTuple):
    """The numbers that turn an index into a work tile."""

    T: Any  # tokens of a batch row
    H: Any  # heads, or groups of heads where a program computes several at once
    segment_steps: Any  # steps of a segment
    num_work_tiles: Any  # sequences or segments times H
    schedule: Any  # the output of `schedule_packed`, or None where sequences are not packed
    first_row: Any = None  # the row of whole tensors that is row 0 of the work tiles, or None where that is row 0
    first_step: Any = None  # likewise the token of whole batch rows that is token 0 of the work tiles
    segments: Any = None  # segments of a sequence, where packed sequences are the segments of others


@gluon.jit
def rematerialize(x):
    """Return the int32 `x` through an opaque `mov`, so that the compiler reloads it from the constant bank at each use.

    Without it, ptxas keeps numbers that are needed once per work tile live across the loop over tiles and spills them,
    and the reload misses the cache.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_work_tile(index):
    """Return the index of the work tile that this program takes after work tile `index`."""
    return index + rematerialize(gl.num_programs(1))


@gluon.jit
def get_work_tile(index, params, L: gl.constexpr, IS_SEGMENTED: gl.constexpr, REMATERIALIZE: gl.constexpr = False):
    """Return batch row, head, first step, number of steps and first tile of work tile `index`.

    The first step is a token of the batch row. The first tile counts tiles of one head over all batch rows, as the gate
    vectors are stored. With REMATERIALIZE the scheduler's numbers are reloaded here instead of kept in registers.
    """
    T, H, segment_steps = params.T, params.H, params.segment_steps
    if REMATERIALIZE:
        T, H, segment_steps = rematerialize(T), rematerialize(H), rematerialize(segment_steps)
    segment = index // H
    if params.schedule is not None:
        row = params.schedule + segment * FIELDS
        start = gl.load(row + FIRST_TOKEN)
        return segment * 0, index % H, start, gl.load(row + NUM_STEPS), gl.load(row + FIRST_TILE)
    elif IS_SEGMENTED:
        count = (T + segment_steps - 1) // segment_steps  # segments of a batch row
        start = segment % count * segment_steps
        first_tile = segment // count * ((T + L - 1) // L) + start // L
        return segment // count, index % H, start, gl.minimum(T - start, segment_steps), first_tile
    else:
        return segment, index % H, 0, T, segment * ((T + L - 1) // L)


@gluon.jit
def state_index(index, params, INDEXED: gl.constexpr = False, AT_END: gl.constexpr = False):
    """Return the index of the states of work tile `index` in tensors (segments, H, dqk, dhv).

    With INDEXED it is the index in a pool, (rows, H, dqk, dhv): from -H to -1 where the sequence has no row, and less
    than -H where the pool lacks its row. With AT_END the pool is that of the final states.
    """
    if INDEXED:
        H = params.H
        field: gl.constexpr = FINAL_POOL_INDEX if AT_END else POOL_INDEX
        return gl.load(params.schedule + index // H * FIELDS + field) * H + index % H
    elif params.schedule is not None:
        H = params.H
        # The mask is true: with it ptxas allocates registers as in the kernels that have been measured.
        return gl.load(params.schedule + index // H * FIELDS + SEGMENT_INDEX, mask=True) * H + index % H
    else:
        return index


@gluon.jit
def num_tiles(index, start, steps, params, L: gl.constexpr, REVERSE: gl.constexpr, SKIP_LAST: gl.constexpr):
    """Return the number of tiles of work tile `index`, which starts at step `start` and has `steps` steps.

    With SKIP_LAST it is 0 for the last segment of a sequence in the direction of the scan: no segment follows that
    needs the state after it.
    """
    tiles = (steps + L - 1) // L
    if not SKIP_LAST:
        return tiles
    elif params.schedule is not None:
        row = params.schedule + index // params.H * FIELDS
        return gl.where(gl.load(row + (STARTS_SEQUENCE if REVERSE else ENDS_SEQUENCE)) != 0, 0, tiles)
    else:
        return gl.where(start == 0 if REVERSE else start + steps == params.T, 0, tiles)


@gluon.jit
def state_block(NUM_SPLITS: gl.constexpr, WIDTH: gl.constexpr):
    """Return the first row and column of this program's block of the state, (128, WIDTH).

    Programs are numbered along axis 0 of the grid: those that share 128 rows, NUM_SPLITS of them, come one after the
    other.
    """
    return gl.program_id(0) // NUM_SPLITS * 128, gl.program_id(0) % NUM_SPLITS * WIDTH


@gluon.jit
def tile_rows(i, start, steps, L: gl.constexpr, REVERSE: gl.constexpr):
    """Return the first token of the `i`-th tile that a scan of a work tile loads, and the token after the work tile.

    The work tile starts at token `start` and has `steps` steps; with REVERSE its last tile is loaded first.
    """
    return start + ((steps + L - 1) // L - 1 - i if REVERSE else i) * L, start + steps


@gluon.jit
def row_of_whole(b, params):
    """Return the row of a tensor with all batch rows for row `b` of the work tiles, which may be those of a slice."""
    if params.first_row is not None:
        return b + params.first_row
    else:
        return b


@gluon.jit
def step_of_whole(t, params):
    """Return the token of a whole batch row for token `t` of the work tiles, which may be those of some steps."""
    if params.first_step is not None:
        return t + params.first_step
    else:
        return t


@gluon.jit
def tile_coordinates(b, h, t, column, end, params):
    """Return the TMA coordinates of the tile of head `h` whose first row is token `t` and first column `column`.

    The descriptor is one of `tfla.backends.hopper.host.make_descriptor`. Rows from token `end` of a packed sequence
    on are out of bounds: TMA reads them as zeros and does not write them. Where work tiles are those of some steps, the
    tensor has all steps.
    """
    if params.schedule is not None:
        return VIRTUAL_ROWS, end, h, VIRTUAL_ROWS - end + t, column
    else:
        return b, h, step_of_whole(t, params), column


def launch(ctx: LaunchContext) -> LaunchContext:
    """Return the context with the schedule of packed sequences, (segments, FIELDS) int32, which a launch computes.

    Where sequences are not packed, this is `ctx` without a launch.

    Args:
        ctx: The context of the call, whose `cu_seqlens` are bounded (`sequences.bound`).
    """
    if not ctx.packed:
        return ctx
    schedule, block = ctx.new(ctx.segments, FIELDS.value, dtype=torch.int32), 16
    ctx.launch(schedule_packed, (ceil_div(ctx.segments, block),),
        ctx.cu_seqlens, schedule, ctx.x.sequences, ctx.segment_steps if ctx.segmented else ctx.T + 1, ctx.segments,
        L=ctx.L, SEGMENT_BLOCK=block, SEQUENCE_BLOCK=64, INDEXED=ctx.indexed, num_warps=4,
    )  # fmt: skip
    return dataclasses.replace(ctx, schedule=schedule)
