"""What each segment adds to a state: (dqk, dhv), from zero to behind the segment, and the decay over it.

The partitions, and who waits for whom, are those of :mod:`.o_dv`, but a consumer is done with a tile when

    C = decay C + (x w)^T y

is, 64 rows of it by 128 or 256 columns; x, y are k, v, and walking back, for the cotangent, q, do. With a normaliser
there is one more column, n, of which y is 1.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.gate_warp import GateBuffers, GateSource, GateWarpConfig, run_gate_warp
from tfla.backends.hopper.mma import accumulator_layout, scale_by_gates, state_pointers
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
    advance,
    allocate_full_empty,
    allocate_tiles,
    allocate_vectors,
    async_load,
    barrier,
    producer_tail,
    stage_and_phase,
)
from tfla.backends.hopper.scheduler import (
    RUNTIME_SCALARS,
    SchedulerParams,
    get_work_tile,
    next_work_tile,
    num_tiles,
    state_index,
    tile_coordinates,
)


class Config(NamedTuple):
    """Constants of a kernel."""

    DX: Any
    DY: Any
    NUM_SPLITS: Any  # programs that share the columns
    L: Any  # steps of a tile
    STAGES: Any
    REVERSE: Any  # from the last tile to the first
    IS_SEGMENTED: Any
    NORMALIZE: Any
    SKIP_LAST: Any  # nothing of the last segment of a sequence


class GlobalPointers(NamedTuple):
    """What consumers write in memory."""

    state_out: Any
    n_out: Any
    decays: Any


class SharedStorage(NamedTuple):
    """Shared memory, in STAGES stages."""

    x: Any
    y: Any
    g: Any
    u: Any
    full: Any
    empty: Any


@gluon.jit
def run_load_warp(X, Y, shared, params, group_size, config):
    """The loader: one warp."""
    L: gl.constexpr = config.L
    n = 0
    row = gl.program_id(1) // config.NUM_SPLITS * 128
    column = gl.program_id(1) % config.NUM_SPLITS * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if config.REVERSE else i) * L
            end = start + steps
            s, phase = stage_and_phase(n, config.STAGES)
            mbarrier.wait(shared.empty.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes)
            async_load(X, tile_coordinates(b, h // group_size, t, row, end, params), bar, shared.x.index(s))
            async_load(Y, tile_coordinates(b, h, t, column, end, params), bar, shared.y.index(s))
            n += 1
    producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def load_left_operand(shared, s, half: gl.constexpr, config):
    """(x w)^T of the tile in stage s, and with a normaliser its sums."""
    L: gl.constexpr = config.L
    x_t = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0)).load(accumulator_layout(L))
    sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, accumulator_layout(L)))
    if config.NORMALIZE:
        # Not of what is rounded: outputs are divided by q . n, which can be small beside q and n.
        w = shared.g.index(s).slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, accumulator_layout(L)))
        sums = gl.sum(x_t.to(gl.float32) * gl.expand_dims(w, 0), 1)
    return scale_by_gates(x_t, shared.u.index(s), L, gl.DotOperandLayout(0, accumulator_layout(128), 2)), sums


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """One warpgroup, with 64 rows. The left operand of a tile is made while the products of that before are on their
    way."""
    L: gl.constexpr = config.L
    WIDTH: gl.constexpr = config.DY // config.NUM_SPLITS
    of_state: gl.constexpr = accumulator_layout(128)
    row = gl.program_id(1) // config.NUM_SPLITS * 128 + half * 64
    column = gl.program_id(1) % config.NUM_SPLITS * WIDTH
    one = gl.arange(0, 1, gl.SliceLayout(0, of_state))
    s = 0
    phase = 0
    mbarrier.wait(shared.full.index(0), 0)
    B, sums = load_left_operand(shared, 0, half, config)
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        _b, _h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        C0 = gl.zeros([64, 128], gl.float32, of_state)
        C1 = gl.zeros([64, 128], gl.float32, of_state)
        N = gl.zeros([64], gl.float32, gl.SliceLayout(1, accumulator_layout(L)))
        total = one.to(gl.float32) + 1.0
        for _ in range(0, num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)):
            y = shared.y.index(s).reshape([L, WIDTH])
            decay = shared.g.index(s).slice(TILE_DECAY * L, 1, 0)
            of_tile = decay.load(gl.SliceLayout(0, of_state))
            tile_decay = gl.expand_dims(of_tile, 0)
            total = total * of_tile
            if config.NORMALIZE:
                N = N * gl.max(decay.load(gl.SliceLayout(0, accumulator_layout(L))), 0) + sums
            C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * tile_decay, is_async=True)
            if WIDTH == 256:
                C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * tile_decay, is_async=True)
            done = s
            s, phase = advance(s, phase, config.STAGES)
            mbarrier.wait(shared.full.index(s), phase)
            later, sums = load_left_operand(shared, s, half, config)
            if WIDTH == 256:
                C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            else:
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            B = later
            barrier()  # no warp reads the tile any more
            mbarrier.arrive(shared.empty.index(done), count=1)
        store_segment_state(C0, C1, N, total, one, state_index(index, params), row, column, gmem, config)
        index = next_work_tile(index)


@gluon.jit
def store_segment_state(C0, C1, N, total, one, at, row, column, gmem, config):
    """What a segment adds to C, to n, and its decay, each by one program."""
    state_out = gmem.state_out
    dtype: gl.constexpr = state_out.dtype.element_ty
    of_state: gl.constexpr = C0.type.layout
    gl.store(state_pointers(state_out, at, row, column, config.DX, config.DY, False, of_state), C0.to(dtype))
    if config.DY == 256 * config.NUM_SPLITS:
        gl.store(state_pointers(state_out, at, row, column + 128, config.DX, config.DY, False, of_state), C1.to(dtype))
    if config.NORMALIZE:
        rk = row + gl.arange(0, 64, N.type.layout)
        gl.store(gmem.n_out + at.to(gl.int64) * config.DX + rk, N, mask=rk * 0 + column == 0)
    gl.store(gmem.decays + at + one, total, mask=one + row + column == 0)


@gluon.jit(do_not_specialize=RUNTIME_SCALARS)
def segment_states_kernel(
    X, Y, gates, i_gate, f_gate, state_out, n_out, decays, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, NUM_SPLITS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, NORMALIZE: gl.constexpr, SKIP_LAST: gl.constexpr,
    IS_VARLEN: gl.constexpr, GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr,
    SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Fills states, and with a normaliser n, and the decays."""
    partitions(
        X, Y,
        GateSource(
            gates, i_gate, f_gate, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
            GATES, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        tiles_per_head, group_size, GlobalPointers(state_out, n_out, decays),
        SchedulerParams(T, H, segment_steps, num_work_tiles, schedule if IS_VARLEN else None),
        Config(DX, DY, NUM_SPLITS, L, STAGES, REVERSE, IS_SEGMENTED, NORMALIZE, SKIP_LAST),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, source, tiles_per_head, group_size, gmem, params, config):
    """Gives them shared memory, and starts them."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    x = allocate_tiles(X, STAGES)
    y = allocate_tiles(Y, STAGES)
    g = allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = allocate_vectors(X.dtype, STAGES, 2 * L)
    full, empty = allocate_full_empty(STAGES, 2, 2)
    fence_async_shared()
    shared = SharedStorage(x, y, g, u, full, empty)
    buffers = GateBuffers(g, u)
    gate_config: gl.constexpr = GateWarpConfig(
        L, STAGES, config.REVERSE, config.IS_SEGMENTED, SKIP_LAST=config.SKIP_LAST, GATE_WARPS=2, HAS_OUTPUT=False
    )
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, shared, params, group_size, config)),
            (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
