"""dv and dbeta of the delta rule with at most one forget gate a step: a fused scan against time.

A program computes 128 columns of dhv of each of its work tiles, as `delta_h.py` does: two consumers hold 64 columns of
the transposed cotangent dC^T, (dhv, dqk), in registers. The equations are (R1), (R5) and (R6) of
`tfla.backends.triton.delta_kernels`, where the read key is k. L is the number of steps of a tile. Of the vectors of a
tile, a is the decay from its start to each step, w the decay from each step to its end, and g is its whole decay. D is
the gate matrix, and X the matrix that the forward stored, (R1).

The steps of a tile n (`process_tile`), against time; P is that of tile n, computed during tile n - 1:

    (1)   R^T <- dC^T k^T                               (64, L) = (64, dqk) (dqk, L)
    (2)   the stages of tile n - 1 are empty            its dv has left shared memory
    (3)   wait for do, E and X of tile n, and for both halves of P
    (4)   dU^T <- do^T P                                (64, L) = (64, L) (L, L), beside (1)
    (5)   do . E, summed over 64 columns                (L), for the store warp, while (1) and (4) run
    (6)   dU^T <- dU^T + R^T * w                        (64, L), (R5)
    (7)   Z^T <- dU^T - (dU^T * beta) X                 (64, L) = (64, L) (L, L), (R5), in float16
    (8)   dC^T <- g dC^T + (do^T * (scale a)) q         (64, dqk) = (64, L) (L, dqk), half of (R6), beside (7)
    (9)   dC^T <- dC^T - (Z^T * (a beta)) k             (64, dqk) = (64, L) (L, dqk), the other half
    (10)  S <- q k^T of tile n + 1                      (L, L / 2), one half of the columns for each consumer
    (11)  Z . E, summed over 64 columns                 (L), for the store warp: dbeta
    (12)  dv^T = Z^T * beta                             over E, and from there to global memory
    (13)  P <- S * D * scale of tile n + 1, masked      (L, L / 2), to shared memory, (R1) times scale

There are two rings. The stages of one, KEY_STAGES, have q, k and the vectors of a tile, which (10) and (13) need a tile
early; those of the other, STAGES, have do, E and X, and the sums that the store warp stores. A consumer releases its
stages of both rings with one arrival. The copies of a whole tile are always on their way while another one is computed.
Arrows lead from the partition that arrives at a barrier to the one that waits for it:

    key and gate warp   --keys_full[n % 3]--> consumers 0 and 1 --empty[n % 2]--> key and gate warp
    load and store warp --full[n % 2]-------> consumers 0 and 1 --empty[n % 2]--> load and store warp
    consumer 0 <--ready[n % 2] (P of tile n)--> consumer 1
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
from tfla.backends.hopper import delta_tiles, host, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.delta_tiles import COLUMNS, NUM_VECTORS, READ_WEIGHT, ROWS, UPDATE_WEIGHT, WRITE, Config
from tfla.backends.hopper.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from tfla.backends.hopper.store_warp import DOTS_WITH_E

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(2)  # stages of do, E and X, 40 KiB of tiles each
AHEAD = gl.constexpr(1)  # stages of q and k beyond these
KEY_STAGES = gl.constexpr(3)  # stages of q and k, 32 KiB of tiles each
PARTS = gl.constexpr(8)  # parts of a sum over 128 columns: one for each warp of the two consumers


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers and the store warp access."""

    dv: Any  # TMA descriptor
    dbeta: Any  # Z . E over the columns of each program, (programs of a head, B, T, H)
    do_e: Any  # do . E, likewise
    state_in: Any  # dC after the last step of each sequence, (sequences, H, dqk, dhv)
    state_out: Any  # dC before the first step of each sequence, (sequences, H, dqk, dhv)
    scale: Any  # the factor of the queries


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring of keys:
    q: Any  # (KEY_STAGES, L, dqk)
    k: Any  # (KEY_STAGES, L, dqk)
    g: Any  # the vectors of each tile, (KEY_STAGES, NUM_VECTORS L)
    keys_full: Any  # barriers, (KEY_STAGES)
    # The ring of values:
    do: Any  # (2 STAGES, L, 64): one tile for each consumer
    e: Any  # E, and then dv, (2 STAGES, L, 64)
    x: Any  # X, (STAGES, L, L)
    sums: Any  # parts of do . E and of Z . E, (STAGES, 2 PARTS L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES), of both rings
    # What consumers exchange:
    p: Any  # P of this tile and of the next, (2, L, L)
    ready: Any  # barriers, (2): both halves of P are stored


