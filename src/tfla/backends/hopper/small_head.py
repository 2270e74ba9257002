"""o, dq, or dk and dv together, of heads so narrow that one warpgroup has a whole state C, (dqk, dhv), in registers.

    loader, gaters --full[s]--> consumers --free[s]--> loader, gaters
    loader --full_m[head]--> consumer --free_m[head]--> loader        with MARKED, walking back
    consumer 1 --given--> consumer 0 --taken--> consumer 1            with SHARED and KEYS

    loader     tiles of x, y, zk, zv by TMA to stage s of a ring of STAGES stages, and the states of marks
    gaters     the gate vectors of the heads in turn to the same stage
    consumers  a head each. C, rounded, is in shared memory, a right operand. Per tile (`process_tile`)
        out_v = zk C, weighted, + P y        P = zk x^T, weighted              with VALUES
        out_k = zv C^T, weighted, + P x      P = (zv y^T + delta), weighted    with KEYS; dq's finds delta
        C     = decay C + (x w)^T y
        out_v overwrites y, with KEYS zv, and out_k zk, and they leave by TMA; when they have left, a tile later, the
        stage is free

    result   | x, y  | zk, zv
    o        | k, v  | q
    dq       | k, v  | q, do
    dk, dv   | q, do | k, v     walking back
    a state  | k, v  |          or q, do, its cotangent: what a segment adds to it

A program has HEADS heads at a time, two where shared memory holds their tiles. Where both have the same q and k,
SHARED, a stage has those once, and what both add to dq or dk leaves as one. n is summed in float32.

For the gradients of the gates, with KEYS, the sums over dqk of zk . out_k go to memory, which are those of q . dq or
k . dk. With MARKED the walk for dq leaves the state before every MARKS-th step of a piece but the first, by TMA as it
lies in shared memory. The loader of the walk back brings those of a tile after the tile, one for each consumer, into a
place that is free once the consumer has added up <C, dC> of the one before, which is what that walk leaves.
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

from tfla.backends.gpu.gate_kernels import DELTA_P, FLOOR, VECTORS
from tfla.backends.hopper.gate_warp import GateBuffers, GateSource, GateWarpConfig, run_gate_warp
from tfla.backends.hopper.mma import (
    accumulator_layout,
    apply_causal_mask,
    issue_mma,
    load_gate_matrix,
    load_update_weights,
    scale_by_gates,
    state_pointers,
    to_left_operand,
)
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
    advance,
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
    num_tiles,
    state_index,
    tile_coordinates,
)


class Config(NamedTuple):
    """Constants of a kernel."""

    HEADS: Any  # of a program
    SHARED_QK: Any  # they share q and k
    QK_COPIES: Any  # of tiles of q or k in a stage
    DK: Any
    DV: Any
    L: Any  # steps of a tile
    STAGES: Any
    CHECKPOINT_STEPS: Any  # steps between marks
    REVERSE: Any  # from the last tile to the first
    IS_SEGMENTED: Any
    USE_INITIAL_STATE: Any  # pieces start from states that are given, not from zeros
    STORE_FINAL_STATE: Any  # states behind pieces are wanted
    SKIP_LAST: Any  # nothing of the last segment of a sequence
    OUTPUT_V: Any  # out_v is wanted
    OUTPUT_K: Any  # out_k is wanted
    HAS_OUTPUT: Any  # one of them is
    NORMALIZE: Any
    SAVE_D: Any  # d is wanted
    USE_DP_OFFSET: Any  # delta is not zero
    COMPUTE_DP_OFFSET: Any  # walking forth: it is not known yet, the gate vector DELTA_P has -u
    HAS_CHECKPOINTS: Any  # there are marks


class GlobalPointers(NamedTuple):
    """What consumers read and write in memory."""

    out_v: Any
    out_k: Any
    checkpoints: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any
    n_checkpoints: Any
    decays: Any
    w_out: Any
    d_out: Any
    dots: Any
    gates: Any


class SharedStorage(NamedTuple):
    """Shared memory; what a walk does not have is another of them."""

    x: Any  # COPIES tiles a stage
    y: Any  # HEADS tiles a stage
    zk: Any
    zv: Any
    c: Any  # C of each head, rounded
    n: Any
    full: Any
    empty: Any
    part: Any  # of dq or dk, of the second head, which the first adds to its own
    part_full: Any  # it is there
    part_empty: Any  # it has been read
    checkpoint_state: Any  # states at a mark, one for each head
    full_checkpoint: Any
    empty_checkpoint: Any


class Accumulators(NamedTuple):
    """Of a head, in registers."""

    C: Any
    n: Any
    decay: Any  # since it was zero


class PipelineState(NamedTuple):
    """Of a tile."""

    index: Any  # its stage
    phase: Any  # of the barriers of the stage
    count: Any  # tiles before it
    num_checkpoints: Any  # marks before it


class WorkTile(NamedTuple):
    """Of work, of one head."""

    b: Any  # batch row
    head_group: Any  # which HEADS heads
    h: Any  # which head
    start: Any  # its first step
    steps: Any
    tiles: Any
    first_step: Any  # `start` among the steps of all batch rows
    first_tile: Any  # its first tile among those of all heads


class TileViews(NamedTuple):
    """In shared memory, of one head."""

    c: Any
    n: Any
    part: Any
    x: Any
    y: Any
    zk: Any
    zv: Any
    g: Any
    u: Any
    e: Any  # exp(-m), or delta


class FragmentIds(NamedTuple):
    """Indices in layouts of a consumer's registers."""

    i: Any  # steps, which read
    j: Any  # steps that update
    rk: Any  # of n
    rl: Any  # steps of out_k
    rd: Any  # steps of out_v
    one: Any  # a single zero


