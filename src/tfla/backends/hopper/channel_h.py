"""h with gates by channel, or the states before the tiles: a fused scan that keeps the state on chip.

The equations are those of `tfla.backends.triton.channel_scans`, everything transposed. `channel_states.py` has what a
program and its consumers compute. The steps of a tile (`process_tile`), of which those for E are left out without
CORRECT, where E is V; without OUTPUT, for the states, there are (2), (3) and (7):

    (1)  R^T <- C^T (r a)^T and out^T <- C^T (q a)^T      (64, L) = (64, dqk) (dqk, L)
    (2)  the stage of the tile before is empty            its outputs and its state have left shared memory
    (3)  C^T                                              to shared memory and from there to memory, without OUTPUT
    (4)  R^T <- V^T - R^T,  E^T <- R^T - R^T (X B)^T      (64, L) = (64, L) (L, L), in float16
    (5)  E                                                to shared memory and from there to memory, with SAVE
    (6)  out^T <- out^T + E^T (P B)^T                     (64, L) = (64, L) (L, L), E^T of CORRECT split in two
    (7)  C^T <- C^T g + E^T (k w B)                       (64, dqk) = (64, L) (L, dqk), k w B split in two by SPLIT
    (8)  out                                              over v, and from there to memory, while (7) runs

From (1) to (7) each product reads the result of the one before it from registers; consumers exchange nothing. The ring
has q, r, v, P and X, the late ring k w B and the decays g. Which partition waits for which:

    load warp            --full[s]-->      consumers 0 and 1 --empty[s]-->      load warp
    key and decay warp   --late_full[u]--> consumers 0 and 1 --late_empty[u]--> key and decay warp
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

from tfla.backends.hopper import channel_states, delta_tiles, mma, pipeline, scheduler
from tfla.backends.hopper.channel_states import Config
from tfla.backends.hopper.delta_tiles import COLUMNS, ROWS

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext
    from tfla.backends.triton.channel_tiles import Operands

# Stages of the ring and of the late ring, as shared memory has room for them.
STAGES_FOR_H, STAGES_FOR_STATES = (2, 2), (3, 3)


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out: Any  # TMA descriptors
    e: Any
    states: Any
    state_in: Any  # (sequences, H, dqk, dhv)
    state_out: Any  # (sequences, H, dqk, dhv)
    tiles_per_head: Any  # tiles of one head over all batch rows


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    q: Any  # (STAGES, L, BLOCKS ROWS), with OUTPUT
    r: Any  # (STAGES, L, BLOCKS ROWS), with CORRECT
    v: Any  # and then h, (2 STAGES, L, 64): one tile for each consumer
    p: Any  # (STAGES, L, L), with OUTPUT
    x: Any  # (STAGES, L, L), with CORRECT
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # The late ring:
    k: Any  # (LATE_STAGES, L, BLOCKS ROWS)
    k_low: Any  # (LATE_STAGES, L, BLOCKS ROWS), with SPLIT
    decay: Any  # (LATE_STAGES, BLOCKS ROWS)
    late_full: Any  # barriers, (LATE_STAGES)
    late_empty: Any  # barriers, (LATE_STAGES)
    # What leaves:
    e: Any  # (2, L, 64), with SAVE
    states: Any  # (2 BLOCKS, 64, ROWS), without OUTPUT


@gluon.jit
def run_load_warp(Q, R, V, P, X, shared, params, config):
    """Load the tiles of the ring to shared memory by TMA.

    Args:
        Q, R: TMA descriptors of the operands of reads, in tiles (L, BLOCKS ROWS).
        V: TMA descriptor of v, in tiles (L, 64), two a program.
        P, X: TMA descriptors of P B and X B, in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    of_output: gl.constexpr = Q.block_type.nbytes + P.block_type.nbytes if config.OUTPUT else 0
    of_errors: gl.constexpr = R.block_type.nbytes + X.block_type.nbytes if config.CORRECT else 0
    nbytes: gl.constexpr = 2 * V.block_type.nbytes + of_output + of_errors
    column = gl.program_id(0) * COLUMNS
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, False)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            mbarrier.expect(bar, nbytes)
            row = scheduler.row_of_whole(b, params)
            at = scheduler.tile_coordinates(row, h, t, 0, end, params)
            if config.CORRECT:
                pipeline.async_load(R, at, bar, shared.r.index(s))
            if config.OUTPUT:
                pipeline.async_load(Q, at, bar, shared.q.index(s))
            for half in gl.static_range(2):
                of_half = scheduler.tile_coordinates(row, h, t, column + 64 * half, end, params)
                pipeline.async_load(V, of_half, bar, shared.v.index(2 * s + half))
            if config.CORRECT:
                pipeline.async_load(X, at, bar, shared.x.index(s))
            if config.OUTPUT:
                at = scheduler.tile_coordinates(b, h, t, 0, end, params)
                pipeline.async_load(P, at, bar, shared.p.index(s))
            n += 1


