"""dq and dk of the delta rule where dhv is at most 128: a fused scan with time.

The backward of the delta rule, given the prediction errors E and dv, is that of linear attention with two readers of
the state C: queries, with the cotangent do, and keys, with the cotangent -dv. From one state the scan computes the
gradients of both readers: dq, and dr, the part of dk that comes from reading. To dr it adds dk_w, the part that comes
from writing, which `delta_dv_dk_kernel` has left. Equations (R4), (R7) and (B7) are those of
`tfla.backends.triton.delta_kernels`. S_q = scale (do E^T) * D B and S_k = -(dv E^T) * D B are both strictly lower
triangular, with the gate matrix D and B = diag(beta). L is the number of steps of a tile. Of the vectors of a tile, a
is the decay from its start to each step, w the decay from each step to its end, and g is its whole decay.

A program computes the whole state of one head, (dqk, dhv); two consumers hold 64 rows of it each, in registers, and
compute transposed outputs. The steps of a tile n (`process_tile`):

    (1)   dq^T <- (C do^T) * (scale a),  dr^T <- -(C dv^T) * a      (64, L) = (64, dhv) (dhv, L), (R7)
    (2)   the stage of tile n - 1 is empty                          its dq and dk have left shared memory
    (3)   q . dq + k . dr, summed over 64 rows                      (L), for the store warp: reads of earlier tiles
    (4)   wait for both halves of S_q and S_k of tile n
    (5)   dq^T <- dq^T + k^T S_q^T,  dr^T <- dr^T + k^T S_k^T       (64, L) = (64, L) (L, L)
    (6)   C <- g C + (k * (w beta))^T E                             (64, dhv) = (64, L) (L, dhv), (R4)
    (7)   dq^T <- dq^T + k^T * (scale do . E beta)                  what queries read of their own steps' writes
    (8)   dq, dk^T = dr^T + dk_w^T                                  over q and k, and from there to global memory
    (9)   S_q, S_k of tile n + 1                                    (L, L / 2), one half of the columns each
    (10)  W = S_q * (q k^T) + S_k * (k k^T), its row and column sums  (L), for the store warp: pairs of steps of a tile
    (11)  checkpoint, which the load warp has brought to L2         <C, dC>

The left operand of (6) is split into a sum of two 16-bit numbers, and so is S_q of (5); the rounding of other operands
changes no result by more than its own rounding. W stays in float32: where keys are alike, the terms of what steps read
by them cancel in dlog_f, and rounding errors of W would not cancel. With gates the scan stores sums for the gradient of
the gates, (B7). They leave out the pair of a step with itself, since no gate lies between the write and the read of one
step.

With NORMALIZED q and k are divided by their norms. r = 1 / |k| and r_q = 1 / |q| are factors of the weights of reads
and writes, so that dq and dk come out as those of the normalized q and k times r_q and r. What is left of the norms'
own gradient is a correction by rows, before step (8):

    dq <- dq - q r_q^2 (q . dq),   dk <- dk - k r^2 (k . dk)

The part of k . dk that comes from writing is beta dbeta. The rest of both inner products are the sums of (3) and (10),
for each reader apart, and for q also what (7) adds. A dot warp adds them up while (5) and (6) run:

    consumers 0 and 1 --summed (sums of tile n)--> dot warp --factors (of q and k in tile n)--> consumers 0 and 1

dk_w of a tile takes the place of its do, which step (1) reads last. dk can lie in the memory of dk_w:

    consumers 0 and 1 --do_read (step (1) of tile n is done)--> load warp --dk_w_full (step (8))--> consumers 0 and 1

The docstring of `dq_dk.py` shows which of the other partitions waits for which. A stage of the ring has 80 KiB: 16 KiB
for each of q, k, E, do and dv. The ring has two stages.
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

from tfla.backends.hopper import delta_dk_w, delta_tiles, host, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.checkpoints import checkpoint_dots, prefetch_checkpoint
from tfla.backends.hopper.delta_tiles import (
    COLUMNS,
    KEY_NORM,
    KEY_WRITE,
    QUERY_NORM,
    ROWS,
    SAME_STEP,
    UPDATE_WEIGHT,
    WRITE,
    Config,
    WorkTile,
)
from tfla.backends.hopper.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from tfla.backends.hopper.store_warp import NO_RESULT, SUMS_OF_READERS

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(2)  # stages of the ring, 80 KiB of tiles each
# Parts of the sums of a stage, L numbers each: eight of reads, one for each warp of the consumers; two of rows of W,
# one for each consumer; four of columns of W, of which each warp has half of a part. With NORMALIZED the parts of reads
# are those of queries until the dot warp adds those of keys, and two more are rows of S_k * (k k^T), by consumers.
PARTS = gl.constexpr(16)  # a power of two; the last two are used with NORMALIZED alone
KEY_ROWS = gl.constexpr(14)  # the first of those
# Vectors of a tile that the dot warp stores: the factors of q and k in the correction of dq and dk.
QUERY_FACTOR = gl.constexpr(13)
KEY_FACTOR = gl.constexpr(14)
# The vector of a tile that consumer 0 stores; that of consumer 1 is 8 vectors after it. It has what (7) adds to q . dq,
# in the consumer's half of the steps, and zeros.
OWN_READS = gl.constexpr(7)
# Matrices in `p`: two of each, for this tile and the next.
OF_QUERIES = gl.constexpr(0)
OF_KEYS = gl.constexpr(2)
LOW = gl.constexpr(4)  # the rounding errors of those of queries


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    dq: Any  # TMA descriptor
    dk: Any  # TMA descriptor
    state_in: Any  # C before the first step, (sequences, H, dqk, dhv)
    checkpoints: Any  # dC at checkpoints, (checkpoints, H, ROWS, COLUMNS), in the order of `checkpoints.py`
    dots: Any  # parts of <C, dC> there, (checkpoints, H, 8)
    scale: Any  # the factor of the queries


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    q: Any  # and then dq, (2 STAGES, L, 64): one tile for each consumer
    k: Any  # and then dk, (2 STAGES, L, 64)
    e: Any  # (STAGES, L, COLUMNS)
    do: Any  # and then dk_w, (STAGES, L, COLUMNS)
    dv: Any  # (STAGES, L, COLUMNS)
    g: Any  # the vectors of each tile, (STAGES, `delta_tiles.count_vectors` L)
    sums: Any  # for the store warp, (STAGES, PARTS L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    do_read: Any  # barrier: both consumers have read do of a tile
    dk_w_full: Any  # barrier: dk_w of the tile has arrived in its place
    # What consumers exchange:
    p: Any  # S_q, S_k and the rounding errors of S_q, each of this tile and of the next, (6, L, L)
    ready: Any  # barriers, (2): both halves of them are stored
    # With NORMALIZED:
    key_reads: Any  # parts of k . dr of reads of earlier tiles, (1, 8 L)
    summed: Any  # barrier: both consumers have stored what the dot warp adds up
    factors: Any  # barrier: the dot warp has stored QUERY_FACTOR and KEY_FACTOR


@gluon.jit
def run_dot_warp(source, dbeta, shared, params, config):
    """Store the factors of q and k in the correction of dq and dk of each tile, with NORMALIZED.

    The store warp needs the reads of both readers in one sum: those of keys are added to the first part of the sums.

    Args:
        source: Where beta, 1 / |k| and 1 / |q| come from.
        dbeta: (B, T, H) float32.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        first = (b.to(gl.int64) * params.T + start) * params.H + h
        beta = source.beta + (b.to(gl.int64) * source.stride_b + h.to(gl.int64) * source.stride_h)
        beta += gl.to_tensor(start).to(gl.int64) * source.stride_t
        for i in range(0, (steps + L - 1) // L):
            t = i * L + r
            at = first + t.to(gl.int64) * params.H
            exists = t < steps
            written = gl.load(dbeta + at, mask=exists, other=0.0)
            written *= gl.load(beta + t.to(gl.int64) * source.stride_t, mask=exists, other=0.0).to(gl.float32)
            of_key = gl.load(source.key_norms + at, mask=exists, other=0.0)
            of_query = gl.load(source.query_norms + at, mask=exists, other=0.0)
            s = n % STAGES
            g = shared.g.index(s)
            sums = shared.sums.index(s)
            mbarrier.wait(shared.summed, n & 1)
            key_reads = store_warp.add_parts(shared.key_reads.index(0), 0, store_warp.READ_PARTS, r)
            key_rows = store_warp.add_parts(sums, KEY_ROWS, store_warp.ROW_PARTS, r)
            dq = store_warp.add_parts(sums, 0, store_warp.READ_PARTS, r)
            dq += store_warp.add_parts(sums, store_warp.READ_PARTS, store_warp.ROW_PARTS, r) - key_rows
            part = sums.slice(0, L, 0)
            part.store(part.load(r.type.layout) + key_reads)  # the store warp needs the sum of both readers
            for half in gl.static_range(2):
                dq += g.slice((OWN_READS + 8 * half) * L, L, 0).load(r.type.layout)
            g.slice(QUERY_FACTOR * L, L, 0).store(dq * of_query * of_query)
            g.slice(KEY_FACTOR * L, L, 0).store((key_reads + key_rows + written) * of_key * of_key)
            pipeline.barrier()  # all of the warp has stored
            mbarrier.arrive(shared.factors, count=1)
            n += 1


@gluon.jit
def load_dk_w(DK_W, n, tile, shared, params):
    """Load dk_w of tile n, which is at `tile`, to the place of its do when both consumers have read that."""
    b, h, t, end = tile
    mbarrier.wait(shared.do_read, n & 1)
    mbarrier.expect(shared.dk_w_full, DK_W.block_type.nbytes)
    at = scheduler.tile_coordinates(b, h, t, 0, end, params)
    pipeline.async_load(DK_W, at, shared.dk_w_full, shared.do.index(n % STAGES))


@gluon.jit
def prefetch_at_checkpoint(index, i, checkpoints, params, config):
    """Start to bring dC to L2 where tile `i` of work tile `index` starts at a checkpoint, for step (11)."""
    t = i * config.L
    if t % config.CHECKPOINT_STEPS == 0 and i > 0:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, config.L, False, True)
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps)
        checkpoint = delta_tiles.checkpoint_index(t, work_tile, params, config)
        prefetch_checkpoint(checkpoints, checkpoint, 0, 0, ROWS, COLUMNS, COLUMNS)