@gluon.jit
def run_load_warp(tensors, shared, params, group_size, config):
    """The loader: one warp."""
    X, Y, ZK, ZV, Checkpoints = tensors
    L: gl.constexpr = config.L
    HEADS: gl.constexpr = config.HEADS
    QK_COPIES: gl.constexpr = config.QK_COPIES
    of_k: gl.constexpr = X.block_type.nbytes * (2 if config.HAS_OUTPUT else 1) * QK_COPIES
    of_v: gl.constexpr = Y.block_type.nbytes * (2 if config.OUTPUT_K else 1) * HEADS
    n = 0
    num_checkpoints = 0
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        for i in range(0, tiles):
            step = (tiles - 1 - i if config.REVERSE else i) * L
            t = start + step
            end = start + steps
            s, phase = stage_and_phase(n, config.STAGES)
            mbarrier.wait(shared.empty.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, of_k + of_v)
            for e in gl.static_range(QK_COPIES):
                x = tile_coordinates(b, (h * HEADS + e) // group_size, t, 0, end, params)
                async_load(X, x, bar, shared.x.index(QK_COPIES * s + e))
                if config.HAS_OUTPUT:
                    async_load(ZK, x, bar, shared.zk.index(QK_COPIES * s + e))
            for e in gl.static_range(HEADS):
                y = tile_coordinates(b, h * HEADS + e, t, 0, end, params)
                async_load(Y, y, bar, shared.y.index(HEADS * s + e))
                if config.OUTPUT_K:
                    async_load(ZV, y, bar, shared.zv.index(HEADS * s + e))
            n += 1
            if config.HAS_CHECKPOINTS and config.REVERSE and step > 0 and step % config.CHECKPOINT_STEPS == 0:
                for e in gl.static_range(HEADS):
                    mbarrier.wait(shared.empty_checkpoint.index(e), (num_checkpoints & 1) ^ 1)
                    mbarrier.expect(shared.full_checkpoint.index(e), Checkpoints.block_type.nbytes)
                    row = checkpoint_index(b, start, step, h * HEADS + e, params, config) * config.DK
                    async_load(
                        Checkpoints,
                        [row.to(gl.int32), 0],
                        shared.full_checkpoint.index(e),
                        shared.checkpoint_state.index(e),
                    )
                num_checkpoints += 1


@gluon.jit
def checkpoint_index(b, start, step, h, params, config):
    """Which mark of which head, the piece of b having begun with step `start`."""
    heads = params.H * config.HEADS
    return (
        (b.to(gl.int64) * params.T + start) // config.CHECKPOINT_STEPS - 1 + step // config.CHECKPOINT_STEPS
    ) * heads + h


@gluon.jit
def opaque_index(ring, index: gl.constexpr, n):
    """The index-th of a ring. The compiler is not to know that no tile n changes it: what it would find out early about
    its addresses takes registers all the way."""
    return ring.index(index + (n >> 30))


@gluon.jit
def view_tile(shared, buffers, s, n, head: gl.constexpr, config):
    """The n-th, in stage s."""
    L: gl.constexpr = config.L
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    gate_slot = head * config.STAGES + s
    return TileViews(
        opaque_index(shared.c, head, n),
        opaque_index(shared.n, head, n),
        opaque_index(shared.part, 0, n),
        shared.x.index(config.QK_COPIES * s + copy).reshape([L, config.DK]),
        shared.y.index(config.HEADS * s + head).reshape([L, config.DV]),
        shared.zk.index(config.QK_COPIES * s + copy).reshape([L, config.DK]),
        shared.zv.index(config.HEADS * s + head).reshape([L, config.DV]),
        buffers.vectors.index(gate_slot),
        buffers.weights.index(gate_slot),
        buffers.extra.index(gate_slot),
    )


@gluon.jit
def store_shared_state(C, N, c, n, NORMALIZE: gl.constexpr):
    """Where the next tile reads it."""
    c.store(C.to(c.dtype))
    if NORMALIZE:
        n.store(N)
    fence_async_shared()
    barrier()


@gluon.jit
def load_initial_state(index, ids, gmem, params, head: gl.constexpr, config):
    """That a piece of work starts from."""
    of_v: gl.constexpr = accumulator_layout(config.DV)
    C = gl.zeros([config.DK, config.DV], gl.float32, of_v)
    N = gl.zeros([config.DK], gl.float32, gl.SliceLayout(1, accumulator_layout(config.L)))
    total = ids.one.to(gl.float32) + 1.0
    if config.USE_INITIAL_STATE:
        at = state_index(index, params) * config.HEADS + head
        C = gl.load(
            state_pointers(gmem.state_in, at, 0, 0, config.DK, config.DV, False, of_v, config.DK, config.DV)
        ).to(gl.float32)  # fmt: skip
        if config.NORMALIZE:
            N = gl.load(gmem.n_in + at.to(gl.int64) * config.DK + ids.rk)
    return Accumulators(C, N, total)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, head: gl.constexpr, config):
    """That a piece of work ends with, or what it adds to one, with the decay over it."""
    C, N, total = acc
    state_out = gmem.state_out
    at = state_index(index, params) * config.HEADS + head
    dtype: gl.constexpr = state_out.dtype.element_ty
    pointers = state_pointers(
        state_out, at, 0, 0, config.DK, config.DV, False, accumulator_layout(config.DV), config.DK, config.DV
    )
    gl.store(pointers, C.to(dtype))
    if config.NORMALIZE:
        gl.store(gmem.n_out + at.to(gl.int64) * config.DK + ids.rk, N)
    if not config.HAS_OUTPUT:
        gl.store(gmem.decays + at + ids.one, total)


