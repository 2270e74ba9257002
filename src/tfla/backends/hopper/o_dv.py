"""o, and walking back dv: one program walks all heads it is given, with BLOCKS x 128 columns of their states.

    loader, gaters, carrier --full[s]--> consumer 0, consumer 1 --free[s]--> loader, gaters, carrier
                                         consumer 0 <--ready[n % 2], begun--> consumer 1

    loader       tiles of x, z, y by TMA to stage s of a ring of STAGES stages
    gaters       their gate vectors to the same stage; in turn with one block, whose tiles are done sooner, or with n
    carrier      to memory d, or delta, of what consumers have left in a stage, before it is filled again
    consumer 0,1 each half of the columns of the state C^T, (dhv, dqk), in registers. Per tile n (`process_tile`)
        out^T = C^T z^T, weighted, + y^T P^T   the state, rounded, is a left operand as it lies in registers
        C^T   = decay C^T + (y w)^T x
        P     = z x^T, weighted, of the next tile: half of the updates each, exchanged through shared memory
        out   overwrites the tile of y and leaves by TMA; when it has left, a tile later, the stage is free

x, y, z are k, v, q for o and q, do, k for dv, as in :mod:`tfla.backends.triton.walk`. With a normaliser o's consumers
also have half of n each, and dv's read h as well: delta is made of do . h, and only this walk has time for its bytes.
Without one, dv of heads of 128 x 128 is made with dk, by :mod:`.dk_dv`.
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

from tfla.backends.hopper.gate_warp import GateBuffers, GateSource, GateWarpConfig, run_gate_warp
from tfla.backends.hopper.mma import (
    accumulator_layout,
    apply_causal_mask,
    issue_mma,
    load_gate_matrix,
    scale_by_gates,
    store_partial_dots,
    to_left_operand,
)
from tfla.backends.hopper.normalizer import (
    accumulator_rows,
    divide_by_denominators,
    empty_n,
    issue_n_product,
    load_initial_n,
    store_shared_inverse,
    store_shared_n,
    store_shared_sums,
    update_n,
)
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_MAX,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    PRODUCER_REGISTERS_MIN,
    STATE_WEIGHT,
    TILE_DECAY,
    PipelineState,
    advance,
    allocate_barrier,
    allocate_barriers,
    allocate_full_empty,
    allocate_operands,
    allocate_tiles,
    allocate_vectors,
    async_load,
    async_store,
    barrier,
    producer_tail,
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
from tfla.backends.hopper.store_warp import (
    DENOMINATORS,
    DP_OFFSETS,
    NO_RESULT,
    StoreWarpConfig,
    full_arrivals,
    run_store_warp,
)
from tfla.backends.triton.gates import FLOOR


class Config(NamedTuple):
    """Constants of a kernel."""

    DK: Any
    DV: Any
    BLOCKS: Any  # of 64 columns that a consumer has
    L: Any  # steps of a tile
    STAGES: Any
    REVERSE: Any  # from the last tile to the first
    IS_SEGMENTED: Any
    USE_INITIAL_STATE: Any  # pieces start from states that are given, not from zeros
    STORE_FINAL_STATE: Any  # states behind pieces are wanted
    NORMALIZE: Any
    SAVE_D: Any  # d is wanted
    COMPUTE_DP_OFFSET: Any  # the gate vector DELTA_P has -u and gets -u (y . y2), which are do and h


class GlobalPointers(NamedTuple):
    """What consumers read and write in memory."""

    out: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any


class SharedStorage(NamedTuple):
    """Shared memory: what has STAGES stages, what the consumers exchange, and what only a normaliser takes."""

    x: Any
    y: Any  # 2 tiles a stage, one for each consumer
    z: Any
    y2: Any
    p: Any  # P of this tile and of the next
    g: Any
    w: Any
    full: Any
    empty: Any
    ready: Any  # P of a tile, and with a normaliser n and the sums of P
    floor: Any  # exp(-m)
    matrix: Any  # weights of updates as a right operand
    n: Any  # of this tile and of the next, as `store_shared_n` has it
    sums: Any  # of rows of P, two for each tile
    inverse: Any  # 1 / max(|d|, exp(-m)), one for each consumer
    initial_n_ready: Any  # n that a piece starts from
    d: Any  # for the carrier: d, or parts of do . h


class Accumulators(NamedTuple):
    """Of a consumer, in registers."""

    C0: Any
    C1: Any  # where it has two blocks
    n: Any  # columns, of which the first three add up to n


class WorkTile(NamedTuple):
    """Of work."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # its first step
    steps: Any
    tiles: Any


