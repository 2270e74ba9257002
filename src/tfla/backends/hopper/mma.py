"""Matrix products of the Hopper kernels and the weighting of their operands by gates."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tfla.backends.hopper.pipeline import COLUMN_EXPONENT, ROW_EXPONENT


@gluon.jit
def state_pointers(
    state, at, row, column, DX: gl.constexpr, DY: gl.constexpr, TRANSPOSED: gl.constexpr, layout: gl.constexpr,
    ROWS: gl.constexpr = 64, COLUMNS: gl.constexpr = 128,
):  # fmt: skip
    """Of some rows and columns of the at-th state (DX, DY), or in memory (DY, DX)."""
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    first = state + at.to(gl.int64) * (DX * DY)
    if TRANSPOSED:
        return first + (column + c) * DX + (row + r)
    else:
        # Elements of a thread are constants apart only before row and column come to them: addresses in no registers.
        return first + (row * DY + column) + (r * DY + c)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Layout of a product of so many columns that one warpgroup computes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def to_left_operand(x, columns: gl.constexpr):
    """x, in registers, as the left operand of such a product."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, accumulator_layout(columns), 2), assert_trivial=True)


@gluon.jit
def issue_mma(a, b):
    """Starts a b."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zero = gl.zeros([rows, columns], gl.float32, accumulator_layout(columns))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def split_in_three(x, dtype: gl.constexpr):
    """x as a sum of three of low precision, whose first two are off by 2^-17 of it in bfloat16."""
    high = x.to(dtype)
    rest = x - high.to(gl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(gl.float32)).to(dtype)


@gluon.jit
def store_partial_dots(x, y, to, part: gl.constexpr, L: gl.constexpr):
    """Sums over 64 rows of x (64, L), in registers, times y, in shared memory, as four parts: sums over 16 rows each,
    which are those of a warp, without an exchange between warps."""
    products = x.to(gl.float32) * y.load(x.type.layout).to(gl.float32)
    sums = gl.sum(gl.reshape(products, [4, 16, L]), 1)
    to.slice(part * 4 * L, 4 * L, 0).store(gl.reshape(sums, [4 * L]))


@gluon.jit
def load_update_weights(w, L: gl.constexpr, layout: gl.constexpr):
    """Of the updates of a tile, in float32."""
    return w.slice(0, L, 0).load(layout).to(gl.float32) + w.slice(L, L, 0).load(layout).to(gl.float32)


@gluon.jit
def scale_by_gates(tile, w, L: gl.constexpr, layout: gl.constexpr):
    """A tile in registers, (d, L), times the weights of its steps, rounded once: the left operand of an MMA."""
    high = gl.expand_dims(w.slice(0, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)
    low = gl.expand_dims(w.slice(L, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)
    tile, high = gl.broadcast(tile, high)
    tile, low = gl.broadcast(tile, low)
    if tile.dtype == gl.bfloat16:
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
    else:
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.f16x2 t, $1, $3; fma.rn.f16x2 $0, $1, $2, t; }"
    x = gl.inline_asm_elementwise(asm, "=r,r,r,r", [tile, high, low], dtype=tile.dtype, is_pure=True, pack=2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def load_gate_matrix(g, L: gl.constexpr, half: gl.constexpr, layout: gl.constexpr, PARTS: gl.constexpr = 2):
    """exp2(READ_i + WRITE_j) for one half of the updates j, or with one part for all, unmasked."""
    read = g.slice(ROW_EXPONENT * L, L, 0).load(gl.SliceLayout(1, layout))
    write = g.slice(COLUMN_EXPONENT * L + half * (L // PARTS), L // PARTS, 0).load(gl.SliceLayout(0, layout))
    return gl.exp2(gl.expand_dims(read, 1) + gl.expand_dims(write, 0))


@gluon.jit
def apply_causal_mask(S, D, i, j, half: gl.constexpr, REVERSE: gl.constexpr):
    """S * D where a step sees the update: i >= j, walking back i <= j.

    Each thread has i and j in a pattern (i: its own + 8, j: its own + 1 + 8 n), so that one difference of the thread
    against constants says it for all: plain i >= j holds sixteen registers more.
    """
    of_thread = gl.expand_dims(i & -9, 1) - gl.expand_dims(j & 6, 0)
    constant = gl.expand_dims(j & -7, 0) - gl.expand_dims(i & 8, 1) + half * 32
    if REVERSE:
        return gl.where(of_thread <= constant, S * D, 0.0)
    else:
        return gl.where(of_thread >= constant, S * D, 0.0)