@gluon.jit
def run_key_warp(K, K_low, low_row, shared, params, config):
    """Load the tiles of the late ring to shared memory by TMA.

    Args:
        K, K_low: TMA descriptors of the operands of writes, in tiles (L, BLOCKS ROWS).
        low_row: The row of K_low that is row 0 of the work tiles.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    nbytes: gl.constexpr = (2 if config.SPLIT else 1) * K.block_type.nbytes
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, False)
            s, bar = pipeline.acquire(n, shared.late_full, shared.late_empty, config.LATE_STAGES)
            mbarrier.expect(bar, nbytes)
            at_low = scheduler.tile_coordinates(b + low_row, h, t, 0, end, params)
            at = scheduler.tile_coordinates(scheduler.row_of_whole(b, params), h, t, 0, end, params)
            channel_states.load_keys(K, K_low, at, at_low, bar, shared, s, config)
            n += 1


@gluon.jit
def read_states(C0, C1, n, s, at_state, ids, gmem, shared, half: gl.constexpr, config):
    """Start what a tile reads of the state, steps (1) to (3).

    Args:
        C0, C1: The blocks of the state.
        n: Number of the tile among those of the program.
        s: Its stage in the ring.
        at_state: Its index among the tiles of all heads.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        half: Which consumer this is.
        config: Constants.

    Returns:
        R^T and out^T, (64, L), and their last left operand. All must be waited for.
    """
    L: gl.constexpr = config.L
    dtype: gl.constexpr = shared.k.dtype
    R = gl.zeros([64, L], gl.float32, mma.accumulator_layout(L))
    out = R
    rounded = C0.to(dtype)
    A = mma.to_left_operand(rounded, L)
    if config.CORRECT:
        r = shared.r.index(s).reshape([L, ROWS])
        R = mma.issue_mma(A, r.permute((1, 0)))
    if config.OUTPUT:
        q = shared.q.index(s).reshape([L, config.BLOCKS * ROWS])
        out = mma.issue_mma(A, q.slice(0, ROWS, 1).permute((1, 0)))
    channel_states.release_previous(n, shared, config)
    if not config.OUTPUT:
        channel_states.store_to_shared(rounded, shared.states, half, 0, config)
        if config.BLOCKS == 2:
            channel_states.store_to_shared(C1.to(dtype), shared.states, half, 1, config)
        channel_states.start_state_stores(gmem.states, at_state, ids, shared.states, half, config)
    elif config.BLOCKS == 2:
        rounded = C1.to(dtype)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
        A = mma.to_left_operand(rounded, L)
        out = warpgroup_mma(A, q.slice(ROWS, ROWS, 1).permute((1, 0)), out, is_async=True)
    return R, out, A


@gluon.jit
def process_tile(C0, C1, n, at_state, coordinates, ids, gmem, shared, half: gl.constexpr, config):
    """Process a tile: everything in the module's docstring.

    Args:
        C0, C1: The blocks of the transposed state before the tile, (64, ROWS).
        n: Number of the tile among those of the program.
        at_state: Its index among the tiles of all heads.
        coordinates: TMA coordinates of h and E.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The blocks of the state after the tile.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.k.dtype
    s, phase = pipeline.stage_and_phase(n, config.STAGES)
    u, late_phase = pipeline.stage_and_phase(n, config.LATE_STAGES)
    v = shared.v.index(2 * s + half).reshape([L, 64]).permute((1, 0))  # (64, L)
    k = shared.k.index(u).reshape([L, config.BLOCKS * ROWS])
    mbarrier.wait(shared.full.index(s), phase)
    # (1) to (3)
    R, out, A = read_states(C0, C1, n, s, at_state, ids, gmem, shared, half, config)
    errors = v.load(of_out)  # E^T, (64, L)
    if config.CORRECT:
        # (4)
        x = shared.x.index(s).reshape([L, L]).permute((1, 0))
        v_t = errors.to(gl.float32)
        R = warpgroup_mma_wait(1 if config.OUTPUT else 0, deps=[R])  # C^T (q a)^T still runs
        E, B, up = delta_tiles.issue_correction(v_t - R, None, x, L)
        E, B, out, A = warpgroup_mma_wait(0, deps=[E, B, out, A])
        errors, low = mma.split_in_two(E * up, dtype)
        if config.SAVE:
            # (5)
            shared.e.index(half).reshape([L, 64]).permute((1, 0)).store(errors)
            fence_async_shared()
            pipeline.async_store(gmem.e, coordinates, shared.e.index(half))
    elif config.OUTPUT:
        out, A = warpgroup_mma_wait(0, deps=[out, A])
    U = mma.to_left_operand(errors, ROWS)
    if config.OUTPUT:
        # (6)
        p = shared.p.index(s).reshape([L, L]).permute((1, 0))
        A = mma.to_left_operand(errors, L)
        out = warpgroup_mma(A, p, out, is_async=True)
        if config.CORRECT:
            A_low = mma.to_left_operand(low, L)
            out = warpgroup_mma(A_low, p, out, is_async=True)
    # (7)
    mbarrier.wait(shared.late_full.index(u), late_phase)
    C0, C1 = channel_states.decay_states(C0, C1, shared.decay.index(u), config)
    C0, C1 = channel_states.issue_update(C0, C1, U, k, config)
    if config.SPLIT:
        k_low = shared.k_low.index(u).reshape([L, config.BLOCKS * ROWS])
        C0, C1 = channel_states.issue_update(C0, C1, U, k_low, config)
    if config.OUTPUT:
        # (8) The update still runs.
        UPDATES: gl.constexpr = config.BLOCKS * (2 if config.SPLIT else 1)
        if config.CORRECT:
            out, A, A_low = warpgroup_mma_wait(UPDATES, deps=[out, A, A_low])
        else:
            out, A = warpgroup_mma_wait(UPDATES, deps=[out, A])
        v.store(out.to(dtype))
        fence_async_shared()
        pipeline.async_store(gmem.out, coordinates, shared.v.index(2 * s + half))
    C0, C1 = channel_states.wait_for_states(C0, C1, U, config)
    mbarrier.arrive(shared.late_empty.index(u), count=1)
    return C0, C1


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    channel_states.run_tiles(process_tile, half, gmem, shared, params, config)


