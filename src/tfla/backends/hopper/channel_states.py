"""The parts that the scans with gates by channel share: the state of a consumer, its decay, and states in memory.

A program has 128 columns of dhv of each of its work tiles, and all of dqk. Two consumers hold 64 of the columns each,
as the transposed state, C^T or dC^T, in BLOCKS blocks of 64 x 128 in registers. The operands of
`tfla.backends.triton.channel_tiles` have the decays of steps, so that of gates only the decay of the tile is left: a
number for each column of the transposed state.

There are two rings of stages in shared memory. A tile needs what is in one of them from its start on, and what is in
the other, the late ring, when it corrects or updates the state. The late ring may have fewer stages: its copies have
the first half of a tile to arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.gpu.config import ceil_div
from tfla.backends.hopper import delta_tiles, host, mma, pipeline, scheduler
from tfla.backends.hopper.delta_tiles import COLUMNS, ROWS
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_MAX,
    PRODUCER_REGISTERS,
    PRODUCER_REGISTERS_MIN,
)

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext

LARGEST_DQK = 256  # without correction; with it ROWS


class Config(NamedTuple):
    """The constants of the kernels."""

    DK: Any  # dqk of the tensors
    DV: Any  # dhv of the tensors
    L: Any  # steps of a tile
    BLOCKS: Any  # blocks of 128 key channels, 1 or 2
    STAGES: Any  # stages of the ring
    LATE_STAGES: Any  # stages of the late ring
    REVERSE: Any  # scan against time, for dv
    CORRECT: Any  # there are read keys and X
    SPLIT: Any  # write keys are sums of two numbers
    USE_INITIAL_STATE: Any  # start from `state_in`, not from zeros
    STORE_FINAL_STATE: Any  # store the states after work tiles to `state_out`
    OUTPUT: Any = True  # compute h, not the states before tiles; unused for dv
    SAVE: Any = False  # store E; unused for dv
    DOTS: Any = False  # store dv . E
    BY_KEYS: Any = False  # consumers hold transposed states
    INDEXED: Any = False  # `state_in` and `state_out` are pools, and the schedule has the rows; for h


class ConsumerIds(NamedTuple):
    """The indices of what a consumer holds."""

    column: Any  # the first column of dhv


@gluon.jit
def run_decay_warp(decays, vectors, full, empty, params, tiles_per_head, config):
    """Store the decay of each tile to the late ring.

    Args:
        decays: Decays of tiles, (H, tiles, DK), float32 in global memory.
        vectors: Shared memory for them, (LATE_STAGES, BLOCKS ROWS).
        full: Full barriers of the late ring, (LATE_STAGES).
        empty: Empty barriers, (LATE_STAGES).
        params: The numbers of the scheduler.
        tiles_per_head: Tiles of one head over all batch rows.
        config: Constants.
    """
    L: gl.constexpr = config.L
    WIDTH: gl.constexpr = config.BLOCKS * ROWS
    c = gl.arange(0, WIDTH, gl.BlockedLayout([WIDTH // 32], [32], [1], [0]))
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        _b, h, _start, steps, first_tile = scheduler.get_work_tile(index, params, L, False)
        tiles = (steps + L - 1) // L
        first = decays + (h.to(gl.int64) * tiles_per_head + first_tile) * config.DK
        for i in range(0, tiles):
            tile = tiles - 1 - i if config.REVERSE else i
            decay = gl.load(first + tile * config.DK + c, mask=c < config.DK, other=0.0)
            s, bar = pipeline.acquire(n, full, empty, config.LATE_STAGES)
            vectors.index(s).store(decay)
            pipeline.barrier()
            mbarrier.arrive(bar, count=1)
            n += 1


@gluon.jit
def load_keys(K, K_low, at, at_low, bar, shared, s, config):
    """Start the TMA copies of the operands of writes to stage s: K, and with SPLIT K_low."""
    pipeline.async_load(K, at, bar, shared.k.index(s))
    if config.SPLIT:
        pipeline.async_load(K_low, at_low, bar, shared.k_low.index(s))


@gluon.jit
def load_states(index, ids, gmem, params, config):
    """Return the blocks of the state that work tile `index` starts from."""
    C0 = delta_tiles.load_state(index, ids, gmem, params, config)
    C1 = gl.zeros([64, ROWS], gl.float32, mma.accumulator_layout(ROWS))
    if config.BLOCKS == 2:
        C1 = delta_tiles.load_state(index, ids, gmem, params, config, 1)
    return C0, C1


@gluon.jit
def store_states(C0, C1, index, ids, gmem, params, config):
    """Store the blocks of the state after work tile `index`, with STORE_FINAL_STATE."""
    delta_tiles.store_state(C0, index, ids, gmem, params, config)
    if config.BLOCKS == 2:
        delta_tiles.store_state(C1, index, ids, gmem, params, config, 1)


@gluon.jit
def release_previous(n, shared, config):
    """Wait until what the tile before has stored has left, and release its stage."""
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((n + config.STAGES - 1) % config.STAGES), count=1, pred=n > 0)


@gluon.jit
def decayed(C, decay, block: gl.constexpr):
    """Return a block of the state, (64, ROWS), times the decay of the tile, (BLOCKS ROWS) in shared memory."""
    return C * gl.expand_dims(decay.slice(block * ROWS, ROWS, 0).load(gl.SliceLayout(0, C.type.layout)), 0)


@gluon.jit
def store_to_shared(C, states, half: gl.constexpr, block: gl.constexpr, config):
    """Store a rounded block of the state, (64, ROWS), to shared memory, from where it leaves."""
    states.index(half * config.BLOCKS + block).reshape([64, ROWS]).store(C)


@gluon.jit
def start_state_stores(to, tile, ids, states, half: gl.constexpr, config):
    """Start the TMA stores of the consumer's blocks of the state of a tile.

    Args:
        to: TMA descriptor of the states, (H * tiles, DV, DK), in tiles (64, ROWS).
        tile: The index of the tile among those of all heads.
        ids: Indices of what the consumer holds.
        states: The blocks in shared memory, (2 BLOCKS, 64, ROWS).
        half: Which consumer this is.
        config: Constants.
    """
    fence_async_shared()
    for block in gl.static_range(config.BLOCKS):
        pipeline.async_store(to, (tile, ids.column, block * ROWS), states.index(half * config.BLOCKS + block))


@gluon.jit
def decay_states(C0, C1, decay, config):
    """Return the blocks of the state times the decay of the tile, (BLOCKS ROWS) in shared memory.

    No product with either of them may run: ptxas would wait for it.
    """
    C0 = decayed(C0, decay, 0)
    if config.BLOCKS == 2:
        C1 = decayed(C1, decay, 1)
    return C0, C1


@gluon.jit
def issue_update(C0, C1, A, operand, config):
    """Start C <- C + A operand, (64, L) times (L, BLOCKS ROWS), for a left operand A in registers."""
    C0 = warpgroup_mma(A, operand.slice(0, ROWS, 1), C0, is_async=True)
    if config.BLOCKS == 2:
        C1 = warpgroup_mma(A, operand.slice(ROWS, ROWS, 1), C1, is_async=True)
    return C0, C1


@gluon.jit
def wait_for_states(C0, C1, A, config):
    """Wait for all products: the blocks of the state and the left operand A of their last products."""
    if config.BLOCKS == 2:
        C0, C1, A = warpgroup_mma_wait(0, deps=[C0, C1, A])
    else:
        C0, A = warpgroup_mma_wait(0, deps=[C0, A])
    pipeline.barrier()  # the MMAs of all warps have read their operands
    return C0, C1


@gluon.jit
def run_tiles(process_tile: gl.constexpr, half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program.

    Args:
        process_tile: What a tile is processed by; it returns the blocks of the state after the tile, or before it.
        half: Which consumer this is.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    ids = ConsumerIds(column=gl.program_id(0) * COLUMNS + half * 64)
    n = gl.to_tensor(0)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        b, h, start, steps, first_tile = scheduler.get_work_tile(index, params, L, False, True)
        C0, C1 = load_states(index, ids, gmem, params, config)
        tiles = (steps + L - 1) // L
        at_state = h * gmem.tiles_per_head + first_tile
        for i in range(0, tiles):
            t, end = scheduler.tile_rows(i, start, steps, L, config.REVERSE)
            row = scheduler.row_of_whole(b, params)
            coordinates = scheduler.tile_coordinates(row, h, t, ids.column, end, params)
            tile = at_state + (tiles - 1 - i if config.REVERSE else i)
            C0, C1 = process_tile(C0, C1, n, tile, coordinates, ids, gmem, shared, half, config)
            n += 1
        store_states(C0, C1, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    if config.DOTS:
        # The store warp waits for the last tile, too.
        mbarrier.arrive(shared.empty.index((n + config.STAGES - 1) % config.STAGES), count=1)


@gluon.constexpr_function
def consumer_registers(BLOCKS):
    """Return the registers of a thread of a consumer."""
    return CONSUMER_REGISTERS if BLOCKS == 1 else CONSUMER_REGISTERS_MAX


@gluon.constexpr_function
def producer_registers(BLOCKS):
    """Return the registers of a thread of the other warps."""
    return PRODUCER_REGISTERS if BLOCKS == 1 else PRODUCER_REGISTERS_MIN


# Scalar arguments that Triton must not specialize on, so that one compiled kernel serves all lengths.
RUNTIME_SCALARS = ["T", "tiles_per_head", "H", "num_work_tiles", "first_row", "low_row", "first_step"]


def kernel_scalars(ctx: ChannelContext, k_low: Tensor | None) -> tuple[int, ...]:
    """Return the numbers that the kernels take after their tensors, RUNTIME_SCALARS."""
    base = ctx.base
    rows = ctx.first_row or 0, ctx.first_row_in(k_low), ctx.first_step
    return base.T, base.tiles, base.H, base.segments * base.H, *rows


def supports(ctx: ChannelContext) -> bool:
    """Return whether the kernels compute the scans of this call: whether consumers can hold its states."""
    base = ctx.base
    return (ROWS.value if ctx.spec.correct else LARGEST_DQK) >= base.K and base.L == 64 and base.T > 0


def blocks(ctx: ChannelContext) -> int:
    """Return the blocks of 128 key channels."""
    return ceil_div(ctx.base.K, ROWS.value)


def grid(ctx: ChannelContext) -> tuple[int, int]:
    """Return the grid of a scan."""
    return host.grid(ctx.base, ceil_div(ctx.base.V, COLUMNS.value))


def keys_descriptor(ctx: ChannelContext, x: Tensor | None, other: Any = None) -> Any:
    """Return the TMA descriptor of an operand, (B, T, H, dqk), in tiles (L, BLOCKS ROWS); `other` without it."""
    return other if x is None else host.descriptor(ctx.base, x, blocks(ctx) * ROWS.value)


def values_descriptor(ctx: ChannelContext, x: Tensor | None, other: Any = None) -> Any:
    """Return the TMA descriptor of a tensor (B, T, H, dhv) in tiles (L, 64); `other` without it."""
    return other if x is None else host.descriptor(ctx.base, x, COLUMNS.value // 2)


def steps_descriptor(ctx: ChannelContext, x: Tensor | None, other: Any = None) -> Any:
    """Return the TMA descriptor of P or X, (B, T, H, L), in tiles (L, L); `other` without it."""
    return other if x is None else host.descriptor(ctx.base, x, ctx.base.L)


def states_descriptor(ctx: ChannelContext, states: Tensor | None, other: Any = None) -> Any:
    """Return the TMA descriptor of states, (H, tiles, dhv, dqk), in tiles (64, ROWS); `other` without it."""
    if states is None:
        return other
    _, _, V, K = states.shape
    shape, strides, block = [states.numel() // (V * K), V, K], [V * K, K, 1], [1, 64, ROWS.value]
    made = TensorDescriptor(states, shape, strides, block, gl.NVMMASharedLayout(128, 16, 3))
    return ctx.base.do(host.descriptor_factory(made), states)
