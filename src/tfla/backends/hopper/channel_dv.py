"""dv with gates by channel and the cotangents after the tiles: a fused scan against time.

The equations are those of `tfla.backends.triton.channel_scans`, everything transposed. `channel_states.py` has what a
program and its consumers compute. The steps of a tile (`process_tile`), those with X and r only with CORRECT:

    (1)  Y^T <- dC^T (k w B)^T                            (64, L) = (64, dqk) (dqk, L), k w B split in two by SPLIT
    (2)  the stage of the tile before is empty            its dv and its cotangent have left shared memory
    (3)  dC^T                                             to shared memory and from there to memory
    (4)  Y^T <- Y^T + do^T (P B)                          (64, L) = (64, L) (L, L)
    (5)  dv^T <- Y^T - Y^T (X B)                          (64, L) = (64, L) (L, L), in float16
    (6)  dC^T <- dC^T g + do^T (q a)                      (64, dqk) = (64, L) (L, dqk), beside (5)
    (7)  dv . E, summed over 64 columns                   (L), for the store warp, with DOTS
    (8)  dv                                               over do, and from there to memory
    (9)  dC^T <- dC^T - dv^T (r a)                        (64, dqk) = (64, L) (L, dqk), while (7) and (8) run

The ring has k w B, do, E and P, the late ring q, r, X and the decays g. Consumers exchange nothing. Which partition
waits for which:

    load and store warp  --full[s]-->      consumers 0 and 1 --empty[s]-->      load and store warp
    read and decay warp  --late_full[u]--> consumers 0 and 1 --late_empty[u]--> read and decay warp
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper import channel_states, delta_tiles, mma, pipeline, scheduler, store_warp
from tfla.backends.hopper.channel_states import Config
from tfla.backends.hopper.delta_tiles import COLUMNS, ROWS
from tfla.backends.hopper.store_warp import DV_DOTS, NO_RESULT

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext
    from tfla.backends.triton.channel_tiles import Operands

RING_STAGES = 2, 1  # of the ring, of 72 KiB with correction and 56 with dqk 256, and of the late ring, of 40 and 32
PARTS = gl.constexpr(8)  # parts of a sum over 128 columns: one for each warp of the two consumers


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers and the store warp access."""

    dv: Any  # TMA descriptors
    states: Any
    dots: Any  # dv . E over the columns of each program, (programs of a head, B, T, H)
    state_in: Any  # dC after the last step of each sequence, (sequences, H, dqk, dhv)
    state_out: Any  # dC before the first step of each sequence, (sequences, H, dqk, dhv)
    tiles_per_head: Any  # tiles of one head over all batch rows


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    k: Any  # (STAGES, L, BLOCKS ROWS)
    k_low: Any  # (STAGES, L, BLOCKS ROWS), with SPLIT
    do: Any  # and then dv, (2 STAGES, L, 64): one tile for each consumer
    e: Any  # (2 STAGES, L, 64), with DOTS
    p: Any  # (STAGES, L, L)
    sums: Any  # parts of dv . E, (STAGES, PARTS L), with DOTS
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # The late ring:
    q: Any  # (LATE_STAGES, L, BLOCKS ROWS)
    r: Any  # (LATE_STAGES, L, BLOCKS ROWS), with CORRECT
    x: Any  # (LATE_STAGES, L, L), with CORRECT
    decay: Any  # (LATE_STAGES, BLOCKS ROWS)
    late_full: Any  # barriers, (LATE_STAGES)
    late_empty: Any  # barriers, (LATE_STAGES)
    # What leaves:
    states: Any  # (2 BLOCKS, 64, ROWS)


