"""dv of the delta rule, and what writing adds to dk: a fused scan against time of 128 columns of the values.

A program computes 128 columns of the state of one head. Two consumers hold 64 of them each, of the transposed
cotangent dC^T, (dhv, dqk), in registers. The equations are (R1), (R5), (R6) and (R8) of
`tfla.backends.triton.delta_kernels`, where the read key is k. L is the number of steps of a tile. Of the vectors of a
tile, a is the decay from its start to each step, w the decay from each step to its end, and g is its whole decay. D is
the gate matrix, and X the matrix of (R1). dC is on chip, and q, k, do and E are read for dv: with them the scan
computes the part of dk that comes from writing, which it stores for the scans with time:

    dk_w = B ((E dC) w + S_q^T q + S_k^T k)

S_q = scale (do E^T) * D is lower triangular, with its diagonal, which is what queries read of their own step, and S_k =
-(dv E^T) * D strictly lower triangular. Both consumers compute all of S_q^T and S_k^T, which are left operands from
registers, and 64 columns of dk_w each. dC, rounded, goes through shared memory, where it is a right operand.

The steps of a tile n (`process_tile`), against time; P is that of tile n, computed during tile n - 1:

    (1)   R^T <- dC^T k^T                               (64, L) = (64, dqk) (dqk, L)
    (2)   dC^T, rounded, to shared memory
    (3)   wait for both blocks of dC and both halves of P
    (4)   checkpoint                                    dC, from shared memory
    (5)   dU^T <- do^T P                                (64, L) = (64, L) (L, L), beside (1)
    (6)   dU^T <- dU^T + R^T * w                        (64, L), (R5)
    (7)   Z^T <- dU^T - (dU^T * beta) X                 (64, L) = (64, L) (L, L), (R5), in float16
    (8)   dC^T <- g dC^T + (do^T * (scale a)) q         (64, dqk) = (64, L) (L, dqk), half of (R6), beside (7)
    (9)   dC^T <- dC^T - (dv^T * a) k                   (64, dqk) = (64, L) (L, dqk), the other half
    (10)  Z . E, summed over 64 columns                 (L), for the store warp: dbeta
    (11)  dv^T = Z^T * beta                             to shared memory, and from there to global memory
    (12)  S_q^T <- E do^T, S_k^T <- E dv^T              (L, L) = (L, dhv) (dhv, L); the diagonal of the first is do . E
    (13)  dk <- E dC                                    (L, 64) = (L, dhv) (dhv, 64), (R8), while (12) is rounded
    (14)  dk <- dk * w, and k . dk over 64 columns      (L), for the store warp: reads by later tiles
    (15)  dk <- dk + S_q^T q + S_k^T k                  (L, 64) = (L, L) (L, 64)
    (16)  S <- q k^T of tile n + 1                      (L, L / 2), one half of the columns for each consumer
    (17)  the stage of tile n is empty
    (18)  dk_w = dk * beta                              from registers to global memory; later blocks add to it
    (19)  P <- S * D * scale of tile n + 1, masked      (L, L / 2), to shared memory, (R1) times scale

The left operand of (8) is split into a sum of two 16-bit numbers, and that of (9) is made of dv as it is stored: what
gates read of this scan and of the one with time then differs by less than what rounding inputs costs.

With NORMALIZED q and k are divided by their norms, and dk_w is r times the gradient of the normalized keys, r = 1 / |k|
and r_q = 1 / |q|. These are factors of weights: r of w, r_q of a in (8) and r of a in (9). P_ij and S_q,ij have the
factor r_q of the query i and r of the key j, and S_k,ij has r of both keys.

Accumulators and operands of (13) live only from there on, so that at no time more than 176 registers hold data. The
rest must hold what a loop keeps. So addresses and descriptors that are the same in every tile are computed again.

Heads with dhv above 128 have a launch for each BLOCK of 128 columns. All results but dv and the states are sums over
the columns of dhv: the second launch adds its dk_w to that of the first, and the caller adds up the rest.

The ring has two stages of 72 KiB: q, k, do and E, 16 KiB each, and X. Arrows lead from the partition that arrives at a
barrier to the one that waits for it:

    load, gate and store warp --full[n % 2]--> consumers 0 and 1 --empty[n % 2]--> load, gate and store warp
    consumer 0 <--ready (dC and P of tile n), ready_dv (dv of tile n), left (dC of tile n has been read)--> consumer 1

`ready_dv` also says that the other consumer has read P, and `ready` that it has read dv of the previous tile.
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

from tfla.backends.gpu.config import ceil_div
from tfla.backends.hopper import delta_dk_w, delta_tiles, host, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.checkpoints import store_checkpoint
from tfla.backends.hopper.delta_tiles import (
    COLUMNS,
    KEY_NORM,
    QUERY_NORM,
    ROWS,
    UPDATE_WEIGHT,
    WRITE,
    Config,
    WorkTile,
)
from tfla.backends.hopper.pipeline import COLUMN_EXPONENT, CONSUMER_REGISTERS, PRODUCER_REGISTERS, ROW_EXPONENT
from tfla.backends.hopper.store_warp import DOT_PARTS, DOTS_AND_WRITES, WRITE_PARTS

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(2)  # stages of the ring, 72 KiB of tiles each
PARTS = gl.constexpr(16)  # parts of the sums of a stage, see `store_warp.py`; a power of two, eleven are used


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    dv: Any  # TMA descriptor
    dk_w: Any  # (B, T, H, ROWS), in the order of `delta_dk_w.py`
    state_in: Any  # dC after the last step of each sequence, (sequences, H, dqk, dhv)
    state_out: Any  # dC before the first step of each sequence, (sequences, H, dqk, dhv)
    checkpoints: Any  # dC at checkpoints, (checkpoints, H, ROWS, dhv), in the order of `checkpoints.py`
    scale: Any  # the factor of the queries


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    q: Any  # (STAGES, L, dqk)
    k: Any  # (STAGES, L, dqk)
    do: Any  # (2 STAGES, L, 64): one tile for each consumer
    e: Any  # (2 STAGES, L, 64)
    x: Any  # X, (STAGES, L, L)
    g: Any  # the vectors of each tile, (STAGES, `delta_tiles.count_vectors` L)
    sums: Any  # for the store warp, (STAGES, PARTS L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # What consumers exchange:
    c: Any  # dC^T before the tile in the direction of the scan, rounded, (2, 64, dqk): one block for each consumer
    p: Any  # P, (1, L, L)
    ready: Any  # barrier: both blocks of c and both halves of P are stored
    dv: Any  # dv, on its way to memory, (2, L, 64): one tile for each consumer
    ready_dv: Any  # barrier: both tiles of dv are stored
    left: Any  # barrier: both consumers have read c


@gluon.jit
def run_load_warp(tensors, shared, params, group_size, config):
    """Load the tiles of q, k, do, E and X to shared memory by TMA.

    Args:
        tensors: TMA descriptors of q and k, in tiles (L, ROWS), of do and E, in tiles (L, 64), two a program, and of X,
            in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    Q, K, DO, E, X = tensors
    L: gl.constexpr = config.L
    values: gl.constexpr = 2 * DO.block_type.nbytes + 2 * E.block_type.nbytes
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, Q.block_type.nbytes + K.block_type.nbytes + X.block_type.nbytes + values)
            at = scheduler.tile_coordinates(b, h // group_size, t, 0, end, params)
            pipeline.async_load(K, at, bar, shared.k.index(s))
            pipeline.async_load(Q, at, bar, shared.q.index(s))
            for half in gl.static_range(2):
                at = scheduler.tile_coordinates(b, h, t, config.BLOCK * COLUMNS + 64 * half, end, params)
                pipeline.async_load(DO, at, bar, shared.do.index(2 * s + half))
                pipeline.async_load(E, at, bar, shared.e.index(2 * s + half))
            pipeline.async_load(X, scheduler.tile_coordinates(b, h, t, 0, end, params), bar, shared.x.index(s))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, STAGES)