@gluon.jit
def run_load_warp(Q, K, E, DO, DV, DK_W, checkpoints, shared, params, group_size, config):
    """Load the tiles of q, k, E, do and dv to shared memory by TMA, after each tile dk_w of the one before.

    Args:
        Q, K: TMA descriptors of q and k, in tiles (L, 64), two a program.
        E, DO, DV: TMA descriptors of E, do and dv, in tiles (L, COLUMNS).
        DK_W: TMA descriptor of dk_w, in tiles like those of do.
        checkpoints: dC at checkpoints in global memory, with GATED.
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    n = 0
    previous_b, previous_h, previous_t, previous_end = 0, 0, 0, 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, False)
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
            # The stage of this tile is empty before consumers have read do of the one before.
            if n > 0:
                load_dk_w(DK_W, n - 1, (previous_b, previous_h, previous_t, previous_end), shared, params)
            previous_b, previous_h, previous_t, previous_end = b, h, t, end
            if config.GATED:
                prefetch_at_checkpoint(index, i, checkpoints, params, config)
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, STAGES)
    if n > 0:
        load_dk_w(DK_W, n - 1, (previous_b, previous_h, previous_t, previous_end), shared, params)


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Start do E^T and dv E^T of the tile in stage s for one half of the columns, (L, L / 2), step (9)."""
    L: gl.constexpr = config.L
    e = shared.e.index(s).reshape([L, COLUMNS]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return (
        mma.issue_mma(shared.do.index(s).reshape([L, COLUMNS]), e),
        mma.issue_mma(shared.dv.index(s).reshape([L, COLUMNS]), e),
    )


@gluon.jit
def issue_key_products(x, k, s, half: gl.constexpr, config):
    """Start x k^T of the tile in stage s for one half of the columns, (L, L / 2), where x is q or k, step (10)."""
    L: gl.constexpr = config.L
    first = k.index(2 * s).reshape([L, 64]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    second = k.index(2 * s + 1).reshape([L, 64]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    product = mma.issue_mma(x.index(2 * s).reshape([L, 64]), first)
    return warpgroup_mma(x.index(2 * s + 1).reshape([L, 64]), second, product, is_async=True)


@gluon.jit
def load_weights(shared, s, half: gl.constexpr, config):
    """Return D B of the tile in stage s for one half of the columns, (L, L / 2), unmasked, B with r of NORMALIZED."""
    L: gl.constexpr = config.L
    D = delta_tiles.load_decays(shared, s, half, config)
    vector: gl.constexpr = KEY_WRITE if config.NORMALIZED else WRITE
    write = shared.g.index(s).slice(vector * L + half * (L // 2), L // 2, 0)
    return D * gl.expand_dims(write.load(gl.SliceLayout(0, D.type.layout)), 0)


@gluon.jit
def store_scores(S_q, S_k, QK, KK, n, s, ids, gmem, shared, half: gl.constexpr, config):
    """Store the consumer's half of S_q and S_k of tile n, the sums of step (10) and OWN_READS, and tell the other one.

    Args:
        S_q, S_k: do E^T and dv E^T, (L, L / 2), of which S_q and S_k are made.
        QK, KK: q k^T and k k^T, (L, L / 2), which are read with gates or NORMALIZED.
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
    if config.NORMALIZED:
        g = shared.g.index(s)
        sums = shared.sums.index(s)
        layout: gl.constexpr = weights.type.layout
        to_keys = weights * delta_tiles.load_row_norms(g, KEY_NORM, L, layout)
        weights *= delta_tiles.load_row_norms(g, QUERY_NORM, L, layout)
        S_q = mma.apply_causal_mask(S_q, weights * gmem.scale, ids.i, ids.j, half, False, True)
        S_k = mma.apply_causal_mask(S_k, -to_keys, ids.i, ids.j, half, False, True)
        # q . dq of a step's own write is q . k times SAME_STEP.
        same = gl.expand_dims(g.slice(SAME_STEP * L, L, 0).load(gl.SliceLayout(1, layout)), 1)
        own = gl.where(gl.expand_dims(ids.i, 1) == gl.expand_dims(half * (L // 2) + ids.j, 0), QK * same, 0.0)
        g.slice((OWN_READS + 8 * half) * L, L, 0).store(gl.sum(own, 1))
        KK *= S_k
        sums.slice((KEY_ROWS + half) * L, L, 0).store(gl.sum(KK, 1))
        store_warp.store_pairs(S_q * QK + KK, sums, half, L)
    else:
        S_q = mma.apply_causal_mask(S_q, weights * gmem.scale, ids.i, ids.j, half, False, True)
        S_k = mma.apply_causal_mask(S_k, -weights, ids.i, ids.j, half, False, True)
        if config.GATED:
            store_warp.store_pairs(S_q * QK + S_k * KK, shared.sums.index(s), half, L)
    to = n % 2
    S_q, low = mma.split_in_two(S_q, shared.p.dtype)
    shared.p.index(LOW + to).slice(half * (L // 2), L // 2, 1).store(low)
    shared.p.index(OF_QUERIES + to).slice(half * (L // 2), L // 2, 1).store(S_q)
    shared.p.index(OF_KEYS + to).slice(half * (L // 2), L // 2, 1).store(S_k.to(shared.p.dtype))
    fence_async_shared()  # MMAs read them through the asynchronous proxy
    pipeline.barrier()  # all warps of this consumer have stored
    mbarrier.arrive(shared.ready.index(to), count=1)


@gluon.jit
def prepare_tile(C, U, U_low, pipe_state, ids, gmem, shared, half: gl.constexpr, config):
    """Wait for the next tile and compute the consumer's half of its S_q and S_k, steps (9) and (10).

    The update of the state C still runs and reads U and U_low.

    Returns:
        C, and the position of the next tile.
    """
    n = pipe_state.count + 1
    s, phase = pipeline.advance(pipe_state.index, pipe_state.phase, STAGES)
    mbarrier.wait(shared.full.index(s), phase)
    S_q, S_k = issue_scores(shared, s, half, config)
    QK, KK = S_q, S_k
    if config.GATED or config.NORMALIZED:
        QK = issue_key_products(shared.q, shared.k, s, half, config)
        KK = issue_key_products(shared.k, shared.k, s, half, config)
        S_q, S_k, QK, KK, C, U, U_low = warpgroup_mma_wait(0, deps=[S_q, S_k, QK, KK, C, U, U_low])
    else:
        S_q, S_k, C, U, U_low = warpgroup_mma_wait(0, deps=[S_q, S_k, C, U, U_low])
    store_scores(S_q, S_k, QK, KK, n, s, ids, gmem, shared, half, config)
    return C, pipeline.PipelineState(s, phase, n)


@gluon.jit
def prepare_first_tile(ids, gmem, shared, half: gl.constexpr, config):
    """Do steps (9) and (10) of the first tile, which no earlier tile has done."""
    mbarrier.wait(shared.full.index(0), 0)
    S_q, S_k = issue_scores(shared, 0, half, config)
    QK, KK = S_q, S_k
    if config.GATED or config.NORMALIZED:
        QK = issue_key_products(shared.q, shared.k, 0, half, config)
        KK = issue_key_products(shared.k, shared.k, 0, half, config)
        S_q, S_k, QK, KK = warpgroup_mma_wait(0, deps=[S_q, S_k, QK, KK])
    else:
        S_q, S_k = warpgroup_mma_wait(0, deps=[S_q, S_k])
    store_scores(S_q, S_k, QK, KK, 0, 0, ids, gmem, shared, half, config)


@gluon.jit
def release_previous(pipe_state, shared):
    """Wait until the outputs of the previous tile have left, and release its stage, step (2)."""
    previous = (pipe_state.index + STAGES - 1) % STAGES
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index(previous), count=1, pred=pipe_state.count > 0)


@gluon.jit
def store_output(x, to, out, t, work_tile, ids, params):
    """Store dq^T or dk^T, (64, L), over q or k in shared memory `to`, and start its way to memory, step (8)."""
    to.reshape([x.shape[1], 64]).permute((1, 0)).store(x.to(to.dtype))
    fence_async_shared()
    pipeline.async_store(out, delta_tiles.output_coordinates(t, work_tile, ids, params), to)


@gluon.jit
def corrections(x, g, FACTOR: gl.constexpr, layout: gl.constexpr, L: gl.constexpr):
    """Return what the norms of q or k take off its gradient, (64, L); x is the tile, (1, L, 1, 64)."""
    x_t = x.reshape([L, 64]).permute((1, 0)).load(layout).to(gl.float32)
    return x_t * delta_tiles.load_vector(g, FACTOR, L, layout)


@gluon.jit
def process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (10) of the module's docstring.

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
    # (2) dq and dk of the previous tile have left: its stage is empty.
    release_previous(pipe_state, shared)
    Q, R, A = warpgroup_mma_wait(0, deps=[Q, R, A])
    pipeline.barrier()  # all warps of this consumer have waited
    mbarrier.arrive(shared.do_read, count=1)
    Q *= delta_tiles.load_of_reads(g, True, L, of_out, config) * gmem.scale
    R *= -delta_tiles.load_of_reads(g, False, L, of_out, config)
    k = shared.k.index(2 * s + half)
    k_t = k.reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    if config.GATED or config.NORMALIZED:
        # (3) q . dq + k . dr, summed over the consumer's rows; with NORMALIZED each apart
        if config.NORMALIZED:
            mma.store_partial_sums(R * k_t.to(gl.float32), shared.key_reads.index(0), half, L)
            q_t = q.reshape([L, 64]).permute((1, 0)).load(of_out)
            reads = Q * q_t.to(gl.float32)
        else:
            q_t = q.reshape([L, 64]).permute((1, 0)).load(of_out)
            reads = Q * q_t.to(gl.float32) + R * k_t.to(gl.float32)
        mma.store_partial_sums(reads, shared.sums.index(s), half, L)
    if config.NORMALIZED:
        pipeline.barrier()  # all warps of this consumer have stored
        mbarrier.arrive(shared.summed, count=1)
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
    # (8) dq and dk, over q and k and on their way to memory
    if config.NORMALIZED:
        mbarrier.wait(shared.factors, n & 1)
        Q -= corrections(q, g, QUERY_FACTOR, of_out, L)
    store_output(Q, q, gmem.dq, t, work_tile, ids, params)
    mbarrier.wait(shared.dk_w_full, n & 1)
    dk_w = shared.do.index(s).reshape([L, COLUMNS]).slice(half * 64, 64, 1)
    R += delta_dk_w.load_transposed(dk_w).to(gl.float32)
    if config.NORMALIZED:
        R -= corrections(k, g, KEY_FACTOR, of_out, L)
    store_output(R, k, gmem.dk, t, work_tile, ids, params)
    return prepare_tile(C, U, U_low, pipe_state, ids, gmem, shared, half, config)


@gluon.jit
def store_checkpoint_dots(C, t, work_tile, ids, gmem, params, half: gl.constexpr, config):
    """Store the inner product <C, dC> where step `t` of a work tile is at a checkpoint, step (11)."""
    if t % config.CHECKPOINT_STEPS == 0 and t < work_tile.steps:
        checkpoint = delta_tiles.checkpoint_index(t, work_tile, params, config)
        layout: gl.constexpr = mma.accumulator_layout(COLUMNS)
        dot = checkpoint_dots(C, gmem.checkpoints, checkpoint, ids.column, 0, ROWS, COLUMNS, layout)
        warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
        gl.store(gmem.dots + checkpoint * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    ids = delta_tiles.fragment_ids(half, config)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    prepare_first_tile(ids, gmem, shared, half, config)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False, True)
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps)
        tiles = (steps + L - 1) // L
        C = delta_tiles.load_state(index, ids, gmem, params, config)
        for i in range(0, tiles):
            t = i * L
            C, pipe_state = process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half, config)
            if config.GATED:
                store_checkpoint_dots(C, t + L, work_tile, ids, gmem, params, half, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    # The store warp waits for the last tile, too.
    if config.GATED:
        mbarrier.arrive(shared.empty.index((pipe_state.index + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=delta_tiles.RUNTIME_SCALARS)
def delta_dq_dk_kernel(
    Q, K, E, DO, DV_in, DQ_out, DK_out, do_e, sums, pairs, checkpoints, dots, gates, beta, norms, query_norms, dbeta,
    state_in, schedule, DK_W, T, tiles_per_head, H, group_size, num_work_tiles, stride_b, stride_t, stride_h, scale,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, GATED: gl.constexpr,
    NORMALIZED: gl.constexpr, IS_VARLEN: gl.constexpr, USE_INITIAL_STATE: gl.constexpr,
):  # fmt: skip
    """Compute dq and dk.

    Tensors that the constants say are not used may be any.

    Args:
        Q, K: TMA descriptors of the queries and keys, in tiles (L, 64).
        E: TMA descriptor of the prediction errors, in tiles (L, COLUMNS).
        DO, DV_in: TMA descriptors of the cotangent of h and of dv, in tiles like those of E.
        DQ_out, DK_out: TMA descriptors of the results, in tiles (L, 64).
        do_e: do . E, (B, T, H), float32.
        sums: Output for what the steps read of earlier tiles, (H, tiles, L), with GATED.
        pairs: Output for sums of pairs, (H, tiles, PAIR_SUMS, L), with GATED: ROW_SUM and COLUMN_SUM.
        checkpoints: dC at checkpoints, (checkpoints, H, ROWS, COLUMNS), with GATED.
        dots: Output for parts of <C, dC> there, (checkpoints, H, 8), with GATED.
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
        norms, query_norms: 1 / |k| and 1 / |q|, (B, T, H) float32, with NORMALIZED.
        dbeta: (B, T, H) float32, with NORMALIZED.
        state_in: Initial states, (sequences, H, dqk, dhv), with USE_INITIAL_STATE.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        DK_W: TMA descriptor of the gradient of keys as writers, (B, T, H, ROWS), in the order of `delta_dk_w.py`, in
            tiles like those of DO. DK_out may lie in its memory: hosts of plans allow that for the last tensor.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        num_work_tiles: Sequences times H.
        stride_b, stride_t, stride_h: Strides of beta.
        scale: The factor of the queries.
    """
    partitions(
        (Q, K, E, DO, DV_in, DK_W),
        delta_tiles.WriteSource(
            vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
            tiles_per_head=tiles_per_head, key_norms=norms, query_norms=query_norms, do_e=do_e, scale=scale,
        ),
        sums, pairs, dbeta, group_size,
        GlobalPointers(
            dq=DQ_out, dk=DK_out, state_in=state_in, checkpoints=checkpoints, dots=dots, scale=scale
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=False, SAVE=False, USE_INITIAL_STATE=USE_INITIAL_STATE,
            STORE_FINAL_STATE=False, BY_KEYS=True, CHECKPOINT_STEPS=CHECKPOINT_STEPS, NORMALIZED=NORMALIZED,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, sums, pairs, dbeta, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers and three or four single warps."""
    Q, K, E, DO, DV, DK_W = tensors
    L: gl.constexpr = config.L
    RESULT: gl.constexpr = SUMS_OF_READERS if config.GATED else NO_RESULT
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(RESULT), 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, 2 * STAGES),
        k=pipeline.allocate_tiles(K, 2 * STAGES),
        e=pipeline.allocate_tiles(E, STAGES),
        do=pipeline.allocate_tiles(DO, STAGES),
        dv=pipeline.allocate_tiles(DV, STAGES),
        g=pipeline.allocate_vectors(gl.float32, STAGES, delta_tiles.count_vectors(config.NORMALIZED) * L),
        sums=pipeline.allocate_vectors(gl.float32, STAGES, PARTS * L),
        full=full,
        empty=empty,
        do_read=pipeline.allocate_barrier(2),
        dk_w_full=pipeline.allocate_barrier(1),
        p=pipeline.allocate_operands(Q.dtype, 6, L, L),
        ready=pipeline.allocate_barriers(2, 2),
        key_reads=pipeline.allocate_vectors(gl.float32, 1, 8 * L) if config.NORMALIZED else None,
        summed=pipeline.allocate_barrier(2) if config.NORMALIZED else None,
        factors=pipeline.allocate_barrier(1) if config.NORMALIZED else None,
    )
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L, STAGES=STAGES, REVERSE=False, IS_SEGMENTED=False, RESULT=RESULT
    )
    fence_async_shared()
    # Two whole lists, since one that is joined from two loses the fields that are None.
    if config.NORMALIZED:
        gl.warp_specialize(
            [
                (run_consumer, (0, gmem, shared, params, config)),
                (run_consumer, (1, gmem, shared, params, config)),
                (run_load_warp, (Q, K, E, DO, DV, DK_W, gmem.checkpoints, shared, params, group_size, config)),
                (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, config)),
                (store_warp.run_store_warp, (
                    shared.sums, sums, pairs, full, empty, params, source.tiles_per_head, store_config,
                )),
                (run_dot_warp, (source, dbeta, shared, params, config)),
            ],
            [4, 1, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (run_consumer, (0, gmem, shared, params, config)),
                (run_consumer, (1, gmem, shared, params, config)),
                (run_load_warp, (Q, K, E, DO, DV, DK_W, gmem.checkpoints, shared, params, group_size, config)),
                (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, config)),
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
    checkpoints: Tensor  # of dC, (checkpoints, H, ROWS, COLUMNS)
    dots: Tensor  # parts of <C, dC> there, (checkpoints * H, 8)


def launch(
    ctx: "DeltaContext", gates: Tensor, E: Tensor, dh: Tensor, dv: Tensor, do_e: Tensor, dq: Tensor, dk: Tensor,
    dk_w: Tensor, sums: Sums, dbeta: Tensor, *, initial: Tensor | None,
) -> None:  # fmt: skip
    """Compute dq and dk.

    Args:
        ctx: The context of the call, with the schedule of packed sequences.
        gates: The gate vectors, or any tensor where there are no gates.
        E: The prediction errors, (B, T, H, dhv).
        dh: The cotangent of h, (B, T, H, dhv).
        dv: The gradient of v, (B, T, H, dhv).
        do_e: do . E, (B, T, H) float32.
        dq, dk: Outputs, (B, T, H, dqk). dk may have the memory of dk_w where dqk is ROWS.
        dk_w: The gradient of keys as writers, (B, T, H, ROWS), which `delta_dv_dk.launch` has written.
        sums: What both scans leave for the gradient of gates.
        dbeta: The gradient of beta, (B, T, H) float32.
        initial: Initial states, (N, H, dqk, dhv), or None for zeros.
    """
    base, x = ctx.base, ctx.x
    columns = COLUMNS.value
    base.launch(delta_dq_dk_kernel, host.grid(base, 1),
        host.descriptor(base, x.q, 64), host.descriptor(base, x.k, 64), host.descriptor(base, E, columns),
        host.descriptor(base, dh, columns), host.descriptor(base, dv, columns), host.descriptor(base, dq, 64),
        host.descriptor(base, dk, 64), do_e, *sums, gates, ctx.beta,
        *(ctx.norms_apart or (gates, gates)), dbeta,
        gates if initial is None else initial, base.schedule, host.descriptor(base, dk_w, columns),
        *delta_tiles.kernel_scalars(ctx),
        DK=base.K, DV=base.V, L=base.L, CHECKPOINT_STEPS=base.checkpoint_steps, GATED=ctx.gated,
        NORMALIZED=ctx.norms is not None, IS_VARLEN=base.packed, USE_INITIAL_STATE=initial is not None, num_warps=4,
    )  # fmt: skip
