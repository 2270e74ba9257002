"""X of the delta rule, (R1) of `tfla.backends.triton.delta_kernels`: a program is one warp and computes one tile.

A tile has blocks of 16 x 16, of which those of the lower triangle are computed, with rows i and columns j of blocks
from 0 to 3. Those above it are stored as zeros, because the scans multiply by all of X:

    (1)   M_ij = k_i . k_j D_ij      from a tile of keys that TMA brings, with all ten blocks in registers
    (2)   four X_ii, row by row      a thread has two columns of one block, all rows, and reads weights from shared
                                     memory, which all threads of the block share: no sums over threads
    (3)   X_10 and X_32              X21 <- Y - X22 B2 Y with Y = M21 - M21 B1 X11. Left operands M21 are results of
    (4)   X_20, X_21, X_30, X_31     MMAs as they lie, because a sum may have its terms in any order: a thread has the
                                     same two neighbors of the inner dimension in both operands. Others pass through
                                     shared memory

With gates by channel M B is in memory already, in the place of X B, as the sum of two 16-bit numbers: the second of one
below the diagonal lies above it. With W = M B, X B is W (I + W)^-1, the same with W for M and ones for beta, so that
one kernel is for both.

Where the kernels divide keys by their norms, M_ij = r_i r_j k_i . k_j D_ij with r_i = 1 / sqrt(|k_i|^2 + 1e-6), and
|k_i|^2 is on the diagonal of the products of keys. The scans read r, too.

With one warp a program there is no barrier between warps, and twelve programs fit a multiprocessor: their warps hide
what each of them waits for. What steps (2) to (4) share lies where the keys were.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tfla.backends.gpu.config import power_of_two
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_kernels import COLUMN, ROW, VECTORS, first_tile, locate_chunk
from tfla.backends.hopper import host, mma, pipeline, scheduler
from tfla.backends.hopper.delta_tiles import inverse_norm
from tfla.backends.triton.correction_dtype import correction_dtype
from tfla.backends.triton.delta_kernels import solve_precision

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext
    from tfla.backends.triton.delta import DeltaContext

SIDE = gl.constexpr(16)  # of a block
BLOCKS = gl.constexpr(4)  # blocks of a tile in each direction
MAX_REGISTERS = 168  # of a thread: twelve programs fit a multiprocessor
CHANNELS = gl.constexpr(16)  # channels whose keys are operands at once, those of one MMA


@gluon.constexpr_function
def results():
    """Return the layout of a block that MMAs of one warp compute."""
    return gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])


@gluon.constexpr_function
def operand(index, k_width):
    """Return the layout of a left or right operand with k_width neighbors of the inner dimension in a thread."""
    return gl.DotOperandLayout(index, results(), k_width)


@gluon.constexpr_function
def columns_of_blocks():
    """Return the layout (BLOCKS, rows, SIDE) of step (2): a thread has two columns of one block."""
    return gl.BlockedLayout([1, 1, 2], [4, 1, 8], [1, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def rows_of_blocks():
    """Return the layout (BLOCKS, 1, columns) of rows of blocks that all threads of a block have."""
    return gl.SliceLayout(3, gl.BlockedLayout([1, 1, 16, 1], [4, 1, 1, 8], [1, 1, 1, 1], [3, 2, 1, 0]))


@gluon.constexpr_function
def shared_blocks(count):
    """Return the layout (count SIDE, SIDE) of blocks in shared memory, row by row but for the bits of rows and columns.

    The threads of an operand have four or eight rows each; these bits give them different banks. A bit of the offset
    that bits of rows change by exclusive or must not be that of another row alone: Triton (3.6 to 3.7.1) adds the
    latter to the result, where it would have to change it.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [2, 0], [1, 8], [4, 12], [8, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout(bases if count == 4 else bases[:8])


@gluon.jit
def nearest_tf32(x, PRECISION: gl.constexpr):
    """Return x rounded where MMAs cut it off to tf32."""
    if PRECISION == "tf32":
        return mma.nearest_tf32(x)
    else:
        return x


@gluon.jit
def load_keys(k, row: gl.constexpr, channel: gl.constexpr):
    """Return keys of SIDE steps from `row` and CHANNELS channels as a left operand, and transposed as a right one."""
    k = k.slice(row, SIDE, 0).slice(channel, CHANNELS, 1)
    return k.load(operand(0, 2)), k.permute((1, 0)).load(operand(1, 2))


@gluon.jit
def load_factors(vectors, row: gl.constexpr, column: gl.constexpr, i: gl.constexpr, j: gl.constexpr):
    """Return the numbers of vectors `row` and `column` for the rows and the columns of block (i, j)."""
    of_rows = vectors.index(row).slice(SIDE * i, SIDE, 0).load(gl.SliceLayout(1, results()))
    of_columns = vectors.index(column).slice(SIDE * j, SIDE, 0).load(gl.SliceLayout(0, results()))
    return gl.expand_dims(of_rows, 1), gl.expand_dims(of_columns, 0)


@gluon.jit
def decayed(M, vectors, i: gl.constexpr, j: gl.constexpr, GATED: gl.constexpr, NORMALIZED: gl.constexpr):
    """Return M_ij times its decays, and with NORMALIZED divided by the norms of its keys."""
    if GATED:
        row, column = load_factors(vectors, 0, 1, i, j)
        M *= gl.exp2(row + column)
    if NORMALIZED:
        row, column = load_factors(vectors, 3, 3, i, j)
        M *= row * column
    return M


@gluon.jit
def store_norms(M, vectors, block: gl.constexpr):
    """Store r of a block of steps, from the diagonal of M, which is k k^T, to the fourth of the vectors."""
    i = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(1, results())), 1)
    j = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, results())), 0)
    square = gl.sum(gl.where(i == j, M, 0.0), 1)  # (SIDE)
    vectors.index(3).slice(SIDE * block, SIDE, 0).store(inverse_norm(square))


