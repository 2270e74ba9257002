"""Matrix products of the Hopper kernels, and the gate weights of their operands.

A consumer is one warpgroup. Its accumulators come from wgmma with 64 rows, in the layout `accumulator_layout`. wgmma
can take a 16-bit left operand from registers in the same layout, so that a result, rounded, is the left operand of the
next product without a copy through shared memory. Functions that start with `issue` start an asynchronous product; its
operands in registers must stay unchanged until a `warpgroup_mma_wait` that has them among its `deps`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tfla.backends.hopper.pipeline import COLUMN_EXPONENT, ROW_EXPONENT


@gluon.jit
def state_pointers(
    state, at, row, column, DX: gl.constexpr, DY: gl.constexpr, TRANSPOSED: gl.constexpr, layout: gl.constexpr,
    ROWS: gl.constexpr = 64, COLUMNS: gl.constexpr = 128, BY_ROWS: gl.constexpr = False,
):  # fmt: skip
    """Return pointers (ROWS, COLUMNS) to a block of the state with index `at`, from `row` and `column` on.

    States are (DX, DY) in memory, or with TRANSPOSED (DY, DX). With BY_ROWS the compiler finds no offsets in common
    with those without it, which it would keep from an initial to a final state, and spill.
    """
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    first = state + at.to(gl.int64) * (DX * DY)
    if TRANSPOSED:
        return first + (column + c) * DX + (row + r)
    elif BY_ROWS:
        return (first + (row + r).to(gl.int64) * DY) + (column + c)
    else:
        # `r * DY + c` first: the elements of a thread then differ by constants, which take no registers.
        return first + (row * DY + column) + (r * DY + c)


@gluon.jit
def block_exists(
    at, row, column, DX: gl.constexpr, DY: gl.constexpr, PADDED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Return which elements of a block (ROWS, COLUMNS) exist: none if `at` is negative.

    With PADDED those that are not inside of a state (DX, DY) do not exist, either; the block is from `row` and `column`
    on.
    """
    layout: gl.constexpr = accumulator_layout(COLUMNS)
    exists = gl.zeros([ROWS, COLUMNS], gl.int32, layout) + at >= 0
    if PADDED:
        r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
        c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
        exists = exists & (row + r < DX) & (column + c < DY)
    return exists