@gluon.jit
def run_load_warp(K, K_low, DO, E, P, low_row, shared, params, config):
    """Load the tiles of the ring to shared memory by TMA.

    Args:
        K, K_low: TMA descriptors of the operands of writes, in tiles (L, BLOCKS ROWS).
        DO, E: TMA descriptors of do and E, in tiles (L, 64), two a program.
        P: TMA descriptor of P B, in tiles (L, L).
        low_row: The row of K_low that is row 0 of the work tiles.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    keys: gl.constexpr = (2 if config.SPLIT else 1) * K.block_type.nbytes
    nbytes: gl.constexpr = keys + (4 if config.DOTS else 2) * DO.block_type.nbytes + P.block_type.nbytes
    column = gl.program_id(0) * COLUMNS
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            mbarrier.expect(bar, nbytes)
            row = scheduler.row_of_whole(b, params)
            of_slice = scheduler.tile_coordinates(b, h, t, 0, end, params)
            at = scheduler.tile_coordinates(row, h, t, 0, end, params)
            at_low = scheduler.tile_coordinates(b + low_row, h, t, 0, end, params)
            channel_states.load_keys(K, K_low, at, at_low, bar, shared, s, config)
            pipeline.async_load(P, of_slice, bar, shared.p.index(s))
            for half in gl.static_range(2):
                of_half = scheduler.tile_coordinates(row, h, t, column + 64 * half, end, params)
                pipeline.async_load(DO, of_half, bar, shared.do.index(2 * s + half))
                if config.DOTS:
                    pipeline.async_load(E, of_half, bar, shared.e.index(2 * s + half))
            n += 1


@gluon.jit
def run_read_warp(Q, R, X, shared, params, config):
    """Load the tiles of the late ring to shared memory by TMA.

    Args:
        Q, R: TMA descriptors of the operands of reads, in tiles (L, BLOCKS ROWS).
        X: TMA descriptor of X B, in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    of_errors: gl.constexpr = R.block_type.nbytes + X.block_type.nbytes if config.CORRECT else 0
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, True)
            u, bar = pipeline.acquire(n, shared.late_full, shared.late_empty, config.LATE_STAGES)
            mbarrier.expect(bar, Q.block_type.nbytes + of_errors)
            at = scheduler.tile_coordinates(scheduler.row_of_whole(b, params), h, t, 0, end, params)
            if config.CORRECT:
                pipeline.async_load(X, at, bar, shared.x.index(u))
            pipeline.async_load(Q, at, bar, shared.q.index(u))
            if config.CORRECT:
                pipeline.async_load(R, at, bar, shared.r.index(u))
            n += 1


@gluon.jit
def issue_reads(A, s, block: gl.constexpr, Y, shared, config):
    """Start Y + A (k w B)^T for a block of channels, (64, L) + (64, ROWS) (ROWS, L)."""
    L: gl.constexpr = config.L
    k = shared.k.index(s).reshape([L, config.BLOCKS * ROWS]).slice(block * ROWS, ROWS, 1).permute((1, 0))
    Y = warpgroup_mma(A, k, Y, use_acc=block > 0, is_async=True)
    if config.SPLIT:
        k_low = shared.k_low.index(s).reshape([L, config.BLOCKS * ROWS]).slice(block * ROWS, ROWS, 1).permute((1, 0))
        Y = warpgroup_mma(A, k_low, Y, is_async=True)
    return Y


