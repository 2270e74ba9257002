"""dk and dv together, of heads with dqk 128 and dhv 128 without a normaliser: one program walks all heads it is given,
with whole states, and reads q, k, v and do once.

    loader                 --full_q[r]--> consumer 0, consumer 1 --free_q[r]--> loader
    loader, gater, carrier --full[s]----> consumer 0, consumer 1 --free[s]----> loader, gater, carrier
                                          consumer 0 <--ready, read--> consumer 1

    loader       by TMA q and v of a tile to stage r of READ stages, k and do to stage s of STAGES stages
    gater        its gate vectors to stage s
    carrier      to memory the sums that consumers have left in a stage, before it is filled again
    consumer 0,1 each half of the rows of the state's cotangent C, (dqk, dhv), in registers. Per tile (`process_tile`)
        P    = v do^T by consumer 0, for dk, and k q^T by consumer 1, for dv, weighted
        dk^T = C v^T                     C, rounded, is a left operand as it lies in registers, and goes to shared
                                         memory, where dv finds the rows of both
        -- ready: both have stored P and C
        dk^T = dk^T weighted + q^T P^T   half of the rows each
        C    = decay C + (q w)^T do
        dv   = k C, weighted, + P do     half of the columns each
        -- read: both are done with k and C, and with the half of do that the other writes into
        dk   overwrites k, and dv do, and they leave by TMA; when they have left, a tile later, their stage is free,
             and that of q and v has been since both had q^T

The sums of k . dk and the products of C with states at marks are as in :mod:`.dq_dk`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.checkpoints import checkpoint_dots
from tfla.backends.hopper.dq_dk import WorkTile
from tfla.backends.hopper.gate_warp import GateBuffers, GateSource, GateWarpConfig, run_gate_warp
from tfla.backends.hopper.mma import (
    accumulator_layout,
    apply_causal_mask,
    issue_mma,
    load_gate_matrix,
    scale_by_gates,
    state_pointers,
    store_partial_dots,
    to_left_operand,
)
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
    allocate_barrier,
    allocate_full_empty,
    allocate_operands,
    allocate_tiles,
    allocate_vectors,
    async_load,
    async_store,
    barrier,
    stage_and_phase,
)
from tfla.backends.hopper.scheduler import (
    RUNTIME_SCALARS,
    SchedulerParams,
    get_work_tile,
    next_work_tile,
    state_index,
    tile_coordinates,
)
from tfla.backends.hopper.store_warp import GATE_SUMS, StoreWarpConfig, full_arrivals, run_store_warp

D = gl.constexpr(128)  # dqk and dhv
HALF = gl.constexpr(64)
# Stages of 32 KiB that fit beside C and P. Those of k and do are free later, once what overwrote them has left.
QV_STAGES = gl.constexpr(2)
STAGES = gl.constexpr(3)


class Config(NamedTuple):
    """Constants of a kernel."""

    L: Any  # steps of a tile
    CHECKPOINT_STEPS: Any  # steps between marks
    REVERSE: Any
    IS_SEGMENTED: Any
    USE_INITIAL_STATE: Any  # pieces start from states that are given, not from zeros
    STORE_FINAL_STATE: Any  # states behind pieces are wanted


class GlobalPointers(NamedTuple):
    """What consumers read and write in memory."""

    out_k: Any
    out_v: Any
    state_in: Any
    state_out: Any
    checkpoints: Any
    dots: Any


class SharedStorage(NamedTuple):
    """Shared memory."""

    q: Any
    k: Any  # tiles as two halves each
    v: Any
    do: Any  # as two halves
    c: Any  # C, rounded
    p: Any  # P for dk, and two for dv, of this tile and of the one before
    g: Any
    u: Any
    partial_dots: Any  # for the carrier: parts of k . dk
    full_q: Any  # q and v of a tile are there
    empty_q: Any
    full: Any  # k, do and the gate vectors are
    empty: Any
    ready: Any
    consumed: Any


class FragmentIds(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # those that update
    rows: Any  # of C in shared memory
    columns: Any


class TileViews(NamedTuple):
    """In shared memory."""

    q: Any
    v: Any
    k0: Any  # halves
    k1: Any
    do0: Any
    do1: Any
    g: Any
    p_k: Any  # P for dk
    p_v: Any  # P for dv


@gluon.jit
def run_load_warp(tensors, shared, params, group_size, config):
    """The loader: one warp."""
    Q, K, V, DO = tensors
    L: gl.constexpr = config.L
    n = 0
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = (steps + L - 1) // L
        end = start + steps
        for i in range(0, tiles):
            t = start + (tiles - 1 - i) * L
            left_k = tile_coordinates(b, h // group_size, t, 0, end, params)
            left_v = tile_coordinates(b, h, t, 0, end, params)
            s, phase = stage_and_phase(n, STAGES)
            mbarrier.wait(shared.empty.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, 2 * (K.block_type.nbytes + DO.block_type.nbytes))
            async_load(DO, left_v, bar, shared.do.index(2 * s))
            async_load(DO, tile_coordinates(b, h, t, HALF, end, params), bar, shared.do.index(2 * s + 1))
            async_load(K, left_k, bar, shared.k.index(2 * s))
            async_load(K, tile_coordinates(b, h // group_size, t, HALF, end, params), bar, shared.k.index(2 * s + 1))
            s, phase = stage_and_phase(n, QV_STAGES)
            mbarrier.wait(shared.empty_q.index(s), phase ^ 1)
            bar = shared.full_q.index(s)
            mbarrier.expect(bar, Q.block_type.nbytes + V.block_type.nbytes)
            async_load(V, left_v, bar, shared.v.index(s))
            async_load(Q, left_k, bar, shared.q.index(s))
            n += 1


@gluon.jit
def issue_mma_of_halves(a0, b0, a1, b1):
    """Starts a0 b0 + a1 b1."""
    return warpgroup_mma(a1, b1, issue_mma(a0, b0), is_async=True)


@gluon.jit
def view_tile(shared, r, s, n, L: gl.constexpr):
    """The n-th, its q and v in stage r, the rest in stage s."""
    return TileViews(
        shared.q.index(r).reshape([L, D]),
        shared.v.index(r).reshape([L, D]),
        shared.k.index(2 * s).reshape([L, HALF]),
        shared.k.index(2 * s + 1).reshape([L, HALF]),
        shared.do.index(2 * s).reshape([L, HALF]),
        shared.do.index(2 * s + 1).reshape([L, HALF]),
        shared.g.index(s),
        shared.p.index(0),
        shared.p.index(1 + n % 2),  # the other consumer may still read that of the tile before
    )


@gluon.jit
def issue_scores(tile, half: gl.constexpr):
    """Starts v do^T, for dk, or k q^T, for dv."""
    if half == 0:
        a0 = tile.v.slice(0, HALF, 1)
        a1 = tile.v.slice(HALF, HALF, 1)
        return issue_mma_of_halves(a0, tile.do0.permute((1, 0)), a1, tile.do1.permute((1, 0)))
    else:
        b0 = tile.q.slice(0, HALF, 1).permute((1, 0))
        b1 = tile.q.slice(HALF, HALF, 1).permute((1, 0))
        return issue_mma_of_halves(tile.k0, b0, tile.k1, b1)


@gluon.jit
def state_block_pointers(state, at, half: gl.constexpr, column):
    """Pointers to 64 x 64 of a consumer's rows of the at-th state."""
    return state_pointers(state, at, half * HALF, column, D, D, False, accumulator_layout(HALF), HALF, HALF)


