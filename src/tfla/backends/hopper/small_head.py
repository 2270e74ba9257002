"""o, dq, or dk and dv together, of heads so small that one warpgroup holds a whole state C, (dqk, dhv), in registers.

A program computes HEADS heads of each of its work tiles, two where shared memory holds their tiles, with a consumer for
each head. The operands by result, with the gate weights of `docs/mathematics.md`:

    result   scan           x    y     zk   zv    out_v   out_k   a        update weights u
    o        with time      k    v     q    -     o       -       INTER    UPDATE
    dq       with time      k    v     q    do    -       dq      INTER    UPDATE
    dk, dv   against time   q    do    k    v     dv      dk      UPDATE   INTER (a')
    state    either         k,q  v,do  -    -     -       -       -        as above

The last row is what a segment adds to the state, as in `segment_states.py`. C stands for dC against time.

The steps of a tile (`process_tile`); (2) to (4) with OUTPUT_V, (6) to (8) with OUTPUT_K. In registers, as float32
accumulators, out_v and out_k are `V` and `K` in the code, and n is `N`:

    (1)   wait for the tile
    (2)   S <- zk x^T, out_v <- zk C           (L, L), and (L, dhv) = (L, dqk) (dqk, dhv), (T1), (T2), (T11)
    (3)   P <- S * D, masked                   (L, L), (T1), (T11); for o with a normalizer d <- a * (zk n) + P 1, (T3)
    (4)   out_v <- out_v * a + P y             (L, dhv), (T2), (T11)
    (5)   the stage of the previous tile is empty: its outputs have left shared memory
    (6)   S <- zv y^T, out_k <- zv C^T         (L, L), and (L, dqk) = (L, dhv) (dhv, dqk), (T8), (T9), (T10)
    (7)   delta <- -u (do . h)                 (L), only for dq with a normalizer, (T7)
    (8)   P <- (S + delta) * D, masked         (L, L), (T8);
          out_k <- (out_k + n) * a + P x       (L, dqk), (T10), or with delta n^T for n (T9)
    (9)   C <- g C + (x * u)^T y               (dqk, dhv) = (dqk, L) (L, dhv), (T5), (T12)
    (10)  n <- g n + x^T u                     (dqk), (T6), against time with u * delta for u (T13)
    (11)  out_v <- out_v / max(|d|, exp(-m))   only for o with a normalizer, (T4);
          zk . out_k                           (L), to global memory: q . dq or k . dk of (B5)
    (12)  out_v over y, or with OUTPUT_K over zv; out_k over zk; from there to global memory by TMA; C, rounded, and n
          to shared memory, where the next tile reads them
    (13)  checkpoint                           dq stores C and n, dk the inner product <C, dC> with them, (B5)

Which partition waits for which:

    load warp, gate warps --full[s]--> consumers --empty[s]--> load warp, gate warps
    load warp --full_checkpoint[head]--> consumer --empty_checkpoint[head]--> load warp    with HAS_CHECKPOINTS, REVERSE
    consumer 1 --part_full--> consumer 0 --part_empty--> consumer 1                        with SHARED_QK, OUTPUT_K

A stage is empty one tile late, at (5), when the outputs that overwrite it have left; without outputs at the end of the
tile. With both outputs out_k starts when the products of out_v are done. out_v is then held in 16 bits until (8) has
read zv, over which it is stored.

Where both heads share q and k (SHARED_QK), a stage has those once, and the sum of what both add to dq or dk is stored.
C is a right operand in shared memory, so that a product can contract either side of it. n is summed in float32.

Checkpoints go to memory by TMA, as the state lies in shared memory. Against time the load warp loads that of a tile
after the tile itself, for each consumer to a buffer of its own, which is empty when the consumer has computed <C, dC>
with the checkpoint before.
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
from tfla.backends.hopper import gate_warp, mma, pipeline, scheduler
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
)


class Config(NamedTuple):
    """The constants of the kernel."""

    HEADS: Any  # heads of a program, 1 or 2: one for each consumer
    SHARED_QK: Any  # both heads share q and k
    QK_COPIES: Any  # tiles of q or k in a stage: 1 with SHARED_QK, else HEADS
    DK: Any  # dqk
    DV: Any  # dhv
    L: Any  # steps of a tile
    STAGES: Any  # stages of the ring
    CHECKPOINT_STEPS: Any  # steps between checkpoints
    REVERSE: Any  # scan against time
    IS_SEGMENTED: Any  # sequences are cut into segments, each a work tile
    USE_INITIAL_STATE: Any  # start work tiles from `state_in` and `n_in`, not from zeros
    STORE_FINAL_STATE: Any  # store the states after work tiles to `state_out` and `n_out`
    SKIP_LAST: Any  # the last segment of a sequence has no tiles, see `num_tiles`
    OUTPUT_V: Any  # compute out_v: o or dv
    OUTPUT_K: Any  # compute out_k: dq or dk
    HAS_OUTPUT: Any  # OUTPUT_V or OUTPUT_K
    NORMALIZE: Any  # the state has n
    SAVE_D: Any  # store d to `d_out`
    USE_DP_OFFSET: Any  # add delta of (T7) to zv y^T
    COMPUTE_DP_OFFSET: Any  # compute delta in the scan for dq: the gate vector DELTA_P holds -u before
    HAS_CHECKPOINTS: Any  # store states at checkpoints, or against time read them
    INDEXED: Any  # for o: `state_in` and `state_out` are pools, whose rows the schedule has
    STATE_DK: Any  # dqk of `state_in` and `state_out`
    STATE_DV: Any  # their dhv
    PADDED: Any  # with INDEXED: they are less than DK or DV, and the last rows or columns of states are zero


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out_v: Any  # TMA descriptor
    out_k: Any  # TMA descriptor
    checkpoints: Any  # TMA descriptor
    state_in: Any  # (segments, H, dqk, dhv)
    state_out: Any  # (segments, H, dqk, dhv)
    n_in: Any  # (segments, H, dqk)
    n_out: Any  # (segments, H, dqk)
    n_checkpoints: Any  # (checkpoints, H, dqk)
    decays: Any  # (segments, H)
    w_out: Any  # sums zk . out_k, (H, tiles, L)
    d_out: Any  # (B, T, H)
    dots: Any  # <C, dC>, (checkpoints, H), float64
    gates: Any  # gate vectors, (H, tiles, VECTORS, L)


class SharedStorage(NamedTuple):
    """The shared memory of a program. A field that the constants say is not used is an alias of another one."""

    # The ring:
    x: Any  # (QK_COPIES STAGES, L, dqk)
    y: Any  # (HEADS STAGES, L, dhv)
    zk: Any  # (QK_COPIES STAGES, L, dqk), with HAS_OUTPUT
    zv: Any  # (HEADS STAGES, L, dhv), with OUTPUT_K
    # The state of each head, as the next tile reads it:
    c: Any  # C, rounded, (HEADS, dqk, dhv), with HAS_OUTPUT
    n: Any  # n, float32, (HEADS, dqk), with NORMALIZE
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # With SHARED_QK and OUTPUT_K:
    part: Any  # out_k of the second head, which the first consumer adds to its own, (1, L, dqk)
    part_full: Any  # barrier: `part` is stored
    part_empty: Any  # barrier: `part` has been read
    # With HAS_CHECKPOINTS against time:
    checkpoint_state: Any  # the state at a checkpoint, (HEADS, dqk, dhv)
    full_checkpoint: Any  # barriers, (HEADS)
    empty_checkpoint: Any  # barriers, (HEADS)


class Accumulators(NamedTuple):
    """The state of one head that a consumer holds in registers, in float32."""

    C: Any  # (dqk, dhv)
    n: Any  # (dqk)
    decay: Any  # from the start of the work tile to this tile, (1), without outputs


class PipelineState(NamedTuple):
    """The position of a consumer in the ring."""

    index: Any  # stage of the current tile
    phase: Any  # phase of the stage's barriers for this tile
    count: Any  # number of tiles before this one, over all work tiles of the program
    num_checkpoints: Any  # number of checkpoints read before this tile, over all work tiles of the program


class WorkTile(NamedTuple):
    """The work tile of one head."""

    b: Any  # batch row
    head_group: Any  # group of HEADS heads
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps
    tiles: Any  # number of tiles
    first_step: Any  # first token, counted over all batch rows
    first_tile: Any  # first tile, counted over all heads


class TileViews(NamedTuple):
    """The views of a tile of one head in shared memory."""

    c: Any  # C before the tile, rounded, (dqk, dhv)
    n: Any  # n before the tile, (dqk)
    part: Any  # out_k of the second head, (L, dqk)
    x: Any  # (L, dqk)
    y: Any  # (L, dhv)
    zk: Any  # (L, dqk)
    zv: Any  # (L, dhv)
    g: Any  # gate vectors, (NUM_GATE_VECTORS L)
    u: Any  # update weights, (2 L)
    e: Any  # exp(-m) for o, -u for dq, delta for dk and dv, (L)


class FragmentIds(NamedTuple):
    """The indices of what a consumer holds."""

    i: Any  # rows of P, steps of the outputs, (L)
    j: Any  # columns of P, steps of the updates, (L)
    rk: Any  # elements of n, (dqk)
    rl: Any  # steps, rows of out_k, (L)
    rd: Any  # steps, rows of out_v, (L)
    one: Any  # the index of the only element of a vector, 0, (1)


@gluon.jit
def run_load_warp(tensors, shared, params, group_size, config):
    """Load the tiles of x, y, zk and zv to shared memory by TMA, and against time the states at checkpoints.

    Args:
        tensors: TMA descriptors of x and zk, in tiles (L, dqk), of y and zv, in tiles (L, dhv), and of checkpoints:
            (x, y, zk, zv, checkpoints).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    X, Y, ZK, ZV, Checkpoints = tensors
    L: gl.constexpr = config.L
    HEADS: gl.constexpr = config.HEADS
    QK_COPIES: gl.constexpr = config.QK_COPIES
    k_bytes: gl.constexpr = X.block_type.nbytes * (2 if config.HAS_OUTPUT else 1) * QK_COPIES  # x, zk
    v_bytes: gl.constexpr = Y.block_type.nbytes * (2 if config.OUTPUT_K else 1) * HEADS  # y, zv
    n = 0
    num_checkpoints = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = scheduler.num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        for i in range(0, tiles):
            step = (tiles - 1 - i if config.REVERSE else i) * L
            t = start + step
            end = start + steps
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            mbarrier.expect(bar, k_bytes + v_bytes)
            for e in gl.static_range(QK_COPIES):
                at_k = scheduler.tile_coordinates(b, (h * HEADS + e) // group_size, t, 0, end, params)
                pipeline.async_load(X, at_k, bar, shared.x.index(QK_COPIES * s + e))
                if config.HAS_OUTPUT:
                    pipeline.async_load(ZK, at_k, bar, shared.zk.index(QK_COPIES * s + e))
            for e in gl.static_range(HEADS):
                at_v = scheduler.tile_coordinates(b, h * HEADS + e, t, 0, end, params)
                pipeline.async_load(Y, at_v, bar, shared.y.index(HEADS * s + e))
                if config.OUTPUT_K:
                    pipeline.async_load(ZV, at_v, bar, shared.zv.index(HEADS * s + e))
            n += 1
            # The state before the tile: the consumers multiply it by dC when they have processed the tile.
            if config.HAS_CHECKPOINTS and config.REVERSE and step > 0 and step % config.CHECKPOINT_STEPS == 0:
                for e in gl.static_range(HEADS):
                    mbarrier.wait(shared.empty_checkpoint.index(e), (num_checkpoints & 1) ^ 1)
                    mbarrier.expect(shared.full_checkpoint.index(e), Checkpoints.block_type.nbytes)
                    row = checkpoint_index(b, start, step, h * HEADS + e, params, config) * config.DK
                    pipeline.async_load(
                        Checkpoints,
                        [row.to(gl.int32), 0],
                        shared.full_checkpoint.index(e),
                        shared.checkpoint_state.index(e),
                    )
                num_checkpoints += 1


@gluon.jit
def checkpoint_index(b, start, step, h, params, config):
    """Return the index, in (checkpoints, H), of the checkpoint of head h before step `step` of a work tile.

    Args:
        b: Batch row.
        start: First token of the work tile in the batch row.
        step: Step of the work tile, a multiple of CHECKPOINT_STEPS.
        h: Head.
        params: The numbers of the scheduler.
        config: Constants.
    """
    heads = params.H * config.HEADS
    return (
        (b.to(gl.int64) * params.T + start) // config.CHECKPOINT_STEPS - 1 + step // config.CHECKPOINT_STEPS
    ) * heads + h


@gluon.jit
def opaque_index(ring, index: gl.constexpr, n):
    """Return `ring.index(index)`, at an address that the compiler cannot compute before the loop over tiles.

    For every tile n, n >> 30 is 0, which the compiler cannot assume. It would otherwise hold addresses in registers
    throughout the loop.
    """
    return ring.index(index + (n >> 30))


@gluon.jit
def view_tile(shared, buffers, s, n, head: gl.constexpr, config):
    """Return views of tile n of one head, in stage s, and of the state before it."""
    L: gl.constexpr = config.L
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    gate_index = head * config.STAGES + s
    return TileViews(
        c=opaque_index(shared.c, head, n),
        n=opaque_index(shared.n, head, n),
        part=opaque_index(shared.part, 0, n),
        x=shared.x.index(config.QK_COPIES * s + copy).reshape([L, config.DK]),
        y=shared.y.index(config.HEADS * s + head).reshape([L, config.DV]),
        zk=shared.zk.index(config.QK_COPIES * s + copy).reshape([L, config.DK]),
        zv=shared.zv.index(config.HEADS * s + head).reshape([L, config.DV]),
        g=buffers.vectors.index(gate_index),
        u=buffers.weights.index(gate_index),
        e=buffers.extra.index(gate_index),
    )


@gluon.jit
def store_shared_state(C, N, c, n, NORMALIZE: gl.constexpr):
    """Store the state to shared memory, where the next tile reads it.

    Args:
        C: (dqk, dhv), rounded here.
        N: n, (dqk).
        c: Where C goes in shared memory, (dqk, dhv).
        n: Where n goes in shared memory, (dqk).
        NORMALIZE: Whether there is n.
    """
    c.store(C.to(c.dtype))
    if NORMALIZE:
        n.store(N)
    fence_async_shared()
    pipeline.barrier()


@gluon.jit
def state_pointers(state, at, config):
    """Return pointers (dqk, dhv) to state `at`."""
    layout: gl.constexpr = mma.accumulator_layout(config.DV)
    return mma.state_pointers(
        state, at, 0, 0, config.STATE_DK, config.STATE_DV, False, layout, config.DK, config.DV
    )  # fmt: skip


@gluon.jit
def load_initial_state(index, ids, gmem, params, head: gl.constexpr, config):
    """Return the state before the first step of work tile `index`: zeros, or loaded with USE_INITIAL_STATE."""
    of_v: gl.constexpr = mma.accumulator_layout(config.DV)
    C = gl.zeros([config.DK, config.DV], gl.float32, of_v)
    N = gl.zeros([config.DK], gl.float32, gl.SliceLayout(1, mma.accumulator_layout(config.L)))
    total = ids.one.to(gl.float32) + 1.0
    if config.USE_INITIAL_STATE:
        at = scheduler.state_index(index, params, config.INDEXED) * config.HEADS + head
        C = mma.load_block(
            state_pointers(gmem.state_in, at, config), at, params.H * config.HEADS, 0, 0, config.STATE_DK,
            config.STATE_DV, config.PADDED, config.DK, config.DV, config.INDEXED,
        )  # (dqk, dhv)  # fmt: skip
        if config.NORMALIZE:
            if config.INDEXED:
                at = scheduler.state_index(index, params) * config.HEADS + head
            N = gl.load(gmem.n_in + at.to(gl.int64) * config.DK + ids.rk)  # (dqk)
    return Accumulators(C=C, n=N, decay=total)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, head: gl.constexpr, config):
    """Store the state after the last step of work tile `index`, and without outputs the decay over it."""
    C, N, total = acc
    state_out = gmem.state_out
    at = scheduler.state_index(index, params, config.INDEXED, True) * config.HEADS + head
    dtype: gl.constexpr = state_out.dtype.element_ty
    mma.store_block(
        state_pointers(state_out, at, config), C.to(dtype), at, 0, 0, config.STATE_DK, config.STATE_DV,
        config.PADDED, config.DK, config.DV, config.INDEXED,
    )  # fmt: skip
    if config.NORMALIZE:
        if config.INDEXED:
            at = scheduler.state_index(index, params) * config.HEADS + head
        gl.store(gmem.n_out + at.to(gl.int64) * config.DK + ids.rk, N)
    if not config.HAS_OUTPUT:
        gl.store(gmem.decays + at + ids.one, total)