@gluon.jit
def load_row_weights(g, WHICH: gl.constexpr, L: gl.constexpr):
    """Return a vector of a tile as weights of the rows of accumulators (L, 64), (L, 1)."""
    return gl.expand_dims(g.slice(WHICH * L, L, 0).load(gl.SliceLayout(1, mma.accumulator_layout(64))), 1)


@gluon.jit
def load_transposed_decays(g, config):
    """Return D^T of a tile, (L, L), unmasked."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(L)
    if config.GATED:
        column = g.slice(ROW_EXPONENT * L, L, 0).load(gl.SliceLayout(0, layout))  # (L)
        row = g.slice(COLUMN_EXPONENT * L, L, 0).load(gl.SliceLayout(1, layout))  # (L)
        return gl.exp2(gl.expand_dims(row, 1) + gl.expand_dims(column, 0))
    else:
        return gl.zeros([L, L], gl.float32, layout) + 1.0


@gluon.jit
def with_norms(weights, g, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, config):
    """Return weights of pairs, (L, L), times 1 / |q| or 1 / |k| of their rows and of their columns, with NORMALIZED."""
    if config.NORMALIZED:
        layout: gl.constexpr = weights.type.layout
        weights *= delta_tiles.load_row_norms(g, OF_ROWS, config.L, layout)
        weights *= delta_tiles.load_vector(g, OF_COLUMNS, config.L, layout)
    return weights


@gluon.jit
def load_score_weights(gmem, shared, s, half: gl.constexpr, config):
    """Return D times scale, and r_q and r, of the tile in stage s for half of the columns, (L, L / 2), unmasked."""
    L: gl.constexpr = config.L
    weights = delta_tiles.load_scaled_decays(gmem, shared, s, half, config)
    if config.NORMALIZED:
        layout: gl.constexpr = weights.type.layout
        g = shared.g.index(s)
        of_keys = g.slice(KEY_NORM * L + half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, layout))
        weights *= delta_tiles.load_row_norms(g, QUERY_NORM, L, layout) * gl.expand_dims(of_keys, 0)
    return weights


@gluon.jit
def issue_pairs(e0, e1, y0, y1):
    """Start E y^T, (L, L) = (L, dhv) (dhv, L), from both halves of the columns of E and y, (L, 64) each."""
    product = mma.issue_mma(e0, y0.permute((1, 0)))
    return warpgroup_mma(e1, y1.permute((1, 0)), product, is_async=True)


@gluon.jit
def store_scores(S, weights, ids, shared, half: gl.constexpr, config):
    """Store the consumer's half of P, which is S times `weights`, masked, step (19)."""
    L: gl.constexpr = config.L
    P = mma.apply_causal_mask(S, weights, ids.i, ids.j, half, False)
    shared.p.index(0).slice(half * (L // 2), L // 2, 1).store(P.to(shared.p.dtype))


@gluon.jit
def store_state_checkpoint(t, work_tile, gmem, shared, params, half: gl.constexpr, config):
    """Store 64 rows of dC after the tile at step `t`, from shared memory, where this is a checkpoint, step (4)."""
    step = t + config.L
    DY: gl.constexpr = (config.DV + COLUMNS - 1) // COLUMNS * COLUMNS
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps:
        at = delta_tiles.checkpoint_index(step, work_tile, params, config)
        for block in gl.static_range(2):
            of_block = shared.c.index(block).slice(half * 64, 64, 1).permute((1, 0))
            x = of_block.load(mma.accumulator_layout(64))  # (64, 64) of dC
            store_checkpoint(x, gmem.checkpoints, at, half * 64, config.BLOCK * COLUMNS + block * 64, ROWS, DY)


@gluon.jit
def process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (19) of the module's docstring.

    Args:
        C: The cotangent of the state after the tile, transposed, (64, ROWS).
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
        The cotangent of the state before the tile, and the position of the next tile.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.p.dtype
    s, phase, n = pipe_state
    q = shared.q.index(s).reshape([L, ROWS])
    k = shared.k.index(s).reshape([L, ROWS])
    my_k = k.slice(half * 64, 64, 1)  # (L, 64)
    g = shared.g.index(s)
    e0 = shared.e.index(2 * s).reshape([L, 64])
    e1 = shared.e.index(2 * s + 1).reshape([L, 64])
    sums = shared.sums.index(s)
    # 0, which the compiler cannot assume: it would keep addresses and descriptors that no stage changes, and spill them
    at0 = scheduler.rematerialize(n * 0)
    # (1) R^T <- dC^T k^T
    A = mma.to_left_operand(C.to(dtype), L)
    R = mma.issue_mma(A, k.permute((1, 0)))
    # (2) dC to shared memory. The fence after it also serves the stores of P, which the previous tile ended with.
    mbarrier.wait(shared.left, (n & 1) ^ 1)
    shared.c.index(at0 + half).store(C.to(dtype))
    fence_async_shared()
    tma.store_wait(0)  # dv of the previous tile has left
    pipeline.barrier()
    mbarrier.arrive(shared.ready, count=1)
    # (3) Both halves of dC and of P are there.
    do = shared.do.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    B = mma.to_left_operand(do, L)
    mbarrier.wait(shared.ready, n & 1)
    # (5) dU^T <- do^T P
    U = mma.issue_mma(B, shared.p.index(at0))
    # (4) Checkpoint
    if config.GATED:
        store_state_checkpoint(t, work_tile, gmem, shared, params, half, config)
    R, A, U, B = warpgroup_mma_wait(0, deps=[R, A, U, B])
    # (6) dU^T <- dU^T + R^T * w
    U += R * delta_tiles.load_vector(g, UPDATE_WEIGHT, L, of_out)
    # (7) Z^T <- dU^T - (dU^T * beta) X
    x = shared.x.index(s).reshape([L, L])
    Z, B, up = delta_tiles.issue_correction(U, delta_tiles.load_vector(g, WRITE, L, of_out), x, L)
    # (8) dC^T <- g dC^T + (do^T * (scale a)) q
    weights = delta_tiles.load_of_reads(g, True, L, of_out, config) * gmem.scale  # (1, L)
    D, D_low = mma.split_left_operand(do.to(gl.float32) * weights, ROWS, dtype)
    C = warpgroup_mma(D, q, C * delta_tiles.load_tile_decay(g, L), is_async=True)
    C = warpgroup_mma(D_low, q, C, is_async=True)
    Z, B = warpgroup_mma_wait(2, deps=[Z, B])  # (8) still runs
    Z = Z * up
    # (9) dC^T <- dC^T - (dv^T * a) k, of dv as it is stored: its rounding cancels in what gates read of both scans
    dv = (Z * delta_tiles.load_vector(g, WRITE, L, of_out)).to(dtype)
    read = dv.to(gl.float32) * -delta_tiles.load_of_reads(g, False, L, of_out, config)
    V = mma.to_left_operand(read.to(dtype), ROWS)
    C = warpgroup_mma(V, k, C, is_async=True)
    # (10) Z . E
    my_e = e0 if half == 0 else e1
    mma.store_partial_dots(Z, my_e.permute((1, 0)), sums, half, L)
    # (11) dv, to the other consumer and on its way to memory
    shared.dv.index(at0 + half).reshape([L, 64]).permute((1, 0)).store(dv)
    fence_async_shared()
    pipeline.barrier()
    mbarrier.arrive(shared.ready_dv, count=1)
    pipeline.async_store(
        gmem.dv, delta_tiles.output_coordinates(t, work_tile, ids, params), shared.dv.index(at0 + half)
    )
    # (12) S_q^T <- E do^T, S_k^T <- E dv^T
    do0 = shared.do.index(2 * s).reshape([L, 64])
    do1 = shared.do.index(2 * s + 1).reshape([L, 64])
    S_q = issue_pairs(e0, e1, do0, do1)
    mbarrier.wait(shared.ready_dv, n & 1)
    C, D, D_low, V = warpgroup_mma_wait(2, deps=[C, D, D_low, V])
    S_k = issue_pairs(e0, e1, shared.dv.index(at0).reshape([L, 64]), shared.dv.index(at0 + 1).reshape([L, 64]))
    decays = load_transposed_decays(g, config)
    i = gl.arange(0, L, gl.SliceLayout(0, of_out))
    j = gl.arange(0, L, gl.SliceLayout(1, of_out))
    S_q = warpgroup_mma_wait(2, deps=[S_q])
    if half == 0:
        do_e = gl.sum(gl.where(gl.expand_dims(j, 1) == gl.expand_dims(i, 0), S_q, 0.0), 1)
        sums.slice((DOT_PARTS + WRITE_PARTS) * L, L, 0).store(do_e)
    weights = with_norms(decays * gmem.scale, g, KEY_NORM, QUERY_NORM, config)
    S_q = mma.apply_causal_mask(S_q, weights, j, i, 0, True)
    A = mma.to_left_operand(S_q.to(dtype), 64)
    # (13) dk <- E dC
    dk = mma.issue_mma(e0, shared.c.index(at0).slice(half * 64, 64, 1))
    dk = warpgroup_mma(e1, shared.c.index(at0 + 1).slice(half * 64, 64, 1), dk, is_async=True)
    S_k = warpgroup_mma_wait(2, deps=[S_k])
    S_k = mma.apply_causal_mask(S_k, with_norms(-decays, g, KEY_NORM, KEY_NORM, config), j, i, 0, True, True)
    B = mma.to_left_operand(S_k.to(dtype), 64)
    # (14) dk <- dk * w, and what later tiles read
    dk = warpgroup_mma_wait(0, deps=[dk])
    dk *= load_row_weights(g, UPDATE_WEIGHT, L)
    if config.GATED:
        writes = gl.sum(dk * my_k.load(mma.accumulator_layout(64)).to(gl.float32), 1)  # (L)
        writes *= g.slice(WRITE * L, L, 0).load(writes.type.layout)
        sums.slice((DOT_PARTS + half) * L, L, 0).store(writes)
    # (15) dk <- dk + S_q^T q + S_k^T k
    dk = warpgroup_mma(A, q.slice(half * 64, 64, 1), dk, is_async=True)
    dk = warpgroup_mma(B, my_k, dk, is_async=True)
    if config.BLOCK > 0:
        before = delta_dk_w.load(gmem.dk_w, t, half * 64, work_tile, params, config)
    # (16) S of the next tile
    write = load_row_weights(g, WRITE, L)
    following, phase = pipeline.advance(s, phase, STAGES)
    mbarrier.wait(shared.full.index(following), phase)
    S = delta_tiles.issue_scores(shared, following, half, config)
    # (17) No MMA reads this tile any more: its stage is empty, and dC may be overwritten.
    dk, A, B = warpgroup_mma_wait(1, deps=[dk, A, B])  # (16) still runs
    pipeline.barrier()
    mbarrier.arrive(shared.left, count=1)
    mbarrier.arrive(shared.empty.index(s), count=1)
    # (18) dk_w
    dk *= write
    if config.BLOCK > 0:
        dk += before.to(gl.float32)
    delta_dk_w.store(dk, gmem.dk_w, t, half * 64, work_tile, params, config)
    # (19) P of the next tile
    weights = load_score_weights(gmem, shared, following, half, config)  # (L, L / 2)
    S = warpgroup_mma_wait(0, deps=[S])
    store_scores(S, weights, ids, shared, half, config)
    return C, pipeline.PipelineState(following, phase, n + 1)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    ids = delta_tiles.fragment_ids(half, config, config.BLOCK * COLUMNS)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    # (16) and (19) of the first tile, which no earlier tile has done
    mbarrier.wait(shared.full.index(0), 0)
    S = warpgroup_mma_wait(0, deps=[delta_tiles.issue_scores(shared, 0, half, config)])
    weights = load_score_weights(gmem, shared, 0, half, config)
    store_scores(S, weights, ids, shared, half, config)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False, True)
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps)
        C = delta_tiles.load_state(index, ids, gmem, params, config)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = (tiles - 1 - i) * L
            C, pipe_state = process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half, config)
        delta_tiles.store_state(C, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=delta_tiles.RUNTIME_SCALARS)
