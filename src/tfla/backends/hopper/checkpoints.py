"""States at marks in memory, as the walk for dq leaves them and the walk for dk reads them.

Both have 64 rows and some columns of a state in registers, laid out as a product of a warpgroup: a state is blocks of
16 x 16, each in the order in which a warp has it, so that a thread moves 16 bytes at a time and a warp whole lines.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def checkpoint_layout(columns):
    """Layout of 64 rows of a mark, (4, 16 columns), in which each thread has what it has of a product."""
    blocks = [[0, 256 << i] for i in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 8 << i] for i in range(5)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *blocks], lanes, [[1, 0], [2, 0]], [], [4, 16 * columns])


@gluon.jit
def checkpoint_pointers(checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr, COLUMNS: gl.constexpr):
    """Of 64 rows and COLUMNS columns of a mark."""
    layout: gl.constexpr = checkpoint_layout(COLUMNS)
    slab = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, 16 * COLUMNS, gl.SliceLayout(0, layout)), 0)
    return checkpoints + at.to(gl.int64) * (DX * DY) + (row * DY + column * 16) + (slab * (16 * DY) + i)


@gluon.jit
def store_checkpoint(C, checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr):
    """Stores a part of a state."""
    COLUMNS: gl.constexpr = C.shape[1]
    x = gl.reshape(C.to(checkpoints.dtype.element_ty), [4, 2, 8, COLUMNS // 16, 2, 4, 2])
    x = gl.reshape(gl.permute(x, (0, 3, 2, 5, 4, 1, 6)), [4, 16 * COLUMNS])
    x = gl.convert_layout(x, checkpoint_layout(COLUMNS), assert_trivial=True)
    gl.store(checkpoint_pointers(checkpoints, at, row, column, DX, DY, COLUMNS), x)


@gluon.jit
def load_checkpoint(
    checkpoints, at, row, column, DX: gl.constexpr, DY: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """What `store_checkpoint` has stored."""
    x = gl.load(checkpoint_pointers(checkpoints, at, row, column, DX, DY, COLUMNS))
    x = gl.permute(gl.reshape(x, [4, COLUMNS // 16, 8, 4, 2, 2, 2]), (0, 5, 2, 1, 4, 3, 6))
    return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def checkpoint_dots(C, checkpoints, checkpoint, row, column, DX: gl.constexpr, DY: gl.constexpr, layout: gl.constexpr):
    """Of each row of a part of a cotangent, with that of the state at a mark."""
    state = load_checkpoint(checkpoints, checkpoint, row, column, DX, DY, C.shape[1], layout)
    return gl.sum(C * state.to(gl.float32), 1)
