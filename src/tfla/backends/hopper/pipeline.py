"""The pipeline of the Hopper kernels: barriers, stages of a ring, and the copies that fill and empty them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Named differently before Triton 3.7 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Registers of a thread of a consumer, and of the warps that fill shared memory. A program of three warpgroups starts
# with 168 for each thread, all that 65,536 give; what the last one, with few warps at work, leaves goes to consumers:
# 3 * 168 = 2 * 232 + 40.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
# Of consumers that are short of them: with fewer ptxas serializes their MMAs. 3 * 168 = 2 * 240 + 24.
CONSUMER_REGISTERS_MAX = gl.constexpr(240)
PRODUCER_REGISTERS_MIN = gl.constexpr(24)

# Rows of a stage's gate vectors.
ROW_EXPONENT = gl.constexpr(0)  # exponents of the gate matrix: P[read, update] is weighted by exp2(READ + WRITE)
COLUMN_EXPONENT = gl.constexpr(1)
STATE_WEIGHT = gl.constexpr(2)  # weight of the state in an output
TILE_DECAY = gl.constexpr(3)  # decay of the state over the tile
NUM_GATE_VECTORS = gl.constexpr(4)


class PipelineState(NamedTuple):
    """Of a tile."""

    index: Any  # its stage
    phase: Any  # of the barriers of the stage
    count: Any  # tiles before it


@gluon.jit
def allocate_tiles(tensor, stages: gl.constexpr):
    """Shared memory for so many tiles of a tensor."""
    return gl.allocate_shared_memory(tensor.dtype, [stages] + tensor.block_type.shape, tensor.layout)  # noqa: RUF005


@gluon.jit
def allocate_vectors(dtype: gl.constexpr, count: gl.constexpr, size: gl.constexpr):
    """In shared memory, of the CUDA cores."""
    return gl.allocate_shared_memory(dtype, [count, size], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_operands(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """In shared memory, as MMAs take them."""
    return gl.allocate_shared_memory(dtype, [count, rows, columns], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def allocate_barrier(arrivals: gl.constexpr):
    """One that waits for so many."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def allocate_full_empty(STAGES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """`full` and `empty` of a ring, and how many arrivals each waits for."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=FULL)
        mbarrier.init(empty.index(s), count=EMPTY)
    return full, empty


@gluon.jit
def stage_and_phase(n, STAGES: gl.constexpr):
    """Stage and phase of the n-th tile."""
    return n % STAGES, n // STAGES & 1


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """As `stage_and_phase`, of the tile after that in stage s, without a division."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def producer_tail(n, full, empty, STAGES: gl.constexpr, arrivals: gl.constexpr = 1):
    """Hands over the stage without data after n tiles."""
    s, phase = stage_and_phase(n, STAGES)
    mbarrier.wait(empty.index(s), phase ^ 1)
    mbarrier.arrive(full.index(s), count=arrivals)
