"""The store warp, which brings small results of each tile from shared memory to global memory.

Consumers leave partial sums of a tile in its stage: the denominators d, the products do . h, or the products q . dq and
k . dk. The store warp adds them up and stores the sum. It is a producer of the ring: it reads what tile n - STAGES left
in a stage after the consumers have released the stage (empty), and before it arrives at full for tile n, which lets the
consumers overwrite it. After the last tile it waits for the stages that are left.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tfla.backends.gpu.gate_gradients import COLUMN_SUM, OTHER_TILES, PAIR_SUMS, ROW_SUM
from tfla.backends.gpu.gate_kernels import DELTA_P, VECTORS
from tfla.backends.hopper.pipeline import barrier, stage_and_phase
from tfla.backends.hopper.scheduler import get_work_tile

# Values of RESULT: what the store warp stores.
NO_RESULT = gl.constexpr(0)
DENOMINATORS = gl.constexpr(1)  # d of (T3)
DP_OFFSETS = gl.constexpr(2)  # delta = -u (do . h), (T7): the sum do . h times -u, which DELTA_P holds before
GATE_SUMS = gl.constexpr(3)  # q . dq or k . dk of (B5)
SUMS_OF_READERS = gl.constexpr(4)  # of one reader of the delta rule, or of both: what steps read, and pairs of a tile
DOTS_AND_WRITES = gl.constexpr(5)  # do . E, Z . E, which is dbeta, and with gates what later tiles read of each step
DV_DOTS = gl.constexpr(6)  # dv . E with gates by channel

# The parts of SUMS_OF_READERS, (L) each: what steps read, by warps of consumers, the rows of W by consumers, and its
# columns by warps, half of them each.
READ_PARTS = gl.constexpr(8)
ROW_PARTS = gl.constexpr(2)
# The parts of DOTS_AND_WRITES, (L) each: Z . E by warps of consumers, what is read of steps by consumers, and do . E.
DOT_PARTS = gl.constexpr(8)
WRITE_PARTS = gl.constexpr(2)


class StoreWarpConfig(NamedTuple):
    """The constants of the store warp of a kernel."""

    L: Any  # steps of a tile
    STAGES: Any
    REVERSE: Any  # whether the scan goes against time
    IS_SEGMENTED: Any
    RESULT: Any  # NO_RESULT or one of the others above
    GATED: Any = True  # whether DOTS_AND_WRITES has writes
    BLOCK: Any = 0  # the block of columns of dhv whose sums DOTS_AND_WRITES has


@gluon.jit
def store_pairs(W, sums, half: gl.constexpr, L: gl.constexpr):
    """Store the sums of the rows of half of W, (L, L / 2), and, for each warp, of its columns, to shared memory."""
    sums.slice((READ_PARTS + half) * L, L, 0).store(gl.sum(W, 1))
    of_warps = gl.reshape(gl.sum(gl.reshape(W, [4, 16, L // 2]), 1), [2 * L])
    sums.slice((READ_PARTS + ROW_PARTS + 2 * half) * L, 2 * L, 0).store(of_warps)


@gluon.constexpr_function
def full_arrivals(result):
    """Return how many arrivals complete a full barrier: load warp, gate warp, and the store warp if it is used."""
    return 2 if result == NO_RESULT else 3


@gluon.jit
def run_store_warp(results, out, gate_vectors, full, empty, params, tiles_per_head, config):
    """Store the results of all tiles of this program.

    Args:
        results: What the consumers leave, (STAGES, parts L), float32 in shared memory; the parts are to be added up.
        out: Output in global memory: d, (B, T, H), the sums of the gate gradients, (programs, H, tiles, L), or dv . E,
            (programs of a head, B, T, H); with DOTS_AND_WRITES a pair, do . E and Z . E, (blocks, B, T, H).
        gate_vectors: Gate vectors in global memory, (H, tiles, VECTORS, L), whose DELTA_P DP_OFFSETS updates in place;
            with SUMS_OF_READERS and DOTS_AND_WRITES the output for sums of pairs, (programs, H, tiles, PAIR_SUMS, L).
        full: Full barriers of the ring, (STAGES).
        empty: Empty barriers of the ring, (STAGES).
        params: The numbers of the scheduler.
        tiles_per_head: Tiles of one head over all batch rows.
        config: Constants.
    """
    if config.RESULT != NO_RESULT:
        L: gl.constexpr = config.L
        r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
        n = 0
        pending = gl.program_id(1)  # work tile of the next tile to store
        pending_tile = 0  # index of that tile in its work tile
        for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
            _b, _h, _start, steps, _first_tile = get_work_tile(index, params, L, config.IS_SEGMENTED)
            for _ in range(0, (steps + L - 1) // L):
                s, phase = stage_and_phase(n, config.STAGES)
                mbarrier.wait(empty.index(s), phase ^ 1)
                if n >= config.STAGES:
                    pending, pending_tile = store_tile_result(
                        pending, pending_tile, results.index(s), out, gate_vectors, params, tiles_per_head, r, config
                    )
                    barrier()
                mbarrier.arrive(full.index(s), count=1)
                n += 1
        # The last STAGES tiles, or all where there are fewer.
        for i in range(0, config.STAGES):
            s, phase = stage_and_phase(n + i, config.STAGES)
            if n + i >= config.STAGES:
                mbarrier.wait(empty.index(s), phase ^ 1)
                pending, pending_tile = store_tile_result(
                    pending, pending_tile, results.index(s), out, gate_vectors, params, tiles_per_head, r, config
                )
            if i == 0:  # one more stage without data, see `producer_tail`
                barrier()
                mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def add_parts(result, first: gl.constexpr, count: gl.constexpr, r):
    """Return the sum of `count` parts of `result`, (parts L), from part `first` on, (L)."""
    L: gl.constexpr = r.shape[0]
    x = result.slice(first * L, L, 0).load(r.type.layout)
    for part in gl.static_range(1, count):
        x += result.slice((first + part) * L, L, 0).load(r.type.layout)
    return x


@gluon.jit
def store_tile_result(index, i, result, out, gate_vectors, params, tiles_per_head, r, config):
    """Store the result of one tile and return work tile and tile that come next.

    Args:
        index: Index of the work tile.
        i: Index of the tile in its work tile, in the direction of the scan.
        result: Its partial sums, (parts L), float32 in shared memory.
        out: Output in global memory.
        gate_vectors: Gate vectors in global memory, or the second output.
        params: The numbers of the scheduler.
        tiles_per_head: Tiles of one head over all batch rows.
        r: Indices of the steps, (L).
        config: Constants.
    """
    T, H = params.T, params.H
    L: gl.constexpr = r.shape[0]
    b, h, start, steps, first_tile = get_work_tile(index, params, L, config.IS_SEGMENTED)
    tiles = (steps + L - 1) // L
    parts: gl.constexpr = result.shape[0] // L
    if config.RESULT == SUMS_OF_READERS:
        x = add_parts(result, 0, READ_PARTS, r)  # (L)
    else:
        x = add_parts(result, 0, DOT_PARTS if config.RESULT == DOTS_AND_WRITES else parts, r)
    tile = tiles - 1 - i if config.REVERSE else i
    if config.RESULT == DENOMINATORS:
        t = tile * L + r
        first = r * 0 + gl.program_id(0) == 0  # each program of a head has all of d: one of them stores it
        gl.store(out + (b.to(gl.int64) * T + start + t) * H + h, x, mask=(t < steps) & first)
    elif config.RESULT == DV_DOTS:
        t = tile * L + r
        tokens = T if params.schedule is not None else params.num_work_tiles // H * T  # of all batch rows
        at = (gl.program_id(0) * tokens + b.to(gl.int64) * T + start + t) * H + h
        gl.store(out + at, x, mask=t < steps)
    elif config.RESULT == DOTS_AND_WRITES:
        t = tile * L + r
        tokens = T if params.schedule is not None else params.num_work_tiles // H * T  # of all batch rows
        at = (b.to(gl.int64) * T + config.BLOCK * tokens + start + t) * H + h
        do_e, dbeta = out
        gl.store(dbeta + at, x, mask=t < steps)
        gl.store(do_e + at, add_parts(result, DOT_PARTS + WRITE_PARTS, 1, r), mask=t < steps)
        if config.GATED:
            row = (config.BLOCK * H + h).to(gl.int64) * tiles_per_head + first_tile + tile
            of_tile = gate_vectors + row * (PAIR_SUMS * L)
            gl.store(of_tile + OTHER_TILES * L + r, add_parts(result, DOT_PARTS, WRITE_PARTS, r))
    else:
        row = (gl.program_id(0) * H + h).to(gl.int64) * tiles_per_head + first_tile + tile
        if config.RESULT == SUMS_OF_READERS:
            of_tile = gate_vectors + row * (PAIR_SUMS * L)
            gl.store(out + row * L + r, x)
            gl.store(of_tile + ROW_SUM * L + r, add_parts(result, READ_PARTS, ROW_PARTS, r))
            j = gl.arange(0, L // 2, gl.BlockedLayout([L // 64], [32], [1], [0]))
            for half in gl.static_range(2):
                columns = result.slice((READ_PARTS + ROW_PARTS + 2 * half) * L, 2 * L, 0)
                gl.store(of_tile + COLUMN_SUM * L + half * (L // 2) + j, add_parts(columns, 0, 4, j))
        elif config.RESULT == DP_OFFSETS:
            at = gate_vectors + (row * VECTORS + DELTA_P) * L + r
            gl.store(at, gl.load(at) * x)
        else:
            gl.store(out + row * L + r, x)
    last = i + 1 == tiles
    return gl.where(last, index + gl.num_programs(1), index), gl.where(last, 0, i + 1)
