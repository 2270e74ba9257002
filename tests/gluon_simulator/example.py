"""A small kernel that squares tiles, from which its argument WITHOUT leaves out one operation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.mma import accumulator_layout
from tfla.backends.hopper.pipeline import (
    allocate_full_empty,
    allocate_operands,
    allocate_tiles,
    async_load,
    async_store,
    barrier,
    stage_and_phase,
)


@gluon.jit
def load(X, x, full, empty, count, SIZE: gl.constexpr, STAGES: gl.constexpr, WITHOUT: gl.constexpr):
    for n in range(0, count):
        s, phase = stage_and_phase(n, STAGES)
        if WITHOUT != "wait for a free stage":
            mbarrier.wait(empty.index(s), phase ^ 1)
        if WITHOUT != "announcement":
            mbarrier.expect(full.index(s), X.block_type.nbytes)
        async_load(X, [n * SIZE, 0], full.index(s), x.index(s))


@gluon.jit
def square(Out, x, out, full, empty, count, SIZE: gl.constexpr, STAGES: gl.constexpr, WITHOUT: gl.constexpr):
    for n in range(0, count):
        s, phase = stage_and_phase(n, STAGES)
        if WITHOUT != "wait for a full stage":
            mbarrier.wait(full.index(s), phase)
        zero = gl.zeros([SIZE, SIZE], gl.float32, accumulator_layout(SIZE))
        y = warpgroup_mma(x.index(s), x.index(s), zero, use_acc=False, is_async=True)
        if WITHOUT != "wait for the product":
            y = warpgroup_mma_wait(0, deps=[y])
        if WITHOUT != "barrier":
            barrier()
        if WITHOUT != "arrival":
            mbarrier.arrive(empty.index(s), count=1)
        if WITHOUT != "wait for the copy before":
            tma.store_wait(0)
        out.index(0).store(y.to(x.dtype))
        if WITHOUT != "fence":
            fence_async_shared()
        async_store(Out, [n * SIZE, 0], out.index(0))
    if WITHOUT != "wait for the last copy":
        tma.store_wait(0)


@gluon.jit
def squares(X, Out, last, count, SIZE: gl.constexpr, STAGES: gl.constexpr, WITHOUT: gl.constexpr):
    """Store the squares of `count` tiles (SIZE, SIZE) of X to Out, and `count` to the 32 elements of `last`."""
    x = allocate_tiles(X, STAGES)
    out = allocate_operands(X.dtype, 1, SIZE, SIZE)
    full, empty = allocate_full_empty(STAGES, 1, 1)
    if WITHOUT != "fence of barriers":
        fence_async_shared()
    gl.warp_specialize(
        [
            (square, (Out, x, out, full, empty, count, SIZE, STAGES, WITHOUT)),
            (load, (X, x, full, empty, count, SIZE, STAGES, WITHOUT)),
        ],
        [1],
        [24],
    )
    i = gl.arange(0, 64, gl.BlockedLayout([2], [32], [4], [0]))
    if WITHOUT != "mask":
        gl.store(last + i, i * 0 + count, mask=i < 32)
    else:
        gl.store(last + i, i * 0 + count)