@gluon.jit
def compute_denominators(P, tile, weight, config):
    """Return d = a * (zk n) + P 1, (L), step (3)."""
    of_v: gl.constexpr = weight.type.layout
    of_k: gl.constexpr = mma.accumulator_layout(config.DK)
    row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, of_k)), 0)  # (1, dqk)
    dot = gl.sum(tile.zk.load(of_k).to(gl.float32) * row, 1)
    d = gl.convert_layout(gl.sum(P, 1), of_v, assert_trivial=True)
    return d + gl.convert_layout(dot, of_v, assert_trivial=True) * weight


@gluon.jit
def divide_by_denominators(V, d, t, tile, work_tile, ids, gmem, params, config):
    """Return `V` / max(|d|, exp(-m)), (L, dhv), step (11), and store d with SAVE_D."""
    if config.SAVE_D:
        heads = params.H * config.HEADS
        gl.store(
            gmem.d_out + (work_tile.first_step + t + ids.rd) * heads + work_tile.h, d, mask=ids.rd < work_tile.steps - t
        )
    return V * gl.expand_dims(1.0 / gl.maximum(gl.abs(d), tile.e.load(d.type.layout)), 1)


@gluon.jit
def compute_dp_offset(S, K, D, t, tile, work_tile, ids, gmem, config):
    """Return delta = -u (do . h), (L), and store it as the gate vector DELTA_P, step (7).

    No h is needed: by (T2), do . h is q . (do C^T) * a' plus the row sums of P * (do v^T), where P = (q k^T) * D'. The
    code multiplies (do v^T) by D' instead.

    Args:
        S: zv y^T = do v^T, (L, L).
        K: zv C^T = do C^T, (L, dqk).
        D: The gate matrix D', (L, L).
        t: First step of the tile in the work tile.
        tile: Views of the tile.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        config: Constants.
    """
    L: gl.constexpr = config.L
    of_k: gl.constexpr = K.type.layout
    # (L, L)
    R = warpgroup_mma_wait(0, deps=[mma.issue_mma(tile.zk, tile.x.permute((1, 0)))])
    dot = gl.sum(K * tile.zk.load(of_k).to(gl.float32), 1)  # (L)
    dot *= tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, of_k))
    scores = gl.sum(mma.apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE) * R, 1)
    dot += gl.convert_layout(scores, dot.type.layout, assert_trivial=True)
    u = tile.e.load(dot.type.layout)  # -u, (L)
    delta = gl.where(u == 0.0, 0.0, u * dot)
    gl.store(gmem.gates + ((work_tile.first_tile + t // L) * VECTORS + DELTA_P) * L + ids.rl, delta)
    return delta


@gluon.jit
def issue_k_output(S, K, D, t, tile, work_tile, ids, gmem, config):
    """Start out_k <- (out_k + n) * a + P x: (L, dqk) + (L, L) @ (L, dqk), steps (7) and (8).

    Args:
        S: zv y^T, (L, L), not yet waited for.
        K: zv C^T, (L, dqk), not yet waited for.
        D: The gate matrix, (L, L).
        t: First step of the tile in the work tile.
        tile: Views of the tile.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        config: Constants.

    Returns:
        out_k, and the left operand P in registers. Both must be waited for.
    """
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
        D = mma.load_gate_matrix(tile.g, L, 0, mma.accumulator_layout(L), 1)  # reloaded: out_v needs its registers
    P = mma.apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE)
    A = mma.to_left_operand(P.to(tile.x.dtype), config.DK)
    weight = tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, mma.accumulator_layout(config.DK)))  # (L)
    if not config.COMPUTE_DP_OFFSET:
        K = warpgroup_mma_wait(0, deps=[K])
    if config.NORMALIZE:
        row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, K.type.layout)), 0)  # (1, dqk)
        if config.REVERSE:
            K += row
        elif config.COMPUTE_DP_OFFSET:
            K += row * gl.expand_dims(delta, 1)
    return warpgroup_mma(A, tile.x, K * gl.expand_dims(weight, 1), is_async=True), A