@gluon.jit(do_not_specialize=channel_states.RUNTIME_SCALARS)
def channel_h_kernel(
    Q, R, K, K_low, V, P, X, Out, E, states, decays, state_in, state_out, schedule,
    T, tiles_per_head, H, num_work_tiles, first_row, low_row, first_step,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    LATE_STAGES: gl.constexpr, CORRECT: gl.constexpr, SPLIT: gl.constexpr, OUTPUT: gl.constexpr, SAVE: gl.constexpr,
    IS_VARLEN: gl.constexpr, SLICED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
    INDEXED: gl.constexpr,
):  # fmt: skip
    """Compute h, and with SAVE E; or without OUTPUT the states before the tiles.

    Tensors that the constants say are not used may be any. Those of operands are TMA descriptors in tiles (L, BLOCKS
    ROWS), P and X in tiles (L, L), values in tiles (L, 64).

    Args:
        Q, R, K, K_low, P, X: The operands, see `Operands` of the Triton kernels; Q and P are read with OUTPUT, R and X
            with CORRECT, K_low with SPLIT.
        V: The values, or without CORRECT and OUTPUT the prediction errors.
        Out, E: h and the prediction errors.
        states: TMA descriptor of the states, (H * tiles, dhv, dqk), in tiles (64, ROWS).
        decays: The decays of tiles, (H, tiles, dqk) float32.
        state_in: Initial states, (sequences, H, dqk, dhv), with USE_INITIAL_STATE; with INDEXED a pool.
        state_out: Final states, (sequences, H, dqk, dhv), with STORE_FINAL_STATE; with INDEXED a pool.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        num_work_tiles: Sequences times H.
        first_row: With SLICED the row at which those of the slice start in Q, R, K, X and the tensors with columns of
            dhv; P has the rows of the slice.
        low_row: With SLICED the row at which they start in K_low.
        first_step: With SLICED the token at which the steps start in all tensors (B, T, ...); what has tiles or
            sequences has those of these steps and rows alone.
    """
    partitions(
        (Q, R, V, P, X), (K, K_low), low_row if SLICED else 0, decays,
        GlobalPointers(
            out=Out, e=E, states=states, state_in=state_in, state_out=state_out, tiles_per_head=tiles_per_head
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
            first_row=first_row if SLICED else None, first_step=first_step if SLICED else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, BLOCKS=BLOCKS, STAGES=STAGES, LATE_STAGES=LATE_STAGES, REVERSE=False, CORRECT=CORRECT,
            SPLIT=SPLIT, USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE, OUTPUT=OUTPUT,
            SAVE=SAVE, INDEXED=INDEXED,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, keys, low_row, decays, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: two consumers and three single warps."""
    Q, R, V, P, X = tensors
    K, K_low = keys
    STAGES: gl.constexpr = config.STAGES
    LATE_STAGES: gl.constexpr = config.LATE_STAGES
    full, empty = pipeline.allocate_full_empty(STAGES, 1, 2)
    late_full, late_empty = pipeline.allocate_full_empty(LATE_STAGES, 2, 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, STAGES) if config.OUTPUT else None,
        r=pipeline.allocate_tiles(R, STAGES) if config.CORRECT else None,
        v=pipeline.allocate_tiles(V, 2 * STAGES),
        p=pipeline.allocate_tiles(P, STAGES) if config.OUTPUT else None,
        x=pipeline.allocate_tiles(X, STAGES) if config.CORRECT else None,
        full=full,
        empty=empty,
        k=pipeline.allocate_tiles(K, LATE_STAGES),
        k_low=pipeline.allocate_tiles(K_low, LATE_STAGES) if config.SPLIT else None,
        decay=pipeline.allocate_vectors(gl.float32, LATE_STAGES, config.BLOCKS * ROWS),
        late_full=late_full,
        late_empty=late_empty,
        e=pipeline.allocate_tiles(gmem.e, 2) if config.SAVE else None,
        states=pipeline.allocate_tiles(gmem.states, 2 * config.BLOCKS) if not config.OUTPUT else None,
    )
    fence_async_shared()
    PRODUCER: gl.constexpr = channel_states.producer_registers(config.BLOCKS)
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (Q, R, V, P, X, shared, params, config)),
            (run_key_warp, (K, K_low, low_row, shared, params, config)),
            (channel_states.run_decay_warp, (
                decays, shared.decay, late_full, late_empty, params, gmem.tiles_per_head, config,
            )),
        ],
        [4, 1, 1, 1],
        [channel_states.consumer_registers(config.BLOCKS), PRODUCER, PRODUCER, PRODUCER],
    )  # fmt: skip


def launch(
    ctx: "ChannelContext", operands: "Operands", v: Tensor, h: Tensor | None, E: Tensor | None, states: Tensor | None,
    initial: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Compute h, or the states, like `channel_h_scan` of the Triton kernels.

    Args:
        ctx: The context of the call.
        operands: The result of :func:`tfla.backends.triton.channel_tiles.launch`.
        v: The values, (B, T, H, dhv); without h the prediction errors.
        h: Output, (B, T, H, dhv), or None for the states.
        E: Output for the prediction errors, (B, T, H, dhv), or None.
        states: Without h the output for the states before the tiles, (H, tiles, dhv, dqk).
        initial: The initial states, (N, H, dqk, dhv), or None for zeros. Where the context has rows, it is the pool.
        final: Output for the final states, which may be the pool, or None.
    """
    base = scheduler.launch(ctx.base)
    output = h is not None
    correct = output and ctx.spec.correct
    values = channel_states.values_descriptor(ctx, v)
    ring, late = STAGES_FOR_H if output else STAGES_FOR_STATES
    base.launch(channel_h_kernel, channel_states.grid(ctx),
        channel_states.keys_descriptor(ctx, operands.q), channel_states.keys_descriptor(ctx, operands.r, values),
        channel_states.keys_descriptor(ctx, operands.k), channel_states.keys_descriptor(ctx, operands.k_low, values),
        values, channel_states.steps_descriptor(ctx, operands.P),
        channel_states.steps_descriptor(ctx, operands.X, values), channel_states.values_descriptor(ctx, h, values),
        channel_states.values_descriptor(ctx, E, values), channel_states.states_descriptor(ctx, states, values),
        operands.decays,
        operands.decays if initial is None else initial, operands.decays if final is None else final, base.schedule,
        *channel_states.kernel_scalars(ctx, operands.k_low), DK=base.K, DV=base.V, L=base.L,
        BLOCKS=channel_states.blocks(ctx), STAGES=ring, LATE_STAGES=late, CORRECT=correct, SPLIT=ctx.split_keys,
        OUTPUT=output, SAVE=E is not None,
        IS_VARLEN=base.packed, SLICED=ctx.first_row is not None, USE_INITIAL_STATE=initial is not None,
        STORE_FINAL_STATE=final is not None, INDEXED=base.rows is not None, num_warps=4,
    )  # fmt: skip