@gluon.jit
def split_columns(x):
    """Return the columns of x, (BLOCKS, 1, n), n of which a thread has, as a tuple of n tensors (BLOCKS, 1, 1)."""
    n: gl.constexpr = x.shape[2]
    if n == 1:
        return (x,)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [BLOCKS, 1, 2, n // 2]), [0, 1, 3, 2]))
        return split_columns(a) + split_columns(b)


@gluon.jit
def split_rows(x):
    """Return the rows of x, (BLOCKS, n, SIDE), n of which a thread has, as a tuple of n tensors (BLOCKS, 1, SIDE)."""
    n: gl.constexpr = x.shape[1]
    if n == 1:
        return (x,)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [BLOCKS, 2, n // 2, SIDE]), [0, 2, 3, 1]))
        return split_rows(a) + split_rows(b)


@gluon.jit
def join_rows(rows, first: gl.constexpr, n: gl.constexpr):
    """Return rows `first` to first + n - 1 of a tuple of tensors (BLOCKS, 1, SIDE), as (BLOCKS, n, SIDE)."""
    if n == 1:
        return rows[first]
    else:
        x = gl.join(join_rows(rows, first, n // 2), join_rows(rows, first + n // 2, n // 2))
        return gl.reshape(gl.permute(x, [0, 3, 1, 2]), [BLOCKS, n, SIDE])


@gluon.jit
def block_of(blocks, i: gl.constexpr):
    """Return block i, (SIDE, SIDE), of blocks in shared memory, (BLOCKS SIDE, SIDE)."""
    return blocks.slice(SIDE * i, SIDE, 0)


@gluon.jit
def solve_diagonal(m, vectors, blocks, X, steps, stride, PRECISION: gl.constexpr):
    """Compute and store X_ii = M_ii (I + B M_ii)^-1 row by row; row i is m_i - sum over j < i of m_ij b_j x_j.

    Args:
        m: M_ii in shared memory, (BLOCKS SIDE, SIDE), zeros on and above the diagonal.
        vectors: Those of `multiply_keys` in shared memory, of which the third is beta; or None where beta is 1.
        blocks: Output in shared memory for X_ii rounded to tf32, (BLOCKS SIDE, SIDE).
        X: Output for X_ii, the first step of the tile.
        steps: Steps from there on.
        stride: From one step of X to the next.
    """
    layout: gl.constexpr = columns_of_blocks()
    of_rows: gl.constexpr = rows_of_blocks()
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    block = gl.expand_dims(gl.expand_dims(block, 1), 2) * SIDE  # first steps of blocks
    column = gl.arange(0, SIDE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 1)
    if vectors is not None:
        b = split_columns(vectors.index(2).reshape([BLOCKS, 1, SIDE]).load(of_rows))
    m = m.reshape([BLOCKS, SIDE, SIDE])
    rows = split_rows(m.load(layout))
    weights = split_rows(m.load(of_rows))
    solved = ()
    written = ()  # b_j x_j
    for i in gl.static_range(SIDE):
        x = gl.convert_layout(rows[i], layout, assert_trivial=True)
        if i > 0:
            weights_i = split_columns(weights[i])
            for j in gl.static_range(i):
                x -= gl.convert_layout(weights_i[j], layout, assert_trivial=True) * written[j]
        gl.store(X + (block + i) * stride + block + column, x.to(X.dtype.element_ty), mask=block + i < steps)
        solved = solved + (nearest_tf32(x, PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
        write = x
        if vectors is not None:
            write *= gl.convert_layout(b[i], layout, assert_trivial=True)
        written = written + (write,)  # type: ignore[assignment]  # noqa: RUF005
    blocks.reshape([BLOCKS, SIDE, SIDE]).store(join_rows(solved, 0, SIDE))


@gluon.jit
def negative_beta(vectors, block: gl.constexpr, axis: gl.constexpr):
    """Return -beta of a block of steps as factors of the rows (axis 0) or columns (axis 1) of a block of results."""
    if vectors is None:
        return -1.0
    else:
        layout: gl.constexpr = gl.SliceLayout(1 - axis, results())
        return gl.expand_dims(-vectors.index(2).slice(SIDE * block, SIDE, 0).load(layout), 1 - axis)


@gluon.jit
def left_times(x, factors, PRECISION: gl.constexpr):
    """Return x * factors, results of MMAs, as a left operand."""
    return gl.convert_layout(nearest_tf32(x * factors, PRECISION), operand(0, 2), assert_trivial=True)


@gluon.jit
def product(a, b, total, PRECISION: gl.constexpr):
    """Return total + a b."""
    return mma_v2(a, b, total, input_precision=PRECISION)


@gluon.jit
def load_block(W, i: gl.constexpr, j: gl.constexpr, steps, stride):
    """Return W_ij, (SIDE, SIDE), for i > j; of W_ii, what is below its diagonal."""
    row = SIDE * i + gl.arange(0, SIDE, gl.SliceLayout(1, results()))
    column = SIDE * j + gl.arange(0, SIDE, gl.SliceLayout(0, results()))
    row, column = gl.expand_dims(row, 1), gl.expand_dims(column, 0)
    high = gl.load(W + row * stride + column, mask=row < steps, other=0.0)
    low = gl.load(W + column * stride + row, mask=column < steps, other=0.0)
    return high.to(gl.float32) + low.to(gl.float32)


@gluon.jit
def store_block(X, x, i: gl.constexpr, j: gl.constexpr, steps, stride):
    """Store X_ij, (SIDE, SIDE)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])
    row = SIDE * i + gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    column = SIDE * j + gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    at = X + gl.expand_dims(row, 1) * stride + gl.expand_dims(column, 0)
    value = gl.convert_layout(x.to(X.dtype.element_ty), layout)
    gl.store(at, value, mask=gl.expand_dims(row < steps, 1))


@gluon.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def solve_kernel(
    K, beta, gates, needs_levels, cu, X, norms, sequences, T, tiles_of_head, H, GROUP, bb, bt, bh, L: gl.constexpr,
    GATED: gl.constexpr, BY_CHANNEL: gl.constexpr, NORMALIZED: gl.constexpr, IS_VARLEN: gl.constexpr,
    PRECISION: gl.constexpr,
):  # fmt: skip
    """Compute X of every tile, or with BY_CHANNEL X B of those that need no levels. The grid is (tiles, H).

    Args:
        K: TMA descriptor of the keys, (B, T, H / GROUP, dqk), in tiles (L, dqk) with dqk rounded up to a power of two;
            not read with BY_CHANNEL, like beta and gates.
        beta: (B, T, H), any float dtype.
        gates: The gate vectors, (H, tiles, VECTORS, L) float32, with GATED.
        needs_levels: (H, tiles) int8, 1 for tiles that need levels, with BY_CHANNEL.
        cu: The offsets of packed sequences, (sequences + 1), with IS_VARLEN.
        X: Output, (B, T, H, L); with BY_CHANNEL it has M B before, see above.
        norms: Output for r, (B, T, H) float32, with NORMALIZED.
        sequences: Number of sequences.
        T: Tokens of a batch row.
        tiles_of_head: Tiles of one head over all batch rows.
        H: Heads.
        GROUP: Heads that share keys.
        bb, bt, bh: Strides of beta.
        PRECISION: Of the products that solve for X.
    """
    h = gl.program_id(1).to(gl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, gl.program_id(0), L, IS_VARLEN)
    tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
    exists = start < length
    if BY_CHANNEL:
        exists = exists & (gl.load(needs_levels + tile, mask=exists, other=1) == 0)
    if exists:
        batch = first * 0 if IS_VARLEN else s.to(gl.int64)
        t0 = (first + start if IS_VARLEN else start).to(gl.int64)
        params = scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=0, schedule=cu if IS_VARLEN else None
        )
        steps = (length - start).to(gl.int32)
        keys = scheduler.tile_coordinates(
            batch.to(gl.int32), gl.program_id(1) // GROUP, t0.to(gl.int32), 0, t0.to(gl.int32) + steps, params
        )
        beta += batch * bb + h * bh + t0 * bt
        gates += tile * (VECTORS * L)
        X += ((first + start) * H + h) * L
        if BY_CHANNEL:
            solve_tile(None, load_tile(X, steps, H * L), X, steps, H * L, False, False, PRECISION)
        else:
            vectors, M = multiply_keys(K, keys, beta, gates, steps, bt, L, GATED, NORMALIZED)
            if NORMALIZED:
                r = gl.arange(0, L, gl.BlockedLayout([2], [32], [1], [0]))
                norms += (first + start) * H + h
                gl.store(norms + r.to(gl.int64) * H, vectors.index(3).load(r.type.layout), mask=r < steps)
            solve_tile(vectors, M, X, steps, H * L, GATED, NORMALIZED, PRECISION)


@gluon.jit
def load_tile(W, steps, stride):
    """Return the blocks of W of one tile in the order of `multiply_keys`."""
    return (
        load_block(W, 0, 0, steps, stride), load_block(W, 1, 1, steps, stride), load_block(W, 2, 2, steps, stride),
        load_block(W, 3, 3, steps, stride), load_block(W, 1, 0, steps, stride), load_block(W, 3, 2, steps, stride),
        load_block(W, 2, 0, steps, stride), load_block(W, 2, 1, steps, stride), load_block(W, 3, 0, steps, stride),
        load_block(W, 3, 1, steps, stride),
    )  # fmt: skip


@gluon.jit
def multiply_keys(K, keys, beta, gates, steps, bt, L: gl.constexpr, GATED: gl.constexpr, NORMALIZED: gl.constexpr):
    """Return the vectors of one tile in shared memory, and blocks of k_i . k_j, of keys with these TMA coordinates.

    The vectors are the exponents of the decays of rows and of columns, beta, and with NORMALIZED r.

    All pointers are at the first step of the tile, beta with a distance bt from step to step.
    """
    full = pipeline.allocate_barrier(1)
    k = pipeline.allocate_tiles(K, 1)
    fence_async_shared()
    mbarrier.expect(full, K.block_type.nbytes)
    pipeline.async_load(K, keys, full, k.index(0))
    r = gl.arange(0, L, gl.BlockedLayout([2], [32], [1], [0]))
    b = gl.load(beta + r.to(gl.int64) * bt, mask=r < steps, other=0.0).to(gl.float32)
    count: gl.constexpr = 4 if NORMALIZED else 3
    vectors = gl.allocate_shared_memory(gl.float32, [count, L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if GATED:
        row = gl.load(gates + ROW * L + r)
        column = gl.load(gates + COLUMN * L + r)
        vectors.index(0).store(row)
        vectors.index(1).store(column)
    vectors.index(2).store(b)
    # (1) M
    zero = gl.zeros([SIDE, SIDE], gl.float32, results())
    M00, M11, M22, M33 = zero, zero, zero, zero
    M10, M32, M20, M21, M30, M31 = zero, zero, zero, zero, zero, zero
    mbarrier.wait(full, 0)
    mbarrier.invalidate(full)  # PTX asks for it before other tensors are stored there
    BK: gl.constexpr = K.block_type.shape[-1]
    k = k.index(0).reshape([L, BK])
    for channel in gl.static_range(0, BK, CHANNELS):
        left0, right0 = load_keys(k, 0, channel)
        left1, right1 = load_keys(k, SIDE, channel)
        left2, right2 = load_keys(k, 2 * SIDE, channel)
        left3, right3 = load_keys(k, 3 * SIDE, channel)
        M00 = mma_v2(left0, right0, M00)
        M11 = mma_v2(left1, right1, M11)
        M22 = mma_v2(left2, right2, M22)
        M33 = mma_v2(left3, right3, M33)
        M10 = mma_v2(left1, right0, M10)
        M32 = mma_v2(left3, right2, M32)
        M20 = mma_v2(left2, right0, M20)
        M21 = mma_v2(left2, right1, M21)
        M30 = mma_v2(left3, right0, M30)
        M31 = mma_v2(left3, right1, M31)
    if NORMALIZED:
        store_norms(M00, vectors, 0)
        store_norms(M11, vectors, 1)
        store_norms(M22, vectors, 2)
        store_norms(M33, vectors, 3)
    return vectors, (M00, M11, M22, M33, M10, M32, M20, M21, M30, M31)


@gluon.jit
def solve_tile(vectors, M, X, steps, xt, GATED: gl.constexpr, NORMALIZED: gl.constexpr, PRECISION: gl.constexpr):
    """Compute X of one tile, whose first step X is at, with a distance xt from step to step.

    Args:
        vectors: Those of `multiply_keys` in shared memory, (3, L), with NORMALIZED (4, L); or None with beta = 1.
        M: The blocks of the lower triangle, in the order of `multiply_keys`, before their decays.
        X: Output.
    """
    M00, M11, M22, M33, M10, M32, M20, M21, M30, M31 = M
    diagonal = gl.allocate_shared_memory(gl.float32, [BLOCKS * SIDE, SIDE], shared_blocks(4))
    blocks = gl.allocate_shared_memory(gl.float32, [BLOCKS * SIDE, SIDE], shared_blocks(4))
    below = gl.allocate_shared_memory(gl.float32, [SIDE, SIDE], shared_blocks(1))
    # (2) The diagonal
    i = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(1, results())), 1)
    j = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, results())), 0)
    block_of(diagonal, 0).store(gl.where(j < i, decayed(M00, vectors, 0, 0, GATED, NORMALIZED), 0.0))
    block_of(diagonal, 1).store(gl.where(j < i, decayed(M11, vectors, 1, 1, GATED, NORMALIZED), 0.0))
    block_of(diagonal, 2).store(gl.where(j < i, decayed(M22, vectors, 2, 2, GATED, NORMALIZED), 0.0))
    block_of(diagonal, 3).store(gl.where(j < i, decayed(M33, vectors, 3, 3, GATED, NORMALIZED), 0.0))
    solve_diagonal(diagonal, vectors, blocks, X, steps, xt, PRECISION)
    # (3) The blocks below the diagonal in the upper and in the lower half
    M10 = decayed(M10, vectors, 1, 0, GATED, NORMALIZED)
    M32 = decayed(M32, vectors, 3, 2, GATED, NORMALIZED)
    b0 = negative_beta(vectors, 0, 1)
    Y10 = product(left_times(M10, b0, PRECISION), block_of(blocks, 0).load(operand(1, 2)), M10, PRECISION)
    Y32 = product(
        left_times(M32, negative_beta(vectors, 2, 1), PRECISION),
        block_of(blocks, 2).load(operand(1, 2)),
        M32,
        PRECISION,
    )
    b3 = negative_beta(vectors, 3, 0)
    block_of(diagonal, 0).store(nearest_tf32(Y10 * negative_beta(vectors, 1, 0), PRECISION))
    block_of(diagonal, 1).store(nearest_tf32(Y32 * b3, PRECISION))
    X33 = block_of(blocks, 3).load(operand(0, 1))
    X10 = product(block_of(blocks, 1).load(operand(0, 1)), block_of(diagonal, 0).load(operand(1, 1)), Y10, PRECISION)
    X32 = product(X33, block_of(diagonal, 1).load(operand(1, 1)), Y32, PRECISION)
    store_block(X, X10, 1, 0, steps, xt)
    store_block(X, X32, 3, 2, steps, xt)
    below.store(nearest_tf32(X10, PRECISION))
    # (4) The block of 32 x 32 below these
    M20 = decayed(M20, vectors, 2, 0, GATED, NORMALIZED)
    M21 = decayed(M21, vectors, 2, 1, GATED, NORMALIZED)
    M30 = decayed(M30, vectors, 3, 0, GATED, NORMALIZED)
    M31 = decayed(M31, vectors, 3, 1, GATED, NORMALIZED)
    b1 = negative_beta(vectors, 1, 1)
    X00 = block_of(blocks, 0).load(operand(1, 2))
    X10 = below.load(operand(1, 2))
    X11 = block_of(blocks, 1).load(operand(1, 2))
    left21 = left_times(M21, b1, PRECISION)
    left31 = left_times(M31, b1, PRECISION)
    Y20 = product(left21, X10, product(left_times(M20, b0, PRECISION), X00, M20, PRECISION), PRECISION)
    Y21 = product(left21, X11, M21, PRECISION)
    Y30 = product(left31, X10, product(left_times(M30, b0, PRECISION), X00, M30, PRECISION), PRECISION)
    Y31 = product(left31, X11, M31, PRECISION)
    b2 = negative_beta(vectors, 2, 0)
    block_of(diagonal, 0).store(nearest_tf32(Y20 * b2, PRECISION))
    block_of(diagonal, 1).store(nearest_tf32(Y21 * b2, PRECISION))
    block_of(diagonal, 2).store(nearest_tf32(Y30 * b3, PRECISION))
    block_of(diagonal, 3).store(nearest_tf32(Y31 * b3, PRECISION))
    X22 = block_of(blocks, 2).load(operand(0, 1))
    left32 = gl.convert_layout(nearest_tf32(X32, PRECISION), operand(0, 2), assert_trivial=True)
    Y20_right = block_of(diagonal, 0).load(operand(1, 1))
    Y21_right = block_of(diagonal, 1).load(operand(1, 1))
    Y30 = product(left32, block_of(diagonal, 0).load(operand(1, 2)), Y30, PRECISION)
    Y31 = product(left32, block_of(diagonal, 1).load(operand(1, 2)), Y31, PRECISION)
    store_block(X, product(X22, Y20_right, Y20, PRECISION), 2, 0, steps, xt)
    store_block(X, product(X22, Y21_right, Y21, PRECISION), 2, 1, steps, xt)
    store_block(X, product(X33, block_of(diagonal, 2).load(operand(1, 1)), Y30, PRECISION), 3, 0, steps, xt)
    store_block(X, product(X33, block_of(diagonal, 3).load(operand(1, 1)), Y31, PRECISION), 3, 1, steps, xt)
    zero = gl.zeros([SIDE, SIDE], gl.float32, results())
    store_block(X, zero, 0, 1, steps, xt)
    store_block(X, zero, 0, 2, steps, xt)
    store_block(X, zero, 0, 3, steps, xt)
    store_block(X, zero, 1, 2, steps, xt)
    store_block(X, zero, 1, 3, steps, xt)
    store_block(X, zero, 2, 3, steps, xt)


def launch(ctx: "DeltaContext", gates: Tensor) -> Tensor:
    """Return X, (B, T, H, L), and fill the norms of keys where the context has them."""
    base, x = ctx.base, ctx.x
    X = base.new(base.B, base.T, base.H, base.L, dtype=correction_dtype(x))
    base.launch(solve_kernel, (base.tiles, base.H),
        host.descriptor(base, x.k, power_of_two(base.K)), ctx.beta, gates, gates, base.cu_seqlens, X,
        (ctx.norms_apart or (gates, gates))[0], x.sequences,
        base.T, base.tiles, base.H, base.group, *time_strides(ctx.beta), L=base.L, GATED=ctx.gated, BY_CHANNEL=False,
        NORMALIZED=ctx.norms is not None, IS_VARLEN=base.packed, PRECISION=solve_precision(x.q.dtype), num_warps=1,
        compilation={"maxnreg": MAX_REGISTERS},
    )  # fmt: skip
    return X


def launch_by_channel(ctx: "ChannelContext", X: Tensor, needs_levels: Tensor) -> None:
    """Compute X B of all tiles that need no levels, in the place of M B.

    Args:
        ctx: The context of the call.
        X: M B, and then X B, (B, T, H, L).
        needs_levels: (H, tiles) int8, 1 for tiles that need levels.
    """
    base, x = ctx.base, ctx.x
    base.launch(solve_kernel, (base.tiles, base.H),
        X, ctx.beta, X, needs_levels, base.cu_seqlens, X, X, x.sequences, base.T, base.tiles, base.H, base.group,
        *time_strides(ctx.beta), L=base.L, GATED=False, BY_CHANNEL=True, NORMALIZED=False, IS_VARLEN=base.packed,
        PRECISION=solve_precision(x.q.dtype), num_warps=1, compilation={"maxnreg": MAX_REGISTERS},
    )  # fmt: skip