@gluon.jit
def compute_denominators(P, tile, weight, config):
    """d: zk . n, weighted, and the sums of P."""
    of_v: gl.constexpr = weight.type.layout
    of_k: gl.constexpr = accumulator_layout(config.DK)
    row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, of_k)), 0)
    dot = gl.sum(tile.zk.load(of_k).to(gl.float32) * row, 1)
    d = gl.convert_layout(gl.sum(P, 1), of_v, assert_trivial=True)
    return d + gl.convert_layout(dot, of_v, assert_trivial=True) * weight


@gluon.jit
def divide_by_denominators(V, d, t, tile, work_tile, ids, gmem, params, config):
    """By max(|d|, exp(-m))."""
    if config.SAVE_D:
        heads = params.H * config.HEADS
        gl.store(
            gmem.d_out + (work_tile.first_step + t + ids.rd) * heads + work_tile.h, d, mask=ids.rd < work_tile.steps - t
        )
    return V * gl.expand_dims(1.0 / gl.maximum(gl.abs(d), tile.e.load(d.type.layout)), 1)


@gluon.jit
def compute_dp_offset(S, K, D, t, tile, work_tile, ids, gmem, config):
    """-u (do . h): do . h is zk . (zv C^T), weighted, and the sums of the rows of (S, weighted) * (zk x^T)."""
    L: gl.constexpr = config.L
    of_k: gl.constexpr = K.type.layout
    R = warpgroup_mma_wait(0, deps=[issue_mma(tile.zk, tile.x.permute((1, 0)))])
    dot = gl.sum(K * tile.zk.load(of_k).to(gl.float32), 1)
    dot *= tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, of_k))
    scores = gl.sum(apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE) * R, 1)
    dot += gl.convert_layout(scores, dot.type.layout, assert_trivial=True)
    u = tile.e.load(dot.type.layout)
    delta = gl.where(u == 0.0, 0.0, u * dot)
    gl.store(gmem.gates + ((work_tile.first_tile + t // L) * VECTORS + DELTA_P) * L + ids.rl, delta)
    return delta


@gluon.jit
def issue_k_output(S, K, D, t, tile, work_tile, ids, gmem, config):
    """zv C^T to out_k: starts to add P x, P = (zv y^T + delta) weighted."""
    L: gl.constexpr = config.L
    if config.COMPUTE_DP_OFFSET:
        S, K = warpgroup_mma_wait(0, deps=[S, K])
        delta = compute_dp_offset(S, K, D, t, tile, work_tile, ids, gmem, config)
        S += gl.expand_dims(gl.convert_layout(delta, gl.SliceLayout(1, S.type.layout), assert_trivial=True), 1)
    else:
        S = warpgroup_mma_wait(1, deps=[S])
        if config.USE_DP_OFFSET:
            S += gl.expand_dims(tile.e.load(gl.SliceLayout(0, S.type.layout)), 0)
    if config.OUTPUT_V:
        D = load_gate_matrix(tile.g, L, 0, accumulator_layout(L), 1)  # again: kept, it takes registers that out_v needs
    P = apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE)
    A = to_left_operand(P.to(tile.x.dtype), config.DK)
    weight = tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, accumulator_layout(config.DK)))
    if not config.COMPUTE_DP_OFFSET:
        K = warpgroup_mma_wait(0, deps=[K])
    if config.NORMALIZE:
        row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, K.type.layout)), 0)
        if config.REVERSE:
            K += row
        elif config.COMPUTE_DP_OFFSET:
            K += row * gl.expand_dims(delta, 1)
    return warpgroup_mma(A, tile.x, K * gl.expand_dims(weight, 1), is_async=True), A


