"""X B of tiles with gates by channel, from the M B that :mod:`.channel_operands` has stored.

With X = M (I + B M)^-1, Y = X B and W = M B this is Y = W (I + W)^-1, so that row i is y_i = w_i - sum over j < i of
w_ij y_j. One warp computes a tile. With rows and columns in two halves of 32:

    (1)   Y11 and Y22 row by row: a thread has two columns of one of them, so that it needs numbers of W alone, which
          it reads from shared memory, and nothing of other threads
    (2)   Y21 <- Z - Y22 Z with Z = W21 - W21 Y11, by MMAs in tf32

Above the diagonal W is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tfla.backends.gpu.gate_kernels import first_tile, locate_chunk
from tfla.backends.hopper import mma, pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from tfla.backends.triton.channel_rule import ChannelContext

REGISTERS = 128  # of a thread, so that sixteen warps fit a multiprocessor
L = gl.constexpr(64)  # steps of a tile
SIDE = gl.constexpr(32)  # of a block
RUN = gl.constexpr(8)  # rows of X in one tensor
# (halves, columns, rows of a run): a thread has two columns of one half, and all rows.
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 2, 8], [2, 16, 1], [1, 1, 1], [2, 1, 0]))
MEMORY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))  # 16 bytes a thread
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 1))


@gluon.jit
def products_with_run(w, row: gl.constexpr, y, run: gl.constexpr):
    """Return the sums over the rows of a run of Y, (2, SIDE, RUN), times W of row `row`, (2, SIDE)."""
    weights = w.slice(2 * row, 2, 0).slice(RUN * run, RUN, 1).load(gl.SliceLayout(1, COLUMNS))  # (2, RUN)
    return gl.sum(y * gl.expand_dims(weights, 1), 2)


@gluon.jit
def row_of_run(i: gl.constexpr):
    """Return whether a row of a run is row i, (1, 1, RUN)."""
    r = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(0, COLUMNS)))
    return gl.expand_dims(gl.expand_dims(r == i, 0), 0)


@gluon.jit
def solve_run(w, y0, y1, y2, run: gl.constexpr):
    """Return the rows of Y of a run, (2, SIDE, RUN).

    Args:
        w: Shared memory with W of both halves, (2 SIDE, SIDE): row i of half n is row 2 i + n.
        y0, y1, y2: The results for the runs before.
        run: Which run.
    """
    y = gl.zeros([2, SIDE, RUN], gl.float32, COLUMNS)
    for i in gl.static_range(RUN):
        row = w.slice(2 * (RUN * run + i), 2, 0).load(gl.SliceLayout(2, COLUMNS))  # (2, SIDE)
        if run > 0:
            row -= products_with_run(w, RUN * run + i, y0, 0)
        if run > 1:
            row -= products_with_run(w, RUN * run + i, y1, 1)
        if run > 2:
            row -= products_with_run(w, RUN * run + i, y2, 2)
        if i > 0:
            row -= products_with_run(w, RUN * run + i, y, run)
        y = gl.where(row_of_run(i), gl.expand_dims(row, 2), y)
    return y


@gluon.jit
def store_run(to, y, run: gl.constexpr):
    """Store rows of Y, (2, SIDE, RUN), to shared memory in the order of rows that W has there."""
    for i in gl.static_range(RUN):
        row = gl.sum(gl.where(row_of_run(i), y, 0.0), 2)
        to.slice(2 * (RUN * run + i), 2, 0).store(row)


@gluon.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H"])
def channel_solve_kernel(
    W, X, cu, leveled, sequences, T, tiles_of_head, H, IN_PLACE: gl.constexpr, IS_VARLEN: gl.constexpr,
):  # fmt: skip
    """Compute X B of one tile, unless the tile needs levels. The grid is (tiles * H).

    Args:
        W: M B, (B, T, H, L).
        X: the output, of the same shape; with IN_PLACE it is W.
        cu: the offsets of packed sequences, (sequences + 1).
        leveled: (H, tiles) int8, which tiles need levels.
    """
    w = gl.allocate_shared_memory(gl.float32, [2 * SIDE, SIDE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    h = (gl.program_id(0) % H).to(gl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, gl.program_id(0) // H, L, IS_VARLEN)
    tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
    exists = start < length
    if exists & (gl.load(leveled + tile, mask=exists, other=1) == 0):
        steps = length - start
        of_tile = ((first + start) * H + h) * L
        W += of_tile
        X += of_tile
        r = gl.arange(0, L, gl.SliceLayout(1, MEMORY))
        step = (r & 1) * SIDE + (r >> 1)  # of row r of w, of half r % 2
        c = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, MEMORY)), 0)
        at = gl.expand_dims(step * (H * L) + (r & 1) * SIDE, 1) + c
        inside = gl.expand_dims(step < steps, 1)
        w.store(gl.load(W + at, mask=inside, other=0.0).to(gl.float32))  # (2 SIDE, SIDE)
        r = SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, MEMORY))
        at21 = gl.expand_dims(r * (H * L), 1) + c
        inside21 = gl.expand_dims(r < steps, 1)
        w21 = gl.load(W + at21, mask=inside21, other=0.0)  # (SIDE, SIDE)
        if not IN_PLACE:  # above the diagonal
            zeros = gl.zeros([SIDE, SIDE], X.dtype.element_ty, MEMORY)
            gl.store(X + (at21 - SIDE * (H * L) + SIDE), zeros, mask=gl.expand_dims(r - SIDE < steps, 1))
        # (1) The halves on the diagonal
        y0 = solve_run(w, None, None, None, 0)
        y1 = solve_run(w, y0, None, None, 1)
        y2 = solve_run(w, y0, y1, None, 2)
        y3 = solve_run(w, y0, y1, y2, 3)
        pipeline.barrier()
        store_run(w, y0, 0)
        store_run(w, y1, 1)
        store_run(w, y2, 2)
        store_run(w, y3, 3)
        gl.store(X + at, w.load(MEMORY).to(X.dtype.element_ty), mask=inside)
        # (2) The block below them
        halves = w.reshape([SIDE, 2 * SIDE])
        left = mma.nearest_tf32(-gl.convert_layout(w21, LEFT).to(gl.float32))
        right = mma.nearest_tf32(halves.slice(0, SIDE, 1).load(RIGHT))
        Z = mma_v2(left, right, gl.convert_layout(w21, PRODUCT).to(gl.float32), input_precision="tf32")
        left = mma.nearest_tf32(halves.slice(SIDE, SIDE, 1).load(LEFT))
        y = mma_v2(left, gl.convert_layout(mma.nearest_tf32(-Z), RIGHT), Z, input_precision="tf32")
        gl.store(X + at21, gl.convert_layout(y.to(X.dtype.element_ty), MEMORY), mask=inside21)


def launch(ctx: ChannelContext, W: Tensor, X: Tensor, leveled: Tensor) -> None:
    """Compute X B of all tiles that need no levels.

    Args:
        ctx: The context of the call.
        W: M B, (B, T, H, L).
        X: The output; it may be W.
        leveled: Which tiles need levels, (H, tiles) int8.
    """
    base = ctx.base
    base.launch(channel_solve_kernel, (base.tiles * base.H,),
        W, X, base.cu_seqlens, leveled, ctx.x.sequences, base.T, base.tiles, base.H,
        IN_PLACE=W is X, IS_VARLEN=base.packed, num_warps=1, compilation={"maxnreg": REGISTERS},
    )  # fmt: skip
