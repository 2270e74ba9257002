"""dq, and walking back dk: one program walks all heads it is given, with 128 rows of their states.

The partitions, and who waits for whom, are those of :mod:`.o_dv`. Per tile a consumer, which has 64 rows of the
state C, (dqk, dhv), as BLOCKS pieces of 128 columns, computes

    out^T = C z^T, weighted, + x^T P^T
    C     = decay C + (x w)^T y
    P     = (z y^T + delta) weighted, of the next tile: half of the updates each

x, y, z are k, v, do for dq and q, do, v for dk. What `out` is a gradient of, q or k, comes with the stage too: its
product with `out` is summed over the rows, by the warps for the carrier, which brings the sum to memory for the
gradients of the gates; then `out` overwrites it and leaves by TMA. With a normaliser there is one more column of the
state, n, and dq's walk, which has q, leaves what segments add to its cotangent. Without one, dk of heads of 128 x 128
is made with dv, by :mod:`.dk_dv`.

All of it is linear in the columns. Where a program cannot hold them, dhv > 256, NUM_SPLITS programs share them. Two
and two add up their outputs in memory (:mod:`.split_reduce`), of more what pairs leave is to be summed; the first has
delta and n. TRANSPOSED it is o and dv for dqk > 128, where :mod:`.o_dv` cannot hold a state: rows are those of C^T, and
x, y, z are v, k, q for o and do, q, k for dv. Where a program has all of dqk, 256, that for o has all of n, too, and
divides (:mod:`.normalizer`).
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

from tfla.backends.hopper.checkpoints import checkpoint_dots, store_checkpoint
from tfla.backends.hopper.gate_warp import RECOMPUTED, GateBuffers, GateSource, GateWarpConfig, run_gate_warp
from tfla.backends.hopper.mma import (
    accumulator_layout,
    apply_causal_mask,
    issue_mma,
    load_gate_matrix,
    load_update_weights,
    scale_by_gates,
    state_pointers,
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
from tfla.backends.hopper.split_reduce import PAIR, async_add, run_zero_fill_warp
from tfla.backends.hopper.store_warp import (
    DENOMINATORS,
    GATE_SUMS,
    NO_RESULT,
    StoreWarpConfig,
    full_arrivals,
    run_store_warp,
)
from tfla.backends.triton.gates import DELTA_P, FLOOR


class Config(NamedTuple):
    """Constants of a kernel."""

    DX: Any
    DY: Any
    NUM_SPLITS: Any  # programs that share the columns
    WIDTH: Any  # columns of one
    BLOCKS: Any  # of 128 columns of them
    L: Any  # steps of a tile
    STAGES: Any
    CHECKPOINT_STEPS: Any  # steps between marks
    REVERSE: Any  # from the last tile to the first
    IS_SEGMENTED: Any
    USE_INITIAL_STATE: Any  # pieces start from states that are given, not from zeros
    STORE_FINAL_STATE: Any  # states behind pieces are wanted
    NORMALIZE: Any
    USE_DP_OFFSET: Any  # delta is not zero
    TRANSPOSED: Any
    ACCUMULATE_DN: Any  # what pieces add to the cotangent of n is wanted
    FUSE_NORMALIZER: Any  # outputs are divided by the denominators
    SAVE_D: Any  # which are wanted


class GlobalPointers(NamedTuple):
    """What consumers read and write in memory."""

    out: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any  # n behind pieces, or with ADDS what they add to its cotangent
    checkpoints: Any
    n_checkpoints: Any
    dots: Any


class SharedStorage(NamedTuple):
    """Shared memory: what has STAGES stages, and what the consumers exchange."""

    x: Any
    y: Any
    z: Any
    w: Any  # q or k, 2 tiles a stage, one for each consumer
    p: Any  # P of this tile and of the next
    g: Any
    u: Any
    delta: Any
    partial_dots: Any  # for the carrier: parts of w . out
    full: Any
    empty: Any
    ready: Any  # P of a tile, and where it divides n and the sums of P
    # Where it divides, as :mod:`.o_dv` has them.
    floor: Any
    matrix: Any
    n: Any
    sums: Any
    inverse: Any
    initial_n_ready: Any
    d: Any


class Accumulators(NamedTuple):
    """Of a consumer, in registers."""

    C0: Any
    C1: Any  # where it has two blocks
    n: Any
    dn: Any  # what tiles add to the cotangent of n before their piece
    decay: Any  # since there
    N0: Any  # n, where it divides: 64 of the consumer's 128
    N1: Any


class WorkTile(NamedTuple):
    """Of work."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # its first step
    steps: Any
    tiles: Any
    checkpoint: Any  # before its first