@gluon.jit
def load_block(
    pointers, at, H, row, column, DX: gl.constexpr, DY: gl.constexpr, PADDED: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Load a block (ROWS, COLUMNS) of the initial state with index `at`, in float32.

    With INDEXED, `at` is an index in a pool of states of H heads (`scheduler.state_index`). The block is then zero
    where it does not exist, see `block_exists`, and NaN if the pool lacks the row of the sequence.
    """
    if INDEXED:
        exists = block_exists(at, row, column, DX, DY, PADDED, ROWS, COLUMNS)
        return gl.where(at < -H, float("nan"), gl.load(pointers, mask=exists, other=0.0).to(gl.float32))
    else:
        return gl.load(pointers).to(gl.float32)


@gluon.jit
def store_block(
    pointers, block, at, row, column, DX: gl.constexpr, DY: gl.constexpr, PADDED: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Store a block (ROWS, COLUMNS) of the final state with index `at`.

    With INDEXED it is rounded to the dtype of the pool, and only what exists is stored, see `block_exists`.
    """
    if INDEXED:
        exists = block_exists(at, row, column, DX, DY, PADDED, ROWS, COLUMNS)
        gl.store(pointers, block.to(pointers.dtype.element_ty), mask=exists)
    else:
        gl.store(pointers, block)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Return the layout of a product with 64 rows and this many columns that one warpgroup computes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def to_left_operand(x, columns: gl.constexpr):
    """Return `x`, 16-bit in the layout of accumulators, as the left operand of a product with this many columns.

    The layouts are the same, so that nothing moves: a register holds two neighboring numbers in both.
    """
    return gl.convert_layout(x, gl.DotOperandLayout(0, accumulator_layout(columns), 2), assert_trivial=True)


@gluon.jit
def issue_mma(a, b):
    """Start `a @ b`: (rows, inner) @ (inner, columns), accumulated in float32."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zero = gl.zeros([rows, columns], gl.float32, accumulator_layout(columns))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def nearest_tf32(x):
    """Return float32 values x whose first bits are the nearest tf32; MMAs cut off the others."""
    return (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def split_in_two(x, dtype: gl.constexpr):
    """Return float32 values x as two numbers of a 16-bit dtype: x rounded, and the rounding error."""
    if dtype == gl.bfloat16:
        # Rounded in integers: two numbers are converted by one instruction, and only where the result is not used again
        high = ((x.to(gl.int32, bitcast=True) + 0x8000) & -0x10000).to(gl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(gl.float32)
    return high.to(dtype), (x - high).to(dtype)


@gluon.jit
def split_left_operand(x, columns: gl.constexpr, dtype: gl.constexpr):
    """Return float32 values x as left operands of two MMAs, with `split_in_two`."""
    high, low = split_in_two(x, dtype)
    return to_left_operand(high, columns), to_left_operand(low, columns)


@gluon.jit
def split_in_three(x, dtype: gl.constexpr):
    """Return three numbers of low precision whose sum is `x`.

    The first two alone are off by a relative 2^-17 in bfloat16.
    """
    high = x.to(dtype)
    rest = x - high.to(gl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(gl.float32)).to(dtype)


@gluon.jit
def store_partial_dots(x, y, to, part: gl.constexpr, L: gl.constexpr):
    """Store partial sums over the rows of `x * y` to shared memory: what one consumer adds to q . dq or k . dk, (B5).

    There are four for each step, each over the 16 rows that one warp holds, so that warps exchange nothing. The store
    warp adds them up.

    Args:
        x: Accumulators (64, L) in registers: a transposed gradient.
        y: A transposed tile (64, L) in shared memory, of what it is the gradient of.
        to: The vector in shared memory, (8 L): four sums of L elements for each consumer. It is (16 L) where each
            consumer leaves two sets of sums.
        part: Which four of the sums: 0 or 1, by consumer; 2 or 3 for the second set.
        L: Steps of a tile.
    """
    store_partial_sums(x.to(gl.float32) * y.load(x.type.layout).to(gl.float32), to, part, L)


@gluon.jit
def store_partial_sums(products, to, part: gl.constexpr, L: gl.constexpr):
    """Store partial sums over the rows of `products`, (64, L), like `store_partial_dots`."""
    sums = gl.sum(gl.reshape(products, [4, 16, L]), 1)
    to.slice(part * 4 * L, 4 * L, 0).store(gl.reshape(sums, [4 * L]))


@gluon.jit
def load_update_weights(w, L: gl.constexpr, layout: gl.constexpr):
    """Return the update weights of a tile in float32, (L): the sum of the high and the low part in `w`, (2 L)."""
    return w.slice(0, L, 0).load(layout).to(gl.float32) + w.slice(L, L, 0).load(layout).to(gl.float32)


@gluon.jit
def scale_by_gates(tile, w, L: gl.constexpr, layout: gl.constexpr):
    """Return `tile * w`, rounded once, as a left operand in `layout`.

    Args:
        tile: A transposed tile (d, L) in registers.
        w: The update weights in shared memory, (2 L): for each step a high part and a low part of low precision.
        L: Steps of a tile.
        layout: Layout of the left operand.
    """
    high = gl.expand_dims(w.slice(0, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)  # (1, L)
    low = gl.expand_dims(w.slice(L, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)  # (1, L)
    tile, high = gl.broadcast(tile, high)
    tile, low = gl.broadcast(tile, low)
    if tile.dtype == gl.bfloat16:
        # tile * low is so small that its rounding does not show: only the fma rounds.
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
    else:
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.f16x2 t, $1, $3; fma.rn.f16x2 $0, $1, $2, t; }"
    x = gl.inline_asm_elementwise(asm, "=r,r,r,r", [tile, high, low], dtype=tile.dtype, is_pure=True, pack=2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def load_gate_matrix(g, L: gl.constexpr, half: gl.constexpr, layout: gl.constexpr, PARTS: gl.constexpr = 2):
    """Return columns of the gate matrix D (docs/mathematics.md), (L, L / PARTS), not masked yet.

    Args:
        g: Gate vectors of the tile in shared memory, (NUM_GATE_VECTORS L).
        L: Steps of a tile.
        half: Which of the PARTS parts of the columns.
        layout: Layout of the result.
        PARTS: 2 where each consumer has half of the columns, 1 where it has all.
    """
    row = g.slice(ROW_EXPONENT * L, L, 0).load(gl.SliceLayout(1, layout))  # (L)
    # (L / PARTS)
    column = g.slice(COLUMN_EXPONENT * L + half * (L // PARTS), L // PARTS, 0).load(gl.SliceLayout(0, layout))
    return gl.exp2(gl.expand_dims(row, 1) + gl.expand_dims(column, 0))


@gluon.jit
def apply_causal_mask(S, D, i, j, half: gl.constexpr, REVERSE: gl.constexpr, STRICT: gl.constexpr = False):
    """Return `S * D` where output step i includes update step j, else 0: i >= j, or with REVERSE i <= j.

    In the layout of accumulators a thread has row indices {r, r + 8} and column indices {c, c + 1} + 8 n. The
    comparison is therefore one of a number of the thread, r - c, with constants. The plain comparison i >= j holds 16
    more registers.

    Args:
        S: Scores, (L, L), or one half of their columns, (L, 32).
        D: The gate matrix, of the same shape.
        i: Rows of S, (L).
        j: Columns of S, counted from the first one that S has.
        half: Which half of the columns S has; 0 where it has all.
        REVERSE: Whether the scan goes against time.
        STRICT: Whether the diagonal is masked, too.
    """
    of_thread = gl.expand_dims(i & -9, 1) - gl.expand_dims(j & 6, 0)
    constant = gl.expand_dims(j & -7, 0) - gl.expand_dims(i & 8, 1) + half * 32
    if STRICT:
        return gl.where(of_thread < constant if REVERSE else of_thread > constant, S * D, 0.0)
    elif REVERSE:
        return gl.where(of_thread <= constant, S * D, 0.0)
    else:
        return gl.where(of_thread >= constant, S * D, 0.0)
