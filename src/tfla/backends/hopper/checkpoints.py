"""State checkpoints in memory, which the scan for dq stores and the scan for dk reads.

Both scans hold 64 rows of a state in each consumer, in the layout of accumulators. A checkpoint is stored in blocks of
16 x 16, each in the order in which the threads of a warp hold it. A thread then moves 16 bytes at a time and a warp
whole cache lines, and the scan for dk reads exactly the elements whose cotangents it holds. The load warps of
`dq_dk.py` and `delta_dq_dk.py` bring them to the L2 cache while consumers compute the tile before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BYTES = gl.constexpr(2)  # of an element of a checkpoint


@gluon.constexpr_function
def checkpoint_layout(columns):
    """Return the layout of 64 rows of a checkpoint in memory order, (4, 16 columns).

    Each thread holds the elements that it holds of accumulators (64, columns).
    """
    blocks = [[0, 256 << i] for i in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 8 << i] for i in range(5)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *blocks], lanes, [[1, 0], [2, 0]], [], [4, 16 * columns])


@gluon.jit
def checkpoint_pointers(checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr, COLUMNS: gl.constexpr):
    """Return pointers (4, 16 COLUMNS) to 64 rows and COLUMNS columns of checkpoint `at`, from `row` and `column` on."""
    layout: gl.constexpr = checkpoint_layout(COLUMNS)
    slab = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, 16 * COLUMNS, gl.SliceLayout(0, layout)), 0)
    return checkpoints + at.to(gl.int64) * (DX * DY) + (row * DY + column * 16) + (slab * (16 * DY) + i)


@gluon.jit
def store_checkpoint(C, checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr):
    """Store accumulators `C`, (64, columns), to checkpoint `at` from `row` and `column` on."""
    COLUMNS: gl.constexpr = C.shape[1]
    x = gl.reshape(C.to(checkpoints.dtype.element_ty), [4, 2, 8, COLUMNS // 16, 2, 4, 2])
    x = gl.reshape(gl.permute(x, (0, 3, 2, 5, 4, 1, 6)), [4, 16 * COLUMNS])
    x = gl.convert_layout(x, checkpoint_layout(COLUMNS), assert_trivial=True)
    gl.store(checkpoint_pointers(checkpoints, at, row, column, DX, DY, COLUMNS), x)


@gluon.jit
def load_checkpoint(
    checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """Return what `store_checkpoint` has stored, (64, COLUMNS), in `layout`."""
    x = gl.load(checkpoint_pointers(checkpoints, at, row, column, DX, DY, COLUMNS))  # (4, 16 COLUMNS)
    x = gl.permute(gl.reshape(x, [4, COLUMNS // 16, 8, 4, 2, 2, 2]), (0, 5, 2, 1, 4, 3, 6))
    return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def checkpoint_dots(C, checkpoints, checkpoint, row, column, DX: gl.constexpr, DY: gl.constexpr, layout: gl.constexpr):
    """Return the inner products of the rows of the cotangent `C`, (64, columns), with those of a checkpoint, (64)."""
    state = load_checkpoint(checkpoints, checkpoint, row, column, DX, DY, C.shape[1], layout)
    return gl.sum(C * state.to(gl.float32), 1)


@gluon.jit
def prefetch(pointer, size):
    """Let one thread of the warp start to bring `size` bytes at `pointer` to L2; both are multiples of 16."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; elect.sync _|p, -1; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2; }",
        "=r,l,r", [pointer, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_checkpoint(checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr, COLUMNS: gl.constexpr):
    """Start to bring to L2 what both consumers read of checkpoint `at`: 128 rows and COLUMNS columns.

    A partition of one warp calls this.
    """
    first = checkpoints + at.to(gl.int64) * (DX * DY) + (row * DY + column * 16)
    PARTS: gl.constexpr = 1 if COLUMNS == DY else 8
    for part in range(PARTS):
        prefetch(first + part * (16 * DY), 128 // PARTS * COLUMNS * BYTES)
