"""dk_w in memory: the part of dk that comes from writing, which one scan of the delta rule stores and the other reads.

`delta_dv_dk_kernel` has tiles of it with steps as rows of accumulators. Its shared memory has no room for them, so each
thread stores what it holds, and loads it where a later launch adds to it. Of each 16 numbers of a step those that a
thread holds are next to each other, the first and the ninth, the second and the tenth, and so on: a warp then moves
whole sectors. The 128 numbers of a step stay together, so that dk can lie in the same memory, and TMA can bring tiles
of it to `delta_dq_dk_kernel`, and for wider heads to `dq_dk_kernel`. These need them with steps as columns. The two
numbers of a thread are next to each other for them, too, and a warp loads them from all banks of shared memory at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tfla.backends.hopper import mma, scheduler
from tfla.backends.hopper.delta_tiles import ROWS


@gluon.constexpr_function
def layout_by_rows():
    """Return the layout in memory, (64, 64), of what threads hold of accumulators (64, 64) whose rows are steps."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(
        registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )


@gluon.constexpr_function
def layout_by_columns():
    """Return the layout in tiles, (64, 64), of what threads hold of accumulators (64, 64) whose columns are steps."""
    registers = [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [64, 64]
    )


@gluon.jit
def pointers(dk_w, t, column, work_tile, params, config):
    """Return pointers (L, 64) to dk_w from step `t` and `column` on, and which steps exist, (L, 1).

    Args:
        dk_w: (B, T, H, ROWS) in global memory.
        t: The first step of the tile in the work tile.
        column: The first of 64 columns.
        work_tile: The work tile.
        params: The numbers of the scheduler.
        config: Constants.
    """
    layout: gl.constexpr = layout_by_rows()
    step = gl.arange(0, config.L, gl.SliceLayout(1, layout))
    of_row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    H = scheduler.rematerialize(params.H)  # the offsets of all steps would be kept
    token = work_tile.b.to(gl.int64) * params.T + work_tile.start + t
    first = dk_w + (token * H + work_tile.h) * ROWS + column
    inside = gl.expand_dims(step < work_tile.steps - t, 1)
    return first + (gl.expand_dims(step * (H * ROWS), 1) + of_row), inside


@gluon.jit
def store(x, dk_w, t, column, work_tile, params, config):
    """Store accumulators `x`, (L, 64), as 64 columns of dk_w of the tile at step `t`."""
    L: gl.constexpr = config.L
    x = gl.permute(gl.reshape(x.to(dk_w.dtype.element_ty), [L, 4, 2, 8]), (0, 1, 3, 2))
    x = gl.convert_layout(gl.reshape(x, [L, 64]), layout_by_rows(), assert_trivial=True)
    to, inside = pointers(dk_w, t, column, work_tile, params, config)
    gl.store(to, x, mask=inside)


@gluon.jit
def load(dk_w, t, column, work_tile, params, config):
    """Return 64 columns of dk_w of the tile at step `t`, (L, 64), as `store` takes them; 0 after the last step."""
    L: gl.constexpr = config.L
    at, inside = pointers(dk_w, t, column, work_tile, params, config)
    x = gl.permute(gl.reshape(gl.load(at, inside, 0.0), [L, 4, 8, 2]), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(x, [L, 64]), mma.accumulator_layout(64), assert_trivial=True)


@gluon.jit
def load_transposed(tile):
    """Return a tile (L, 64) of dk_w in shared memory as transposed accumulators, (64, L), in its dtype."""
    L: gl.constexpr = tile.shape[0]
    x = gl.permute(gl.reshape(tile.load(layout_by_columns()), [L, 4, 8, 2]), (1, 3, 2, 0))
    return gl.convert_layout(gl.reshape(x, [64, L]), mma.accumulator_layout(L), assert_trivial=True)