def delta_dv_dk_kernel(
    Q, K, DO, E, X, DV_out, dk_w, dbeta, do_e, pairs, checkpoints, gates, beta, norms, query_norms, state_in, state_out,
    schedule, T, tiles_per_head, H, group_size, num_work_tiles, stride_b, stride_t, stride_h, scale,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, GATED: gl.constexpr,
    NORMALIZED: gl.constexpr, IS_VARLEN: gl.constexpr, USE_INITIAL_STATE: gl.constexpr,
    STORE_FINAL_STATE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Compute dv, dk_w, dbeta and do . E, and with STORE_FINAL_STATE the cotangents of the initial states.

    Tensors that the constants say are not used may be any.

    Args:
        Q, K: TMA descriptors of the queries and keys, in tiles (L, ROWS).
        DO: TMA descriptor of the cotangent of h, in tiles (L, 64).
        E: TMA descriptor of the prediction errors, in tiles like those of do.
        X: TMA descriptor of the result of `solve_kernel`, (B, T, H, L), in tiles (L, L).
        DV_out: TMA descriptor of dv, in tiles like those of do.
        dk_w: Output, the gradient of keys as writers, (B, T, H, ROWS), in the order of `delta_dk_w.py`; where BLOCK is
            not 0, it is added to what is there.
        dbeta, do_e: Outputs Z . E and do . E over the columns of each launch, (blocks, B, T, H), float32.
        pairs: Output for sums of pairs, (blocks, H, tiles, PAIR_SUMS, L), with GATED: OTHER_TILES.
        checkpoints: Output for dC at checkpoints, (checkpoints, H, ROWS, dhv up to a multiple of COLUMNS), with GATED.
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
        norms, query_norms: 1 / |k| and 1 / |q|, (B, T, H) float32, with NORMALIZED.
        state_in: Cotangents of the final states, (sequences, H, dqk, dhv), with USE_INITIAL_STATE.
        state_out: Cotangents of the initial states, (sequences, H, dqk, dhv), with STORE_FINAL_STATE.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        num_work_tiles: Sequences times H.
        stride_b, stride_t, stride_h: Strides of beta.
        scale: The factor of the queries.
        BLOCK: Which block of COLUMNS columns of dhv the launch computes.
    """
    partitions(
        (Q, K, DO, E, X),
        delta_tiles.WriteSource(
            vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
            tiles_per_head=tiles_per_head, key_norms=norms, query_norms=query_norms,
        ),
        (do_e, dbeta), pairs, group_size,
        GlobalPointers(
            dv=DV_out, dk_w=dk_w, state_in=state_in, state_out=state_out, checkpoints=checkpoints, scale=scale
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=True, SAVE=False, USE_INITIAL_STATE=USE_INITIAL_STATE,
            STORE_FINAL_STATE=STORE_FINAL_STATE, CHECKPOINT_STEPS=CHECKPOINT_STEPS, NORMALIZED=NORMALIZED,
            BLOCK=BLOCK,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, dots, pairs, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers and three single warps."""
    Q, K, DO, E, X = tensors
    L: gl.constexpr = config.L
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(DOTS_AND_WRITES), 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, STAGES),
        k=pipeline.allocate_tiles(K, STAGES),
        do=pipeline.allocate_tiles(DO, 2 * STAGES),
        e=pipeline.allocate_tiles(E, 2 * STAGES),
        x=pipeline.allocate_tiles(X, STAGES),
        g=pipeline.allocate_vectors(gl.float32, STAGES, delta_tiles.count_vectors(config.NORMALIZED) * L),
        sums=pipeline.allocate_vectors(gl.float32, STAGES, PARTS * L),
        full=full,
        empty=empty,
        c=pipeline.allocate_operands(Q.dtype, 2, 64, ROWS),
        p=pipeline.allocate_operands(Q.dtype, 1, L, L),
        ready=pipeline.allocate_barrier(2),
        dv=pipeline.allocate_tiles(gmem.dv, 2),
        ready_dv=pipeline.allocate_barrier(2),
        left=pipeline.allocate_barrier(2),
    )
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L,
        STAGES=STAGES,
        REVERSE=True,
        IS_SEGMENTED=False,
        RESULT=DOTS_AND_WRITES,
        GATED=config.GATED,
        BLOCK=config.BLOCK,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (tensors, shared, params, group_size, config)),
            (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, config)),
            (store_warp.run_store_warp, (
                shared.sums, dots, pairs, full, empty, params, source.tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch(
    ctx: "DeltaContext", gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, dk_w: Tensor, pairs: Tensor,
    checkpoints: Tensor, *, final: Tensor | None, initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute dv, dk_w, dbeta and the cotangents of the initial states, by a launch for each 128 columns of dhv.

    Args:
        ctx: The context of the call, with the schedule of packed sequences.
        gates: The gate vectors, or any tensor where there are no gates.
        X: The matrices X of (R1) that the forward stored, (B, T, H, L).
        E: The prediction errors of the forward, (B, T, H, dhv).
        dh: The cotangent of h, (B, T, H, dhv).
        dv: Output, (B, T, H, dhv).
        dk_w: Output, the gradient of keys as writers, (B, T, H, ROWS).
        pairs: Output for sums of pairs of steps, (blocks of 128 columns, H, tiles, PAIR_SUMS, L), with gates.
        checkpoints: Output for dC at checkpoints, (checkpoints, H, ROWS, dhv up to a multiple of 128), with gates.
        final: The cotangents of the final states, (N, H, dqk, dhv), or None for zeros.
        initial: Output for the cotangents of the initial states, or None.

    Returns:
        dbeta and do . E, (B, T, H) float32.
    """
    base = ctx.base
    blocks = ceil_div(base.V, COLUMNS.value)
    shape = base.B, base.T, base.H
    dbeta, do_e = delta_tiles.new_dots(base, *shape) if blocks == 1 else delta_tiles.new_dots(base, 1, blocks, *shape)
    descriptors = delta_tiles.descriptors_for_dv(ctx, dh, E, X, dv)
    for block in range(blocks):
        base.launch(delta_dv_dk_kernel, host.grid(base, 1),
            *descriptors, dk_w, dbeta, do_e, pairs, checkpoints, gates, ctx.beta,
            *(ctx.norms_apart or (gates, gates)),
            gates if final is None else final, gates if initial is None else initial, base.schedule,
            *delta_tiles.kernel_scalars(ctx), DK=base.K, DV=base.V, L=base.L, CHECKPOINT_STEPS=base.checkpoint_steps,
            GATED=ctx.gated, NORMALIZED=ctx.norms is not None, IS_VARLEN=base.packed,
            USE_INITIAL_STATE=final is not None, STORE_FINAL_STATE=initial is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    if blocks == 1:
        return dbeta, do_e
    return base.recorder.sum_of(dbeta, 0), base.recorder.sum_of(do_e, 0)
