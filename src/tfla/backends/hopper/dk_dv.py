"""dk and dv together, of heads with dqk 128 and dhv 128 without a normalizer: one fused scan against time.

A program computes whole heads and loads q, k, v and do once for both results. Two consumers hold the cotangent dC of
the state, (dqk, dhv), in registers: each has 64 of its rows, as two blocks of 64 x 64. The equations are those of
`docs/mathematics.md` with delta = 0, and w, a', g and D' are its gate weights.

The steps of a tile (`process_tile`); consumer 0 computes P for dk, consumer 1 P for dv, and both read both:

    (1)   S <- v do^T, or k q^T                     (L, L), consumer 0, or consumer 1
    (2)   the stage of the previous tile is empty   its dk and dv have left shared memory
    (3)   P <- S * D'^T, masked                     (L, L), to shared memory: S^T of (T8), or P'^T of (T11)
    (4)   dk^T <- dC v^T                            (64, L) = (64, dhv) (dhv, L), first term of (T10); dC, rounded, is
                                                    the left operand, and goes to shared memory for step (9)
    (5)   wait until both P and all of dC are stored
    (6)   dk^T <- dk^T * w + q^T P^T                (64, L), (T10)
    (7)   dC <- g dC + (q * a')^T do                (64, dhv) = (64, L) (L, dhv), (T12)
    (8)   k . dk, summed over 64 columns            (L), for the store warp, (B5)
    (9)   dv <- k dC                                (L, 64) = (L, dqk) (dqk, 64), first term of (T11), of dC before (7)
    (10)  dv <- dv * w + P do                       (L, 64), (T11)
    (11)  wait until both are done with k, and with the columns of do that the other overwrites
    (12)  dk, dv                                    to shared memory, over k and do, and from there to global memory
    (13)  checkpoint                                the inner product <C, dC> with the state that the scan for dq has
                                                    stored, (B5)

Which partition waits for which:

    load warp                  --full_q[r]--> consumers 0 and 1 --empty_q[r]--> load warp                  q and v
    load, gate and store warps --full[s]----> consumers 0 and 1 --empty[s]----> load, gate and store warps k, do, gates
    consumer 0 <--ready (5), consumed (11)--> consumer 1

q and v have a ring of their own, since their stages are empty before step (8). The stages of k and do are empty one
tile later, when the results that overwrite them have left.

(6) comes before (7) in the tensor cores' order, so that (8) can start when dk is done and (7) still runs. (9) reads dC
from shared memory, as it was before (7), since each consumer needs all rows of dC for its columns of dv.
"""

from typing import Any, NamedTuple

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

from tfla.backends.gpu.context import LaunchContext
from tfla.backends.hopper import dq_dk, gate_warp, host, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.checkpoints import checkpoint_dots
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
)
from tfla.backends.hopper.store_warp import GATE_SUMS

D = gl.constexpr(128)  # dqk and dhv
HALF = gl.constexpr(64)
# Stages of 32 KiB that fit beside dC and P. Those of k and do stay in use for longer.
QV_STAGES = gl.constexpr(2)
STAGES = gl.constexpr(3)