@gluon.jit
def run_key_warp(Q, K, shared, params, group_size, config):
    """Load the tiles of q and k to shared memory by TMA.

    Args:
        Q, K: TMA descriptors of q and k, in tiles (L, ROWS).
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
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            s, bar = pipeline.acquire(n, shared.keys_full, shared.empty, STAGES, AHEAD)
            mbarrier.expect(bar, Q.block_type.nbytes + K.block_type.nbytes)
            coordinates = scheduler.tile_coordinates(b, h // group_size, t, 0, end, params)
            pipeline.async_load(K, coordinates, bar, shared.k.index(s))
            pipeline.async_load(Q, coordinates, bar, shared.q.index(s))
            n += 1
    pipeline.producer_tail(n, shared.keys_full, shared.empty, STAGES, AHEAD=AHEAD)


@gluon.jit
def run_load_warp(DO, E, X, shared, params, config):
    """Load the tiles of do, E and X to shared memory by TMA.

    Consumers wait for a stage of this ring in its own tile, (3), so there is no stage to hand over after the last tile.

    Args:
        DO, E: TMA descriptors of do and E, in tiles (L, 64), two a program.
        X: TMA descriptor of X, in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    n = 0
    column = gl.program_id(1) * COLUMNS
    for index in range(gl.program_id(0), params.num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, 2 * DO.block_type.nbytes + 2 * E.block_type.nbytes + X.block_type.nbytes)
            for half in gl.static_range(2):
                at = scheduler.tile_coordinates(b, h, t, column + 64 * half, end, params)
                pipeline.async_load(DO, at, bar, shared.do.index(2 * s + half))
                pipeline.async_load(E, at, bar, shared.e.index(2 * s + half))
            pipeline.async_load(X, scheduler.tile_coordinates(b, h, t, 0, end, params), bar, shared.x.index(s))
            n += 1


