"""The carrier: one warp that brings to memory what consumers leave of a tile in its stage: they have no time for that.

It does so once the stage is free, and the stage is full again only when it has; of the last tiles at the end.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tfla.backends.hopper.pipeline import barrier, producer_tail, stage_and_phase
from tfla.backends.hopper.scheduler import get_work_tile
from tfla.backends.triton.gates import DELTA_P, VECTORS

NO_RESULT = gl.constexpr(0)
DENOMINATORS = gl.constexpr(1)
DP_OFFSETS = gl.constexpr(2)  # of parts of dh . h, times what is in its place, -u
GATE_SUMS = gl.constexpr(3)  # of parts of q . dq or k . dk


class StoreWarpConfig(NamedTuple):
    """What the carrier of a walk is to do."""

    L: Any
    STAGES: Any
    REVERSE: Any
    IS_SEGMENTED: Any
    RESULT: Any


@gluon.constexpr_function
def full_arrivals(results):
    """That fill a stage: those of the loader, the gater and the carrier, where it has anything to do."""
    return 2 if results == NO_RESULT else 3


@gluon.jit
def run_store_warp(results, out, gate_vectors, full, empty, params, tiles_per_head, config):
    """carried: what consumers leave, in STAGES stages, parts of L; to: where it goes, or with OF_DELTA to vectors."""
    if config.RESULT != NO_RESULT:
        L: gl.constexpr = config.L
        r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
        n = 0
        pending = gl.program_id(0)  # the piece of the tile that is next, and which it is there
        pending_tile = 0
        for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
            _b, _h, _start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
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
        producer_tail(n, full, empty, config.STAGES)
        for i in range(0, config.STAGES):
            if n + i >= config.STAGES:
                s, phase = stage_and_phase(n + i, config.STAGES)
                mbarrier.wait(empty.index(s), phase ^ 1)
                pending, pending_tile = store_tile_result(
                    pending, pending_tile, results.index(s), out, gate_vectors, params, tiles_per_head, r, config
                )


@gluon.jit
def store_tile_result(index, i, result, out, gate_vectors, params, tiles_per_head, r, config):
    """Of the i-th tile walked of a piece; returns piece and tile that come next."""
    T, H = params.T, params.H
    L: gl.constexpr = r.shape[0]
    b, h, start, steps, tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
    tiles = (steps + L - 1) // L
    x = result.slice(0, L, 0).load(r.type.layout)
    for part in gl.static_range(1, result.shape[0] // L):
        x += result.slice(part * L, L, 0).load(r.type.layout)
    tile = tiles - 1 - i if config.REVERSE else i
    if config.RESULT == DENOMINATORS:
        t = tile * L + r
        first = r * 0 + gl.program_id(1) == 0  # of those that share a head, each of which has all of it
        gl.store(out + (b.to(gl.int64) * T + start + t) * H + h, x, mask=(t < steps) & first)
    else:
        row = (gl.program_id(1) * H + h).to(gl.int64) * tiles_per_head + tile0 + tile
        if config.RESULT == DP_OFFSETS:
            at = gate_vectors + (row * VECTORS + DELTA_P) * L + r
            gl.store(at, gl.load(at) * x)
        else:
            gl.store(out + row * L + r, x)
    last = i + 1 == tiles
    return gl.where(last, index + gl.num_programs(0), index), gl.where(last, 0, i + 1)
