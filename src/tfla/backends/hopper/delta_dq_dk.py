"""dq and dk of the delta rule where dhv is at most 128: a fused scan with time for dq, and one against time for dk.

The backward of the delta rule, given the prediction errors E and dv, is that of linear attention with two readers of
the state C: queries, with the cotangent do, and keys, with the cotangent -dv. The scan with time computes, from one
state, the gradients of both readers: dq, and dr, the part of dk that comes from reading. The scan against time adds dr
to the part of dk that comes from writing, in float32, so that dk is rounded once. Equations (R4) to (R8) and (B7) are
those of `tfla.backends.triton.delta_kernels`. S_q = scale (do E^T) * D B and S_k = -(dv E^T) * D B are both strictly
lower triangular, with the gate matrix D and B = diag(beta). L is the number of steps of a tile. Of the vectors of a
tile, a is the decay from its start to each step, w the decay from each step to its end, and g is its whole decay.

A program computes the whole state of one head, (dqk, dhv); two consumers hold 64 rows of it each, in registers, and
compute transposed outputs. The steps of a tile n with time (`process_tile`):

    (1)   dq^T <- (C do^T) * (scale a),  dr^T <- -(C dv^T) * a      (64, L) = (64, dhv) (dhv, L), (R7)
    (2)   the stage of tile n - 1 is empty                          its dq has left shared memory
    (3)   q . dq + k . dr, summed over 64 rows                      (L), for the store warp: reads of earlier tiles
    (4)   wait for both halves of S_q and S_k of tile n
    (5)   dq^T <- dq^T + k^T S_q^T,  dr^T <- dr^T + k^T S_k^T       (64, L) = (64, L) (L, L)
    (6)   C <- g C + (k * (w beta))^T E                             (64, dhv) = (64, L) (L, dhv), (R4)
    (7)   dq^T <- dq^T + k^T * (scale do . E beta)                  what queries read of their own steps' writes
    (8)   dq                                                        over q, and from there to global memory
    (9)   dr                                                        from registers to global memory
    (10)  S_q, S_k of tile n + 1                                    (L, L / 2), one half of the columns each
    (11)  W = S_q * (q k^T) + S_k * (k k^T), its row and column sums  (L), for the store warp: pairs of steps of a tile
    (12)  checkpoint                                                C

and against time (`process_tile_back`):

    (1)   dk^T <- (dC E^T) * (w beta)                               (64, L) = (64, dhv) (dhv, L), (R8)
    (2)   the stage of tile n + 1 is empty
    (3)   k . dk, summed over 64 rows                               (L), for the store warp: reads by later tiles
    (4)   wait for both halves of S_q and S_k of tile n
    (5)   dk^T <- dk^T + q^T S_q + k^T S_k                          (64, L) = (64, L) (L, L)
    (6)   dC <- g dC + (q * (scale a))^T do - (k * a)^T dv          (64, dhv) = (64, L) (L, dhv), (R6)
    (7)   dk^T <- dk^T + q^T * (scale do . E beta) + dr^T
    (8)   dk                                                        over q, and from there to global memory
    (10)  S_q, S_k of tile n - 1
    (12)  checkpoint                                                <C, dC>

The left operands of (6) are split into sums of two 16-bit numbers, and so is S_q of (5) in the scan with time; the
rounding of other operands changes no result by more than its own rounding. W stays in float32: where keys are alike,
the terms of what steps read by them cancel in dlog_f, and rounding errors of W would not cancel. With gates both scans
store sums for the gradient of the gates, (B7). They leave out the pair of a step with itself, since no gate lies
between the write and the read of one step.

dr is never in shared memory. Consumers store it in the order of registers (`partial_pointers`), and those of the scan
against time load what they add to. A row of 128 numbers stays the row of its step, so that dk can lie in the same
memory.

The docstring of `dq_dk.py` shows which partition waits for which. A stage of the ring has 80 KiB: 16 KiB for each of
q, k, E, do and dv. The ring has two stages.
"""

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

