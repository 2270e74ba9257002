"""The pipeline of the Hopper kernels: shared memory, the stages of a ring, and the barriers that guard them.

A ring has STAGES stages in shared memory. Tile n of a program goes to stage n % STAGES. Each stage has two mbarriers:

    full[s]   The producers (load warp, gate warp, store warp) arrive when they have filled stage s; consumers wait.
    empty[s]  The consumers arrive when they no longer read stage s; producers wait before they fill it again.

A barrier completes once for each tile that passes its stage, and its phase alternates between 0 and 1. Consumers wait
for full[s] with the phase of the tile. Producers wait for empty[s] with the opposite phase, so that the first wait for
each stage passes at once: a wait for the phase before the first one returns immediately.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# These functions have other names before Triton 3.7 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Registers of each thread of a consumer warpgroup, and of each thread of the producer warps. A program of three
# warpgroups starts with 168 for each thread, which is all that 65,536 registers allow. The producers are single warps
# in the third warpgroup; the consumers get the registers that it gives up: 3 * 168 = 2 * 232 + 40.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
# The same for consumers that would not fit in 232 registers: ptxas then serializes their MMAs. 3 * 168 = 2 * 240 + 24.
CONSUMER_REGISTERS_MAX = gl.constexpr(240)
PRODUCER_REGISTERS_MIN = gl.constexpr(24)

# Gate vectors of a stage, NUM_GATE_VECTORS of L float32 numbers each. Rows of P are the steps of the outputs, columns
# of P the steps of the updates; the gate matrix is exp2(ROW_EXPONENT[i] + COLUMN_EXPONENT[j]).
ROW_EXPONENT = gl.constexpr(0)
COLUMN_EXPONENT = gl.constexpr(1)
STATE_WEIGHT = gl.constexpr(2)  # weight of the state in the output of each step
TILE_DECAY = gl.constexpr(3)  # decay of the state over the tile, the same number in each element
NUM_GATE_VECTORS = gl.constexpr(4)


class PipelineState(NamedTuple):
    """The position of a partition in the ring."""

    index: Any  # stage of the current tile
    phase: Any  # phase of the stage's barriers for this tile, 0 or 1
    count: Any  # number of tiles before this one, over all work tiles of the program


@gluon.jit
def keep_order():
    """Keep ptxas from moving instructions across this point.

    It moves loads and sums up to where their operands are known, and spills what the registers then do not hold.
    `pmevent` signals an event that nothing counts; it is a single instruction with an effect, which ptxas keeps.
    """
    gl.inline_asm_elementwise("pmevent 7; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_tiles(tensor, stages: gl.constexpr):
    """Return shared memory for `stages` tiles of the tensor descriptor `tensor`: (stages, *block shape)."""
    return gl.allocate_shared_memory(tensor.dtype, [stages] + tensor.block_type.shape, tensor.layout)  # noqa: RUF005


@gluon.jit
def allocate_vectors(dtype: gl.constexpr, count: gl.constexpr, size: gl.constexpr):
    """Return shared memory (count, size) without swizzling, for vectors that only the CUDA cores access."""
    return gl.allocate_shared_memory(dtype, [count, size], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_operands(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Return shared memory (count, rows, columns) in the layout of MMA operands."""
    return gl.allocate_shared_memory(dtype, [count, rows, columns], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def allocate_barrier(arrivals: gl.constexpr):
    """Return an mbarrier that `arrivals` arrivals complete."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Return `count` mbarriers, each of which `arrivals` arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def allocate_full_empty(STAGES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Return the full and the empty barriers of a ring, which FULL and EMPTY arrivals complete."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=FULL)
        mbarrier.init(empty.index(s), count=EMPTY)
    return full, empty


@gluon.jit
def stage_and_phase(n, STAGES: gl.constexpr):
    """Return the stage of tile n and the phase of its barriers for that tile."""
    return n % STAGES, n // STAGES & 1


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """Return stage and phase of the next tile, like `stage_and_phase` but without a division."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def acquire(n, full, empty, STAGES: gl.constexpr):
    """Wait until the stage of tile n is empty; return the stage and its full barrier.

    Args:
        n: Number of the tile, over all work tiles of the program.
        full: Full barriers of the ring, (STAGES).
        empty: Empty barriers, (STAGES).
        STAGES: Stages of the ring.
    """
    s, phase = stage_and_phase(n, STAGES)
    mbarrier.wait(empty.index(s), phase ^ 1)
    return s, full.index(s)


@gluon.jit
def producer_tail(n, full, empty, STAGES: gl.constexpr, arrivals: gl.constexpr = 1):
    """Hand over one more stage without data after the last tile, n - 1.

    Consumers wait for the next tile while they compute one, so they wait for one stage more than there are tiles.

    Args:
        n: Number of tiles of the program.
        full: Full barriers of the ring, (STAGES).
        empty: Empty barriers, (STAGES).
        STAGES: Stages of the ring.
        arrivals: How many of the arrivals that complete the stage are of this warp.
    """
    _s, bar = acquire(n, full, empty, STAGES)
    mbarrier.arrive(bar, count=arrivals)