class Config(NamedTuple):
    """The constants of the kernel."""

    L: Any  # steps of a tile
    CHECKPOINT_STEPS: Any  # steps between checkpoints
    REVERSE: Any  # scan against time, always true
    IS_SEGMENTED: Any  # sequences are cut into segments, each a work tile
    USE_INITIAL_STATE: Any  # start work tiles from `state_in`, not from zeros
    STORE_FINAL_STATE: Any  # store dC at the ends of work tiles to `state_out`


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out_k: Any  # TMA descriptor
    out_v: Any  # TMA descriptor
    state_in: Any  # (segments, H, dqk, dhv)
    state_out: Any  # (segments, H, dqk, dhv)
    checkpoints: Any  # (checkpoints, H, dqk, dhv)
    dots: Any  # (checkpoints, H, 8)


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # Both rings:
    q: Any  # (QV_STAGES, L, dqk)
    k: Any  # (2 STAGES, L, 64): two halves of the columns for each tile
    v: Any  # (QV_STAGES, L, dhv)
    do: Any  # (2 STAGES, L, 64): two halves of the columns for each tile
    # What the consumers exchange:
    c: Any  # dC, rounded, (dqk, dhv)
    p: Any  # P for dk, and P for dv of this tile and of the one before, (3, L, L)
    # Both rings:
    g: Any  # gate vectors, (STAGES, NUM_GATE_VECTORS L)
    u: Any  # update weights, (STAGES, 2 L)
    partial_dots: Any  # for the store warp: partial sums of k . dk, (STAGES, 8 L)
    full_q: Any  # barriers of q and v, (QV_STAGES)
    empty_q: Any  # barriers of q and v, (QV_STAGES)
    full: Any  # barriers of the rest, (STAGES)
    empty: Any  # barriers of the rest, (STAGES)
    # What the consumers exchange:
    ready: Any  # barrier: both P and all of dC are stored, step (5)
    consumed: Any  # barrier: both consumers are done with what results overwrite, step (11)


class FragmentIds(NamedTuple):
    """The indices of what a consumer holds, and its parts of dC in shared memory."""

    i: Any  # rows of P, steps of the outputs, (L)
    j: Any  # columns of P, steps of the updates, (L)
    rows: Any  # the consumer's rows of dC in shared memory, (64, dhv)
    columns: Any  # the columns of dC that the consumer needs for its columns of dv, (dqk, 64)


class TileViews(NamedTuple):
    """The views of a tile in shared memory."""

    q: Any  # (L, dqk)
    v: Any  # (L, dhv)
    k0: Any  # first half of the columns of k, (L, 64)
    k1: Any  # second half, (L, 64)
    do0: Any  # first half of the columns of do, (L, 64)
    do1: Any  # second half, (L, 64)
    g: Any  # gate vectors, (NUM_GATE_VECTORS L)
    p_k: Any  # P for dk, (L, L)
    p_v: Any  # P for dv, (L, L)


@gluon.jit
def run_load_warp(tensors, shared, params, group_size, config):
    """Load the tiles of q, k, v and do to shared memory by TMA.

    Args:
        tensors: TMA descriptors of q and v, in tiles (L, 128), and of k and do, in tiles (L, 64): (q, k, v, do).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    Q, K, V, DO = tensors
    L: gl.constexpr = config.L
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = (steps + L - 1) // L
        end = start + steps
        for i in range(0, tiles):
            t = start + (tiles - 1 - i) * L
            at_k = scheduler.tile_coordinates(b, h // group_size, t, 0, end, params)  # of q and k, from column 0 on
            at_v = scheduler.tile_coordinates(b, h, t, 0, end, params)  # of v and do
            # k and do, in halves of 64 columns
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, 2 * (K.block_type.nbytes + DO.block_type.nbytes))
            pipeline.async_load(DO, at_v, bar, shared.do.index(2 * s))
            pipeline.async_load(
                DO, scheduler.tile_coordinates(b, h, t, HALF, end, params), bar, shared.do.index(2 * s + 1)
            )
            pipeline.async_load(K, at_k, bar, shared.k.index(2 * s))
            pipeline.async_load(
                K, scheduler.tile_coordinates(b, h // group_size, t, HALF, end, params), bar, shared.k.index(2 * s + 1)
            )
            # q and v, in their own ring
            r, phase = pipeline.stage_and_phase(n, QV_STAGES)
            mbarrier.wait(shared.empty_q.index(r), phase ^ 1)
            bar = shared.full_q.index(r)
            mbarrier.expect(bar, Q.block_type.nbytes + V.block_type.nbytes)
            pipeline.async_load(V, at_v, bar, shared.v.index(r))
            pipeline.async_load(Q, at_k, bar, shared.q.index(r))
            n += 1


@gluon.jit
def issue_mma_of_halves(a0, b0, a1, b1):
    """Start a0 b0 + a1 b1, a product whose inner dimension is in two halves."""
    return warpgroup_mma(a1, b1, mma.issue_mma(a0, b0), is_async=True)


@gluon.jit
def view_tile(shared, r, s, n, L: gl.constexpr):
    """Return views of tile n, with q and v in stage r of their ring and the rest in stage s."""
    return TileViews(
        q=shared.q.index(r).reshape([L, D]),
        v=shared.v.index(r).reshape([L, D]),
        k0=shared.k.index(2 * s).reshape([L, HALF]),
        k1=shared.k.index(2 * s + 1).reshape([L, HALF]),
        do0=shared.do.index(2 * s).reshape([L, HALF]),
        do1=shared.do.index(2 * s + 1).reshape([L, HALF]),
        g=shared.g.index(s),
        p_k=shared.p.index(0),
        p_v=shared.p.index(1 + n % 2),  # of two, since the other consumer may still read that of the previous tile
    )


@gluon.jit
def issue_scores(tile, half: gl.constexpr):
    """Start S of the tile, (L, L), step (1): v do^T for dk (consumer 0), or k q^T for dv (consumer 1)."""
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
    """Return pointers (64, 64) to the consumer's rows of state `at`, from `column` on."""
    return mma.state_pointers(state, at, half * HALF, column, D, D, False, mma.accumulator_layout(HALF), HALF, HALF)