@gluon.jit
def update_n(N, x_t, tile, config):
    """decay n + x w."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = gl.SliceLayout(0, x_t.type.layout)
    N = N * gl.max(tile.g.slice(TILE_DECAY * L, 1, 0).load(layout), 0)
    if config.USE_DP_OFFSET or not config.REVERSE:
        # Not of the left operand, which is rounded: outputs are divided by q . n, which can be small beside q and n.
        update = load_update_weights(tile.u, L, layout)
        if config.REVERSE:
            update = update * tile.e.load(layout)
        N += gl.sum(x_t.to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def reduce_head_pair(K, part, shared, n, head: gl.constexpr):
    """In the first consumer, which waits for the part of the second; that waits until its part before is read."""
    if head == 1:
        mbarrier.wait(shared.part_empty, (n & 1) ^ 1)
        part.store(K.to(part.dtype))
        barrier()
        mbarrier.arrive(shared.part_full, count=1)
    else:
        mbarrier.wait(shared.part_full, n & 1)
        K += part.load(K.type.layout).to(gl.float32)
        barrier()
        mbarrier.arrive(shared.part_empty, count=1)
    return K


@gluon.jit
def store_outputs(s, t, work_tile, gmem, shared, params, head: gl.constexpr, config):
    """The outputs of the tile in stage s."""
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    if config.OUTPUT_V:
        of_out = (shared.zv if config.OUTPUT_K else shared.y).index(config.HEADS * s + head)
        async_store(
            gmem.out_v,
            tile_coordinates(
                work_tile.b, work_tile.h, work_tile.start + t, 0, work_tile.start + work_tile.steps, params
            ),
            of_out,
        )
    if config.OUTPUT_K and copy == head:
        at_k = tile_coordinates(
            work_tile.b,
            work_tile.head_group * config.QK_COPIES + copy,
            work_tile.start + t,
            0,
            work_tile.start + work_tile.steps,
            params,
        )
        async_store(gmem.out_k, at_k, shared.zk.index(config.QK_COPIES * s + copy))


@gluon.jit
def at_checkpoint(C, N, c, t, n, num_checkpoints, work_tile, ids, gmem, shared, params, head: gl.constexpr, config):
    """The state that `store_shared_state` has put, where it is one at a mark, or walking back <C, dC>."""
    step = t if config.REVERSE else t + config.L
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps and step > 0:
        checkpoint = checkpoint_index(work_tile.b, work_tile.start, step, work_tile.h, params, config)
        if config.REVERSE:
            store_checkpoint_dots(C, N, checkpoint, n, num_checkpoints, ids, gmem, shared, head, config)
            num_checkpoints += 1
        else:
            async_store(gmem.checkpoints, [(checkpoint * config.DK).to(gl.int32), 0], c)
            if config.NORMALIZE:
                gl.store(gmem.n_checkpoints + checkpoint * config.DK + ids.rk, N)
    return num_checkpoints


@gluon.jit
def store_checkpoint_dots(dC, dN, checkpoint, n, num_checkpoints, ids, gmem, shared, head: gl.constexpr, config):
    """<C, dC> at a mark, of C that the loader brings; n in float32 with it."""
    of_row: gl.constexpr = ids.rk.type.layout
    C = opaque_index(shared.checkpoint_state, head, n)
    full = shared.full_checkpoint.index(head)
    empty = shared.empty_checkpoint.index(head)
    phase = num_checkpoints & 1
    one = gl.arange(0, 1, gl.SliceLayout(0, dC.type.layout))
    mbarrier.wait(full, phase)
    both = gl.convert_layout(gl.sum(dC * C.load(dC.type.layout).to(gl.float32), 1), of_row, assert_trivial=True)
    barrier()
    mbarrier.arrive(empty, count=1)
    if config.NORMALIZE:
        both += dN * gl.load(gmem.n_checkpoints + checkpoint * config.DK + ids.rk)
    gl.store(gmem.dots + checkpoint + one, gl.sum(both, 0).to(gl.float64) + one.to(gl.float64))


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, buffers, head: gl.constexpr, config):
    """A tile, from its arrival to the departure of its outputs."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    of_p: gl.constexpr = accumulator_layout(L)
    dtype: gl.constexpr = shared.x.dtype
    C, N, total = acc
    s, phase, n, num_checkpoints = pipe_state
    tile = view_tile(shared, buffers, s, n, head, config)
    t = (work_tile.tiles - 1 - step if config.REVERSE else step) * L
    mbarrier.wait(shared.full.index(s), phase)
    if config.OUTPUT_V:
        S = issue_mma(tile.zk, tile.x.permute((1, 0)))
        V = issue_mma(tile.zk, tile.c)
    elif config.OUTPUT_K:
        S = issue_mma(tile.zv, tile.y.permute((1, 0)))
        K = issue_mma(tile.zv, tile.c.permute((1, 0)))
    if config.HAS_OUTPUT:
        D = load_gate_matrix(tile.g, L, 0, of_p, 1)
    if config.OUTPUT_V:
        weight = tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, accumulator_layout(config.DV)))
        S = warpgroup_mma_wait(1, deps=[S])
        P = apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE)
        if config.NORMALIZE and not config.REVERSE:
            d = compute_denominators(P, tile, weight, config)
        A = to_left_operand(P.to(dtype), config.DV)
        V = warpgroup_mma_wait(0, deps=[V])
        V = warpgroup_mma(A, tile.y, V * gl.expand_dims(weight, 1), is_async=True)
        if config.OUTPUT_K:
            S = issue_mma(tile.zv, tile.y.permute((1, 0)))
    if config.HAS_OUTPUT:
        # The stage of the previous tile is free once its outputs have left.
        tma.store_wait(0)
        mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    if config.OUTPUT_K:
        if config.OUTPUT_V:
            V, A = warpgroup_mma_wait(1, deps=[V, A])
            out_v = V.to(dtype)
            K = issue_mma(tile.zv, tile.c.permute((1, 0)))
        K, A_k = issue_k_output(S, K, D, t, tile, work_tile, ids, gmem, config)
        if config.OUTPUT_V:
            barrier()  # no warp's MMA reads zv any more
            tile.zv.store(out_v)
    # The state behind the tile, while the outputs are on their way.
    x_t = tile.x.permute((1, 0)).load(of_p)
    B = scale_by_gates(x_t, tile.u, L, gl.DotOperandLayout(0, accumulator_layout(config.DV), 2))
    decay = tile.g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, C.type.layout))
    C = warpgroup_mma(B, tile.y, C * gl.expand_dims(decay, 0), is_async=True)
    if not config.HAS_OUTPUT:
        total = total * decay
    if config.NORMALIZE:
        N = update_n(N, x_t, tile, config)
    if config.OUTPUT_V and not config.OUTPUT_K:
        V, A = warpgroup_mma_wait(1, deps=[V, A])
        if config.NORMALIZE and not config.REVERSE:
            V = divide_by_denominators(V, d, t, tile, work_tile, ids, gmem, params, config)
        out_v = V.to(dtype)
    if config.OUTPUT_K:
        K, A_k = warpgroup_mma_wait(1, deps=[K, A_k])
        to = gmem.w_out + work_tile.first_tile * L + t + ids.rl
        gl.store(to, gl.sum(K * tile.zk.load(K.type.layout).to(gl.float32), 1))
        if config.SHARED_QK:
            K = reduce_head_pair(K, tile.part, shared, n, head)
        out_k = K.to(dtype)
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    barrier()  # no warp's MMA reads the tiles any more
    if config.OUTPUT_V and not config.OUTPUT_K:
        tile.y.store(out_v)
    if config.OUTPUT_K and copy == head:
        tile.zk.store(out_k)
    if config.HAS_OUTPUT:
        store_shared_state(C, N, tile.c, tile.n, config.NORMALIZE)
    else:
        mbarrier.arrive(shared.empty.index(s), count=1)
    store_outputs(s, t, work_tile, gmem, shared, params, head, config)
    if config.HAS_CHECKPOINTS:
        num_checkpoints = at_checkpoint(
            C, N, tile.c, t, n, num_checkpoints, work_tile, ids, gmem, shared, params, head, config
        )
    s, phase = advance(s, phase, STAGES)
    return Accumulators(C, N, total), PipelineState(s, phase, n + 1, num_checkpoints)