@gluon.jit
def process_tile(C0, C1, n, at_state, coordinates, ids, gmem, shared, half: gl.constexpr, config):
    """Process a tile: everything in the module's docstring.

    Args:
        C0, C1: The blocks of the transposed cotangent after the tile, (64, ROWS).
        n: Number of the tile among those of the program.
        at_state: Its index among the tiles of all heads.
        coordinates: TMA coordinates of dv.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The blocks of the cotangent before the tile.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.k.dtype
    s, phase = pipeline.stage_and_phase(n, config.STAGES)
    u, late_phase = pipeline.stage_and_phase(n, config.LATE_STAGES)
    do_tile = shared.do.index(2 * s + half)
    mbarrier.wait(shared.full.index(s), phase)
    # (1) Y^T <- dC^T (k w B)^T
    rounded = C0.to(dtype)
    A = mma.to_left_operand(rounded, L)
    Y = issue_reads(A, s, 0, gl.zeros([64, L], gl.float32, of_out), shared, config)
    # (2)
    channel_states.release_previous(n, shared, config)
    # (3)
    channel_states.store_to_shared(rounded, shared.states, half, 0, config)
    if config.BLOCKS == 2:
        Y, A = warpgroup_mma_wait(0, deps=[Y, A])
        rounded = C1.to(dtype)
        A = mma.to_left_operand(rounded, L)
        Y = issue_reads(A, s, 1, Y, shared, config)
        channel_states.store_to_shared(rounded, shared.states, half, 1, config)
    channel_states.start_state_stores(gmem.states, at_state, ids, shared.states, half, config)
    # (4) Y^T <- Y^T + do^T (P B)
    do = do_tile.reshape([L, 64]).permute((1, 0)).load(of_out)  # (64, L)
    B = mma.to_left_operand(do, L)
    Y = warpgroup_mma(B, shared.p.index(s).reshape([L, L]), Y, is_async=True)
    Y, A, B = warpgroup_mma_wait(0, deps=[Y, A, B])
    mbarrier.wait(shared.late_full.index(u), late_phase)
    if config.CORRECT:
        # (5) dv^T <- Y^T - Y^T (X B)
        Y, A, up = delta_tiles.issue_correction(Y, None, shared.x.index(u).reshape([L, L]), L)
    # (6) dC^T <- dC^T g + do^T (q a)
    U = mma.to_left_operand(do, ROWS)
    q = shared.q.index(u).reshape([L, config.BLOCKS * ROWS])
    C0, C1 = channel_states.decay_states(C0, C1, shared.decay.index(u), config)
    C0, C1 = channel_states.issue_update(C0, C1, U, q, config)
    if config.CORRECT:
        Y, A = warpgroup_mma_wait(config.BLOCKS, deps=[Y, A])  # (6) still runs
        Y = Y * up
        # (9) dC^T <- dC^T - dv^T (r a)
        V = mma.to_left_operand((-Y).to(dtype), ROWS)
        r = shared.r.index(u).reshape([L, config.BLOCKS * ROWS])
        C0, C1 = channel_states.issue_update(C0, C1, V, r, config)
    if config.DOTS:
        # (7) dv . E
        e = shared.e.index(2 * s + half).reshape([L, 64]).permute((1, 0))
        mma.store_partial_dots(Y, e, shared.sums.index(s), half, L)
    # (8) dv, over do and on its way to memory
    do_tile.reshape([L, 64]).permute((1, 0)).store(Y.to(dtype))
    fence_async_shared()
    pipeline.async_store(gmem.dv, coordinates, do_tile)
    if config.CORRECT:
        C0, V, U = warpgroup_mma_wait(0, deps=[C0, V, U])
    C0, C1 = channel_states.wait_for_states(C0, C1, U, config)
    mbarrier.arrive(shared.late_empty.index(u), count=1)
    return C0, C1


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    channel_states.run_tiles(process_tile, half, gmem, shared, params, config)


@gluon.jit(do_not_specialize=channel_states.RUNTIME_SCALARS)
def channel_dv_kernel(
    Q, R, K, K_low, DO, E, P, X, states, decays, dots, state_in, state_out, schedule, DV_out,
    T, tiles_per_head, H, num_work_tiles, first_row, low_row, first_step,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    LATE_STAGES: gl.constexpr, CORRECT: gl.constexpr, SPLIT: gl.constexpr, DOTS: gl.constexpr,
    IS_VARLEN: gl.constexpr, SLICED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
):  # fmt: skip
    """Compute dv and the cotangents after the tiles, and with DOTS dv . E.

    Tensors that the constants say are not used may be any. Those of operands are TMA descriptors in tiles (L, BLOCKS
    ROWS), P and X in tiles (L, L), those like v in tiles (L, 64).

    Args:
        Q, R, K, K_low, P, X: The operands, see `Operands` of the Triton kernels; R and X are read with CORRECT, K_low
            with SPLIT.
        DO: The cotangent of h.
        E: The prediction errors, read with DOTS.
        states: TMA descriptor of the output for the cotangents, (H * tiles, dhv, dqk), in tiles (64, ROWS).
        decays: The decays of tiles, (H, tiles, dqk) float32.
        dots: Output dv . E over the columns of each program, (programs of a head, B, T, H), float32, with DOTS.
        state_in: Cotangents of the final states, (sequences, H, dqk, dhv), with USE_INITIAL_STATE.
        state_out: Cotangents of the initial states, (sequences, H, dqk, dhv), with STORE_FINAL_STATE.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        DV_out: Output. Where one program has all columns of dhv, it may be the memory of an operand: a tile is stored
            after it has been read. It is the last tensor, which jaxlib can pass together with an operand.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        num_work_tiles: Sequences times H.
        first_row: With SLICED the row at which those of the slice start in Q, R, K, X and the tensors with columns of
            dhv; P has the rows of the slice.
        low_row: With SLICED the row at which they start in K_low.
        first_step: With SLICED the token at which the steps start in all tensors (B, T, ...) but dots; what has tiles
            or sequences has those of these steps and rows alone.
    """
    partitions(
        (Q, R, X), (K, K_low, DO, E, P), low_row if SLICED else 0, decays,
        GlobalPointers(
            dv=DV_out, states=states, dots=dots, state_in=state_in, state_out=state_out, tiles_per_head=tiles_per_head
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
            first_row=first_row if SLICED else None, first_step=first_step if SLICED else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, BLOCKS=BLOCKS, STAGES=STAGES, LATE_STAGES=LATE_STAGES, REVERSE=True, CORRECT=CORRECT,
            SPLIT=SPLIT, USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE, DOTS=DOTS,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(late, tensors, low_row, decays, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers and four single warps."""
    Q, R, X = late
    K, K_low, DO, E, P = tensors
    STAGES: gl.constexpr = config.STAGES
    LATE_STAGES: gl.constexpr = config.LATE_STAGES
    RESULT: gl.constexpr = DV_DOTS if config.DOTS else NO_RESULT
    # The ring has no gate warp: its stages are full by arrivals of the load warp and of the store warp.
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(RESULT) - 1, 2)
    late_full, late_empty = pipeline.allocate_full_empty(LATE_STAGES, 2, 2)
    shared = SharedStorage(
        k=pipeline.allocate_tiles(K, STAGES),
        k_low=pipeline.allocate_tiles(K_low, STAGES) if config.SPLIT else None,
        do=pipeline.allocate_tiles(DO, 2 * STAGES),
        e=pipeline.allocate_tiles(E, 2 * STAGES) if config.DOTS else None,
        p=pipeline.allocate_tiles(P, STAGES),
        sums=pipeline.allocate_vectors(gl.float32, STAGES, PARTS * config.L) if config.DOTS else None,
        full=full,
        empty=empty,
        q=pipeline.allocate_tiles(Q, LATE_STAGES),
        r=pipeline.allocate_tiles(R, LATE_STAGES) if config.CORRECT else None,
        x=pipeline.allocate_tiles(X, LATE_STAGES) if config.CORRECT else None,
        decay=pipeline.allocate_vectors(gl.float32, LATE_STAGES, config.BLOCKS * ROWS),
        late_full=late_full,
        late_empty=late_empty,
        states=pipeline.allocate_tiles(gmem.states, 2 * config.BLOCKS),
    )
    fence_async_shared()
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=config.L, STAGES=STAGES, REVERSE=True, IS_SEGMENTED=False, RESULT=RESULT
    )
    PRODUCER: gl.constexpr = channel_states.producer_registers(config.BLOCKS)
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (K, K_low, DO, E, P, low_row, shared, params, config)),
            (run_read_warp, (Q, R, X, shared, params, config)),
            (channel_states.run_decay_warp, (
                decays, shared.decay, late_full, late_empty, params, gmem.tiles_per_head, config,
            )),
            (store_warp.run_store_warp, (
                shared.sums, gmem.dots, gmem.dots, full, empty, params, gmem.tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1, 1],
        [channel_states.consumer_registers(config.BLOCKS), PRODUCER, PRODUCER, PRODUCER, PRODUCER],
    )  # fmt: skip


