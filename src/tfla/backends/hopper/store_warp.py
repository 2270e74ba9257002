"""The carrier: one warp that brings to memory what consumers leave of a tile in its stage: they have no time for that.

It does so once the stage is free, and the stage is full again only when it has; of the last tiles at the end.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tfla.backends.hopper.pipeline import barrier, last_stage, place
from tfla.backends.hopper.scheduler import piece
from tfla.backends.triton.gates import DELTA_P, VECTORS

NOTHING = gl.constexpr(0)
OF_D = gl.constexpr(1)
OF_DELTA = gl.constexpr(2)  # of parts of dh . h, times what is in its place, -u
OF_SUMS = gl.constexpr(3)  # of parts of q . dq or k . dk


class Carrier(NamedTuple):
    """What the carrier of a walk is to do."""

    L: Any
    STAGES: Any
    BACK: Any
    SEGMENTED: Any
    CARRIED: Any


@gluon.constexpr_function
def arrivals(carried):
    """That fill a stage: those of the loader, the gater and the carrier, where it has anything to do."""
    return 2 if carried == NOTHING else 3


@gluon.jit
def carry(carried, to, vectors, full, free, work, tiles_of_head, carrier):
    """carried: what consumers leave, in STAGES stages, parts of L; to: where it goes, or with OF_DELTA to vectors."""
    if carrier.CARRIED != NOTHING:
        L: gl.constexpr = carrier.L
        r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
        n = 0
        saved = gl.program_id(0)  # the piece of the tile that is next, and which it is there
        saved_tile = 0
        for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
            _b, _h, _start, steps, _tile0 = piece(index, work, L, carrier.SEGMENTED)
            for _ in range(0, (steps + L - 1) // L):
                s, phase = place(n, carrier.STAGES)
                mbarrier.wait(free.index(s), phase ^ 1)
                if n >= carrier.STAGES:
                    saved, saved_tile = carry_out(
                        saved, saved_tile, carried.index(s), to, vectors, work, tiles_of_head, r, carrier
                    )
                    barrier()
                mbarrier.arrive(full.index(s), count=1)
                n += 1
        last_stage(n, full, free, carrier.STAGES)
        for i in range(0, carrier.STAGES):
            if n + i >= carrier.STAGES:
                s, phase = place(n + i, carrier.STAGES)
                mbarrier.wait(free.index(s), phase ^ 1)
                saved, saved_tile = carry_out(
                    saved, saved_tile, carried.index(s), to, vectors, work, tiles_of_head, r, carrier
                )


@gluon.jit
def carry_out(index, i, carried, to, vectors, work, tiles_of_head, r, carrier):
    """Of the i-th tile walked of a piece; returns piece and tile that come next."""
    T, H = work.T, work.H
    L: gl.constexpr = r.shape[0]
    b, h, start, steps, tile0 = piece(index, work, L, carrier.SEGMENTED)
    tiles = (steps + L - 1) // L
    x = carried.slice(0, L, 0).load(r.type.layout)
    for part in gl.static_range(1, carried.shape[0] // L):
        x += carried.slice(part * L, L, 0).load(r.type.layout)
    tile = tiles - 1 - i if carrier.BACK else i
    if carrier.CARRIED == OF_D:
        t = tile * L + r
        first = r * 0 + gl.program_id(1) == 0  # of those that share a head, each of which has all of it
        gl.store(to + (b.to(gl.int64) * T + start + t) * H + h, x, mask=(t < steps) & first)
    else:
        row = (gl.program_id(1) * H + h).to(gl.int64) * tiles_of_head + tile0 + tile
        if carrier.CARRIED == OF_DELTA:
            at = vectors + (row * VECTORS + DELTA_P) * L + r
            gl.store(at, gl.load(at) * x)
        else:
            gl.store(to + row * L + r, x)
    last = i + 1 == tiles
    return gl.where(last, index + gl.num_programs(0), index), gl.where(last, 0, i + 1)