class FragmentIds(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # half of them, which update
    rk: Any  # rows of n
    has_n: Any  # whether n is its program's
    rn: Any  # rows of n where it divides, of the first half of the consumer's
    row: Any  # the first of a state
    column: Any
    split: Any  # of the programs that share the columns


@gluon.jit
def run_load_warp(X, Y, Z, W, shared, params, group_size, config):
    """The loader: one warp."""
    L: gl.constexpr = config.L
    n = 0
    row = gl.program_id(1) // config.NUM_SPLITS * 128
    column = gl.program_id(1) % config.NUM_SPLITS * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if config.REVERSE else i) * L
            end = start + steps
            s, phase = stage_and_phase(n, config.STAGES)
            mbarrier.wait(shared.empty.index(s), phase ^ 1)
            bar = shared.full.index(s)
            of_w: gl.constexpr = 0 if config.TRANSPOSED else 2 * W.block_type.nbytes
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes + Z.block_type.nbytes + of_w)
            of_x = h if config.TRANSPOSED else h // group_size
            of_y = h // group_size if config.TRANSPOSED else h
            y = tile_coordinates(b, of_y, t, column, end, params)
            x = tile_coordinates(b, of_x, t, row, end, params)
            async_load(Z, y, bar, shared.z.index(s))
            async_load(Y, y, bar, shared.y.index(s))
            async_load(X, x, bar, shared.x.index(s))
            if not config.TRANSPOSED:
                async_load(W, x, bar, shared.w.index(2 * s))
                async_load(W, tile_coordinates(b, of_x, t, row + 64, end, params), bar, shared.w.index(2 * s + 1))
            n += 1
    producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def state_block_pointers(state, at, ids, block: gl.constexpr, config):
    """Pointers of a consumer's 128 columns of a state."""
    column = ids.column + 128 * block
    return state_pointers(state, at, ids.row, column, config.DX, config.DY, config.TRANSPOSED, accumulator_layout(128))