def launch(
    ctx: "ChannelContext", operands: "Operands", dh: Tensor, E: Tensor, dv: Tensor, final: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute dv, the cotangents after the tiles and of the initial states, like `channel_dv_scan` of Triton.

    Args:
        ctx: The context of the call.
        operands: The result of :func:`tfla.backends.triton.channel_tiles.launch`.
        dh: The cotangent of h, (B, T, H, dhv).
        E: The prediction errors, (B, T, H, dhv); not read where dbeta is not computed from them.
        dv: Output, (B, T, H, dhv).
        final: The cotangents of the final states, (N, H, dqk, dhv), or None for zeros.
        initial: Output for the cotangents of the initial states, or None.

    Returns:
        The cotangents of the states after the tiles, (H, tiles, dhv, dqk), and dv . E over the columns of each program,
        (programs, B, T, H) float32, or None where dbeta is not computed from it.
    """
    base = scheduler.launch(ctx.base)
    grid = channel_states.grid(ctx)
    cotangents, dots = ctx.new_tile_states(), ctx.new_dots(grid[0])
    decays, of_dh = operands.decays, channel_states.values_descriptor(ctx, dh)
    base.launch(channel_dv_kernel, grid,
        channel_states.keys_descriptor(ctx, operands.q), channel_states.keys_descriptor(ctx, operands.r, of_dh),
        channel_states.keys_descriptor(ctx, operands.k), channel_states.keys_descriptor(ctx, operands.k_low, of_dh),
        of_dh, channel_states.values_descriptor(ctx, None if dots is None else E, of_dh),
        channel_states.steps_descriptor(ctx, operands.P), channel_states.steps_descriptor(ctx, operands.X, of_dh),
        channel_states.states_descriptor(ctx, cotangents), decays,
        decays if dots is None else dots, decays if final is None else final, decays if initial is None else initial,
        base.schedule, channel_states.values_descriptor(ctx, dv), *channel_states.kernel_scalars(ctx, operands.k_low),
        DK=base.K, DV=base.V, L=base.L,
        BLOCKS=channel_states.blocks(ctx), STAGES=RING_STAGES[0], LATE_STAGES=RING_STAGES[1], CORRECT=ctx.spec.correct,
        SPLIT=ctx.split_keys, DOTS=dots is not None, IS_VARLEN=base.packed, SLICED=ctx.first_row is not None,
        USE_INITIAL_STATE=final is not None, STORE_FINAL_STATE=initial is not None, num_warps=4,
    )  # fmt: skip
    return cotangents, dots