@gluon.jit
def multiply_by_state(C0, C1, to, v):
    """Return dC v^T, (64, L), and store dC, rounded, to shared memory `to`, (64, dhv), step (4).

    Args:
        C0: First block of the consumer's rows of dC, (64, 64).
        C1: Second block, (64, 64).
        to: The consumer's rows of dC in shared memory, (64, dhv).
        v: Tile of v in shared memory, (L, dhv).
    """
    A = mma.to_left_operand(C0.to(v.dtype), HALF)
    dk = mma.issue_mma(A, v.slice(0, HALF, 1).permute((1, 0)))
    to.slice(0, HALF, 1).store(C0.to(v.dtype))
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    A = mma.to_left_operand(C1.to(v.dtype), HALF)
    dk = warpgroup_mma(A, v.slice(HALF, HALF, 1).permute((1, 0)), dk, is_async=True)
    to.slice(HALF, HALF, 1).store(C1.to(v.dtype))
    fence_async_shared()
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    return dk


@gluon.jit
def store_checkpoint_dots(C0, C1, checkpoint, gmem, half: gl.constexpr):
    """Store the inner product of dC with the state at a checkpoint, <C, dC> of (B5), step (13).

    Each warp stores a part, the sum over its 16 rows.
    """
    layout: gl.constexpr = mma.accumulator_layout(HALF)
    dot = checkpoint_dots(C0, gmem.checkpoints, checkpoint, half * HALF, 0, D, D, layout)
    dot += checkpoint_dots(C1, gmem.checkpoints, checkpoint, half * HALF, HALF, D, D, layout)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    gl.store(gmem.dots + checkpoint * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def process_tile(C0, C1, n, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (13) of the module's docstring.

    Args:
        C0: First block of the consumer's rows of dC after the tile, (64, 64).
        C1: Second block, (64, 64).
        n: Tiles before this one, over all work tiles of the program.
        step: Number of the tile in its work tile, in the direction of the scan.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        half: Which consumer this is.
        config: Constants.

    Returns:
        Both blocks of dC before the tile, and n + 1.
    """
    L: gl.constexpr = config.L
    row: gl.constexpr = half * HALF
    layout: gl.constexpr = mma.accumulator_layout(HALF)
    dtype: gl.constexpr = shared.c.dtype
    t = (work_tile.tiles - 1 - step) * L
    r, phase_r = pipeline.stage_and_phase(n, QV_STAGES)
    s, phase = pipeline.stage_and_phase(n, STAGES)
    tile = view_tile(shared, r, s, n, L)
    g = tile.g
    # (1) S <- v do^T, or k q^T
    mbarrier.wait(shared.full.index(s), phase)
    mbarrier.wait(shared.full_q.index(r), phase_r)
    S = issue_scores(tile, half)
    # (2) The stage of the previous tile is empty after its outputs have left.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    # (3) P <- S * D'^T
    gate = mma.load_gate_matrix(g, L, 0, layout, 1)  # (L, L)
    S = warpgroup_mma_wait(0, deps=[S])
    P = mma.apply_causal_mask(S, gate, ids.i, ids.j, 0, True).to(dtype)
    (tile.p_k if half == 0 else tile.p_v).store(P)
    # (4) dk^T <- dC v^T
    dk = multiply_by_state(C0, C1, ids.rows, tile.v)
    # (5) Both P and all of dC are stored. The loads before the wait do not depend on it.
    pipeline.barrier()
    mbarrier.arrive(shared.ready, count=1)
    q_t = tile.q.slice(row, HALF, 1).permute((1, 0)).load(layout)  # (64, L)
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, layout)), 0)  # (1, L)
    mbarrier.wait(shared.ready, n & 1)
    # (6) dk^T <- dk^T * w + q^T P^T
    A = mma.to_left_operand(q_t, HALF)
    dk = warpgroup_mma(A, tile.p_k.permute((1, 0)), dk * weight, is_async=True)
    # (7) dC <- g dC + (q * a')^T do
    B = mma.scale_by_gates(q_t, shared.u.index(s), L, gl.DotOperandLayout(0, layout, 2))  # (64, L)
    tile_decay = gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)  # (1, 1)
    C0 = warpgroup_mma(B, tile.do0, C0 * tile_decay, is_async=True)
    C1 = warpgroup_mma(B, tile.do1, C1 * tile_decay, is_async=True)
    dk, A = warpgroup_mma_wait(2, deps=[dk, A])
    # Only after the MMAs have read q_t: TMA does not wait for loads from shared memory that are under way.
    pipeline.barrier()
    mbarrier.arrive(shared.empty_q.index(r), count=1)
    # (8) k . dk, summed over the consumer's columns
    my_k = shared.k.index(2 * s + half)
    k_t = my_k.reshape([L, HALF]).permute((1, 0))
    mma.store_partial_dots(dk, k_t, shared.partial_dots.index(s), half, L)
    C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
    # (9) dv <- k dC
    dv = issue_mma_of_halves(tile.k0, ids.columns.slice(0, HALF, 0), tile.k1, ids.columns.slice(HALF, HALF, 0))
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(1, layout)), 1)  # (L, 1)
    dv = warpgroup_mma_wait(0, deps=[dv])
    # (10) dv <- dv * w + P do, after this consumer's arrival for (11): it is done with k
    pipeline.barrier()
    mbarrier.arrive(shared.consumed, count=1)
    my_do = shared.do.index(2 * s + half)
    dv = warpgroup_mma(tile.p_v, my_do.reshape([L, HALF]), dv * weight, is_async=True)
    # (11) The other consumer is done with k, too, and with this consumer's columns of do.
    mbarrier.wait(shared.consumed, n & 1)
    # (12) Both results, over k and do and on their way to memory.
    k_t.store(dk.to(dtype))
    dv = warpgroup_mma_wait(0, deps=[dv])
    pipeline.barrier()  # the MMAs of all warps have read do
    my_do.reshape([L, HALF]).store(dv.to(dtype))
    fence_async_shared()  # one fence before both stores: it would wait for a store that is under way
    pipeline.barrier()
    pipeline.async_store(
        gmem.out_k,
        scheduler.tile_coordinates(
            work_tile.b, work_tile.h, work_tile.start + t, row, work_tile.start + work_tile.steps, params
        ),
        my_k,
    )
    pipeline.async_store(
        gmem.out_v,
        scheduler.tile_coordinates(
            work_tile.b, work_tile.h, work_tile.start + t, row, work_tile.start + work_tile.steps, params
        ),
        my_do,
    )
    n += 1
    # (13) Checkpoint
    if t % config.CHECKPOINT_STEPS == 0 and t > 0:
        store_checkpoint_dots(C0, C1, work_tile.checkpoint + t // config.CHECKPOINT_STEPS * params.H, gmem, half)
    return C0, C1, n


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(HALF)
    i = gl.arange(0, L, gl.SliceLayout(1, layout))
    j = gl.arange(0, L, gl.SliceLayout(0, layout))
    rows, columns = shared.c.slice(half * HALF, HALF, 0), shared.c.slice(half * HALF, HALF, 1)
    ids = FragmentIds(i=i, j=j, rows=rows, columns=columns)
    n = 0
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        work_tile = dq_dk.get_work_tile(index, params, config)
        C0 = gl.zeros([HALF, HALF], gl.float32, layout)
        C1 = gl.zeros([HALF, HALF], gl.float32, layout)
        if config.USE_INITIAL_STATE:
            first = scheduler.state_index(index, params)
            # (64, 64)
            C0 = gl.load(state_block_pointers(gmem.state_in, first, half, 0)).to(gl.float32)
            C1 = gl.load(state_block_pointers(gmem.state_in, first, half, HALF)).to(gl.float32)
        for step in range(0, work_tile.tiles):
            C0, C1, n = process_tile(C0, C1, n, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            last = scheduler.state_index(index, params)
            gl.store(state_block_pointers(gmem.state_out, last, half, 0), C0)
            gl.store(state_block_pointers(gmem.state_out, last, half, HALF), C1)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    # The store warp waits for the last tile, too.
    mbarrier.arrive(shared.empty.index((n + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=scheduler.RUNTIME_SCALARS)
def dk_dv_kernel(
    Q, K, V, DO, OutK, OutV, gates, i_gate, f_gate, w_out, state_in, state_out, checkpoints, dots, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    L: gl.constexpr, CHECKPOINT_STEPS: gl.constexpr, REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr,
    USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr, IS_VARLEN: gl.constexpr,
    GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of heads of 128 x 128 without a normalizer.

    Tensors that the constants say are not used may be any.

    Args:
        Q: TMA descriptor of q, in tiles (L, 128).
        K: TMA descriptor of k, in tiles (L, 64).
        V: TMA descriptor of v, in tiles (L, 128).
        DO: TMA descriptor of do, in tiles (L, 64).
        OutK: TMA descriptor of dk, in tiles (L, 64).
        OutV: TMA descriptor of dv, in tiles (L, 64).
        gates: Gate vectors, (H, tiles, VECTORS, L).
        i_gate: Input gates, (B, T, H).
        f_gate: Forget gates, (B, T, H).
        w_out: Sums k . dk, (H, tiles, L).
        state_in: dC after the last step of each work tile, (segments, H, dqk, dhv), with USE_INITIAL_STATE.
        state_out: dC before the first step of each work tile, (segments, H, dqk, dhv), with STORE_FINAL_STATE.
        checkpoints: States at checkpoints, (checkpoints, H, dqk, dhv), in the order of `checkpoints.py`.
        dots: Parts of <C, dC>, (checkpoints, H, 8).
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        segment_steps: Steps of a segment.
        num_work_tiles: Work tiles.
        stride_ib, stride_it, stride_ih: Strides of the input gates.
        stride_fb, stride_ft, stride_fh: Strides of the forget gates.
        scale: The factor of q.
        log_scale: Its logarithm in base 2.
    """
    partitions(
        (Q, K, V, DO),
        gate_warp.GateSource(
            vectors=gates, i_gate=i_gate, f_gate=f_gate, stride_ib=stride_ib, stride_it=stride_it, stride_ih=stride_ih,
            stride_fb=stride_fb, stride_ft=stride_ft, stride_fh=stride_fh, scale=scale, log_scale=log_scale,
            GATES=GATES, INPUT_GATE=INPUT_GATE, SIGMOID_I=SIGMOID_I, SIGMOID_F=SIGMOID_F,
        ),
        w_out, tiles_per_head, group_size,
        GlobalPointers(
            out_k=OutK, out_v=OutV, state_in=state_in, state_out=state_out, checkpoints=checkpoints, dots=dots,
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=segment_steps, num_work_tiles=num_work_tiles,
            schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            L=L, CHECKPOINT_STEPS=CHECKPOINT_STEPS, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED,
            USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, w_out, tiles_per_head, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: consumers, load, gate and store warps."""
    Q, K, V, DO = tensors
    L: gl.constexpr = config.L
    dtype: gl.constexpr = Q.dtype
    q = pipeline.allocate_tiles(Q, QV_STAGES)
    v = pipeline.allocate_tiles(V, QV_STAGES)
    k = pipeline.allocate_tiles(K, 2 * STAGES)
    do = pipeline.allocate_tiles(DO, 2 * STAGES)
    c = gl.allocate_shared_memory(dtype, [D, D], gl.NVMMASharedLayout(128, 16, 2))
    p = pipeline.allocate_operands(dtype, 3, L, L)
    g = pipeline.allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = pipeline.allocate_vectors(dtype, STAGES, 2 * L)
    partial_dots = pipeline.allocate_vectors(gl.float32, STAGES, 8 * L)
    full_q, empty_q = pipeline.allocate_full_empty(QV_STAGES, 1, 2)
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(GATE_SUMS), 2)
    ready = pipeline.allocate_barrier(2)
    consumed = pipeline.allocate_barrier(2)
    fence_async_shared()
    shared = SharedStorage(
        q=q, k=k, v=v, do=do, c=c, p=p, g=g, u=u, partial_dots=partial_dots, full_q=full_q, empty_q=empty_q, full=full,
        empty=empty, ready=ready, consumed=consumed,
    )  # fmt: skip
    buffers = gate_warp.GateBuffers(g, u)
    gate_config: gl.constexpr = gate_warp.GateWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (tensors, shared, params, group_size, config)),
            (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (store_warp.run_store_warp, (
                partial_dots, w_out, source.vectors, full, empty, params, tiles_per_head,
                store_warp.StoreWarpConfig(
                    L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED, RESULT=GATE_SUMS,
                ),
            )),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def supports(ctx: LaunchContext) -> bool:
    """Return whether the kernel computes dk and dv of a call: one program has a whole state and no n."""
    return (ctx.K, ctx.V) == (host.STATE_ROWS, host.STATE_ROWS) and not ctx.spec.normalize


def launch(
    ctx: LaunchContext, gates: gate_warp.GateVectors, dh: Tensor, dk: Tensor, dv: Tensor, checkpoints: Tensor, *,
    ends: Tensor | None, final: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute dk and dv.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, 128).
        dk, dv: Outputs, (B, T, H, 128).
        checkpoints: The checkpoints of C, (checkpoints, H, 128, 128).
        ends: dC where work tiles end, (segments, H, 128, 128), or None for zeros.
        final: Output for dC where work tiles start, or None.

    Returns:
        The sums k . dk, (1, H, tiles, 1, L), and the parts of <C, dC> at the checkpoints, (checkpoints * H, parts).
    """
    x, vectors = ctx.x, gates.vectors
    sums = ctx.new(1, ctx.H, ctx.tiles, 1, ctx.L)
    dots = ctx.new(checkpoints.shape[0] * ctx.H, host.CONSUMER_WARPS)
    half = host.STATE_ROWS // 2
    ctx.launch(dk_dv_kernel, host.grid(ctx, 1),
        host.descriptor(ctx, x.q, host.STATE_ROWS), host.descriptor(ctx, x.k, half),
        host.descriptor(ctx, x.v, host.STATE_ROWS), host.descriptor(ctx, dh, half), host.descriptor(ctx, dk, half),
        host.descriptor(ctx, dv, half), vectors, *ctx.gate_inputs, sums, vectors if ends is None else ends,
        vectors if final is None else final, checkpoints, dots, ctx.schedule, *host.kernel_scalars(ctx),
        L=ctx.L, CHECKPOINT_STEPS=ctx.checkpoint_steps, REVERSE=True, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=ends is not None, STORE_FINAL_STATE=final is not None, IS_VARLEN=ctx.packed,
        **gates.constants, num_warps=4,
    )  # fmt: skip
    return sums, dots