from tfla.backends.hopper import delta_tiles, host, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.checkpoints import checkpoint_dots, store_checkpoint
from tfla.backends.hopper.delta_tiles import (
    COLUMNS,
    NUM_VECTORS,
    READ_WEIGHT,
    ROWS,
    SAME_STEP,
    UPDATE_WEIGHT,
    WRITE,
    Config,
)
from tfla.backends.hopper.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from tfla.backends.hopper.store_warp import NO_RESULT, SUMS_OF_READERS

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(2)  # stages of the ring, 80 KiB of tiles each
# Parts of the sums of a stage: of reads eight, one for each warp of the consumers; of rows of W one for each consumer;
# of columns of W one for each warp, of half of the columns.
READ_PARTS = store_warp.READ_PARTS
ROW_PARTS = store_warp.ROW_PARTS
PARTS = gl.constexpr(16)  # a power of two; fourteen are used, against time eight
# Matrices in `p`: two of each, for this tile and the next.
OF_QUERIES = gl.constexpr(0)
OF_KEYS = gl.constexpr(2)
LOW = gl.constexpr(4)  # the rounding errors of those of queries, with time


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out: Any  # TMA descriptor of dq or dk
    dr: Any  # (B, T, H, ROWS), in the order of `partial_pointers`
    state_in: Any  # C before the first step or dC after the last one, (sequences, H, dqk, dhv)
    state_out: Any  # dC before the first step, (sequences, H, dqk, dhv)
    checkpoints: Any  # C at checkpoints, (checkpoints, H, ROWS, COLUMNS), in the order of `checkpoints.py`
    dots: Any  # parts of <C, dC> there, (checkpoints, H, 8)
    scale: Any  # the factor of the queries


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    q: Any  # and then the output, (2 STAGES, L, 64): one tile for each consumer
    k: Any  # (2 STAGES, L, 64)
    e: Any  # (STAGES, L, COLUMNS)
    do: Any  # (STAGES, L, COLUMNS)
    dv: Any  # (STAGES, L, COLUMNS)
    g: Any  # the vectors of each tile, (STAGES, NUM_VECTORS L)
    sums: Any  # for the store warp, (STAGES, PARTS L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # What consumers exchange:
    p: Any  # S_q and S_k of this tile and of the next, with time also the rounding errors of S_q, (4 or 6, L, L)
    ready: Any  # barriers, (2): both halves of them are stored


class WorkTile(NamedTuple):
    """The work tile that a program computes."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps
    tiles: Any  # number of tiles


@gluon.jit
def run_load_warp(Q, K, E, DO, DV, shared, params, group_size, config):
    """Load the tiles of q, k, E, do and dv to shared memory by TMA.

    Args:
        Q, K: TMA descriptors of q and k, in tiles (L, 64), two a program.
        E, DO, DV: TMA descriptors of E, do and dv, in tiles (L, COLUMNS).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    n = 0
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, config.REVERSE)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, 2 * Q.block_type.nbytes + 2 * K.block_type.nbytes + 3 * E.block_type.nbytes)
            at = scheduler.tile_coordinates(b, h, t, 0, end, params)
            pipeline.async_load(E, at, bar, shared.e.index(s))
            pipeline.async_load(DO, at, bar, shared.do.index(s))
            pipeline.async_load(DV, at, bar, shared.dv.index(s))
            for half in gl.static_range(2):
                at = scheduler.tile_coordinates(b, h // group_size, t, 64 * half, end, params)
                pipeline.async_load(K, at, bar, shared.k.index(2 * s + half))
                pipeline.async_load(Q, at, bar, shared.q.index(2 * s + half))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, STAGES)


@gluon.constexpr_function
def partial_layout():
    """Return the layout of half of a tile of dr in memory, (64, 64), with its steps as rows.

    Each thread holds the elements that it holds of accumulators (64, 64), with their columns as steps.
    """
    registers = [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [64, 64]
    )


