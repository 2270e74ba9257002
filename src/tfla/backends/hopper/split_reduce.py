"""Two programs that share the columns of a state, each with half, add up their outputs in memory.

An output is linear in the columns: both add their tile of it to zeros, by the copy engine, and as there are two of them
the sum is the same in either order, bit for bit. The clearer of the first writes the zeros, tile by tile just before
they are added to, so that a tile is in the L2 cache from its zeros to its sum. That of the second waits until it has:
programs start in the order of their numbers, so the first is there by then, and it waits for nobody.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tfla.backends.hopper.pipeline import async_store, barrier, producer_tail, stage_and_phase
from tfla.backends.hopper.scheduler import get_work_tile, tile_coordinates

PAIR = gl.constexpr(2)


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    """`tma.async_atomic_add` of Triton 3.9; those before have the operation, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add


@gluon.jit
def wait_until_written():
    """Until what this thread has had the copy engine store is in memory: `tma.store_wait` is done when it is read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def run_zero_fill_warp(Out, zeros, zero_counts, full, empty, params, config):
    """The clearer: one warp, of both programs; `zero_counts` counts the tiles that the first has cleared."""
    L: gl.constexpr = config.L
    num_partials: gl.constexpr = config.NUM_SPLITS // PAIR
    split = gl.program_id(1) % config.NUM_SPLITS
    row = gl.program_id(1) // config.NUM_SPLITS * 128
    count = zero_counts + (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)) // PAIR
    tile = zeros.index(0)
    tile.reshape([L, 64]).store(gl.zeros([L, 64], zeros.dtype, gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])))
    fence_async_shared()
    barrier()
    zeroed = gl.program_id(0) * 0
    n = 0
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            if split % PAIR == 0:
                t = start + (tiles - 1 - i if config.REVERSE else i) * L
                end = start + steps
                column = h * num_partials + split // PAIR
                async_store(Out, tile_coordinates(b, column, t, row, end, params), tile)
                async_store(Out, tile_coordinates(b, column, t, row + 64, end, params), tile)
                wait_until_written()
                barrier()
                gl.atomic_xchg(count, n + 1, sem="release", scope="gpu")
            else:
                while zeroed <= n:
                    zeroed = gl.atomic_add(count, 0, sem="acquire", scope="gpu")
            s, phase = stage_and_phase(n, config.STAGES)
            mbarrier.wait(empty.index(s), phase ^ 1)
            mbarrier.arrive(full.index(s), count=1)
            n += 1
    producer_tail(n, full, empty, config.STAGES)
