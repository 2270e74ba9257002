"""dq, or against time dk: a fused scan; and o and dv of heads with dqk above 128 (TRANSPOSED).

A program computes 128 rows of the state C, (dqk, dhv), by WIDTH columns, up to 256, of each of its work tiles. Two
consumers hold 64 of the rows each, in registers, as BLOCKS blocks of 64 x 128, and compute the transposed output,
(128, L), of one tile after the other. The operands by result, with the gate weights of `docs/mathematics.md`:

    result   scan           x    y     z    w    state C, (DX, DY)     a        update weights u
    dq       with time      k    v     do   q    C, (dqk, dhv)         INTER    UPDATE
    dk       against time   q    do    v    k    dC, (dqk, dhv)        UPDATE   INTER (a')
    o        with time      v    k     q    -    C^T, (dhv, dqk)       INTER    UPDATE         TRANSPOSED
    dv       against time   do   q     k    -    dC^T, (dhv, dqk)      UPDATE   INTER (a')     TRANSPOSED

The steps of a tile n (`process_tile`); P is that of tile n, computed during tile n - 1. It is S of (T8) for dq, S^T for
dk, P of (T1) for o and P'^T of (T11) for dv:

    (1)   out^T <- (C z^T + n delta^T) * a           (64, L) = (64, WIDTH) (WIDTH, L), first term of (T9); (T10) adds
                                                     dn to every step instead; (T2) and (T11) have no second term
    (2)   the stage of tile n - 1 is empty           its output has left shared memory
    (3)   wait for both halves of P
    (4)   d <- a * (z n) + P 1;  1 / max(|d|, ...)   (L), only with FUSE_NORMALIZER, (T3)
    (5)   out^T <- out^T + x^T P^T                   (64, L), second term of (T9), (T10), (T2), (T11); with
                                                     FUSE_NORMALIZER then divided by max(|d|, exp(-m)), (T4)
    (6)   C <- g C + (x * u)^T y                     (64, WIDTH) = (64, L) (L, WIDTH), (T5), (T12)
    (7)   w . out, summed over 64 rows               (L), for the store warp: q . dq or k . dk of (B5)
    (8)   dn <- dn + decay w^T (a * delta)           (64), what a segment adds to dn, (T13), only for dq of segments
    (9)   out                                        to shared memory, over w, and from there to global memory
    (10)  n <- g n + x^T u                           (64), (T6), (T13)
    (11)  P <- (z y^T + delta) * D of tile n + 1     (L, L / 2), masked, one half of the columns for each consumer
    (12)  checkpoint                                 dq stores C and n, dk the inner product <C, dC> with them, (B5)

Which partition waits for which:

    load, gate and store warps --full[s]--> consumers 0 and 1 --empty[s]--> load, gate and store warps
    consumer 0 <--ready[n % 2] (3), initial_n_ready--> consumer 1         the latter with FUSE_NORMALIZER, as in o_dv.py

(11) is of the next tile so that its product and its exchange between the consumers go on while the tensor cores still
compute (6). (10) stands between them because it needs no tensor cores.

All results are linear in the columns of the state. Where dhv is above 256, NUM_SPLITS programs share the columns. Each
pair of them adds up its outputs in memory (`split_reduce.py`), and a later kernel adds up what several pairs of
programs leave. Only the first of these programs adds delta and n. With dqk 256 a program for o has all of n and divides
by the denominators itself (FUSE_NORMALIZER, `normalizer.py`). dk of heads of 128 x 128 without a normalizer comes from
`dk_dv.py`.

The delta rule is linear attention with a write strength beta that writes E, and with two readers of the state (READER):
queries, with the cotangent do, and the read keys k, with the cotangent -dv (`docs/delta-rule.md`). Heads with dhv up to
128 have one launch with time for both, `delta_dq_dk.py`. Of wider heads each reader has its own, where f is the factor
of the reader, scale or -1:

    result   scan           x    y     z    w    a        update weights u   P
    dq       with time      k    E     do   q    f INTER  UPDATE beta        f S beta
    dk       with time      k    E     dv   dk_w f INTER  UPDATE beta        f S beta

Here P is masked strictly. What a query reads of its own step's write is added before step (9): x times the diagonal of
P, of which the caller has do . E; a read key reads none of it. To what keys add as readers step (9) adds dk_w, which
`delta_dv_dk_kernel` has left; the other steps have k in the place of w. Step (7) comes before step (5), so that it
leaves what is read across tiles. The sums of pairs of steps of one tile (B7), without those of a step with itself,
since no gate lies between them, come from step (11): it also computes W = P * (w x^T) from P before it is rounded, and
leaves the sums of its rows and columns. Where keys are alike, rounding errors of P would not cancel in dlog_f.
Checkpoints are of dC here: step (12) makes <C, dC>.

With NORMS the rule has q and k divided by their norms. 1 / |k| is a factor of beta, and that of the reader one of the
rows of P and of a, so that step (9) has 1 / |q| or 1 / |k| times the gradient of the normalized reader. The norm's own
gradient takes off a correction by rows, as in `delta_dq_dk.py`, before step (9):

    dq <- dq - q (q . dq) / |q|^2,   dk <- dk - k (k . dk) / |k|^2

Both inner products are sums that steps (7) and (11) leave for the store warp, and for q what it reads of its own step,
for k what it writes, beta dbeta. A warp in the place of the second gate warp adds them up (`reader_norms.py`).
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

from tfla.backends.gpu.gate_kernels import DELTA_P, FLOOR
from tfla.backends.hopper import (
    delta_dk_w,
    gate_warp,
    mma,
    normalizer,
    pipeline,
    reader_norms,
    scheduler,
    split_reduce,
    store_warp,
)
from tfla.backends.hopper.checkpoints import checkpoint_dots, prefetch, prefetch_checkpoint, store_checkpoint
from tfla.backends.hopper.gate_warp import RECOMPUTED
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_MAX,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    PRODUCER_REGISTERS_MIN,
    STATE_WEIGHT,
    TILE_DECAY,
)
from tfla.backends.hopper.split_reduce import PAIR
from tfla.backends.hopper.store_warp import DENOMINATORS, GATE_SUMS, NO_RESULT, SUMS_OF_READERS

# Values of READER: which reader of the state of the delta rule has the cotangent of a launch.
NO_READER = gl.constexpr(0)  # a launch of linear attention
QUERIES = gl.constexpr(1)
READ_KEYS = gl.constexpr(2)


class Config(NamedTuple):
    """The constants of the kernel."""

    DX: Any  # rows of the state
    DY: Any  # columns of the state
    NUM_SPLITS: Any  # programs that share the columns of the state
    WIDTH: Any  # columns of one program, DY / NUM_SPLITS
    BLOCKS: Any  # blocks of 128 columns of one program
    L: Any  # steps of a tile
    STAGES: Any  # stages of the ring
    CHECKPOINT_STEPS: Any  # steps between checkpoints
    REVERSE: Any  # scan against time, for dk and dv
    IS_SEGMENTED: Any  # sequences are cut into segments, each a work tile
    USE_INITIAL_STATE: Any  # start work tiles from `state_in` and `n_in`, not from zeros
    STORE_FINAL_STATE: Any  # store the states after work tiles to `state_out` and `n_out`
    NORMALIZE: Any  # the state has n, for dq and dk
    USE_DP_OFFSET: Any  # add delta of (T7) to z y^T
    TRANSPOSED: Any  # o and dv
    ACCUMULATE_DN: Any  # store what each segment adds to dn
    FUSE_NORMALIZER: Any  # divide o by the denominators
    SAVE_D: Any  # store d to `w_out`
    READER: Any  # NO_READER, QUERIES or READ_KEYS
    NORMS: Any  # q and k are divided by their norms, with SUMS_OF_READERS
    RESULT: Any  # what the store warp stores
    INDEXED: Any  # for o: `state_in` and `state_out` are pools, whose rows the schedule has
    STATE_DX: Any  # rows of `state_in` and `state_out`
    STATE_DY: Any  # their columns
    PADDED: Any  # with INDEXED: they are fewer than DX or DY, and the last rows or columns of states are zero


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out: Any  # TMA descriptor
    state_in: Any  # (segments, H, dqk, dhv)
    state_out: Any  # (segments, H, dqk, dhv)
    n_in: Any  # (segments, H, dqk)
    n_out: Any  # (segments, H, dqk): final n, or with ACCUMULATE_DN what segments add to dn; READER: sums of pairs
    checkpoints: Any  # (checkpoints, H, dqk, dhv)
    n_checkpoints: Any  # (checkpoints, H, dqk)
    dots: Any  # (checkpoints, H, programs of a head, 8)


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    x: Any  # (STAGES, L, 128)
    y: Any  # (STAGES, L, WIDTH)
    z: Any  # (STAGES, L, WIDTH)
    w: Any  # q or k, with READ_KEYS dk_w, (2 STAGES, L, 64): one tile for each consumer
    g: Any  # gate vectors, (STAGES, NUM_GATE_VECTORS L)
    u: Any  # update weights, (STAGES, 2 L)
    delta: Any  # delta, or with READER f beta, (STAGES, L)
    partial_dots: Any  # for the store warp: partial sums of w . out, (STAGES, 8 L), for SUMS_OF_READERS (STAGES, 16 L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # What the consumers exchange:
    p: Any  # P of this tile and of the next, (2, L, L)
    ready: Any  # barriers, (2): both halves of P are stored, and with FUSE_NORMALIZER n and the row sums of P
    same: Any  # with QUERIES the diagonal of P, (STAGES, L)
    norms: Any  # with NORMS a `reader_norms.SharedStorage`
    # With FUSE_NORMALIZER, as in `o_dv.py`:
    floor: Any  # exp(-m), (STAGES, L)
    matrix: Any  # update weights as a right operand, (STAGES, 8, L)
    n: Any  # n before this tile and before the next, (2, 8, dqk)
    sums: Any  # row sums of both halves of P of this tile and of the next, (4, L)
    inverse: Any  # 1 / max(|d|, exp(-m)), (2, L), one for each consumer
    initial_n_ready: Any  # barrier: n at the start of a work tile is stored
    d: Any  # for the store warp: d, (STAGES, L)


class Accumulators(NamedTuple):
    """The state that a consumer holds in registers, in float32."""

    C0: Any  # first block, (64, 128)
    C1: Any  # second block, (64, 128), with BLOCKS 2
    n: Any  # 64 elements of n, or of dn for dk, (64)
    dn: Any  # what the work tile has added to dn so far, (64), with ACCUMULATE_DN
    decay: Any  # decay from the start of the work tile to this tile, with ACCUMULATE_DN
    N0: Any  # 64 elements of n, (64, 8), with FUSE_NORMALIZER: each consumer has half of 256
    N1: Any  # the 64 elements after these, (64, 8)


class WorkTile(NamedTuple):
    """The work tile that a program computes."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps
    tiles: Any  # number of tiles
    checkpoint: Any  # index of the checkpoint before its first one, in (checkpoints, H)