@gluon.jit
def process_tile(C, pipe_state, coordinates, ids, gmem, shared, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (13) of the module's docstring.

    Args:
        C: The cotangent of the state after the tile, transposed, (64, ROWS).
        pipe_state: Position of the tile in the ring of keys. Its stage is full, and the consumer has waited for that.
        coordinates: TMA coordinates of dv.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The cotangent of the state before the tile, and the position of the next tile.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.p.dtype
    keys, keys_phase, n = pipe_state
    s, phase = pipeline.stage_and_phase(n, STAGES)
    k = shared.k.index(keys).reshape([L, ROWS])
    q = shared.q.index(keys).reshape([L, ROWS])
    g = shared.g.index(keys)
    e = shared.e.index(2 * s + half).reshape([L, 64]).permute((1, 0))  # (64, L)
    x = shared.x.index(s).reshape([L, L])
    sums = shared.sums.index(s)
    # (1) R^T <- dC^T k^T
    A = mma.to_left_operand(C.to(dtype), L)
    R = mma.issue_mma(A, k.permute((1, 0)))
    # (2) dv of the previous tile has left: its stages are empty.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    # (3) The tile is there as a whole.
    mbarrier.wait(shared.full.index(s), phase)
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    # (4) dU^T <- do^T P
    do = shared.do.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    B = mma.to_left_operand(do, L)
    U = mma.issue_mma(B, shared.p.index(n % 2))
    R, A = warpgroup_mma_wait(1, deps=[R, A])  # (4) still runs
    # (5) do . E
    mma.store_partial_dots(do, e, sums, half, L)
    # (6) dU^T <- dU^T + R^T * w
    U, B = warpgroup_mma_wait(0, deps=[U, B])
    U += R * delta_tiles.load_vector(g, UPDATE_WEIGHT, L, of_out)
    # (7) Z^T <- dU^T - (dU^T * beta) X
    Z, B, up = delta_tiles.issue_correction(U, delta_tiles.load_vector(g, WRITE, L, of_out), x, L)
    # (8) dC^T <- g dC^T + (do^T * (scale a)) q
    weights = delta_tiles.load_vector(g, READ_WEIGHT, L, of_out) * gmem.scale  # (1, L)
    D = mma.to_left_operand((do.to(gl.float32) * weights).to(dtype), ROWS)
    C = warpgroup_mma(D, q, C * delta_tiles.load_tile_decay(g, L), is_async=True)
    Z, B = warpgroup_mma_wait(1, deps=[Z, B])  # (8) still runs
    Z = Z * up
    # (9) dC^T <- dC^T - (Z^T * (a beta)) k
    dv = Z * delta_tiles.load_vector(g, WRITE, L, of_out)
    V = mma.to_left_operand((dv * -delta_tiles.load_vector(g, READ_WEIGHT, L, of_out)).to(dtype), ROWS)
    C = warpgroup_mma(V, k, C, is_async=True)
    # (10) The keys of the next tile have arrived: start its S while the products of this tile run.
    keys, keys_phase = pipeline.advance(keys, keys_phase, KEY_STAGES)
    n += 1
    mbarrier.wait(shared.keys_full.index(keys), keys_phase)
    S = delta_tiles.issue_scores(shared, keys, half, config)
    # (11) Z . E
    mma.store_partial_dots(Z, e, sums.slice(PARTS * L, PARTS * L, 0), half, L)
    # (12) dv, over E and on its way to memory
    e.store(dv.to(dtype))
    fence_async_shared()
    pipeline.async_store(gmem.dv, coordinates, shared.e.index(2 * s + half))
    # (13) P of the next tile
    weights = delta_tiles.load_scaled_decays(gmem, shared, keys, half, config)  # (L, L / 2)
    C, D, V, S = warpgroup_mma_wait(0, deps=[C, D, V, S])
    delta_tiles.store_scores(S, weights, n, ids, shared, half, config)
    return C, pipeline.PipelineState(keys, keys_phase, n)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    ids = delta_tiles.fragment_ids(half, config)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    # (10) and (13) of the first tile, which no earlier tile has done
    mbarrier.wait(shared.keys_full.index(0), 0)
    S = warpgroup_mma_wait(0, deps=[delta_tiles.issue_scores(shared, 0, half, config)])
    delta_tiles.store_scores(
        S, delta_tiles.load_scaled_decays(gmem, shared, 0, half, config), 0, ids, shared, half, config
    )
    index = gl.program_id(0)
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False, True)
        C = delta_tiles.load_state(index, ids, gmem, params, config)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            coordinates = scheduler.tile_coordinates(b, h, t, ids.column, end, params)
            C, pipe_state = process_tile(C, pipe_state, coordinates, ids, gmem, shared, half, config)
        delta_tiles.store_state(C, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    # The store warp waits for the last tile, too.
    mbarrier.arrive(shared.empty.index((pipe_state.count + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=delta_tiles.RUNTIME_SCALARS)
def delta_dv_kernel(
    Q, K, DO, E, X, DV_out, dbeta, do_e, gates, beta, state_in, state_out, schedule, T, tiles_per_head, H, group_size,
    num_work_tiles, stride_b, stride_t, stride_h, scale,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, GATED: gl.constexpr, IS_VARLEN: gl.constexpr,
    USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
):  # fmt: skip
    """Compute dv, dbeta and do . E, and with STORE_FINAL_STATE the cotangents of the initial states.

    Tensors that the constants say are not used may be any.

    Args:
        Q, K: TMA descriptors of the queries and keys, in tiles (L, ROWS).
        DO: TMA descriptor of the cotangent of h, in tiles (L, 64).
        E: TMA descriptor of the prediction errors, in tiles like those of do.
        X: TMA descriptor of the result of `solve_kernel`, (B, T, H, L), in tiles (L, L).
        DV_out: TMA descriptor of dv, in tiles like those of do.
        dbeta, do_e: Outputs Z . E and do . E over the columns of each program, (programs of a head, B, T, H), float32.
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
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
    """
    partitions(
        (Q, K, DO, E, X),
        delta_tiles.WriteSource(
            vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
            tiles_per_head=tiles_per_head,
        ),
        group_size,
        GlobalPointers(dv=DV_out, dbeta=dbeta, do_e=do_e, state_in=state_in, state_out=state_out, scale=scale),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=True, SAVE=False, USE_INITIAL_STATE=USE_INITIAL_STATE,
            STORE_FINAL_STATE=STORE_FINAL_STATE,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers and four single warps."""
    Q, K, DO, E, X = tensors
    L: gl.constexpr = config.L
    # The ring of values has no gate warp: its stages are full by arrivals of the load warp and of the store warp.
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(DOTS_WITH_E) - 1, 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, KEY_STAGES),
        k=pipeline.allocate_tiles(K, KEY_STAGES),
        g=pipeline.allocate_vectors(gl.float32, KEY_STAGES, NUM_VECTORS * L),
        keys_full=pipeline.allocate_barriers(KEY_STAGES, 2),
        do=pipeline.allocate_tiles(DO, 2 * STAGES),
        e=pipeline.allocate_tiles(E, 2 * STAGES),
        x=pipeline.allocate_tiles(X, STAGES),
        sums=pipeline.allocate_vectors(gl.float32, STAGES, 2 * PARTS * L),
        full=full,
        empty=empty,
        p=pipeline.allocate_operands(Q.dtype, 2, L, L),
        ready=pipeline.allocate_barriers(2, 2),
    )
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L, STAGES=STAGES, REVERSE=True, IS_SEGMENTED=False, RESULT=DOTS_WITH_E
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_key_warp, (Q, K, shared, params, group_size, config)),
            (run_load_warp, (DO, E, X, shared, params, config)),
            (delta_tiles.run_gate_warp, (source, shared.g, shared.keys_full, empty, params, STAGES, AHEAD, config)),
            (store_warp.run_store_warp, (
                shared.sums, gmem.do_e, gmem.dbeta, full, empty, params, source.tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch(
    ctx: "DeltaContext", gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, final: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute dv, dbeta and the cotangents of the initial states, like `launch_dv` of the Triton kernels.

    Args:
        ctx: The context of the call, with the schedule of packed sequences.
        gates: The gate vectors, or any tensor where there are no gates.
        X: The matrices X of (R1) that the forward stored, (B, T, H, L).
        E: The prediction errors of the forward, (B, T, H, dhv).
        dh: The cotangent of h, (B, T, H, dhv).
        dv: Output, (B, T, H, dhv).
        final: The cotangents of the final states, (N, H, dqk, dhv), or None for zeros.
        initial: Output for the cotangents of the initial states, or None.

    Returns:
        dbeta and do . E, (B, T, H) float32.
    """
    base = ctx.base
    programs = ceil_div(base.V, COLUMNS.value)
    dbeta, do_e = delta_tiles.new_dots(base, 1, programs, base.B, base.T, base.H)
    base.launch(delta_dv_kernel, host.grid(base, programs),
        *delta_tiles.descriptors_for_dv(ctx, dh, E, X, dv), dbeta, do_e, gates, ctx.beta,
        gates if final is None else final, gates if initial is None else initial, base.schedule,
        *delta_tiles.kernel_scalars(ctx),
        DK=base.K, DV=base.V, L=base.L, GATED=ctx.gated, IS_VARLEN=base.packed, USE_INITIAL_STATE=final is not None,
        STORE_FINAL_STATE=initial is not None, num_warps=4,
    )  # fmt: skip
    return base.recorder.sum_of(dbeta, 0), base.recorder.sum_of(do_e, 0)