@gluon.jit
def update_n(N, x_t, tile, config):
    """Return g n + x^T u, (dqk), or against time g dn + x^T (u * delta), step (10).

    Args:
        N: n, (dqk).
        x_t: x^T, (dqk, L), in registers.
        tile: Views of the tile.
        config: Constants.
    """
    L: gl.constexpr = config.L
    layout: gl.constexpr = gl.SliceLayout(0, x_t.type.layout)
    N = N * gl.max(tile.g.slice(TILE_DECAY * L, 1, 0).load(layout), 0)
    if config.USE_DP_OFFSET or not config.REVERSE:
        # From unrounded products: outputs are divided by q . n, which can be far smaller than q and n.
        update = mma.load_update_weights(tile.u, L, layout)  # (L)
        if config.REVERSE:
            update = update * tile.e.load(layout)
        N += gl.sum(x_t.to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def reduce_head_pair(K, part, shared, n, head: gl.constexpr):
    """Return out_k, (L, dqk), summed over both heads in consumer 0.

    Consumer 1 stores its part to shared memory, after consumer 0 has read the part of the tile before. Consumer 0 waits
    for it and adds it to its own.
    """
    if head == 1:
        mbarrier.wait(shared.part_empty, (n & 1) ^ 1)
        part.store(K.to(part.dtype))
        pipeline.barrier()
        mbarrier.arrive(shared.part_full, count=1)
    else:
        mbarrier.wait(shared.part_full, n & 1)
        K += part.load(K.type.layout).to(gl.float32)
        pipeline.barrier()
        mbarrier.arrive(shared.part_empty, count=1)
    return K


@gluon.jit
def store_outputs(s, t, work_tile, gmem, shared, params, head: gl.constexpr, config):
    """Start the TMA stores of the outputs of the tile in stage s, at step `t` of a work tile, step (12)."""
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    if config.OUTPUT_V:
        of_out = (shared.zv if config.OUTPUT_K else shared.y).index(config.HEADS * s + head)
        pipeline.async_store(
            gmem.out_v,
            scheduler.tile_coordinates(
                work_tile.b, work_tile.h, work_tile.start + t, 0, work_tile.start + work_tile.steps, params
            ),
            of_out,
        )
    if config.OUTPUT_K and copy == head:
        at_k = scheduler.tile_coordinates(
            work_tile.b,
            work_tile.head_group * config.QK_COPIES + copy,
            work_tile.start + t,
            0,
            work_tile.start + work_tile.steps,
            params,
        )
        pipeline.async_store(gmem.out_k, at_k, shared.zk.index(config.QK_COPIES * s + copy))


@gluon.jit
def at_checkpoint(C, N, c, t, n, num_checkpoints, work_tile, ids, gmem, shared, params, head: gl.constexpr, config):
    """Store the state or its inner product with the checkpoint, step (13), where a tile ends at one.

    Returns:
        The number of checkpoints read so far, over all work tiles of the program.
    """
    step = t if config.REVERSE else t + config.L
    if step % config.CHECKPOINT_STEPS == 0 and step < work_tile.steps and step > 0:
        checkpoint = checkpoint_index(work_tile.b, work_tile.start, step, work_tile.h, params, config)
        if config.REVERSE:
            store_checkpoint_dots(C, N, checkpoint, n, num_checkpoints, ids, gmem, shared, head, config)
            num_checkpoints += 1
        else:
            pipeline.async_store(gmem.checkpoints, [(checkpoint * config.DK).to(gl.int32), 0], c)
            if config.NORMALIZE:
                gl.store(gmem.n_checkpoints + checkpoint * config.DK + ids.rk, N)
    return num_checkpoints


@gluon.jit
def store_checkpoint_dots(dC, dN, checkpoint, n, num_checkpoints, ids, gmem, shared, head: gl.constexpr, config):
    """Store the inner product of the cotangent with the state at a checkpoint, <C, dC> of (B5), step (13).

    The load warp has loaded C to shared memory. The product of dn with n, in float32, is part of the sum.
    """
    of_row: gl.constexpr = ids.rk.type.layout
    C = opaque_index(shared.checkpoint_state, head, n)
    full = shared.full_checkpoint.index(head)
    empty = shared.empty_checkpoint.index(head)
    phase = num_checkpoints & 1
    one = gl.arange(0, 1, gl.SliceLayout(0, dC.type.layout))
    mbarrier.wait(full, phase)
    # C is (dqk, dhv), the sum over its columns (dqk).
    dots = gl.convert_layout(gl.sum(dC * C.load(dC.type.layout).to(gl.float32), 1), of_row, assert_trivial=True)
    pipeline.barrier()
    mbarrier.arrive(empty, count=1)
    if config.NORMALIZE:
        dots += dN * gl.load(gmem.n_checkpoints + checkpoint * config.DK + ids.rk)
    gl.store(gmem.dots + checkpoint + one, gl.sum(dots, 0).to(gl.float64) + one.to(gl.float64))


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, buffers, head: gl.constexpr, config):
    """Process a tile: everything from step (1) to (13) of the module's docstring.

    Args:
        acc: The state before the tile in the direction of the scan.
        pipe_state: Position of the tile in the ring.
        step: Number of the tile in its work tile, in the direction of the scan.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        buffers: Shared memory of the gate vectors.
        head: Which head of the program, and which consumer.
        config: Constants.

    Returns:
        The state after the tile, and the position of the next tile.
    """
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    copy: gl.constexpr = 0 if config.SHARED_QK else head
    of_p: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.x.dtype
    C, N, total = acc
    s, phase, n, num_checkpoints = pipe_state
    tile = view_tile(shared, buffers, s, n, head, config)
    t = (work_tile.tiles - 1 - step if config.REVERSE else step) * L
    # (1) The tile has arrived.
    mbarrier.wait(shared.full.index(s), phase)
    # (2) S <- zk x^T and out_v <- zk C; without out_v (6), S <- zv y^T and out_k <- zv C^T
    if config.OUTPUT_V:
        S = mma.issue_mma(tile.zk, tile.x.permute((1, 0)))
        V = mma.issue_mma(tile.zk, tile.c)
    elif config.OUTPUT_K:
        S = mma.issue_mma(tile.zv, tile.y.permute((1, 0)))
        K = mma.issue_mma(tile.zv, tile.c.permute((1, 0)))
    # (3) P <- S * D, and d
    if config.HAS_OUTPUT:
        D = mma.load_gate_matrix(tile.g, L, 0, of_p, 1)  # (L, L)
    if config.OUTPUT_V:
        weight = tile.g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, mma.accumulator_layout(config.DV)))  # (L)
        S = warpgroup_mma_wait(1, deps=[S])
        P = mma.apply_causal_mask(S, D, ids.i, ids.j, 0, config.REVERSE)
        if config.NORMALIZE and not config.REVERSE:
            d = compute_denominators(P, tile, weight, config)
        # (4) out_v <- out_v * a + P y
        A = mma.to_left_operand(P.to(dtype), config.DV)
        V = warpgroup_mma_wait(0, deps=[V])
        V = warpgroup_mma(A, tile.y, V * gl.expand_dims(weight, 1), is_async=True)
        # (6) S <- zv y^T
        if config.OUTPUT_K:
            S = mma.issue_mma(tile.zv, tile.y.permute((1, 0)))
    if config.HAS_OUTPUT:
        # (5) The stage of the previous tile is empty after its outputs have left.
        tma.store_wait(0)
        mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    if config.OUTPUT_K:
        if config.OUTPUT_V:
            V, A = warpgroup_mma_wait(1, deps=[V, A])
            out_v = V.to(dtype)
            # (6) out_k <- zv C^T
            K = mma.issue_mma(tile.zv, tile.c.permute((1, 0)))
        # (7) delta, and (8) out_k <- out_k * a + P x
        K, A_k = issue_k_output(S, K, D, t, tile, work_tile, ids, gmem, config)
        if config.OUTPUT_V:
            pipeline.barrier()  # the MMAs of all warps have read zv
            tile.zv.store(out_v)
    # (9) C <- g C + (x * u)^T y
    x_t = tile.x.permute((1, 0)).load(of_p)  # (dqk, L)
    B = mma.scale_by_gates(x_t, tile.u, L, gl.DotOperandLayout(0, mma.accumulator_layout(config.DV), 2))
    decay = tile.g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, C.type.layout))  # (1)
    C = warpgroup_mma(B, tile.y, C * gl.expand_dims(decay, 0), is_async=True)
    if not config.HAS_OUTPUT:
        total = total * decay
    # (10) n <- g n + x^T u
    if config.NORMALIZE:
        N = update_n(N, x_t, tile, config)
    # (11) out_v <- out_v / max(|d|, exp(-m)) for o, and zk . out_k
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
    # (12) Outputs over y, zv and zk and on their way to memory, and the state for the next tile.
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    pipeline.barrier()  # the MMAs of all warps have read the tiles
    if config.OUTPUT_V and not config.OUTPUT_K:
        tile.y.store(out_v)
    if config.OUTPUT_K and copy == head:
        tile.zk.store(out_k)
    if config.HAS_OUTPUT:
        store_shared_state(C, N, tile.c, tile.n, config.NORMALIZE)
    else:
        mbarrier.arrive(shared.empty.index(s), count=1)
    store_outputs(s, t, work_tile, gmem, shared, params, head, config)
    # (13) Checkpoint
    if config.HAS_CHECKPOINTS:
        num_checkpoints = at_checkpoint(
            C, N, tile.c, t, n, num_checkpoints, work_tile, ids, gmem, shared, params, head, config
        )
    s, phase = pipeline.advance(s, phase, STAGES)
    pipe_state = PipelineState(index=s, phase=phase, count=n + 1, num_checkpoints=num_checkpoints)
    return Accumulators(C=C, n=N, decay=total), pipe_state