@gluon.jit
def load_initial_state(index, ids, gmem, params, config):
    """That a piece of work starts from."""
    C0 = gl.zeros([64, 128], gl.float32, accumulator_layout(128))
    C1 = gl.zeros([64, 128], gl.float32, accumulator_layout(128))
    N = gl.zeros([64], gl.float32, gl.SliceLayout(1, accumulator_layout(config.L)))
    dn = gl.zeros([64], gl.float32, gl.SliceLayout(1, accumulator_layout(config.L)))
    N0, N1 = empty_n(), empty_n()
    if config.USE_INITIAL_STATE:
        at = state_index(index, params)
        C0 = gl.load(state_block_pointers(gmem.state_in, at, ids, 0, config)).to(gl.float32)
        if config.BLOCKS == 2:
            C1 = gl.load(state_block_pointers(gmem.state_in, at, ids, 1, config)).to(gl.float32)
        if config.NORMALIZE:
            N = gl.load(gmem.n_in + at.to(gl.int64) * config.DX + ids.rk, mask=ids.has_n, other=0.0)
        if config.FUSE_NORMALIZER:
            n_in = gmem.n_in + at.to(gl.int64) * config.DY + ids.rn
            N0, N1 = load_initial_n(gl.load(n_in)), load_initial_n(gl.load(n_in + 64))
    return Accumulators(C0, C1, N, dn, 1.0, N0, N1)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, config):
    """That behind a piece of work."""
    at = state_index(index, params)
    gl.store(state_block_pointers(gmem.state_out, at, ids, 0, config), acc.C0)
    if config.BLOCKS == 2:
        gl.store(state_block_pointers(gmem.state_out, at, ids, 1, config), acc.C1)
    if config.NORMALIZE:
        gl.store(gmem.n_out + at.to(gl.int64) * config.DX + ids.rk, acc.n, mask=ids.has_n)
    if config.FUSE_NORMALIZER:
        n_out = gmem.n_out + at.to(gl.int64) * config.DY + ids.rn
        first = ids.rn * 0 + gl.program_id(1) == 0
        gl.store(n_out, gl.sum(acc.N0, 1), mask=first)
        gl.store(n_out + 64, gl.sum(acc.N1, 1), mask=first)


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Starts z y^T of the tile in stage s for one half of the updates."""
    L: gl.constexpr = config.L
    z = shared.z.index(s).reshape([L, config.WIDTH])
    y = shared.y.index(s).reshape([L, config.WIDTH]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return issue_mma(z, y)


@gluon.jit
def store_scores(S, D, shared, s, n, ids, half: gl.constexpr, config):
    """Weights what `issue_scores` has made of the n-th tile, in stage s, by D, and says that P is there."""
    L: gl.constexpr = config.L
    delta = shared.delta.index(s)
    to = shared.p.index(n % 2)
    if config.USE_DP_OFFSET:
        if config.REVERSE:
            add = gl.expand_dims(delta.slice(half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, S.type.layout)), 0)
        else:
            add = gl.expand_dims(delta.load(gl.SliceLayout(1, S.type.layout)), 1)
        S += add
    P = apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE)
    if config.FUSE_NORMALIZER:
        store_shared_sums(P, shared, n, half)
    to.slice(half * (L // 2), L // 2, 1).store(P.to(to.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(n % 2), count=1)


@gluon.jit
def store_checkpoint_dots(acc, checkpoint, ids, half: gl.constexpr, gmem, config):
    """Of what the state is a cotangent of at a mark with it, a part for each warp."""
    layout: gl.constexpr = accumulator_layout(128)
    dot = checkpoint_dots(acc.C0, gmem.checkpoints, checkpoint, ids.row, ids.column, config.DX, config.DY, layout)
    if config.BLOCKS == 2:
        dot += checkpoint_dots(
            acc.C1, gmem.checkpoints, checkpoint, ids.row, ids.column + 128, config.DX, config.DY, layout
        )
    if config.NORMALIZE:
        n_checkpoint = gl.load(gmem.n_checkpoints + checkpoint * config.DX + ids.rk, mask=ids.has_n, other=0.0)
        dot += gl.convert_layout(acc.n * n_checkpoint, gl.SliceLayout(1, layout), assert_trivial=True)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    at = gmem.dots + (checkpoint * gl.num_programs(1) + gl.program_id(1)) * 8 + half * 4
    gl.store(at + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def store_state_checkpoint(acc, checkpoint, ids, gmem, config):
    """The state before a mark."""
    store_checkpoint(acc.C0, gmem.checkpoints, checkpoint, ids.row, ids.column, config.DX, config.DY)
    if config.BLOCKS == 2:
        store_checkpoint(acc.C1, gmem.checkpoints, checkpoint, ids.row, ids.column + 128, config.DX, config.DY)
    if config.NORMALIZE:
        gl.store(gmem.n_checkpoints + checkpoint * config.DX + ids.rk, acc.n, mask=ids.has_n)


@gluon.jit
def issue_state_update(C0, C1, tile_decay, x_t, y, u, config):
    """Starts decay C + (x w)^T y."""
    B = scale_by_gates(x_t, u, config.L, gl.DotOperandLayout(0, accumulator_layout(128), 2))
    C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * tile_decay, is_async=True)
    if config.BLOCKS == 2:
        C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * tile_decay, is_async=True)
    return C0, C1, B


@gluon.jit
def update_n_on_cuda_cores(N, x, shared, s, config):
    """decay n + x w."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = accumulator_layout(L)
    N = N * gl.max(shared.g.index(s).slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
    if config.USE_DP_OFFSET or not config.REVERSE:
        # Not of A and B, whose registers MMAs read, and not before `out` has left: there are too few.
        update = load_update_weights(shared.u.index(s), L, gl.SliceLayout(0, layout))
        if config.REVERSE:
            update = update * shared.delta.index(s).load(gl.SliceLayout(0, layout))
        N += gl.sum(x.load(layout).to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def accumulate_dn(dn, decay, q_t, g, delta, L: gl.constexpr):
    """dn with what a tile adds, and the decay up to the next."""
    layout: gl.constexpr = accumulator_layout(L)
    by_step: gl.constexpr = gl.SliceLayout(0, layout)
    weight = g.slice(STATE_WEIGHT * L, L, 0).load(by_step) * delta.load(by_step) * decay
    dn += gl.sum(q_t.load(layout).to(gl.float32) * gl.expand_dims(weight, 0), 1)
    return dn, decay * gl.max(g.slice(TILE_DECAY * L, 1, 0).load(by_step), 0)


@gluon.jit
def inter_tile_output(acc, pipe_state, z, shared, config):
    """C z^T + n delta^T, back C z^T + n, weighted. Meanwhile the previous output leaves, and its stage is free."""
    L: gl.constexpr = config.L
    by_step: gl.constexpr = gl.SliceLayout(0, accumulator_layout(L))
    dtype: gl.constexpr = shared.x.dtype
    s, _phase, n = pipe_state
    A = to_left_operand(acc.C0.to(dtype), L)
    out = issue_mma(A, z.slice(0, 128, 1).permute((1, 0)))
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + config.STAGES - 1) % config.STAGES), count=1, pred=n > 0)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    if config.BLOCKS == 2:
        A = to_left_operand(acc.C1.to(dtype), L)
        out = warpgroup_mma(A, z.slice(128, 128, 1).permute((1, 0)), out, is_async=True)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
    if config.NORMALIZE:
        if config.REVERSE:
            out += gl.expand_dims(acc.n, 1)
        elif config.USE_DP_OFFSET:
            out += gl.expand_dims(acc.n, 1) * gl.expand_dims(shared.delta.index(s).load(by_step), 0)
    return out * gl.expand_dims(shared.g.index(s).slice(STATE_WEIGHT * L, L, 0).load(by_step), 0)