@gluon.jit
def partial_pointers(dr, t, work_tile, params, ids, config):
    """Return pointers (L, 64) to the consumer's part of dr of the tile at step `t`, and which steps exist, (L, 1).

    Rows are steps. Of each 16 numbers of a row those that a thread holds are next to each other, the first and the
    ninth, the second and the tenth, and so on: a warp then moves whole sectors.
    """
    L: gl.constexpr = config.L
    layout: gl.constexpr = partial_layout()
    step = gl.arange(0, L, gl.SliceLayout(1, layout))
    of_row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    H = scheduler.rematerialize(params.H)  # the offsets of all steps would be kept
    token = work_tile.b.to(gl.int64) * params.T + work_tile.start + t
    first = dr + (token * H + work_tile.h) * ROWS + ids.column
    inside = gl.expand_dims(step < work_tile.steps - t, 1)
    return first + (gl.expand_dims(step * (H * ROWS), 1) + of_row), inside


@gluon.jit
def store_partial(x, dr, t, work_tile, params, ids, config):
    """Store accumulators (64, L), 64 rows of dr^T of the tile at step `t`, step (9)."""
    pointers, inside = partial_pointers(dr, t, work_tile, params, ids, config)
    x = gl.permute(gl.reshape(x.to(dr.dtype.element_ty), [4, 2, 8, config.L]), (3, 0, 2, 1))
    gl.store(pointers, gl.convert_layout(gl.reshape(x, [config.L, 64]), partial_layout(), assert_trivial=True), inside)