@gluon.jit
def run_consumer(head: gl.constexpr, gmem, shared, params, tiles_per_head, buffers, config):
    """Run one consumer warpgroup, with one head, over all work tiles of the program."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, mma.accumulator_layout(L)))
    j = gl.arange(0, L, gl.SliceLayout(0, mma.accumulator_layout(L)))
    rk = gl.arange(0, config.DK, gl.SliceLayout(1, mma.accumulator_layout(L)))
    rl = gl.arange(0, L, gl.SliceLayout(1, mma.accumulator_layout(config.DK)))
    rd = gl.arange(0, L, gl.SliceLayout(1, mma.accumulator_layout(config.DV)))
    one = gl.arange(0, 1, gl.SliceLayout(0, mma.accumulator_layout(config.DV)))
    ids = FragmentIds(i=i, j=j, rk=rk, rl=rl, rd=rd, one=one)
    pipe_state = PipelineState(0, 0, 0, 0)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        b, head_group, start, steps, tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        h = head_group * config.HEADS + head
        tiles = scheduler.num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        first = b.to(gl.int64) * params.T + start
        work_tile = WorkTile(
            b=b, head_group=head_group, h=h, start=start, steps=steps, tiles=tiles, first_step=first,
            first_tile=h.to(gl.int64) * tiles_per_head + tile,
        )  # fmt: skip
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
        index = scheduler.next_work_tile(index)
    if config.HAS_OUTPUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=scheduler.RUNTIME_SCALARS)
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
    SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr, INDEXED: gl.constexpr,
    STATE_DK: gl.constexpr, STATE_DV: gl.constexpr,
):  # fmt: skip
    """Compute o (OUTPUT_V), dq (OUTPUT_K), dk and dv (both, with REVERSE), or final states and decays (neither).

    Shapes below are in heads of v, of which there are H times HEADS. Tensors that the constants say are not used may be
    any.

    Args:
        X: TMA descriptor of x, in tiles (L, dqk).
        Y: TMA descriptor of y, in tiles (L, dhv).
        ZK: TMA descriptor of zk, in tiles (L, dqk).
        ZV: TMA descriptor of zv, in tiles (L, dhv).
        OutV: TMA descriptor of out_v, in tiles (L, dhv).
        OutK: TMA descriptor of out_k, in tiles (L, dqk); with SHARED_QK it has H heads, else H times HEADS.
        Checkpoints: TMA descriptor of states at checkpoints, (checkpoints heads dqk, dhv), in tiles (dqk, dhv).
        gates: Gate vectors, (heads, tiles, VECTORS, L).
        i_gate: Input gates, (B, T, heads).
        f_gate: Forget gates, (B, T, heads).
        w_out: Sums zk . out_k, (heads, tiles, L), with OUTPUT_K.
        d_out: d, (B, T, heads), with SAVE_D.
        dots: <C, dC>, (checkpoints, heads), float64.
        state_in: Initial states, (segments, heads, dqk, dhv), with USE_INITIAL_STATE; with INDEXED a pool.
        state_out: Final states, (segments, heads, dqk, dhv), with STORE_FINAL_STATE; with INDEXED a pool.
        n_in: Initial n, (segments, heads, dqk).
        n_out: Final n, (segments, heads, dqk).
        n_checkpoints: n at checkpoints, (checkpoints, heads, dqk).
        decays: Decays over segments, (segments, heads), without outputs.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Groups of HEADS heads.
        group_size: Heads of v that share a head of q and k.
        segment_steps: Steps of a segment.
        num_work_tiles: Work tiles, each of HEADS heads.
        stride_ib, stride_it, stride_ih: Strides of the input gates.
        stride_fb, stride_ft, stride_fh: Strides of the forget gates.
        scale: The factor of q.
        log_scale: Its logarithm in base 2.
    """
    HAS_OUTPUT: gl.constexpr = OUTPUT_V or OUTPUT_K
    EXTRA: gl.constexpr = (
        (DELTA_P if USE_DP_OFFSET else None) if OUTPUT_K else (FLOOR if NORMALIZE and HAS_OUTPUT else None)
    )
    partitions(
        (X, Y, ZK, ZV, Checkpoints),
        gate_warp.GateSource(
            vectors=gates, i_gate=i_gate, f_gate=f_gate, stride_ib=stride_ib, stride_it=stride_it, stride_ih=stride_ih,
            stride_fb=stride_fb, stride_ft=stride_ft, stride_fh=stride_fh, scale=scale, log_scale=log_scale,
            GATES=GATES, INPUT_GATE=INPUT_GATE, SIGMOID_I=SIGMOID_I, SIGMOID_F=SIGMOID_F,
        ),
        tiles_per_head, group_size,
        GlobalPointers(
            out_v=OutV, out_k=OutK, checkpoints=Checkpoints, state_in=state_in, state_out=state_out, n_in=n_in,
            n_out=n_out, n_checkpoints=n_checkpoints, decays=decays, w_out=w_out, d_out=d_out, dots=dots, gates=gates,
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=segment_steps, num_work_tiles=num_work_tiles,
            schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            HEADS=HEADS, SHARED_QK=SHARED_QK, QK_COPIES=1 if SHARED_QK else HEADS, DK=DK, DV=DV, L=L, STAGES=STAGES,
            CHECKPOINT_STEPS=CHECKPOINT_STEPS, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED,
            USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE, SKIP_LAST=SKIP_LAST,
            OUTPUT_V=OUTPUT_V, OUTPUT_K=OUTPUT_K, HAS_OUTPUT=HAS_OUTPUT, NORMALIZE=NORMALIZE, SAVE_D=SAVE_D,
            USE_DP_OFFSET=USE_DP_OFFSET, COMPUTE_DP_OFFSET=USE_DP_OFFSET and not REVERSE,
            HAS_CHECKPOINTS=HAS_CHECKPOINTS, INDEXED=INDEXED, STATE_DK=STATE_DK, STATE_DV=STATE_DV,
            PADDED=STATE_DK != DK or STATE_DV != DV,
        ),
        gate_warp.GateWarpConfig(
            L=L, STAGES=STAGES, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED, EXTRA=EXTRA, SKIP_LAST=SKIP_LAST,
            HEADS=HEADS, GATE_WARPS=HEADS if OUTPUT_K else HEADS + 1,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, tiles_per_head, group_size, gmem, params, config, gate_config):
    """Allocate shared memory and start the partitions of the program: consumers, load and gate warps.

    A program has a consumer for each head and starts one gate warp more than heads; `gate_config` says how many of
    these have work.
    """
    shared = allocate(tensors, config)
    full = shared.full
    empty = shared.empty
    buffers = gate_warp.GateBuffers(*allocate_gate_buffers(shared.x.dtype, gate_config))
    if config.HEADS == 1:
        gl.warp_specialize(
            [
                (run_consumer, (0, gmem, shared, params, tiles_per_head, buffers, config)),
                (run_load_warp, (tensors, shared, params, group_size, config)),
                (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (gate_warp.run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
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
                (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (gate_warp.run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
                (gate_warp.run_gate_warp, (2, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            ],
            [4, 1, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def allocate(tensors, config):
    """Return the shared memory of a program and its barriers, as `SharedStorage`, with aliases for unused fields.

    Full barriers get one arrival of the load warp and one of a gate warp for each head, empty barriers one of each
    consumer.
    """
    X, Y, ZK, ZV, _checkpoints = tensors
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = pipeline.allocate_tiles(X, config.QK_COPIES * STAGES)
    y = pipeline.allocate_tiles(Y, config.HEADS * STAGES)
    zk = pipeline.allocate_tiles(ZK, config.QK_COPIES * STAGES) if config.HAS_OUTPUT else x
    c = pipeline.allocate_operands(dtype, config.HEADS, config.DK, config.DV) if config.HAS_OUTPUT else y
    zv = pipeline.allocate_tiles(ZV, config.HEADS * STAGES) if config.OUTPUT_K else y
    n = pipeline.allocate_vectors(gl.float32, config.HEADS, config.DK) if config.NORMALIZE else y
    full, empty = pipeline.allocate_full_empty(STAGES, 1 + config.HEADS, config.HEADS)
    part = c
    part_full = full
    part_empty = full
    if config.SHARED_QK and config.OUTPUT_K:
        part = pipeline.allocate_operands(dtype, 1, config.L, config.DK)
        part_full = pipeline.allocate_barrier(1)
        part_empty = pipeline.allocate_barrier(1)
    checkpoint_state = c
    full_checkpoint = full
    empty_checkpoint = full
    if config.HAS_CHECKPOINTS and config.REVERSE:
        checkpoint_state = pipeline.allocate_operands(dtype, config.HEADS, config.DK, config.DV)
        full_checkpoint, empty_checkpoint = pipeline.allocate_full_empty(config.HEADS, 1, 1)
    fence_async_shared()
    return SharedStorage(
        x=x, y=y, zk=zk, zv=zv, c=c, n=n, full=full, empty=empty, part=part, part_full=part_full, part_empty=part_empty,
        checkpoint_state=checkpoint_state, full_checkpoint=full_checkpoint, empty_checkpoint=empty_checkpoint,
    )  # fmt: skip


@gluon.jit
def allocate_gate_buffers(dtype: gl.constexpr, gate_config):
    """Return shared memory for the gate vectors: vectors, weights and extra of `GateBuffers`."""
    STAGES: gl.constexpr = gate_config.STAGES * gate_config.HEADS
    g = pipeline.allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * gate_config.L)
    u = pipeline.allocate_vectors(dtype, STAGES, 2 * gate_config.L)
    e = pipeline.allocate_vectors(gl.float32, STAGES, gate_config.L) if gate_config.EXTRA is not None else g
    return g, u, e