@gluon.jit
def store_output(w, t, work_tile, ids, gmem, params, config):
    """The output, which lies in w, of the tile at step t of a piece."""
    end = work_tile.start + work_tile.steps
    if config.NUM_SPLITS == 1:
        async_store(gmem.out, tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, ids.row, end, params), w)
    else:
        column = work_tile.h * (config.NUM_SPLITS // PAIR) + ids.split // PAIR
        async_add(gmem.out, tile_coordinates(work_tile.b, column, work_tile.start + t, ids.row, end, params), w)


@gluon.jit
def start_next_tile(acc, B, pipe_state, shared, ids, half: gl.constexpr, config):
    """The next tile arrives, and its P is made, while the updates of the state, which read B, are on their way."""
    L: gl.constexpr = config.L
    C0, C1, N, dn, decay, N0, N1 = acc
    s, phase = advance(pipe_state.index, pipe_state.phase, config.STAGES)
    n = pipe_state.count + 1
    mbarrier.wait(shared.full.index(s), phase)
    S = issue_scores(shared, s, half, config)
    D = load_gate_matrix(shared.g.index(s), L, half, accumulator_layout(L // 2))
    if config.FUSE_NORMALIZER:
        store_shared_n(gl.sum(N0, 1), shared.n.index(n % 2), half * 128)
        store_shared_n(gl.sum(N1, 1), shared.n.index(n % 2), half * 128 + 64)
        S = warpgroup_mma_wait(0, deps=[S])
    elif config.BLOCKS == 2:
        S, C0, C1, B = warpgroup_mma_wait(0, deps=[S, C0, C1, B])
    else:
        S, C0, B = warpgroup_mma_wait(0, deps=[S, C0, B])
    store_scores(S, D, shared, s, n, ids, half, config)
    return Accumulators(C0, C1, N, dn, decay, N0, N1), PipelineState(s, phase, n)


@gluon.jit
def at_checkpoint(acc, t, work_tile, ids, gmem, params, half: gl.constexpr, config):
    """What is due behind the tile at step t of a piece, if there a mark is."""
    step = t if config.REVERSE else t + config.L
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps and step > 0:
        checkpoint = work_tile.checkpoint + step // config.CHECKPOINT_STEPS * params.H
        if config.REVERSE:
            store_checkpoint_dots(acc, checkpoint, ids, half, gmem, config)
        else:
            store_state_checkpoint(acc, checkpoint, ids, gmem, config)


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """A tile, of which P is there already, to the departure of its output; P of the next tile, which arrives."""
    L: gl.constexpr = config.L
    s, _phase, n = pipe_state
    x = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0))
    y = shared.y.index(s).reshape([L, config.WIDTH])
    z = shared.z.index(s).reshape([L, config.WIDTH])
    w = shared.w.index(2 * s + half)
    w_t = w.reshape([L, 64]).permute((1, 0))
    g = shared.g.index(s)
    t = (work_tile.tiles - 1 - step if config.REVERSE else step) * L
    tile_decay = gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, accumulator_layout(128))), 0)
    out = inter_tile_output(acc, pipe_state, z, shared, config)
    C0, C1, N, dn, decay, N0, N1 = acc
    if config.FUSE_NORMALIZER:  # before more is in registers
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
        d = warpgroup_mma_wait(0, deps=[issue_n_product(z, shared, n)])
        store_shared_inverse(d, shared, s, n, half, L, config.SAVE_D)
    x_t = x.load(accumulator_layout(L))
    if not config.FUSE_NORMALIZER:
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    A = to_left_operand(x_t, L)
    out = warpgroup_mma(A, shared.p.index(n % 2).permute((1, 0)), out, is_async=True)
    C0, C1, B = issue_state_update(C0, C1, tile_decay, x_t, y, shared.u.index(s), config)
    out, A = warpgroup_mma_wait(config.BLOCKS, deps=[out, A])
    if config.FUSE_NORMALIZER:
        out = divide_by_denominators(out, shared, half)
    if not config.TRANSPOSED:
        store_partial_dots(out, w_t, shared.partial_dots.index(s), half, L)
    if config.ACCUMULATE_DN:
        dn, decay = accumulate_dn(dn, decay, w_t, g, shared.delta.index(s), L)
    w_t.store(out.to(w.dtype))
    fence_async_shared()
    store_output(w, t, work_tile, ids, gmem, params, config)
    if config.NORMALIZE:
        N = update_n_on_cuda_cores(N, x, shared, s, config)
    if config.FUSE_NORMALIZER:
        N0 = update_n(N0, y, half * 128, shared, s, L)
        N1 = update_n(N1, y, half * 128 + 64, shared, s, L)
        C0, C1, B, N0, N1 = warpgroup_mma_wait(0, deps=[C0, C1, B, N0, N1])  # P in flight, too, takes more registers
    acc, pipe_state = start_next_tile(
        Accumulators(C0, C1, N, dn, decay, N0, N1), B, pipe_state, shared, ids, half, config
    )
    if not config.TRANSPOSED:
        at_checkpoint(acc, t, work_tile, ids, gmem, params, half, config)
    return acc, pipe_state


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """One warpgroup, with 64 rows."""
    L: gl.constexpr = config.L
    of_p: gl.constexpr = accumulator_layout(L // 2)
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_p))
    row = gl.program_id(1) // config.NUM_SPLITS * 128 + half * 64
    split = gl.program_id(1) % config.NUM_SPLITS
    rk = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(L)))
    ids = FragmentIds(i, j, rk, rk * 0 + split == 0, accumulator_rows(half * 128), row, split * config.WIDTH, split)
    pipe_state = PipelineState(0, 0, 0)
    mbarrier.wait(shared.full.index(0), 0)
    S = warpgroup_mma_wait(0, deps=[issue_scores(shared, 0, half, config)])
    store_scores(S, load_gate_matrix(shared.g.index(0), L, half, of_p), shared, 0, 0, ids, half, config)
    initial_n_phase = 0
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        tiles = (steps + L - 1) // L
        checkpoint = ((b.to(gl.int64) * params.T + start) // config.CHECKPOINT_STEPS - 1) * params.H + h
        work_tile = WorkTile(b, h, start, steps, tiles, checkpoint)
        acc = load_initial_state(index, ids, gmem, params, config)
        if config.FUSE_NORMALIZER:
            store_shared_n(gl.sum(acc.N0, 1), shared.n.index(pipe_state.count % 2), half * 128)
            store_shared_n(gl.sum(acc.N1, 1), shared.n.index(pipe_state.count % 2), half * 128 + 64)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.initial_n_ready, count=1)
            mbarrier.wait(shared.initial_n_ready, initial_n_phase)
            initial_n_phase ^= 1
        for step in range(0, tiles):
            acc, pipe_state = process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            store_final_state(acc, index, ids, gmem, params, config)
        if config.ACCUMULATE_DN:
            at_n = gmem.n_out + state_index(index, params).to(gl.int64) * config.DX + ids.rk
            gl.store(at_n, acc.dn, mask=ids.has_n)
        index = next_work_tile(index)
    tma.store_wait(0)
    if not config.TRANSPOSED or config.SAVE_D:
        mbarrier.arrive(shared.empty.index((pipe_state.index + config.STAGES - 1) % config.STAGES), count=1)