class FragmentIds(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # half of them, which update
    rk: Any  # half of n
    column: Any  # the first of a state, and of y


@gluon.jit
def run_load_warp(X, Y, Z, Y2, shared, params, group_size, config):
    """The loader: one warp."""
    L: gl.constexpr = config.L
    WIDTH: gl.constexpr = 64 * config.BLOCKS
    each_y: gl.constexpr = 4 if config.COMPUTE_DP_OFFSET else 2
    n = 0
    column = gl.program_id(1) * (2 * WIDTH)
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if config.REVERSE else i) * L
            end = start + steps
            s, phase = stage_and_phase(n, config.STAGES)
            mbarrier.wait(shared.empty.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Z.block_type.nbytes + each_y * Y.block_type.nbytes)
            async_load(Z, tile_coordinates(b, h // group_size, t, 0, end, params), bar, shared.z.index(s))
            async_load(X, tile_coordinates(b, h // group_size, t, 0, end, params), bar, shared.x.index(s))
            y = tile_coordinates(b, h, t, column, end, params)
            y_right = tile_coordinates(b, h, t, column + WIDTH, end, params)
            async_load(Y, y, bar, shared.y.index(2 * s))
            async_load(Y, y_right, bar, shared.y.index(2 * s + 1))
            if config.COMPUTE_DP_OFFSET:
                async_load(Y2, y, bar, shared.y2.index(2 * s))
                async_load(Y2, y_right, bar, shared.y2.index(2 * s + 1))
            n += 1
    producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def transposed_state_pointers(state, at, column, config):
    """Of 64 columns of a state (dqk, dhv), transposed."""
    layout: gl.constexpr = accumulator_layout(config.DK)
    v = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    k = gl.arange(0, config.DK, gl.SliceLayout(0, layout))
    return state + at.to(gl.int64) * (config.DK * config.DV) + gl.expand_dims(v, 1) + gl.expand_dims(k, 0) * config.DV


@gluon.jit
def load_initial_state(index, ids, gmem, params, config):
    """That a piece of work starts from."""
    C0 = gl.zeros([64, config.DK], gl.float32, accumulator_layout(config.DK))
    C1 = gl.zeros([64, config.DK], gl.float32, accumulator_layout(config.DK))
    N = empty_n()
    if config.USE_INITIAL_STATE:
        at = state_index(index, params)
        if config.BLOCKS == 2:
            C1 = gl.load(transposed_state_pointers(gmem.state_in, at, ids.column + 64, config)).to(gl.float32)
        C0 = gl.load(transposed_state_pointers(gmem.state_in, at, ids.column, config)).to(gl.float32)
        if config.NORMALIZE:
            N = load_initial_n(gl.load(gmem.n_in + at.to(gl.int64) * config.DK + ids.rk))
    return Accumulators(C0, C1, N)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, config):
    """That behind a piece of work."""
    at = state_index(index, params)
    if config.BLOCKS == 2:
        gl.store(transposed_state_pointers(gmem.state_out, at, ids.column + 64, config), acc.C1)
    gl.store(transposed_state_pointers(gmem.state_out, at, ids.column, config), acc.C0)
    if config.NORMALIZE:
        gl.store(gmem.n_out + at.to(gl.int64) * config.DK + ids.rk, gl.sum(acc.n, 1))


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Starts z x^T of the tile in stage s for one half of the updates."""
    L: gl.constexpr = config.L
    z = shared.z.index(s).reshape([L, config.DK])
    x = shared.x.index(s).reshape([L, config.DK]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return issue_mma(z, x)


@gluon.jit
def view_tile(shared, s, n, half: gl.constexpr, config):
    """x, the consumer's y, z, gate vectors and P^T of the n-th tile, in stage s."""
    z = shared.z.index(s).reshape([config.L, config.DK])
    x = shared.x.index(s).reshape([config.L, config.DK])
    y = shared.y.index(2 * s + half)
    return x, y, z, shared.g.index(s), shared.p.index(n % 2).permute((1, 0))


@gluon.jit
def transposed_block(y, block: gl.constexpr, config):
    """64 columns of a tile, transposed."""
    return y.reshape([config.L, 64 * config.BLOCKS]).slice(64 * block, 64, 1).permute((1, 0))


@gluon.jit
def store_dots(y, y2, to, half: gl.constexpr, config):
    """y . y2 of each step over the consumer's columns, as the diagonal of y2 y^T: with two blocks the CUDA cores take
    longer for it alone than the tensor cores for all of it."""
    WIDTH: gl.constexpr = 64 * config.BLOCKS
    y = y.reshape([config.L, WIDTH])
    y2 = y2.reshape([config.L, WIDTH])
    products = warpgroup_mma_wait(0, deps=[issue_mma(y2, y.permute((1, 0)))])
    layout: gl.constexpr = products.type.layout
    i = gl.expand_dims(gl.arange(0, config.L, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, config.L, gl.SliceLayout(0, layout)), 0)
    to.slice(half * config.L, config.L, 0).store(gl.sum(gl.where(i == j, products, 0.0), 1))


@gluon.jit
def issue_state_product(C, z):
    """Starts C^T z^T. The state, rounded, is the left operand: to be waited for with the product."""
    A = to_left_operand(C.to(z.dtype), z.shape[0])
    return issue_mma(A, z.permute((1, 0))), A


@gluon.jit
def issue_intra_tile(out, weight, y_t, p):
    """Starts out, weighted, + y^T P^T."""
    A = to_left_operand(y_t, p.shape[1])
    return warpgroup_mma(A, p, out * weight, is_async=True), A


@gluon.jit
def issue_state_update(C, tile_decay, y_t, w, x):
    """Starts decay C + (y w)^T x."""
    B = scale_by_gates(y_t, w, x.shape[0], gl.DotOperandLayout(0, accumulator_layout(x.shape[1]), 2))
    return warpgroup_mma(B, x, C * tile_decay, is_async=True), B


@gluon.jit
def finish_first_block(C, out, weight, y_t, to, p, x, tile_decay, shared, s, n, half: gl.constexpr, config):
    """Ends that of two: its output goes over its columns of y, and its state is behind the tile."""
    if config.NORMALIZE:
        d = issue_n_product(shared.z.index(s).reshape([config.L, config.DK]), shared, n)
    out, A = issue_intra_tile(out, weight, y_t, p)
    C, B = issue_state_update(C, tile_decay, y_t, shared.w.index(s), x)
    if config.NORMALIZE:
        out, A, d = warpgroup_mma_wait(1, deps=[out, A, d])
        store_shared_inverse(d, shared, s, n, half, config.L, config.SAVE_D)
        out = divide_by_denominators(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(1, deps=[out, A])
    to.store(out.to(to.dtype))
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    return C


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """A tile, of which P is there already, to the departure of its output; P of the next tile, which arrives."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    of_out: gl.constexpr = accumulator_layout(L)
    C, C1, N = acc
    s, phase, n = pipe_state
    x, y, z, g, p = view_tile(shared, s, n, half, config)
    t = (work_tile.tiles - 1 - step if config.REVERSE else step) * L
    tile_decay = gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, accumulator_layout(config.DK))), 0)
    y_b = transposed_block(y, 0, config)
    if config.COMPUTE_DP_OFFSET and config.BLOCKS == 2:
        store_dots(y, shared.y2.index(2 * s + half), shared.d.index(s), half, config)
    out, A = issue_state_product(C, z)
    # The stage of the previous tile is free once its output has left.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    y_t = y_b.load(of_out)
    if config.COMPUTE_DP_OFFSET and config.BLOCKS == 1:
        store_partial_dots(y_t, transposed_block(shared.y2.index(2 * s + half), 0, config), shared.d.index(s), half, L)
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    if config.BLOCKS == 2:
        C0 = finish_first_block(C, out, weight, y_t, y_b, p, x, tile_decay, shared, s, n, half, config)
        C = C1
        y_b = transposed_block(y, 1, config)
        out, A = issue_state_product(C, z)
        weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
        y_t = y_b.load(of_out)
    elif config.NORMALIZE:
        d = warpgroup_mma_wait(0, deps=[issue_n_product(z, shared, n)])
        store_shared_inverse(d, shared, s, n, half, L, config.SAVE_D)
    out, A = issue_intra_tile(out, weight, y_t, p)
    C, B = issue_state_update(C, tile_decay, y_t, shared.w.index(s), x)
    if config.NORMALIZE:
        N = update_n(N, x, half * 64, shared, s, L)
    # The next tile arrives, and its P is made, while the products of this one are on their way.
    s, phase = advance(s, phase, STAGES)
    n += 1
    mbarrier.wait(shared.full.index(s), phase)
    S = issue_scores(shared, s, half, config)
    if config.NORMALIZE:
        out, A = warpgroup_mma_wait(3, deps=[out, A])  # all but C, N and S
        out = divide_by_denominators(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(2, deps=[out, A])
    y_b.store(out.to(y.dtype))
    fence_async_shared()
    async_store(
        gmem.out,
        tile_coordinates(
            work_tile.b, work_tile.h, work_tile.start + t, ids.column, work_tile.start + work_tile.steps, params
        ),
        y,
    )
    D = load_gate_matrix(shared.g.index(s), L, half, accumulator_layout(L // 2))
    if config.NORMALIZE:
        S, C, B, N = warpgroup_mma_wait(0, deps=[S, C, B, N])
    else:
        S, C, B = warpgroup_mma_wait(0, deps=[S, C, B])
    P = apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE)
    if config.NORMALIZE:
        store_shared_sums(P, shared, n, half)
        store_shared_n(gl.sum(N, 1), shared.n.index(n % 2), half * 64)
    shared.p.index(n % 2).slice(half * (L // 2), L // 2, 1).store(P.to(y.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(n % 2), count=1)
    if config.BLOCKS == 2:
        return Accumulators(C0, C, N), PipelineState(s, phase, n)
    else:
        return Accumulators(C, C1, N), PipelineState(s, phase, n)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """One warpgroup, with BLOCKS x 64 columns; with a normaliser also half of n."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, accumulator_layout(L // 2)))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, accumulator_layout(L // 2)))
    rk = accumulator_rows(half * 64)
    column = gl.program_id(1) * (128 * config.BLOCKS) + half * (64 * config.BLOCKS)
    ids = FragmentIds(i, j, rk, column)
    pipe_state = PipelineState(0, 0, 0)
    mbarrier.wait(shared.full.index(0), 0)
    S = issue_scores(shared, 0, half, config)
    D = load_gate_matrix(shared.g.index(0), L, half, accumulator_layout(L // 2))
    S = warpgroup_mma_wait(0, deps=[S])
    P = apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE)
    if config.NORMALIZE:
        store_shared_sums(P, shared, 0, half)
    shared.p.index(0).slice(half * (L // 2), L // 2, 1).store(P.to(shared.p.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(0), count=1)
    initial_n_phase = 0
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        tiles = (steps + L - 1) // L
        work_tile = WorkTile(b, h, start, steps, tiles)
        acc = load_initial_state(index, ids, gmem, params, config)
        if config.NORMALIZE:
            store_shared_n(gl.sum(acc.n, 1), shared.n.index(pipe_state.count % 2), half * 64)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.initial_n_ready, count=1)
            mbarrier.wait(shared.initial_n_ready, initial_n_phase)
            initial_n_phase ^= 1
        for step in range(0, tiles):
            acc, pipe_state = process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            store_final_state(acc, index, ids, gmem, params, config)
        index = next_work_tile(index)
    tma.store_wait(0)
    if config.SAVE_D or config.COMPUTE_DP_OFFSET:
        mbarrier.arrive(shared.empty.index((pipe_state.index + config.STAGES - 1) % config.STAGES), count=1)


@gluon.jit(do_not_specialize=RUNTIME_SCALARS)
def o_dv_kernel(
    X, Y, Z, Y2, Out, gates, i_gate, f_gate, state_in, state_out, n_in, n_out, d_out, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    DK: gl.constexpr, DV: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
    NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, COMPUTE_DP_OFFSET: gl.constexpr, IS_VARLEN: gl.constexpr,
    GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Fills Out, and of the rest what the constants say."""
    partitions(
        X, Y, Z, Y2,
        GateSource(
            gates, i_gate, f_gate, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
            GATES, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        d_out, tiles_per_head, group_size, GlobalPointers(Out, state_in, state_out, n_in, n_out),
        SchedulerParams(T, H, segment_steps, num_work_tiles, schedule if IS_VARLEN else None),
        Config(
            DK, DV, BLOCKS, L, STAGES, REVERSE, IS_SEGMENTED, USE_INITIAL_STATE, STORE_FINAL_STATE, NORMALIZE, SAVE_D,
            COMPUTE_DP_OFFSET,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, Z, Y2, source, d_out, tiles_per_head, group_size, gmem, params, config):
    """Gives them shared memory, and starts them."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = allocate_tiles(X, STAGES)
    z = allocate_tiles(Z, STAGES)
    y = allocate_tiles(Y, 2 * STAGES)
    y2 = allocate_tiles(Y, 2 * STAGES) if config.COMPUTE_DP_OFFSET else None
    p = allocate_operands(dtype, 2, L, L)
    g = allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    w = allocate_vectors(dtype, STAGES, 2 * L)
    floor = allocate_vectors(gl.float32, STAGES, L) if config.NORMALIZE else None
    matrix = allocate_operands(dtype, STAGES, 8, L) if config.NORMALIZE else None
    n = allocate_operands(dtype, 2, 8, config.DK) if config.NORMALIZE else None
    sums = allocate_vectors(gl.float32, 4, L) if config.NORMALIZE else None
    inverse = allocate_vectors(gl.float32, 2, L) if config.NORMALIZE else None
    d = g  # with nothing to carry anything
    if config.NORMALIZE or config.COMPUTE_DP_OFFSET:
        parts: gl.constexpr = 2 if config.BLOCKS == 2 else 8  # of `store_dots` or `store_partial_dots`, both consumers'
        d = allocate_vectors(gl.float32, STAGES, (parts if config.COMPUTE_DP_OFFSET else 1) * L)
    consumer_registers: gl.constexpr = CONSUMER_REGISTERS_MAX if config.BLOCKS == 2 else CONSUMER_REGISTERS
    producer_registers: gl.constexpr = PRODUCER_REGISTERS_MIN if config.BLOCKS == 2 else PRODUCER_REGISTERS
    RESULT: gl.constexpr = DP_OFFSETS if config.COMPUTE_DP_OFFSET else (DENOMINATORS if config.SAVE_D else NO_RESULT)
    full, empty = allocate_full_empty(STAGES, full_arrivals(RESULT), 2)
    ready = allocate_barriers(2, 2)
    initial_n_ready = allocate_barrier(2) if config.NORMALIZE else None
    fence_async_shared()
    shared = SharedStorage(
        x, y, z, y2, p, g, w, full, empty, ready, floor, matrix, n, sums, inverse, initial_n_ready, d
    )
    buffers = GateBuffers(g, w, floor, matrix)
    gate_config: gl.constexpr = GateWarpConfig(
        L, STAGES, config.REVERSE, config.IS_SEGMENTED, FLOOR if config.NORMALIZE else None,
        GATE_WARPS=2 if config.BLOCKS == 1 or config.NORMALIZE else 1,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, Z, Y2, shared, params, group_size, config)),
            (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_store_warp, (
                d, d_out, source.vectors, full, empty, params, tiles_per_head,
                StoreWarpConfig(L, STAGES, config.REVERSE, config.IS_SEGMENTED, RESULT),
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer_registers, producer_registers, producer_registers, producer_registers, producer_registers],
    )  # fmt: skip
