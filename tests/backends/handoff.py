"""The least hand-off between warps: one stores to shared memory and arrives at an mbarrier, others wait and load.

    compute-sanitizer --tool racecheck python tests/backends/handoff.py

Arriving releases and waiting acquires, so the loads see the stores, and the results say so; racecheck, which reports
hazards all the same, reports as much of every kernel whose warps have different work.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tfla.backends.hopper.pipeline import (
    PRODUCER_REGISTERS,
    allocate_full_empty,
    allocate_vectors,
    barrier,
    stage_and_phase,
)


@gluon.jit
def give(X, ring, full, empty, count, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """A warp."""
    i = gl.arange(0, SIZE, gl.BlockedLayout([2], [32], [1], [0]))
    for n in range(0, count):
        s, phase = stage_and_phase(n, STAGES)
        mbarrier.wait(empty.index(s), phase ^ 1)
        ring.index(s).store(gl.load(X + n * SIZE + i))
        barrier()
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def take(Y, ring, full, empty, count, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, SIZE, layout)
    for n in range(0, count):
        s, phase = stage_and_phase(n, STAGES)
        mbarrier.wait(full.index(s), phase)
        gl.store(Y + n * SIZE + i, ring.index(s).load(layout))
        barrier()
        mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def handoff(X, Y, count, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Copies X to Y."""
    ring = allocate_vectors(gl.float32, STAGES, SIZE)
    full, empty = allocate_full_empty(STAGES, 1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [(take, (Y, ring, full, empty, count, SIZE, STAGES)), (give, (X, ring, full, empty, count, SIZE, STAGES))],
        [1],
        [PRODUCER_REGISTERS],
    )


if __name__ == "__main__":
    x = torch.randn(100 * 128, device="cuda")
    y = torch.empty_like(x)
    handoff[(1,)](x, y, 100, SIZE=128, STAGES=3, num_warps=4)
    assert torch.equal(x, y)