@gluon.jit(do_not_specialize=RUNTIME_SCALARS)
def dq_dk_kernel(
    X, Y, Z, W, Out, gates, i_gate, f_gate, w_out, state_in, state_out, n_in, n_out, checkpoints, n_checkpoints, dots,
    zero_counts, schedule, T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it,
    stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, NUM_SPLITS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    CHECKPOINT_STEPS: gl.constexpr, REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr,
    STORE_FINAL_STATE: gl.constexpr, NORMALIZE: gl.constexpr, USE_DP_OFFSET: gl.constexpr, TRANSPOSED: gl.constexpr,
    FUSE_NORMALIZER: gl.constexpr, SAVE_D: gl.constexpr, IS_VARLEN: gl.constexpr, GATES: gl.constexpr,
    INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """States are (DX, DY), TRANSPOSED in memory (DY, DX); then W and the marks are not used, and w_out gets d.

    Outputs of pairs of PIECES programs, each with as many of the columns, lie side by side as if each head were so
    many. cleared: zeros, one for each pair.
    """
    WIDTH: gl.constexpr = DY // NUM_SPLITS
    ACCUMULATE_DN: gl.constexpr = IS_SEGMENTED and NORMALIZE and USE_DP_OFFSET and not REVERSE
    partitions(
        (X, Y, Z, W),
        GateSource(
            gates, i_gate, f_gate, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
            GATES, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        w_out, zero_counts, tiles_per_head, group_size,
        GlobalPointers(Out, state_in, state_out, n_in, n_out, checkpoints, n_checkpoints, dots),
        SchedulerParams(T, H, segment_steps, num_work_tiles, schedule if IS_VARLEN else None),
        Config(
            DX, DY, NUM_SPLITS, WIDTH, WIDTH // 128, L, STAGES, CHECKPOINT_STEPS, REVERSE, IS_SEGMENTED,
            USE_INITIAL_STATE, STORE_FINAL_STATE, NORMALIZE, USE_DP_OFFSET, TRANSPOSED, ACCUMULATE_DN, FUSE_NORMALIZER,
            SAVE_D,
        ),
    )  # fmt: skip


@gluon.jit
def run_second_gate_warp(
    source, buffers, out, zeros, zero_counts, full, empty, params, tiles_per_head, gate_config, config
):
    """The second gater, or of a pair the clearer."""
    if config.NUM_SPLITS == 1:
        run_gate_warp(1, source, buffers, full, empty, params, tiles_per_head, gate_config)
    else:
        run_zero_fill_warp(out, zeros, zero_counts, full, empty, params, config)


@gluon.jit
def partitions(tensors, source, w_out, zero_counts, tiles_per_head, group_size, gmem, params, config):
    """Gives them shared memory, and starts them."""
    X, Y, Z, W = tensors
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = allocate_tiles(X, STAGES)
    y = allocate_tiles(Y, STAGES)
    z = allocate_tiles(Z, STAGES)
    w = allocate_tiles(W, 2 * STAGES)
    p = allocate_operands(dtype, 2, L, L)
    g = allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = allocate_vectors(dtype, STAGES, 2 * L)
    delta = allocate_vectors(gl.float32, STAGES, L)
    partial_dots = delta if config.TRANSPOSED else allocate_vectors(gl.float32, STAGES, 8 * L)
    d = allocate_vectors(gl.float32, STAGES, L) if config.FUSE_NORMALIZER else partial_dots
    floor = allocate_vectors(gl.float32, STAGES, L) if config.FUSE_NORMALIZER else None
    matrix = allocate_operands(dtype, STAGES, 8, L) if config.FUSE_NORMALIZER else None
    n = allocate_operands(dtype, 2, 8, config.DY) if config.FUSE_NORMALIZER else None
    sums = allocate_vectors(gl.float32, 4, L) if config.FUSE_NORMALIZER else None
    inverse = allocate_vectors(gl.float32, 2, L) if config.FUSE_NORMALIZER else None
    initial_n_ready = allocate_barrier(2) if config.FUSE_NORMALIZER else None
    RESULT: gl.constexpr = GATE_SUMS if not config.TRANSPOSED else (DENOMINATORS if config.SAVE_D else NO_RESULT)
    SPLIT_REDUCE: gl.constexpr = config.NUM_SPLITS > 1
    zeros = allocate_tiles(gmem.out, 1) if SPLIT_REDUCE else x
    full, empty = allocate_full_empty(STAGES, full_arrivals(RESULT) + (1 if SPLIT_REDUCE else 0), 2)
    ready = allocate_barriers(2, 2)
    fence_async_shared()
    shared = SharedStorage(
        x,
        y,
        z,
        w,
        p,
        g,
        u,
        delta,
        partial_dots,
        full,
        empty,
        ready,
        floor,
        matrix,
        n,
        sums,
        inverse,
        initial_n_ready,
        d,
    )
    buffers = GateBuffers(g, u, floor if config.FUSE_NORMALIZER else delta, matrix)
    gate_config: gl.constexpr = GateWarpConfig(
        L,
        STAGES,
        config.REVERSE,
        config.IS_SEGMENTED,
        FLOOR if config.FUSE_NORMALIZER else (DELTA_P if config.USE_DP_OFFSET else None),
        config.NUM_SPLITS,
        GATE_WARPS=2
        if config.FUSE_NORMALIZER or (source.GATES == RECOMPUTED and config.BLOCKS == 2 and not SPLIT_REDUCE)
        else 1,
    )
    consumer_registers: gl.constexpr = CONSUMER_REGISTERS_MAX if config.FUSE_NORMALIZER else CONSUMER_REGISTERS
    producer_registers: gl.constexpr = PRODUCER_REGISTERS_MIN if config.FUSE_NORMALIZER else PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, Z, W, shared, params, group_size, config)),
            (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_second_gate_warp, (
                source, buffers, gmem.out, zeros, zero_counts, full, empty, params, tiles_per_head, gate_config, config,
            )),
            (run_store_warp, (
                d, w_out, source.vectors, full, empty, params, tiles_per_head,
                StoreWarpConfig(L, STAGES, config.REVERSE, config.IS_SEGMENTED, RESULT),
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer_registers, producer_registers, producer_registers, producer_registers, producer_registers],
    )  # fmt: skip
