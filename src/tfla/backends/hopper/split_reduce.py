"""The split reduction: two programs share the columns of a state and add up their outputs in global memory.

An output is a sum over the columns of the state. Where a program holds only some of the columns, both programs of a
pair add their tile of the output to zeros, by TMA (`async_add`). A sum of two addends does not depend on their order,
so results repeat bit for bit. A zero-fill warp of the first program writes the zeros one tile ahead of the sums, so
that zeros, addends and sum meet in the L2 cache. The zero-fill warp of the second program waits for these zeros,
through a counter in global memory. Programs start in the order of their numbers and the first one waits for no other
program, so it runs, or has run, when the second one waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tfla.backends.hopper.pipeline import async_store, barrier, producer_tail, stage_and_phase
from tfla.backends.hopper.scheduler import get_work_tile, tile_coordinates

PAIR = gl.constexpr(2)  # programs that add up their outputs


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    """Start a TMA copy that adds `src` to the tile at `coord`: `tma.async_atomic_add`, which Triton has from 3.9 on."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add


@gluon.jit
def wait_until_written():
    """Wait until the TMA stores of this thread are written to global memory.

    `tma.store_wait` returns earlier, when they have been read from shared memory.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [gl.program_id(1)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def run_zero_fill_warp(Out, zeros, zero_counts, full, empty, params, config):
    """Write the zeros of the output tiles, or in the second program of a pair wait for them.

    The warp is a producer of the ring: it arrives at full for tile n when the zeros of that tile are in memory.

    Args:
        Out: TMA descriptor of the output, (B, H num_partials, T, dqk), in tiles (L, 64).
        zeros: Shared memory for one tile (L, 64).
        zero_counts: Counters in global memory, one for each pair of programs, int32: tiles that have zeros.
        full: Full barriers of the ring, (STAGES).
        empty: Empty barriers of the ring, (STAGES).
        params: The numbers of the scheduler.
        config: Constants of the kernel.
    """
    L: gl.constexpr = config.L
    num_partials: gl.constexpr = config.NUM_SPLITS // PAIR  # sums that pairs of programs leave
    split = gl.program_id(0) % config.NUM_SPLITS
    row = gl.program_id(0) // config.NUM_SPLITS * 128
    count = zero_counts + (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) // PAIR
    tile = zeros.index(0)
    tile.reshape([L, 64]).store(gl.zeros([L, 64], zeros.dtype, gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])))
    fence_async_shared()
    barrier()
    zeroed = gl.program_id(1) * 0  # tiles that are known to have zeros
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = get_work_tile(index, params, L, config.IS_SEGMENTED)
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