@gluon.jit
def load_partial(dr, t, work_tile, params, ids, config):
    """Return what `store_partial` has stored, in dr's dtype, (64, L), and 0 after the last step of a work tile."""
    pointers, inside = partial_pointers(dr, t, work_tile, params, ids, config)
    x = gl.permute(gl.reshape(gl.load(pointers, inside, 0.0), [config.L, 4, 8, 2]), (1, 3, 2, 0))
    return gl.convert_layout(gl.reshape(x, [64, config.L]), mma.accumulator_layout(config.L), assert_trivial=True)


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Start do E^T and dv E^T of the tile in stage s for one half of the columns, (L, L / 2), step (10)."""
    L: gl.constexpr = config.L
    e = shared.e.index(s).reshape([L, COLUMNS]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return (
        mma.issue_mma(shared.do.index(s).reshape([L, COLUMNS]), e),
        mma.issue_mma(shared.dv.index(s).reshape([L, COLUMNS]), e),
    )


@gluon.jit
def issue_key_products(x, k, s, half: gl.constexpr, config):
    """Start x k^T of the tile in stage s for one half of the columns, (L, L / 2), where x is q or k, step (11)."""
    L: gl.constexpr = config.L
    first = k.index(2 * s).reshape([L, 64]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    second = k.index(2 * s + 1).reshape([L, 64]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    product = mma.issue_mma(x.index(2 * s).reshape([L, 64]), first)
    return warpgroup_mma(x.index(2 * s + 1).reshape([L, 64]), second, product, is_async=True)


@gluon.jit
def load_weights(shared, s, half: gl.constexpr, config):
    """Return D B of the tile in stage s for one half of the columns, (L, L / 2), unmasked."""
    L: gl.constexpr = config.L
    D = delta_tiles.load_decays(shared, s, half, config)
    write = shared.g.index(s).slice(WRITE * L + half * (L // 2), L // 2, 0)
    return D * gl.expand_dims(write.load(gl.SliceLayout(0, D.type.layout)), 0)


@gluon.jit
def store_pairs(W, sums, half: gl.constexpr, L: gl.constexpr):
    """Store the sums of the rows of half of W, (L, L / 2), and, for each warp, of its columns, step (11)."""
    sums.slice((READ_PARTS + half) * L, L, 0).store(gl.sum(W, 1))
    of_warps = gl.reshape(gl.sum(gl.reshape(W, [4, 16, L // 2]), 1), [2 * L])
    sums.slice((READ_PARTS + ROW_PARTS + 2 * half) * L, 2 * L, 0).store(of_warps)


@gluon.jit
def store_scores(S_q, S_k, QK, KK, n, s, ids, gmem, shared, half: gl.constexpr, config):
    """Store the consumer's half of S_q and S_k of tile n, and what step (11) leaves, and tell the other consumer.

    Args:
        S_q, S_k: do E^T and dv E^T, (L, L / 2).
        QK, KK: q k^T and k k^T, (L, L / 2), which are read with gates in a scan with time.
        n: Number of the tile.
        s: Its stage.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        half: Which half of the columns, and which consumer.
        config: Constants.
    """
    L: gl.constexpr = config.L
    weights = load_weights(shared, s, half, config)
    S_q = mma.apply_causal_mask(S_q, weights * gmem.scale, ids.i, ids.j, half, False, True)
    S_k = mma.apply_causal_mask(S_k, -weights, ids.i, ids.j, half, False, True)
    if config.GATED and not config.REVERSE:
        store_pairs(S_q * QK + S_k * KK, shared.sums.index(s), half, L)
    to = n % 2
    if not config.REVERSE:
        S_q, low = mma.split_in_two(S_q, shared.p.dtype)
        shared.p.index(LOW + to).slice(half * (L // 2), L // 2, 1).store(low)
    shared.p.index(OF_QUERIES + to).slice(half * (L // 2), L // 2, 1).store(S_q.to(shared.p.dtype))
    shared.p.index(OF_KEYS + to).slice(half * (L // 2), L // 2, 1).store(S_k.to(shared.p.dtype))
    fence_async_shared()  # MMAs read them through the asynchronous proxy
    pipeline.barrier()  # all warps of this consumer have stored
    mbarrier.arrive(shared.ready.index(to), count=1)


@gluon.jit
def prepare_tile(C, U, U_low, V, V_low, pipe_state, ids, gmem, shared, half: gl.constexpr, config):
    """Wait for the next tile and compute the consumer's half of its S_q and S_k, steps (10) and (11).

    The update of the state C still runs and reads U and U_low, against time also V and V_low.

    Returns:
        C, and the position of the next tile.
    """
    n = pipe_state.count + 1
    s, phase = pipeline.advance(pipe_state.index, pipe_state.phase, STAGES)
    mbarrier.wait(shared.full.index(s), phase)
    S_q, S_k = issue_scores(shared, s, half, config)
    QK, KK = S_q, S_k
    if config.REVERSE:
        S_q, S_k, C, U, U_low, V, V_low = warpgroup_mma_wait(0, deps=[S_q, S_k, C, U, U_low, V, V_low])
    elif config.GATED:
        QK = issue_key_products(shared.q, shared.k, s, half, config)
        KK = issue_key_products(shared.k, shared.k, s, half, config)
        S_q, S_k, QK, KK, C, U, U_low = warpgroup_mma_wait(0, deps=[S_q, S_k, QK, KK, C, U, U_low])
    else:
        S_q, S_k, C, U, U_low = warpgroup_mma_wait(0, deps=[S_q, S_k, C, U, U_low])
    store_scores(S_q, S_k, QK, KK, n, s, ids, gmem, shared, half, config)
    return C, pipeline.PipelineState(s, phase, n)


@gluon.jit
def prepare_first_tile(ids, gmem, shared, half: gl.constexpr, config):
    """Do steps (10) and (11) of the first tile, which no earlier tile has done."""
    mbarrier.wait(shared.full.index(0), 0)
    S_q, S_k = issue_scores(shared, 0, half, config)
    QK, KK = S_q, S_k
    if config.GATED and not config.REVERSE:
        QK = issue_key_products(shared.q, shared.k, 0, half, config)
        KK = issue_key_products(shared.k, shared.k, 0, half, config)
        S_q, S_k, QK, KK = warpgroup_mma_wait(0, deps=[S_q, S_k, QK, KK])
    else:
        S_q, S_k = warpgroup_mma_wait(0, deps=[S_q, S_k])
    store_scores(S_q, S_k, QK, KK, 0, 0, ids, gmem, shared, half, config)


@gluon.jit
def release_previous(pipe_state, shared):
    """Wait until the output of the previous tile has left, and release its stage, step (2)."""
    previous = (pipe_state.index + STAGES - 1) % STAGES
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index(previous), count=1, pred=pipe_state.count > 0)


@gluon.jit
def store_output(x, to, t, work_tile, ids, gmem, params):
    """Store dq^T or dk^T, (64, L), over q in shared memory `to`, and start its way to memory, step (8)."""
    to.reshape([x.shape[1], 64]).permute((1, 0)).store(x.to(to.dtype))
    fence_async_shared()
    end = work_tile.start + work_tile.steps
    at = scheduler.tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, ids.column, end, params)
    pipeline.async_store(gmem.out, at, to)


@gluon.jit
def process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile of a scan with time: everything from step (1) to (11) of the module's docstring.

    Args:
        C: The state before the tile, (64, COLUMNS).
        pipe_state: Position of the tile in the ring. Its stage is full, and the consumer has waited for that.
        t: Its first step in the work tile.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The state after the tile, and the position of the next tile.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.p.dtype
    s, _phase, n = pipe_state
    g = shared.g.index(s)
    q = shared.q.index(2 * s + half)
    # (1) dq^T <- (C do^T) * (scale a), dr^T <- -(C dv^T) * a
    A = mma.to_left_operand(C.to(dtype), L)
    Q = mma.issue_mma(A, shared.do.index(s).reshape([L, COLUMNS]).permute((1, 0)))
    R = mma.issue_mma(A, shared.dv.index(s).reshape([L, COLUMNS]).permute((1, 0)))
    # (2) dq of the previous tile has left: its stage is empty.
    release_previous(pipe_state, shared)
    Q, R, A = warpgroup_mma_wait(0, deps=[Q, R, A])
    weights = delta_tiles.load_vector(g, READ_WEIGHT, L, of_out)  # (1, L)
    Q *= weights * gmem.scale
    R *= -weights
    k_t = shared.k.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    if config.GATED:
        # (3) q . dq + k . dr, summed over the consumer's rows
        q_t = q.reshape([L, 64]).permute((1, 0)).load(of_out)
        reads = Q * q_t.to(gl.float32) + R * k_t.to(gl.float32)
        mma.store_partial_sums(reads, shared.sums.index(s), half, L)
    # (4) Both consumers have stored their halves of S_q and S_k.
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    # (5) dq^T <- dq^T + k^T S_q^T, dr^T <- dr^T + k^T S_k^T
    B = mma.to_left_operand(k_t, L)
    Q = warpgroup_mma(B, shared.p.index(OF_QUERIES + n % 2).permute((1, 0)), Q, is_async=True)
    Q = warpgroup_mma(B, shared.p.index(LOW + n % 2).permute((1, 0)), Q, is_async=True)
    R = warpgroup_mma(B, shared.p.index(OF_KEYS + n % 2).permute((1, 0)), R, is_async=True)
    # (6) C <- g C + (k * (w beta))^T E
    e = shared.e.index(s).reshape([L, COLUMNS])
    update = k_t.to(gl.float32) * delta_tiles.load_vector(g, UPDATE_WEIGHT, L, of_out)
    U, U_low = mma.split_left_operand(update, COLUMNS, dtype)
    C = warpgroup_mma(U, e, C * delta_tiles.load_tile_decay(g, L), is_async=True)
    C = warpgroup_mma(U_low, e, C, is_async=True)
    Q, R, B = warpgroup_mma_wait(2, deps=[Q, R, B])  # (6) still runs
    # (7) What queries read of their own steps' writes.
    Q += k_t.to(gl.float32) * delta_tiles.load_vector(g, SAME_STEP, L, of_out)
    # (8) dq, over q and on its way to memory
    store_output(Q, q, t, work_tile, ids, gmem, params)
    # (9) dr
    store_partial(R, gmem.dr, t, work_tile, params, ids, config)
    return prepare_tile(C, U, U_low, U, U_low, pipe_state, ids, gmem, shared, half, config)


@gluon.jit
def process_tile_back(C, pipe_state, t, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile of a scan against time, like `process_tile`; C is the cotangent of the state after the tile."""
    s, _phase, n = pipe_state
    dtype: gl.constexpr = shared.p.dtype
    L: gl.constexpr = config.L
    # (1) dk^T <- (dC E^T) * (w beta)
    A = mma.to_left_operand(C.to(dtype), L)
    K = mma.issue_mma(A, shared.e.index(s).reshape([L, COLUMNS]).permute((1, 0)))
    g = shared.g.index(s)
    of_out: gl.constexpr = mma.accumulator_layout(L)
    # (2) dk of the previous tile has left: its stage is empty.
    release_previous(pipe_state, shared)
    dr = load_partial(gmem.dr, t, work_tile, params, ids, config)  # (64, L), early, so that (7) need not wait for it
    K, A = warpgroup_mma_wait(0, deps=[K, A])
    K *= delta_tiles.load_vector(g, UPDATE_WEIGHT, L, of_out) * delta_tiles.load_vector(g, WRITE, L, of_out)
    k_t = shared.k.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    if config.GATED:
        # (3) k . dk, summed over the consumer's rows
        mma.store_partial_sums(K * k_t.to(gl.float32), shared.sums.index(s), half, L)
    # (4) Both consumers have stored their halves of S_q and S_k.
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    # (5) dk^T <- dk^T + q^T S_q + k^T S_k
    q = shared.q.index(2 * s + half)
    q_t = q.reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    A = mma.to_left_operand(q_t, L)
    B = mma.to_left_operand(k_t, L)
    K = warpgroup_mma(A, shared.p.index(OF_QUERIES + n % 2), K, is_async=True)
    K = warpgroup_mma(B, shared.p.index(OF_KEYS + n % 2), K, is_async=True)
    # (6) dC <- g dC + (q * (scale a))^T do, the first half
    do = shared.do.index(s).reshape([L, COLUMNS])
    dv = shared.dv.index(s).reshape([L, COLUMNS])
    read = q_t.to(gl.float32) * (delta_tiles.load_vector(g, READ_WEIGHT, L, of_out) * gmem.scale)
    U, U_low = mma.split_left_operand(read, COLUMNS, dtype)
    C = warpgroup_mma(U, do, C * delta_tiles.load_tile_decay(g, L), is_async=True)
    C = warpgroup_mma(U_low, do, C, is_async=True)
    K, A, B = warpgroup_mma_wait(2, deps=[K, A, B])  # (6) still runs
    # (7) What queries read of their own steps' writes, and dr.
    q_t = q.reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L), again: no registers are left to keep it
    K += q_t.to(gl.float32) * delta_tiles.load_vector(g, SAME_STEP, L, of_out) + dr.to(gl.float32)
    # (8) dk, over q and on its way to memory
    store_output(K, q, t, work_tile, ids, gmem, params)
    # (6) dC <- dC - (k * a)^T dv, the other half
    k_t = shared.k.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(of_out)  # again, (64, L)
    read = k_t.to(gl.float32) * -delta_tiles.load_vector(g, READ_WEIGHT, L, of_out)
    V, V_low = mma.split_left_operand(read, COLUMNS, dtype)
    C = warpgroup_mma(V, dv, C, is_async=True)
    C = warpgroup_mma(V_low, dv, C, is_async=True)
    return prepare_tile(C, U, U_low, V, V_low, pipe_state, ids, gmem, shared, half, config)