@gluon.jit
def run_consumer(head: gl.constexpr, gmem, shared, params, tiles_per_head, buffers, config):
    """One warpgroup, with one head."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, accumulator_layout(L)))
    j = gl.arange(0, L, gl.SliceLayout(0, accumulator_layout(L)))
    rk = gl.arange(0, config.DK, gl.SliceLayout(1, accumulator_layout(L)))
    rl = gl.arange(0, L, gl.SliceLayout(1, accumulator_layout(config.DK)))
    rd = gl.arange(0, L, gl.SliceLayout(1, accumulator_layout(config.DV)))
    one = gl.arange(0, 1, gl.SliceLayout(0, accumulator_layout(config.DV)))
    ids = FragmentIds(i, j, rk, rl, rd, one)
    pipe_state = PipelineState(0, 0, 0, 0)
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, head_group, start, steps, tile = get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        h = head_group * config.HEADS + head
        tiles = num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        first = b.to(gl.int64) * params.T + start
        work_tile = WorkTile(b, head_group, h, start, steps, tiles, first, h.to(gl.int64) * tiles_per_head + tile)
        acc = load_initial_state(index, ids, gmem, params, head, config)
        if config.HAS_OUTPUT:
            n = pipe_state.count
            store_shared_state(
                acc.C, acc.n, opaque_index(shared.c, head, n), opaque_index(shared.n, head, n), config.NORMALIZE
            )
        for step in range(0, tiles):
            acc, pipe_state = process_tile(
                acc, pipe_state, step, work_tile, ids, gmem, shared, params, buffers, head, config
            )
        if config.STORE_FINAL_STATE:
            store_final_state(acc, index, ids, gmem, params, head, config)
        index = next_work_tile(index)
    if config.HAS_OUTPUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=RUNTIME_SCALARS)
def small_head_kernel(
    X, Y, ZK, ZV, OutV, OutK, Checkpoints, gates, i_gate, f_gate, w_out, d_out, dots, state_in, state_out, n_in, n_out,
    n_checkpoints, decays, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    HEADS: gl.constexpr, SHARED_QK: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr,
    USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr, SKIP_LAST: gl.constexpr, OUTPUT_V: gl.constexpr,
    OUTPUT_K: gl.constexpr, NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, USE_DP_OFFSET: gl.constexpr,
    HAS_CHECKPOINTS: gl.constexpr, IS_VARLEN: gl.constexpr, GATES: gl.constexpr, INPUT_GATE: gl.constexpr,
    SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """H is how often HEADS heads there are; with SHARED OutK has so many."""
    HAS_OUTPUT: gl.constexpr = OUTPUT_V or OUTPUT_K
    EXTRA: gl.constexpr = (
        (DELTA_P if USE_DP_OFFSET else None) if OUTPUT_K else (FLOOR if NORMALIZE and HAS_OUTPUT else None)
    )
    partitions(
        (X, Y, ZK, ZV, Checkpoints),
        GateSource(
            gates, i_gate, f_gate, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
            GATES, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        tiles_per_head, group_size,
        GlobalPointers(
            OutV, OutK, Checkpoints, state_in, state_out, n_in, n_out, n_checkpoints, decays, w_out, d_out, dots, gates,
        ),
        SchedulerParams(T, H, segment_steps, num_work_tiles, schedule if IS_VARLEN else None),
        Config(
            HEADS, SHARED_QK, 1 if SHARED_QK else HEADS, DK, DV, L, STAGES, CHECKPOINT_STEPS, REVERSE, IS_SEGMENTED,
            USE_INITIAL_STATE, STORE_FINAL_STATE, SKIP_LAST, OUTPUT_V, OUTPUT_K, HAS_OUTPUT, NORMALIZE, SAVE_D,
            USE_DP_OFFSET, USE_DP_OFFSET and not REVERSE, HAS_CHECKPOINTS,
        ),
        GateWarpConfig(
            L, STAGES, REVERSE, IS_SEGMENTED, EXTRA, SKIP_LAST=SKIP_LAST, HEADS=HEADS,
            GATE_WARPS=HEADS if OUTPUT_K else HEADS + 1,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, tiles_per_head, group_size, gmem, params, config, gate_config):
    """Gives them shared memory, and starts them."""
    shared = allocate(tensors, config)
    full = shared.full
    empty = shared.empty
    buffers = GateBuffers(*allocate_gate_buffers(shared.x.dtype, gate_config))
    if config.HEADS == 1:
        gl.warp_specialize(
            [
                (run_consumer, (0, gmem, shared, params, tiles_per_head, buffers, config)),
                (run_load_warp, (tensors, shared, params, group_size, config)),
                (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            ],
            [1, 1, 1],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (run_consumer, (0, gmem, shared, params, tiles_per_head, buffers, config)),
                (run_consumer, (1, gmem, shared, params, tiles_per_head, buffers, config)),
                (run_load_warp, (tensors, shared, params, group_size, config)),
                (run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (run_gate_warp, (2, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            ],
            [4, 1, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def allocate(tensors, config):
    """Shared memory and its barriers."""
    X, Y, ZK, ZV, _marks = tensors
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = allocate_tiles(X, config.QK_COPIES * STAGES)
    y = allocate_tiles(Y, config.HEADS * STAGES)
    zk = allocate_tiles(ZK, config.QK_COPIES * STAGES) if config.HAS_OUTPUT else x
    c = allocate_operands(dtype, config.HEADS, config.DK, config.DV) if config.HAS_OUTPUT else y
    zv = allocate_tiles(ZV, config.HEADS * STAGES) if config.OUTPUT_K else y
    n = allocate_vectors(gl.float32, config.HEADS, config.DK) if config.NORMALIZE else y
    full, empty = allocate_full_empty(STAGES, 1 + config.HEADS, config.HEADS)
    part = c
    part_full = full
    part_empty = full
    if config.SHARED_QK and config.OUTPUT_K:
        part = allocate_operands(dtype, 1, config.L, config.DK)
        part_full = allocate_barrier(1)
        part_empty = allocate_barrier(1)
    checkpoint_state = c
    full_checkpoint = full
    empty_checkpoint = full
    if config.HAS_CHECKPOINTS and config.REVERSE:
        checkpoint_state = allocate_operands(dtype, config.HEADS, config.DK, config.DV)
        full_checkpoint, empty_checkpoint = allocate_full_empty(config.HEADS, 1, 1)
    fence_async_shared()
    return SharedStorage(
        x,
        y,
        zk,
        zv,
        c,
        n,
        full,
        empty,
        part,
        part_full,
        part_empty,
        checkpoint_state,
        full_checkpoint,
        empty_checkpoint,
    )


@gluon.jit
def allocate_gate_buffers(dtype: gl.constexpr, gate_config):
    """Those of `GateBuffers`."""
    STAGES: gl.constexpr = gate_config.STAGES * gate_config.HEADS
    g = allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * gate_config.L)
    u = allocate_vectors(dtype, STAGES, 2 * gate_config.L)
    e = allocate_vectors(gl.float32, STAGES, gate_config.L) if gate_config.EXTRA is not None else g
    return g, u, e