@gluon.jit
def multiply_by_state(C0, C1, to, v):
    """C v^T; C, rounded, goes to shared memory."""
    A = to_left_operand(C0.to(v.dtype), HALF)
    dk = issue_mma(A, v.slice(0, HALF, 1).permute((1, 0)))
    to.slice(0, HALF, 1).store(C0.to(v.dtype))
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    A = to_left_operand(C1.to(v.dtype), HALF)
    dk = warpgroup_mma(A, v.slice(HALF, HALF, 1).permute((1, 0)), dk, is_async=True)
    to.slice(HALF, HALF, 1).store(C1.to(v.dtype))
    fence_async_shared()
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    return dk


@gluon.jit
def store_checkpoint_dots(C0, C1, checkpoint, gmem, half: gl.constexpr):
    """Of what C is a cotangent of at a mark with C, a part for each warp."""
    layout: gl.constexpr = accumulator_layout(HALF)
    dot = checkpoint_dots(C0, gmem.checkpoints, checkpoint, half * HALF, 0, D, D, layout)
    dot += checkpoint_dots(C1, gmem.checkpoints, checkpoint, half * HALF, HALF, D, D, layout)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    gl.store(gmem.dots + checkpoint * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def process_tile(C0, C1, n, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """A tile, from its arrival to the departure of its dk and dv."""
    L: gl.constexpr = config.L
    row: gl.constexpr = half * HALF
    layout: gl.constexpr = accumulator_layout(HALF)
    dtype: gl.constexpr = shared.c.dtype
    t = (work_tile.tiles - 1 - step) * L
    r, phase_r = stage_and_phase(n, QV_STAGES)
    s, phase = stage_and_phase(n, STAGES)
    tile = view_tile(shared, r, s, n, L)
    g = tile.g
    mbarrier.wait(shared.full.index(s), phase)
    mbarrier.wait(shared.full_q.index(r), phase_r)
    S = issue_scores(tile, half)
    # The stage of the previous tile is free once its outputs have left.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    gate = load_gate_matrix(g, L, 0, layout, 1)
    S = warpgroup_mma_wait(0, deps=[S])
    P = apply_causal_mask(S, gate, ids.i, ids.j, 0, True).to(dtype)
    (tile.p_k if half == 0 else tile.p_v).store(P)
    dk = multiply_by_state(C0, C1, ids.rows, tile.v)
    barrier()
    mbarrier.arrive(shared.ready, count=1)
    q_t = tile.q.slice(row, HALF, 1).permute((1, 0)).load(layout)
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, layout)), 0)
    mbarrier.wait(shared.ready, n & 1)
    A = to_left_operand(q_t, HALF)
    dk = warpgroup_mma(A, tile.p_k.permute((1, 0)), dk * weight, is_async=True)
    B = scale_by_gates(q_t, shared.u.index(s), L, gl.DotOperandLayout(0, layout, 2))
    tile_decay = gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
    C0 = warpgroup_mma(B, tile.do0, C0 * tile_decay, is_async=True)
    C1 = warpgroup_mma(B, tile.do1, C1 * tile_decay, is_async=True)
    dk, A = warpgroup_mma_wait(2, deps=[dk, A])
    barrier()  # not before MMAs have taken q_t: the copy engine does not wait for loads that are on their way
    mbarrier.arrive(shared.empty_q.index(r), count=1)
    my_k = shared.k.index(2 * s + half)
    k_t = my_k.reshape([L, HALF]).permute((1, 0))
    store_partial_dots(dk, k_t, shared.partial_dots.index(s), half, L)
    C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
    dv = issue_mma_of_halves(tile.k0, ids.columns.slice(0, HALF, 0), tile.k1, ids.columns.slice(HALF, HALF, 0))
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, layout)), 1)
    dv = warpgroup_mma_wait(0, deps=[dv])
    barrier()
    mbarrier.arrive(shared.consumed, count=1)
    my_do = shared.do.index(2 * s + half)
    dv = warpgroup_mma(tile.p_v, my_do.reshape([L, HALF]), dv * weight, is_async=True)
    mbarrier.wait(shared.consumed, n & 1)
    k_t.store(dk.to(dtype))
    dv = warpgroup_mma_wait(0, deps=[dv])
    barrier()  # no warp's MMA reads do any more
    my_do.reshape([L, HALF]).store(dv.to(dtype))
    fence_async_shared()  # would wait for a copy that is on its way: both go after it
    barrier()
    async_store(
        gmem.out_k,
        tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, row, work_tile.start + work_tile.steps, params),
        my_k,
    )
    async_store(
        gmem.out_v,
        tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, row, work_tile.start + work_tile.steps, params),
        my_do,
    )
    n += 1
    if t % config.CHECKPOINT_STEPS == 0 and t > 0:
        store_checkpoint_dots(C0, C1, work_tile.checkpoint + t // config.CHECKPOINT_STEPS * params.H, gmem, half)
    return C0, C1, n


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """One warpgroup, with 64 rows as two pieces of 64 columns."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = accumulator_layout(HALF)
    i = gl.arange(0, L, gl.SliceLayout(1, layout))
    j = gl.arange(0, L, gl.SliceLayout(0, layout))
    ids = FragmentIds(i, j, shared.c.slice(half * HALF, HALF, 0), shared.c.slice(half * HALF, HALF, 1))
    n = 0
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        tiles = (steps + L - 1) // L
        checkpoint = ((b.to(gl.int64) * params.T + start) // config.CHECKPOINT_STEPS - 1) * params.H + h
        work_tile = WorkTile(b, h, start, steps, tiles, checkpoint)
        C0 = gl.zeros([HALF, HALF], gl.float32, layout)
        C1 = gl.zeros([HALF, HALF], gl.float32, layout)
        if config.USE_INITIAL_STATE:
            first = state_index(index, params)
            C0 = gl.load(state_block_pointers(gmem.state_in, first, half, 0)).to(gl.float32)
            C1 = gl.load(state_block_pointers(gmem.state_in, first, half, HALF)).to(gl.float32)
        for step in range(0, tiles):
            C0, C1, n = process_tile(C0, C1, n, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            last = state_index(index, params)
            gl.store(state_block_pointers(gmem.state_out, last, half, 0), C0)
            gl.store(state_block_pointers(gmem.state_out, last, half, HALF), C1)
        index = next_work_tile(index)
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((n + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=RUNTIME_SCALARS)
def dk_dv_kernel(
    Q, K, V, DO, OutK, OutV, gates, i_gate, f_gate, w_out, state_in, state_out, checkpoints, dots, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    L: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr,
    USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr, IS_VARLEN: gl.constexpr,
    GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """The walk is back. Tiles of Q and V are whole, of the others half as wide."""
    partitions(
        (Q, K, V, DO),
        GateSource(
            gates, i_gate, f_gate, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
            GATES, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        w_out, tiles_per_head, group_size, GlobalPointers(OutK, OutV, state_in, state_out, checkpoints, dots),
        SchedulerParams(T, H, segment_steps, num_work_tiles, schedule if IS_VARLEN else None),
        Config(L, CHECKPOINT_STEPS, REVERSE, IS_SEGMENTED, USE_INITIAL_STATE, STORE_FINAL_STATE),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, w_out, tiles_per_head, group_size, gmem, params, config):
    """Gives them shared memory, and starts them."""
    Q, K, V, DO = tensors
    L: gl.constexpr = config.L
    dtype: gl.constexpr = Q.dtype
    q = allocate_tiles(Q, QV_STAGES)
    v = allocate_tiles(V, QV_STAGES)
    k = allocate_tiles(K, 2 * STAGES)
    do = allocate_tiles(DO, 2 * STAGES)
    c = gl.allocate_shared_memory(dtype, [D, D], gl.NVMMASharedLayout(128, 16, 2))
    p = allocate_operands(dtype, 3, L, L)
    g = allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = allocate_vectors(dtype, STAGES, 2 * L)
    sums = allocate_vectors(gl.float32, STAGES, 8 * L)
    full_q, empty_q = allocate_full_empty(QV_STAGES, 1, 2)
    full, empty = allocate_full_empty(STAGES, full_arrivals(GATE_SUMS), 2)
    ready = allocate_barrier(2)
    consumed = allocate_barrier(2)
    fence_async_shared()
    shared = SharedStorage(q, k, v, do, c, p, g, u, sums, full_q, empty_q, full, empty, ready, consumed)
    buffers = GateBuffers(g, u)
    gate_config: gl.constexpr = GateWarpConfig(L, STAGES, config.REVERSE, config.IS_SEGMENTED)
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (tensors, shared, params, group_size, config)),
            (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_store_warp, (
                sums, w_out, source.vectors, full, empty, params, tiles_per_head,
                StoreWarpConfig(L, STAGES, config.REVERSE, config.IS_SEGMENTED, GATE_SUMS),
            )),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