@gluon.jit
def at_checkpoint(C, t, work_tile, ids, gmem, params, half: gl.constexpr, config):
    """Store the state or its inner product with the checkpoint, step (12), where step `t` of a work tile is at one."""
    step = t if config.REVERSE else t + config.L
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps and step > 0:
        first = (work_tile.b.to(gl.int64) * params.T + work_tile.start) // config.CHECKPOINT_STEPS - 1
        checkpoint = (first + step // config.CHECKPOINT_STEPS) * params.H + work_tile.h
        if config.REVERSE:
            layout: gl.constexpr = mma.accumulator_layout(COLUMNS)
            dot = checkpoint_dots(C, gmem.checkpoints, checkpoint, ids.column, 0, ROWS, COLUMNS, layout)
            warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
            gl.store(gmem.dots + checkpoint * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)
        else:
            store_checkpoint(C, gmem.checkpoints, checkpoint, ids.column, 0, ROWS, COLUMNS)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    ids = delta_tiles.fragment_ids(half, config)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    prepare_first_tile(ids, gmem, shared, half, config)
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False, True)
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps, tiles=(steps + L - 1) // L)
        C = delta_tiles.load_state(index, ids, gmem, params, config)
        for i in range(0, work_tile.tiles):
            if config.REVERSE:
                t = (work_tile.tiles - 1 - i) * L
                C, pipe_state = process_tile_back(
                    C, pipe_state, t, work_tile, ids, gmem, shared, params, half, config
                )  # fmt: skip
            else:
                t = i * L
                C, pipe_state = process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half, config)
            if config.GATED:
                at_checkpoint(C, t, work_tile, ids, gmem, params, half, config)
        delta_tiles.store_state(C, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    # The store warp waits for the last tile, too.
    if config.GATED:
        mbarrier.arrive(shared.empty.index((pipe_state.index + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=delta_tiles.RUNTIME_SCALARS)
def delta_dq_dk_kernel(
    Q, K, E, DO, DV_in, Out, dr, do_e, sums, pairs, checkpoints, dots, gates, beta, state_in, state_out, schedule, T,
    tiles_per_head, H, group_size, num_work_tiles, stride_b, stride_t, stride_h, scale,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, GATED: gl.constexpr,
    REVERSE: gl.constexpr, IS_VARLEN: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
):  # fmt: skip
    """Compute dq and dr, or with REVERSE dk.

    Tensors that the constants say are not used may be any.

    Args:
        Q, K: TMA descriptors of the queries and keys, in tiles (L, 64).
        E: TMA descriptor of the prediction errors, in tiles (L, COLUMNS).
        DO, DV_in: TMA descriptors of the cotangent of h and of dv, in tiles like those of E.
        Out: TMA descriptor of the result, in tiles (L, 64).
        dr: The gradient of keys as readers, (B, T, H, ROWS), in the order of `partial_pointers`; an output, or with
            REVERSE an input.
        do_e: do . E, (B, T, H), float32.
        sums: Output for what the steps read of earlier tiles, (H, tiles, L), with GATED and without REVERSE.
        pairs: Output for sums of pairs, (H, tiles, PAIR_SUMS, L), with GATED: ROW_SUM and COLUMN_SUM, or with REVERSE
            OTHER_TILES.
        checkpoints: C at checkpoints, (checkpoints, H, ROWS, COLUMNS), with GATED; an output, or with REVERSE an input.
        dots: Output for parts of <C, dC> there, (checkpoints, H, 8), with GATED and REVERSE.
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
        state_in: Initial states or cotangents of final ones, (sequences, H, dqk, dhv), with USE_INITIAL_STATE.
        state_out: Output for the states after the scan, (sequences, H, dqk, dhv), with STORE_FINAL_STATE.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        num_work_tiles: Sequences times H.
        stride_b, stride_t, stride_h: Strides of beta.
        scale: The factor of the queries.
    """
    partitions(
        (Q, K, E, DO, DV_in),
        delta_tiles.WriteSource(
            vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
            tiles_per_head=tiles_per_head, do_e=do_e, scale=scale,
        ),
        sums, pairs, group_size,
        GlobalPointers(
            out=Out, dr=dr, state_in=state_in, state_out=state_out, checkpoints=checkpoints, dots=dots, scale=scale
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=REVERSE, SAVE=False, USE_INITIAL_STATE=USE_INITIAL_STATE,
            STORE_FINAL_STATE=STORE_FINAL_STATE, BY_KEYS=True, CHECKPOINT_STEPS=CHECKPOINT_STEPS,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, sums, pairs, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers, load, gate and store warp."""
    Q, K, E, DO, DV = tensors
    L: gl.constexpr = config.L
    RESULT: gl.constexpr = SUMS_OF_READERS if config.GATED else NO_RESULT
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(RESULT), 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, 2 * STAGES),
        k=pipeline.allocate_tiles(K, 2 * STAGES),
        e=pipeline.allocate_tiles(E, STAGES),
        do=pipeline.allocate_tiles(DO, STAGES),
        dv=pipeline.allocate_tiles(DV, STAGES),
        g=pipeline.allocate_vectors(gl.float32, STAGES, NUM_VECTORS * L),
        sums=pipeline.allocate_vectors(gl.float32, STAGES, PARTS * L),
        full=full,
        empty=empty,
        p=pipeline.allocate_operands(Q.dtype, 4 if config.REVERSE else 6, L, L),
        ready=pipeline.allocate_barriers(2, 2),
    )
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=False, RESULT=RESULT
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (Q, K, E, DO, DV, shared, params, group_size, config)),
            (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, 0, config)),
            (store_warp.run_store_warp, (
                shared.sums, sums, pairs, full, empty, params, source.tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class Sums(NamedTuple):
    """The tensors that both scans leave for the gradient of gates; without gates any tensors."""

    reads: Tensor  # what steps read of earlier tiles, (1, H, tiles, 1, L)
    pairs: Tensor  # sums of pairs of steps, (1, H, tiles, PAIR_SUMS, L)
    checkpoints: Tensor  # of C, (checkpoints, H, ROWS, COLUMNS)
    dots: Tensor  # parts of <C, dC> there, (checkpoints * H, 8)


def launch(
    ctx: "DeltaContext", gates: Tensor, E: Tensor, dh: Tensor, dv: Tensor, do_e: Tensor, out: Tensor, dr: Tensor,
    sums: Sums, *, reverse: bool, initial: Tensor | None, final: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute dq and dr, or with `reverse` dk.

    Args:
        ctx: The context of the call, with the schedule of packed sequences.
        gates: The gate vectors, or any tensor where there are no gates.
        E: The prediction errors, (B, T, H, dhv).
        dh: The cotangent of h, (B, T, H, dhv).
        dv: The gradient of v, (B, T, H, dhv).
        do_e: do . E, (B, T, H) float32.
        out: Output, dq or dk, (B, T, H, dqk). dk may have the memory of dr where dqk is ROWS.
        dr: The gradient of keys as readers, (B, T, H, ROWS), which a launch without `reverse` writes.
        sums: What both scans leave for the gradient of gates.
        reverse: Whether the scan goes against time.
        initial: Initial states, or with `reverse` cotangents of final ones, (N, H, dqk, dhv), or None for zeros.
        final: Output for the states after the scan, (N, H, dqk, dhv), or None.
    """
    base, x = ctx.base, ctx.x
    columns = COLUMNS.value
    base.launch(delta_dq_dk_kernel, host.grid(base, 1),
        host.descriptor(base, x.q, 64), host.descriptor(base, x.k, 64), host.descriptor(base, E, columns),
        host.descriptor(base, dh, columns), host.descriptor(base, dv, columns), host.descriptor(base, out, 64), dr,
        do_e, *sums, gates, ctx.beta, gates if initial is None else initial, gates if final is None else final,
        base.schedule, *delta_tiles.kernel_scalars(ctx),
        DK=base.K, DV=base.V, L=base.L, CHECKPOINT_STEPS=base.checkpoint_steps, GATED=ctx.gated, REVERSE=reverse,
        IS_VARLEN=base.packed, USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None, num_warps=4,
    )  # fmt: skip