@gluon.constexpr_function
def result_of_store_warp(transposed, save_d, reader, save_sums):
    """Return what the store warp of a launch with these constants stores."""
    if transposed:
        return DENOMINATORS if save_d else NO_RESULT
    if reader == NO_READER:
        return GATE_SUMS
    return SUMS_OF_READERS if save_sums else NO_RESULT


@gluon.jit
def get_work_tile(index, params, config):
    """Return work tile `index` for a consumer of dq and dk, or of dk and dv."""
    L: gl.constexpr = config.L
    b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED, True)
    tiles = (steps + L - 1) // L
    checkpoint = ((b.to(gl.int64) * params.T + start) // config.CHECKPOINT_STEPS - 1) * params.H + h
    return WorkTile(b=b, h=h, start=start, steps=steps, tiles=tiles, checkpoint=checkpoint)


class FragmentIds(NamedTuple):
    """The indices of what a consumer holds."""

    i: Any  # rows of P, steps of the outputs, (L)
    j: Any  # columns of P, steps of the updates, counted from the consumer's half, (L / 2)
    rk: Any  # elements of n, (64)
    has_n: Any  # whether this program has n, (64): the first of those that share the columns
    rn: Any  # elements of n in N0, (64)
    row: Any  # first row of the state
    column: Any  # first column of the state
    split: Any  # which of the programs that share the columns this is


@gluon.constexpr_function
def reads_checkpoints(reverse, transposed, reader):
    """Return whether step (12) of a launch with these constants reads checkpoints."""
    return reader == READ_KEYS or (reverse and not transposed)


@gluon.jit
def prefetch_at_checkpoint(index, h, start, i, tiles, row, column, gmem, params, config):
    """Start to bring a checkpoint to L2 where it is between tile `i` of a work tile and the one before, for step (12).

    Tiles count in the direction of the scan. Consumers compute the one before when the load warp calls this.

    Args:
        index: Index of the work tile.
        h: Its head.
        start: Its first token in the batch row.
        i: Number of the tile.
        tiles: Tiles of the work tile.
        row: First row of the state of this program.
        column: Its first column.
        gmem: Tensors in global memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    step = (tiles - i if config.REVERSE else i) * config.L
    if step % config.CHECKPOINT_STEPS == 0 and i > 0:
        token = start
        if params.schedule is None:  # computed again, or its numbers would be kept for the loop
            b, h, start, _steps, _tile = scheduler.get_work_tile(index, params, config.L, config.IS_SEGMENTED, True)
            token = b.to(gl.int64) * scheduler.rematerialize(params.T) + start
        before = (token // config.CHECKPOINT_STEPS + step // config.CHECKPOINT_STEPS - 1).to(gl.int32)
        checkpoint = before * scheduler.rematerialize(params.H) + h  # as in `at_checkpoint`
        prefetch_checkpoint(gmem.checkpoints, checkpoint, row, column, config.DX, config.DY, config.WIDTH)
        if config.NORMALIZE:
            prefetch(gmem.n_checkpoints + checkpoint.to(gl.int64) * config.DX + row, 128 * 4)


@gluon.jit
def run_load_warp(X, Y, Z, W, gmem, shared, params, group_size, config):
    """Load the tiles of x, y, z and w to shared memory by TMA, and bring checkpoints that step (12) reads to L2.

    Args:
        X: TMA descriptor of x, in tiles (L, 128).
        Y: TMA descriptor of y, in tiles (L, WIDTH).
        Z: TMA descriptor of z, in tiles (L, WIDTH).
        W: TMA descriptor of w, in tiles (L, 64), two a program. With TRANSPOSED these are for the output only.
        gmem: Tensors in global memory, of which the checkpoints are read here.
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    n = 0
    row, column = scheduler.state_block(config.NUM_SPLITS, Y.block_type.shape[-1])
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, config.REVERSE)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            w_bytes: gl.constexpr = 0 if config.TRANSPOSED else 2 * W.block_type.nbytes
            # The barrier completes when all of these bytes have arrived.
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes + Z.block_type.nbytes + w_bytes)
            # x and w have the heads of q and k, y and z those of v and do; with TRANSPOSED it is the other way round.
            x_head = h if config.TRANSPOSED else h // group_size
            y_head = h // group_size if config.TRANSPOSED else h
            at_y = scheduler.tile_coordinates(b, y_head, t, column, end, params)
            at_x = scheduler.tile_coordinates(b, x_head, t, row, end, params)
            pipeline.async_load(Z, at_y, bar, shared.z.index(s))
            pipeline.async_load(Y, at_y, bar, shared.y.index(s))
            pipeline.async_load(X, at_x, bar, shared.x.index(s))
            if not config.TRANSPOSED:
                w_head = h if config.READER == READ_KEYS else x_head  # dk_w is of each head of v
                for w_half in gl.static_range(2):
                    at_w = scheduler.tile_coordinates(b, w_head, t, row + 64 * w_half, end, params)
                    pipeline.async_load(W, at_w, bar, shared.w.index(2 * s + w_half))
            n += 1
            if reads_checkpoints(config.REVERSE, config.TRANSPOSED, config.READER):
                prefetch_at_checkpoint(index, h, start, i, (steps + L - 1) // L, row, column, gmem, params, config)
    pipeline.producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def state_block_pointers(state, at, ids, block: gl.constexpr, config):
    """Return pointers (64, 128) to one block of the consumer's part of state `at`; see `mma.state_pointers`."""
    column = ids.column + 128 * block
    return mma.state_pointers(
        state, at, ids.row, column, config.STATE_DX, config.STATE_DY, config.TRANSPOSED, mma.accumulator_layout(128)
    )  # fmt: skip


@gluon.jit
def load_state_block(state, at, ids, H, block: gl.constexpr, config):
    """Load one block of the consumer's part of the initial state `at`, (64, 128)."""
    return mma.load_block(
        state_block_pointers(state, at, ids, block, config), at, H, ids.row, ids.column + 128 * block, config.STATE_DX,
        config.STATE_DY, config.PADDED, 64, 128, config.INDEXED,
    )  # fmt: skip


@gluon.jit
def store_state_block(C, state, at, ids, block: gl.constexpr, config):
    """Store one block of the consumer's part of the final state `at`, (64, 128)."""
    mma.store_block(
        state_block_pointers(state, at, ids, block, config), C, at, ids.row, ids.column + 128 * block, config.STATE_DX,
        config.STATE_DY, config.PADDED, 64, 128, config.INDEXED,
    )  # fmt: skip


@gluon.jit
def load_initial_state(index, ids, gmem, params, config):
    """Return the state before the first step of work tile `index`: zeros, or loaded with USE_INITIAL_STATE."""
    C0 = gl.zeros([64, 128], gl.float32, mma.accumulator_layout(128))
    C1 = gl.zeros([64, 128], gl.float32, mma.accumulator_layout(128))
    N = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma.accumulator_layout(config.L)))
    dn = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma.accumulator_layout(config.L)))
    N0, N1 = normalizer.empty_n(), normalizer.empty_n()
    if config.USE_INITIAL_STATE:
        at = scheduler.state_index(index, params, config.INDEXED)
        C0 = load_state_block(gmem.state_in, at, ids, params.H, 0, config)
        if config.BLOCKS == 2:
            C1 = load_state_block(gmem.state_in, at, ids, params.H, 1, config)
        if config.INDEXED:
            at = scheduler.state_index(index, params)
        if config.NORMALIZE:
            N = gl.load(gmem.n_in + at.to(gl.int64) * config.DX + ids.rk, mask=ids.has_n, other=0.0)  # (64)
        if config.FUSE_NORMALIZER:
            n_in = gmem.n_in + at.to(gl.int64) * config.DY + ids.rn
            N0, N1 = normalizer.load_initial_n(gl.load(n_in)), normalizer.load_initial_n(gl.load(n_in + 64))
    return Accumulators(C0=C0, C1=C1, n=N, dn=dn, decay=1.0, N0=N0, N1=N1)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, config):
    """Store the state after the last step of work tile `index`."""
    at = scheduler.state_index(index, params, config.INDEXED, True)
    store_state_block(acc.C0, gmem.state_out, at, ids, 0, config)
    if config.BLOCKS == 2:
        store_state_block(acc.C1, gmem.state_out, at, ids, 1, config)
    if config.INDEXED:
        at = scheduler.state_index(index, params)
    if config.NORMALIZE:
        gl.store(gmem.n_out + at.to(gl.int64) * config.DX + ids.rk, acc.n, mask=ids.has_n)
    if config.FUSE_NORMALIZER:
        n_out = gmem.n_out + at.to(gl.int64) * config.DY + ids.rn
        first = ids.rn * 0 + gl.program_id(0) == 0  # all programs of a head have the same n
        gl.store(n_out, gl.sum(acc.N0, 1), mask=first)
        gl.store(n_out + 64, gl.sum(acc.N1, 1), mask=first)


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Start z y^T of the tile in stage s for one half of the columns: (L, WIDTH) @ (WIDTH, L / 2), step (11)."""
    L: gl.constexpr = config.L
    z = shared.z.index(s).reshape([L, config.WIDTH])
    y = shared.y.index(s).reshape([L, config.WIDTH]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return mma.issue_mma(z, y)


@gluon.jit
def issue_read_products(shared, s, half: gl.constexpr, config):
    """Start q x^T or k x^T of the tile in stage s for one half of the columns, (L, L / 2), step (11)."""
    L: gl.constexpr = config.L
    x = shared.x.index(s).reshape([L, 128])
    if config.READER == READ_KEYS:
        return mma.issue_mma(x, x.slice(half * (L // 2), L // 2, 0).permute((1, 0)))
    else:
        return issue_query_products(shared, s, half, config)


@gluon.jit
def issue_query_products(shared, s, half: gl.constexpr, config):
    """Start q x^T like `issue_read_products`, from both tiles of q."""
    L: gl.constexpr = config.L
    x = shared.x.index(s).reshape([L, 128]).slice(half * (L // 2), L // 2, 0)
    product = mma.issue_mma(shared.w.index(2 * s).reshape([L, 64]), x.slice(0, 64, 1).permute((1, 0)))
    w = shared.w.index(2 * s + 1).reshape([L, 64])
    return warpgroup_mma(w, x.slice(64, 64, 1).permute((1, 0)), product, is_async=True)


@gluon.jit
def load_gate_matrix(shared, s, half: gl.constexpr, config):
    """Return D of the tile in stage s, (L, L / 2), unmasked; with READER times f beta of the step that writes."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(L // 2)
    D = mma.load_gate_matrix(shared.g.index(s), L, half, layout)
    if config.READER != NO_READER:
        write = shared.delta.index(s).slice(half * (L // 2), L // 2, 0)
        D *= gl.expand_dims(write.load(gl.SliceLayout(0, layout)), 0)
    return D


@gluon.jit
def store_scores(S, D, R, shared, s, n, ids, half: gl.constexpr, config):
    """Store the masked P = (z y^T + delta) * D of tile n, one half of its columns, and arrive, step (11).

    Args:
        S: z y^T, (L, L / 2).
        D: The gate matrix, (L, L / 2).
        R: What `issue_read_products` has started, q x^T or k x^T, (L, L / 2), read with SUMS_OF_READERS.
        shared: Shared memory.
        s: Stage of the tile.
        n: Number of the tile.
        ids: Indices of what the consumer holds.
        half: Which half of the columns, and which consumer.
        config: Constants.
    """
    L: gl.constexpr = config.L
    delta = shared.delta.index(s)
    to = shared.p.index(n % 2)
    if config.USE_DP_OFFSET:
        if config.REVERSE:
            add = gl.expand_dims(delta.slice(half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, S.type.layout)), 0)
        else:
            add = gl.expand_dims(delta.load(gl.SliceLayout(1, S.type.layout)), 1)
        S += add
    P = mma.apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE, config.READER != NO_READER)
    if config.FUSE_NORMALIZER:
        normalizer.store_shared_sums(P, shared, n, half)
    if config.RESULT == SUMS_OF_READERS:
        store_warp.store_pairs(P * R, shared.partial_dots.index(s), half, L)
        if config.NORMS and config.READER == QUERIES:
            reader_norms.store_own_products(R, ids.i, ids.j, shared.norms, half, L)
    to.slice(half * (L // 2), L // 2, 1).store(P.to(to.dtype))
    fence_async_shared()
    pipeline.barrier()
    mbarrier.arrive(shared.ready.index(n % 2), count=1)


@gluon.jit
def store_checkpoint_dots(acc, checkpoint, ids, half: gl.constexpr, gmem, config):
    """Store the inner product of the cotangent `acc` with the state at a checkpoint, <C, dC> of (B5), step (12).

    Each warp stores a part, the sum over its 16 rows.
    """
    layout: gl.constexpr = mma.accumulator_layout(128)
    dot = checkpoint_dots(acc.C0, gmem.checkpoints, checkpoint, ids.row, ids.column, config.DX, config.DY, layout)
    if config.BLOCKS == 2:
        dot += checkpoint_dots(
            acc.C1, gmem.checkpoints, checkpoint, ids.row, ids.column + 128, config.DX, config.DY, layout
        )
    if config.NORMALIZE:
        # (64)
        n_checkpoint = gl.load(gmem.n_checkpoints + checkpoint * config.DX + ids.rk, mask=ids.has_n, other=0.0)
        dot += gl.convert_layout(acc.n * n_checkpoint, gl.SliceLayout(1, layout), assert_trivial=True)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    at = gmem.dots + (checkpoint * gl.num_programs(0) + gl.program_id(0)) * 8 + half * 4
    gl.store(at + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def store_state_checkpoint(acc, checkpoint, ids, gmem, config):
    """Store the state `acc` to a checkpoint, step (12)."""
    store_checkpoint(acc.C0, gmem.checkpoints, checkpoint, ids.row, ids.column, config.DX, config.DY)
    if config.BLOCKS == 2:
        store_checkpoint(acc.C1, gmem.checkpoints, checkpoint, ids.row, ids.column + 128, config.DX, config.DY)
    if config.NORMALIZE:
        gl.store(gmem.n_checkpoints + checkpoint * config.DX + ids.rk, acc.n, mask=ids.has_n)


@gluon.jit
def issue_state_update(C0, C1, tile_decay, x_t, y, u, config):
    """Start C <- g C + (x * u)^T y: (64, WIDTH) + (64, L) @ (L, WIDTH), step (6).

    Returns:
        Both blocks of C, and the left operand x * u in registers. All must be waited for.
    """
    B = mma.scale_by_gates(x_t, u, config.L, gl.DotOperandLayout(0, mma.accumulator_layout(128), 2))
    C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * tile_decay, is_async=True)
    if config.BLOCKS == 2:
        C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * tile_decay, is_async=True)
    return C0, C1, B


@gluon.jit
def update_n_on_cuda_cores(N, x, shared, s, config):
    """Return g n + x^T u, (64), or for dn g dn + x^T (u * delta), step (10)."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(L)
    N = N * gl.max(shared.g.index(s).slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
    if config.USE_DP_OFFSET or not config.REVERSE:
        # x is loaded again: MMAs that run read the registers of A and B, and there are none left for a copy.
        update = mma.load_update_weights(shared.u.index(s), L, gl.SliceLayout(0, layout))
        if config.REVERSE:
            update = update * shared.delta.index(s).load(gl.SliceLayout(0, layout))
        N += gl.sum(x.load(layout).to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def accumulate_dn(dn, decay, q_t, g, delta, L: gl.constexpr):
    """Return dn with what a tile adds to it, and the decay up to the next tile, step (8).

    With a the state weights: dn + decay q^T (a * delta), (64), and decay * g, where `decay` is from the start of the
    work tile to the start of this tile. This is (T13) summed in the direction of time.
    """
    layout: gl.constexpr = mma.accumulator_layout(L)
    by_step: gl.constexpr = gl.SliceLayout(0, layout)
    weight = g.slice(STATE_WEIGHT * L, L, 0).load(by_step) * delta.load(by_step) * decay  # (L)
    dn += gl.sum(q_t.load(layout).to(gl.float32) * gl.expand_dims(weight, 0), 1)
    return dn, decay * gl.max(g.slice(TILE_DECAY * L, 1, 0).load(by_step), 0)


@gluon.jit
def inter_tile_output(acc, pipe_state, z, shared, config):
    """Return the part of the output that comes from the state, (64, L), steps (1) and (2).

    That is (C z^T + n delta^T) * a for dq, (C z^T + n) * a for dk and C z^T * a with TRANSPOSED. While the first
    product runs, the output of the previous tile leaves shared memory and its stage is released.
    """
    L: gl.constexpr = config.L
    by_step: gl.constexpr = gl.SliceLayout(0, mma.accumulator_layout(L))
    dtype: gl.constexpr = shared.x.dtype
    s, _phase, n = pipe_state
    A = mma.to_left_operand(acc.C0.to(dtype), L)
    out = mma.issue_mma(A, z.slice(0, 128, 1).permute((1, 0)))
    # (2) The output of the previous tile has left: its stage is empty.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + config.STAGES - 1) % config.STAGES), count=1, pred=n > 0)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    if config.BLOCKS == 2:
        A = mma.to_left_operand(acc.C1.to(dtype), L)
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
    """Start the TMA store of the output in shared memory `w`, of the tile at step `t` of a work tile, step (9).

    With NUM_SPLITS it is added to what is in memory. Results of different pairs of programs lie side by side, like
    heads.
    """
    end = work_tile.start + work_tile.steps
    if config.NUM_SPLITS == 1:
        at = scheduler.tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, ids.row, end, params)
        pipeline.async_store(gmem.out, at, w)
    else:
        column = work_tile.h * (config.NUM_SPLITS // PAIR) + ids.split // PAIR
        split_reduce.async_add(
            gmem.out, scheduler.tile_coordinates(work_tile.b, column, work_tile.start + t, ids.row, end, params), w
        )


@gluon.jit
def start_next_tile(acc, B, pipe_state, shared, ids, half: gl.constexpr, config):
    """Wait for the next tile and store its P, step (11), while the updates of the state run.

    The products that run read the left operand `B`.
    """
    C0, C1, N, dn, decay, N0, N1 = acc
    s, phase = pipeline.advance(pipe_state.index, pipe_state.phase, config.STAGES)
    n = pipe_state.count + 1
    mbarrier.wait(shared.full.index(s), phase)
    S = issue_scores(shared, s, half, config)
    R = S
    D = load_gate_matrix(shared, s, half, config)
    if config.FUSE_NORMALIZER:
        normalizer.store_shared_n(gl.sum(N0, 1), shared.n.index(n % 2), half * 128)
        normalizer.store_shared_n(gl.sum(N1, 1), shared.n.index(n % 2), half * 128 + 64)
        S = warpgroup_mma_wait(0, deps=[S])
    elif config.RESULT == SUMS_OF_READERS:  # of heads with two blocks
        R = issue_read_products(shared, s, half, config)
        S, R, C0, C1, B = warpgroup_mma_wait(0, deps=[S, R, C0, C1, B])
    elif config.BLOCKS == 2:
        S, C0, C1, B = warpgroup_mma_wait(0, deps=[S, C0, C1, B])
    else:
        S, C0, B = warpgroup_mma_wait(0, deps=[S, C0, B])
    store_scores(S, D, R, shared, s, n, ids, half, config)
    return Accumulators(C0=C0, C1=C1, n=N, dn=dn, decay=decay, N0=N0, N1=N1), pipeline.PipelineState(s, phase, n)


@gluon.jit
def at_checkpoint(acc, t, work_tile, ids, gmem, params, half: gl.constexpr, config):
    """Store the state or its inner product with the checkpoint, step (12), where step `t` of a work tile is at one."""
    step = t if config.REVERSE else t + config.L
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps and step > 0:
        checkpoint = work_tile.checkpoint + step // config.CHECKPOINT_STEPS * params.H
        if config.REVERSE or config.READER != NO_READER:
            store_checkpoint_dots(acc, checkpoint, ids, half, gmem, config)
        else:
            store_state_checkpoint(acc, checkpoint, ids, gmem, config)


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (12) of the module's docstring.

    Args:
        acc: The state before the tile.
        pipe_state: Position of the tile in the ring. Its stage is full, and the consumer has waited for that.
        step: Number of the tile in its work tile, in the direction of the scan.
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
    s, _phase, n = pipe_state
    x = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0))
    y = shared.y.index(s).reshape([L, config.WIDTH])
    z = shared.z.index(s).reshape([L, config.WIDTH])
    w = shared.w.index(2 * s + half)
    w_t = w.reshape([L, 64]).permute((1, 0))
    g = shared.g.index(s)
    t = (work_tile.tiles - 1 - step if config.REVERSE else step) * L
    tile_decay = gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, mma.accumulator_layout(128))), 0)
    # (1) out^T <- (C z^T + n delta^T) * a, and (2)
    out = inter_tile_output(acc, pipe_state, z, shared, config)
    if config.RESULT == SUMS_OF_READERS:  # (7) of other tiles
        mma.store_partial_dots(out, x if config.READER == READ_KEYS else w_t, shared.partial_dots.index(s), half, L)
        if config.NORMS:
            reader_norms.signal_sums(shared.norms)
    C0, C1, N, dn, decay, N0, N1 = acc
    if config.FUSE_NORMALIZER:  # (3), (4) d and its inverse, while few registers are in use
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
        d = warpgroup_mma_wait(0, deps=[normalizer.issue_n_product(z, shared, n)])
        normalizer.store_shared_inverse(d, shared, s, n, half, L, config.SAVE_D)
    x_t = x.load(mma.accumulator_layout(L))  # (64, L), before the wait, on which it does not depend
    if not config.FUSE_NORMALIZER:  # (3) Both consumers have stored their half of P.
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    # (5) out^T <- out^T + x^T P^T
    A = mma.to_left_operand(x_t, L)
    out = warpgroup_mma(A, shared.p.index(n % 2).permute((1, 0)), out, is_async=True)
    # (6) C <- g C + (x * u)^T y
    C0, C1, B = issue_state_update(C0, C1, tile_decay, x_t, y, shared.u.index(s), config)
    out, A = warpgroup_mma_wait(config.BLOCKS, deps=[out, A])
    if config.FUSE_NORMALIZER:  # the division of (5)
        out = normalizer.divide_by_denominators(out, shared, half)
    if config.RESULT == GATE_SUMS:
        # (7) w . out, summed over the consumer's rows
        mma.store_partial_dots(out, w_t, shared.partial_dots.index(s), half, L)
    if config.READER == QUERIES:  # what queries read of their own steps' writes
        out += x_t.to(gl.float32) * gl.expand_dims(shared.same.index(s).load(gl.SliceLayout(0, out.type.layout)), 0)
    if config.READER == READ_KEYS:  # what keys add as writers
        out += delta_dk_w.load_transposed(w.reshape([L, 64])).to(gl.float32)
    if config.NORMS:
        out -= reader_norms.corrections(x if config.READER == READ_KEYS else w_t, n, shared.norms, L)
    if config.ACCUMULATE_DN:
        # (8) dn <- dn + decay w^T (a * delta)
        dn, decay = accumulate_dn(dn, decay, w_t, g, shared.delta.index(s), L)
    # (9) The output, over w and on its way to memory.
    w_t.store(out.to(w.dtype))
    fence_async_shared()
    store_output(w, t, work_tile, ids, gmem, params, config)
    # (10) n <- g n + x^T u
    if config.NORMALIZE:
        N = update_n_on_cuda_cores(N, x, shared, s, config)
    if config.FUSE_NORMALIZER:
        N0 = normalizer.update_n(N0, y, half * 128, shared, s, L)
        N1 = normalizer.update_n(N1, y, half * 128 + 64, shared, s, L)
        C0, C1, B, N0, N1 = warpgroup_mma_wait(0, deps=[C0, C1, B, N0, N1])  # P beside these takes too many registers
    # (11) P of the next tile
    acc = Accumulators(C0=C0, C1=C1, n=N, dn=dn, decay=decay, N0=N0, N1=N1)
    acc, pipe_state = start_next_tile(acc, B, pipe_state, shared, ids, half, config)
    # (12) Checkpoint
    if not config.TRANSPOSED and config.READER != QUERIES:
        at_checkpoint(acc, t, work_tile, ids, gmem, params, half, config)
    return acc, pipe_state


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    of_p: gl.constexpr = mma.accumulator_layout(L // 2)
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_p))
    row = gl.program_id(0) // config.NUM_SPLITS * 128 + half * 64
    split = gl.program_id(0) % config.NUM_SPLITS
    rk = row + gl.arange(0, 64, gl.SliceLayout(1, mma.accumulator_layout(L)))
    ids = FragmentIds(
        i=i,
        j=j,
        rk=rk,
        has_n=rk * 0 + split == 0,
        rn=normalizer.accumulator_rows(half * 128),
        row=row,
        column=split * config.WIDTH,
        split=split,
    )
    pipe_state = pipeline.PipelineState(0, 0, 0)
    # (11) of the first tile
    mbarrier.wait(shared.full.index(0), 0)
    S = issue_scores(shared, 0, half, config)
    R = S
    if config.RESULT == SUMS_OF_READERS:
        R = issue_read_products(shared, 0, half, config)
        S, R = warpgroup_mma_wait(0, deps=[S, R])
    else:
        S = warpgroup_mma_wait(0, deps=[S])
    store_scores(S, load_gate_matrix(shared, 0, half, config), R, shared, 0, 0, ids, half, config)
    initial_n_phase = 0
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        work_tile = get_work_tile(index, params, config)
        acc = load_initial_state(index, ids, gmem, params, config)
        if config.FUSE_NORMALIZER:
            # The other consumer reads this half of n, too.
            normalizer.store_shared_n(gl.sum(acc.N0, 1), shared.n.index(pipe_state.count % 2), half * 128)
            normalizer.store_shared_n(gl.sum(acc.N1, 1), shared.n.index(pipe_state.count % 2), half * 128 + 64)
            initial_n_phase = normalizer.exchange_initial_n(shared, initial_n_phase)
        for step in range(0, work_tile.tiles):
            acc, pipe_state = process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            store_final_state(acc, index, ids, gmem, params, config)
        if config.ACCUMULATE_DN:
            at_n = gmem.n_out + scheduler.state_index(index, params).to(gl.int64) * config.DX + ids.rk
            gl.store(at_n, acc.dn, mask=ids.has_n)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    # The store warp waits for the last tile, too.
    if config.RESULT != NO_RESULT:
        mbarrier.arrive(shared.empty.index((pipe_state.index + config.STAGES - 1) % config.STAGES), count=1)


@gluon.jit(do_not_specialize=scheduler.RUNTIME_SCALARS)
def dq_dk_kernel(
    X, Y, Z, Out, gates, i_gate, f_gate, key_norms, norms_of_reader, dbeta, w_out, state_in, state_out, n_in, n_out,
    checkpoints, n_checkpoints, dots, zero_counts, schedule, W, T, tiles_per_head, H, group_size, segment_steps,
    num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb, stride_ft, stride_fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, NUM_SPLITS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    CHECKPOINT_STEPS: gl.constexpr, REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr,
    STORE_FINAL_STATE: gl.constexpr, NORMALIZE: gl.constexpr, USE_DP_OFFSET: gl.constexpr, TRANSPOSED: gl.constexpr,
    FUSE_NORMALIZER: gl.constexpr, SAVE_D: gl.constexpr, READER: gl.constexpr, NORMS: gl.constexpr,
    SAVE_SUMS: gl.constexpr, IS_VARLEN: gl.constexpr, GATES: gl.constexpr, INPUT_GATE: gl.constexpr,
    SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr, INDEXED: gl.constexpr,
    STATE_DX: gl.constexpr, STATE_DY: gl.constexpr,
):  # fmt: skip
    """Compute dq, or with REVERSE dk, or with TRANSPOSED o or dv.

    States are (DX, DY), with TRANSPOSED (DY, DX) in memory. With NUM_SPLITS above 1 the outputs of each pair lie side
    by side, as if there were NUM_SPLITS / 2 times as many heads. Tensors that the constants say are not used may be
    any.

    Args:
        X: TMA descriptor of x, in tiles (L, 128).
        Y: TMA descriptor of y, in tiles (L, WIDTH).
        Z: TMA descriptor of z, in tiles (L, WIDTH).
        Out: TMA descriptor of the result, in tiles (L, 64).
        gates: Gate vectors, (H, tiles, VECTORS, L).
        i_gate: Input gates, (B, T, H), or beta with READER.
        f_gate: Forget gates, (B, T, H), or with QUERIES do . E.
        key_norms, norms_of_reader: 1 / |k|, and that of the reader, q or k, (B, T, H) float32, with NORMS.
        dbeta: The gradient of beta, (B, T, H) float32, with NORMS and READ_KEYS.
        w_out: Sums w . out, (programs of a head, H, tiles, L); with TRANSPOSED d, (B, T, H). With SAVE_SUMS and READER
            those of earlier tiles.
        state_in: Initial states, (segments, H, dqk, dhv), with USE_INITIAL_STATE; with INDEXED a pool.
        state_out: Final states, (segments, H, dqk, dhv), with STORE_FINAL_STATE; with INDEXED a pool.
        n_in: Initial n, (segments, H, dqk).
        n_out: Final n, or what segments add to dn with ACCUMULATE_DN, (segments, H, dqk). With SAVE_SUMS and READER the
            sums of pairs, (H, tiles, PAIR_SUMS, L): ROW_SUM and COLUMN_SUM.
        checkpoints: States at checkpoints, (checkpoints, H, dqk, dhv), in the order of `checkpoints.py`.
        n_checkpoints: n at checkpoints, (checkpoints, H, dqk).
        dots: Parts of <C, dC>, (checkpoints, H, programs of a head, 8).
        zero_counts: A zero for each pair of programs, int32, with NUM_SPLITS above 1.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        W: TMA descriptor of w, in tiles (L, 64); with TRANSPOSED that of the result. With READ_KEYS dk_w, (B, T, H,
            128), in the order of `delta_dk_w.py`, in whose memory the result may lie: hosts of plans allow that for the
            last tensor.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        segment_steps: Steps of a segment.
        num_work_tiles: Work tiles.
        stride_ib, stride_it, stride_ih: Strides of the input gates.
        stride_fb, stride_ft, stride_fh: Strides of the forget gates.
        scale: The factor of q, or the factor f of the READER.
        log_scale: Its logarithm in base 2.
    """
    WIDTH: gl.constexpr = DY // NUM_SPLITS
    ACCUMULATE_DN: gl.constexpr = IS_SEGMENTED and NORMALIZE and USE_DP_OFFSET and not REVERSE
    RESULT: gl.constexpr = result_of_store_warp(TRANSPOSED, SAVE_D, READER, SAVE_SUMS)
    partitions(
        (X, Y, Z, W),
        gate_warp.GateSource(
            vectors=gates, i_gate=i_gate, f_gate=f_gate, stride_ib=stride_ib, stride_it=stride_it, stride_ih=stride_ih,
            stride_fb=stride_fb, stride_ft=stride_ft, stride_fh=stride_fh, scale=scale, log_scale=log_scale,
            GATES=GATES, INPUT_GATE=INPUT_GATE, SIGMOID_I=SIGMOID_I, SIGMOID_F=SIGMOID_F,
            key_norms=key_norms if NORMS else None, reader_norms=norms_of_reader if NORMS else None,
        ),
        dbeta, w_out, zero_counts, tiles_per_head, group_size,
        GlobalPointers(
            out=Out, state_in=state_in, state_out=state_out, n_in=n_in, n_out=n_out, checkpoints=checkpoints,
            n_checkpoints=n_checkpoints, dots=dots,
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=segment_steps, num_work_tiles=num_work_tiles,
            schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DX=DX, DY=DY, NUM_SPLITS=NUM_SPLITS, WIDTH=WIDTH, BLOCKS=WIDTH // 128, L=L, STAGES=STAGES,
            CHECKPOINT_STEPS=CHECKPOINT_STEPS, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED,
            USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE, NORMALIZE=NORMALIZE,
            USE_DP_OFFSET=USE_DP_OFFSET, TRANSPOSED=TRANSPOSED, ACCUMULATE_DN=ACCUMULATE_DN,
            FUSE_NORMALIZER=FUSE_NORMALIZER, SAVE_D=SAVE_D, READER=READER, NORMS=NORMS, RESULT=RESULT, INDEXED=INDEXED,
            STATE_DX=STATE_DX, STATE_DY=STATE_DY, PADDED=STATE_DX != DX or STATE_DY != DY,
        ),
    )  # fmt: skip


@gluon.jit
def run_second_gate_warp(
    source, buffers, dbeta, shared, out, zeros, zero_counts, full, empty, params, tiles_per_head, gate_config, config
):
    """Run the second gate warp, or in its place the zero-fill warp, with NUM_SPLITS above 1, or that of NORMS."""
    if config.NORMS:
        reader_norms.run_dot_warp(source, dbeta, shared, params, config)
    elif config.NUM_SPLITS == 1:
        gate_warp.run_gate_warp(1, source, buffers, full, empty, params, tiles_per_head, gate_config)
    else:
        split_reduce.run_zero_fill_warp(out, zeros, zero_counts, full, empty, params, config)


@gluon.jit
def partitions(tensors, source, dbeta, w_out, zero_counts, tiles_per_head, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: consumers, load, gate and store warps."""
    X, Y, Z, W = tensors
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = pipeline.allocate_tiles(X, STAGES)
    y = pipeline.allocate_tiles(Y, STAGES)
    z = pipeline.allocate_tiles(Z, STAGES)
    w = pipeline.allocate_tiles(W, 2 * STAGES)
    p = pipeline.allocate_operands(dtype, 2, L, L)
    g = pipeline.allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = pipeline.allocate_vectors(dtype, STAGES, 2 * L)
    delta = pipeline.allocate_vectors(gl.float32, STAGES, L)
    # A buffer that the constants say is not used is an alias of another one, or None.
    PARTS: gl.constexpr = 16 if config.RESULT == SUMS_OF_READERS else 8
    partial_dots = delta if config.TRANSPOSED else pipeline.allocate_vectors(gl.float32, STAGES, PARTS * L)
    d = pipeline.allocate_vectors(gl.float32, STAGES, L) if config.FUSE_NORMALIZER else partial_dots
    same = pipeline.allocate_vectors(gl.float32, STAGES, L) if config.READER == QUERIES else None
    floor = pipeline.allocate_vectors(gl.float32, STAGES, L) if config.FUSE_NORMALIZER else None
    matrix = pipeline.allocate_operands(dtype, STAGES, 8, L) if config.FUSE_NORMALIZER else None
    n = pipeline.allocate_operands(dtype, 2, 8, config.DY) if config.FUSE_NORMALIZER else None
    sums = pipeline.allocate_vectors(gl.float32, 4, L) if config.FUSE_NORMALIZER else None
    inverse = pipeline.allocate_vectors(gl.float32, 2, L) if config.FUSE_NORMALIZER else None
    initial_n_ready = pipeline.allocate_barrier(2) if config.FUSE_NORMALIZER else None
    RESULT: gl.constexpr = config.RESULT
    PAIRS: gl.constexpr = config.RESULT == SUMS_OF_READERS
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED, RESULT=RESULT,
    )  # fmt: skip
    SPLIT_REDUCE: gl.constexpr = config.NUM_SPLITS > 1
    zeros = pipeline.allocate_tiles(gmem.out, 1) if SPLIT_REDUCE else x
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(RESULT) + (1 if SPLIT_REDUCE else 0), 2)
    ready = pipeline.allocate_barriers(2, 2)
    norms = reader_norms.allocate(L) if config.NORMS else None
    fence_async_shared()
    shared = SharedStorage(
        x=x, y=y, z=z, w=w, g=g, u=u, delta=delta, partial_dots=partial_dots, full=full, empty=empty, p=p, ready=ready,
        floor=floor, matrix=matrix, n=n, sums=sums, inverse=inverse, initial_n_ready=initial_n_ready, d=d, same=same,
        norms=norms,
    )  # fmt: skip
    buffers = gate_warp.GateBuffers(
        vectors=g, weights=u, extra=floor if config.FUSE_NORMALIZER else delta, matrix=matrix, same=same,
    )  # fmt: skip
    # Two gate warps where one would be slower than the consumers, and the place of the second is free.
    gate_config: gl.constexpr = gate_warp.GateWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED,
        EXTRA=FLOOR if config.FUSE_NORMALIZER else (DELTA_P if config.USE_DP_OFFSET else None),
        NUM_SPLITS=config.NUM_SPLITS,
        GATE_WARPS=2 if config.FUSE_NORMALIZER or (
            source.GATES == RECOMPUTED and config.BLOCKS == 2 and not SPLIT_REDUCE
        ) else 1,
        WRITES=config.READER != NO_READER,
    )  # fmt: skip
    consumer_registers: gl.constexpr = CONSUMER_REGISTERS_MAX if config.FUSE_NORMALIZER else CONSUMER_REGISTERS
    producer_registers: gl.constexpr = PRODUCER_REGISTERS_MIN if config.FUSE_NORMALIZER else PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, Z, W, gmem, shared, params, group_size, config)),
            (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (run_second_gate_warp, (
                source, buffers, dbeta, shared, gmem.out, zeros, zero_counts, full, empty, params, tiles_per_head,
                gate_config, config,
            )),
            (store_warp.run_store_warp, (
                d, w_out, gmem.n_out if PAIRS else source.vectors, full, empty, params, tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer_registers, producer_registers, producer_registers, producer_registers, producer_registers],
    )  # fmt: skip
