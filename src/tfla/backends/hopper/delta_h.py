"""h of the delta rule with at most one forget gate a step: a fused scan that keeps the state on chip.

A program computes 128 columns of dhv of each of its work tiles. Two consumers share them: each holds 64 columns of the
transposed state C^T, (dhv, dqk), in registers, as `o_dv.py` does with one block. The equations are (R2) to (R4) of
`tfla.backends.triton.delta_kernels`; X of (R1) comes from `solve_kernel` of :mod:`.delta_solve`, for all tiles at once.

The steps of a tile n (`process_tile`); P is that of tile n, computed during tile n - 1. From (1) to (6) each product
reads the result of the one before it from registers, and neither consumer needs anything of the other for it:

    (1)   R^T <- C^T k^T and out^T <- C^T q^T           (64, L) = (64, dqk) (dqk, L)
    (2)   the stage of tile n - 1 is empty              its outputs have left shared memory
    (3)   R^T <- V^T - R^T * a                          (64, L), (R2)
    (4)   E^T <- R^T - (R^T * beta) X^T                 (64, L) = (64, L) (L, L), (R2), in float16
    (5)   E                                             to shared memory and from there to global memory, with SAVE
    (6)   C^T <- g C^T + (E^T * (w beta)) k             (64, dqk) = (64, L) (L, dqk), (R4), E^T split in two
    (7)   wait for both halves of P
    (8)   out^T <- out^T * a + E^T P^T                  (64, L) = (64, L) (L, L), (R3), E^T split in two with gates
    (9)   S <- q k^T of tile n + 1                      (L, L / 2), one half of the columns for each consumer
    (10)  out^T * scale                                 over v, and from there to global memory
    (11)  P <- S * D * beta of tile n + 1, masked       (L, L / 2), to shared memory, (R1) times beta

Without gates (6) and (8) take E as it is rounded for (5), because the backward computes the states again from that E.
Where nothing decays, rounding errors of E would otherwise add up over the sequence; so later steps correct for them.

With NORMALIZED q and k are divided by their norms. For keys these are weights that come with beta, from `solve_kernel`:
r = 1 / |k| is a factor of a in (3), and of beta in (6) and (11). For queries (9) also computes q q^T, whose diagonal is
|q|^2, (11) stores 1 / |q| beside P, and (10) multiplies by it. With SAVE it goes to memory for the backward.

Which partition waits for which:

    load and gate warp --full[s]--> consumers 0 and 1 --empty[s]--> load and gate warp
    consumer 0 <--ready[n % 2] (P of tile n, and 1 / |q|)--> consumer 1
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
from tfla.backends.hopper import delta_tiles, host, mma, pipeline, scheduler
from tfla.backends.hopper.delta_tiles import (
    COLUMNS,
    KEY_READ_WEIGHT,
    KEY_WRITE,
    READ_WEIGHT,
    ROWS,
    UPDATE_WEIGHT,
    WRITE,
    Config,
    WorkTile,
)
from tfla.backends.hopper.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(3)  # stages of the ring; a stage has 56 KiB of tiles


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out: Any  # TMA descriptor of h
    e: Any  # TMA descriptor of E
    query_norms: Any  # output for 1 / |q|, (B, T, H), with NORMALIZED and SAVE
    state_in: Any  # (sequences, H, dqk, dhv)
    state_out: Any  # (sequences, H, dqk, dhv)
    scale: Any  # the factor of the queries


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring:
    q: Any  # (STAGES, L, dqk)
    k: Any  # (STAGES, L, dqk)
    v: Any  # (2 STAGES, L, 64): one tile for each consumer
    x: Any  # X, (STAGES, L, L)
    g: Any  # the vectors of each tile, (STAGES, `delta_tiles.count_vectors` L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # What consumers exchange, and what leaves:
    p: Any  # P of this tile and of the next, (2, L, L)
    norms: Any  # 1 / |q| of this tile and the next, (2, 2 L): the half of each consumer among zeros; with NORMALIZED
    ready: Any  # barriers, (2): both consumers have stored their half of P, and of the norms
    e: Any  # E, (2, L, 64): one tile for each consumer


@gluon.jit
def run_load_warp(Q, K, V, X, shared, params, group_size, config):
    """Load the tiles of q, k, v and X to shared memory by TMA.

    Args:
        Q, K: TMA descriptors of q and k, in tiles (L, ROWS).
        V: TMA descriptor of v, in tiles (L, 64), two a program.
        X: TMA descriptor of X, in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    nbytes: gl.constexpr = Q.block_type.nbytes + K.block_type.nbytes + 2 * V.block_type.nbytes + X.block_type.nbytes
    n = 0
    column = gl.program_id(0) * COLUMNS
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, False)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, nbytes)
            keys = scheduler.tile_coordinates(b, h // group_size, t, 0, end, params)
            pipeline.async_load(K, keys, bar, shared.k.index(s))
            pipeline.async_load(V, scheduler.tile_coordinates(b, h, t, column, end, params), bar, shared.v.index(2 * s))
            pipeline.async_load(
                V, scheduler.tile_coordinates(b, h, t, column + 64, end, params), bar, shared.v.index(2 * s + 1)
            )
            pipeline.async_load(X, scheduler.tile_coordinates(b, h, t, 0, end, params), bar, shared.x.index(s))
            pipeline.async_load(Q, keys, bar, shared.q.index(s))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, STAGES)


@gluon.jit
def issue_squares(shared, s, half: gl.constexpr, config):
    """Start q q^T of the tile in stage s for one half of the columns, (L, L / 2), whose diagonal is |q|^2."""
    L: gl.constexpr = config.L
    q = shared.q.index(s).reshape([L, ROWS])
    return mma.issue_mma(q, q.slice(half * (L // 2), L // 2, 0).permute((1, 0)))


@gluon.jit
def store_norms(squares, n, ids, shared, half: gl.constexpr, config):
    """Store 1 / |q| of the consumer's half of the steps of tile n, and 0 for the others, (L)."""
    L: gl.constexpr = config.L
    j = half * (L // 2) + ids.j
    square = gl.sum(gl.where(gl.expand_dims(ids.i, 1) == gl.expand_dims(j, 0), squares, 0.0), 1)  # (L)
    is_own = (ids.i >= half * (L // 2)) & (ids.i < (half + 1) * (L // 2))
    inverse = gl.where(is_own, delta_tiles.inverse_norm(square), 0.0)
    shared.norms.index(n % 2).slice(half * L, L, 0).store(inverse)


@gluon.jit
def prepare_tile(S, squares, s, n, ids, shared, half: gl.constexpr, config):
    """Do step (11): store P of tile n in stage s, and with NORMALIZED 1 / |q|, and tell the other consumer."""
    D = load_weights(shared, s, half, config)  # (L, L / 2)
    if config.NORMALIZED:
        S, squares = warpgroup_mma_wait(0, deps=[S, squares])
        store_norms(squares, n, ids, shared, half, config)
    else:
        S = warpgroup_mma_wait(0, deps=[S])
    delta_tiles.store_scores(S, D, n, ids, shared, half, config)


@gluon.jit
def load_weights(shared, s, half: gl.constexpr, config):
    """Return D of the tile in stage s times the weight of the step that writes, (L, L / 2), unmasked."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(L // 2)
    vector: gl.constexpr = KEY_WRITE if config.NORMALIZED else WRITE
    write = shared.g.index(s).slice(vector * L + half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, layout))  # (L / 2)
    return delta_tiles.load_decays(shared, s, half, config) * gl.expand_dims(write, 0)


@gluon.jit
def store_query_norms(norms, t, work_tile, gmem, params, config):
    """Store 1 / |q| of the tile at step t to global memory, from what both consumers have in shared memory, (2 L)."""
    L: gl.constexpr = config.L
    step = gl.arange(0, L, gl.BlockedLayout([1], [32], [4], [0]))
    inverse = norms.slice(0, L, 0).load(step.type.layout) + norms.slice(L, L, 0).load(step.type.layout)
    first = (work_tile.b.to(gl.int64) * params.T + (work_tile.start + t)) * params.H + work_tile.h
    gl.store(gmem.query_norms + (first + step * params.H), inverse, mask=t + step < work_tile.steps)


@gluon.jit
def process_tile(C, pipe_state, t, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (11) of the module's docstring.

    Args:
        C: The state before the tile, transposed, (64, ROWS).
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
    s, phase, n = pipe_state
    coordinates = delta_tiles.output_coordinates(t, work_tile, ids, params)
    k = shared.k.index(s).reshape([L, ROWS])
    q = shared.q.index(s).reshape([L, ROWS])
    v = shared.v.index(2 * s + half).reshape([L, 64]).permute((1, 0))  # (64, L)
    x = shared.x.index(s).reshape([L, L]).permute((1, 0))
    g = shared.g.index(s)
    # (1) R^T <- C^T k^T and out^T <- C^T q^T
    A = mma.to_left_operand(C.to(dtype), L)
    R = mma.issue_mma(A, k.permute((1, 0)))
    out = mma.issue_mma(A, q.permute((1, 0)))
    # (2) The outputs of the previous tile have left: its stage is empty.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    of_key: gl.constexpr = KEY_READ_WEIGHT if config.NORMALIZED else READ_WEIGHT
    read_weight = delta_tiles.load_vector(g, of_key, L, of_out)  # (1, L)
    write = delta_tiles.load_vector(g, WRITE, L, of_out)  # (1, L)
    v_t = v.load(of_out).to(gl.float32)  # (64, L)
    R = warpgroup_mma_wait(1, deps=[R])  # C^T q^T still runs
    # (3) R^T <- V^T - R^T * a
    R = v_t - R * read_weight
    # (4) E^T <- R^T - (R^T * beta) X^T
    E, B, up = delta_tiles.issue_correction(R, write, x, L)
    E, B, out, A = warpgroup_mma_wait(0, deps=[E, B, out, A])
    E = E * up
    if not config.GATED:  # the backward reads E as it is stored
        E = E.to(dtype).to(gl.float32)
    if config.SAVE:
        # (5) E on its way to memory
        shared.e.index(half).reshape([L, 64]).permute((1, 0)).store(E.to(dtype))
        fence_async_shared()
        pipeline.async_store(gmem.e, coordinates, shared.e.index(half))
    # (6) C^T <- g C^T + (E^T * (w beta)) k
    decay = delta_tiles.load_tile_decay(g, L)
    U, U_low = mma.split_left_operand(E * delta_tiles.load_vector(g, UPDATE_WEIGHT, L, of_out), ROWS, dtype)
    C = warpgroup_mma(U, k, C * decay, is_async=True)
    C = warpgroup_mma(U_low, k, C, is_async=True)
    # (7) Both consumers have stored their half of P.
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    # (8) out^T <- out^T * a + E^T P^T
    if config.GATED:
        A, A_low = mma.split_left_operand(E, L, dtype)
    else:
        A = mma.to_left_operand(E.to(dtype), L)
        A_low = A
    p = shared.p.index(n % 2).permute((1, 0))
    out = warpgroup_mma(A, p, out * delta_tiles.load_vector(g, READ_WEIGHT, L, of_out), is_async=True)
    if config.GATED:
        out = warpgroup_mma(A_low, p, out, is_async=True)
    # (9) The next tile has arrived: start its S while the products of this tile run.
    s, phase = pipeline.advance(s, phase, STAGES)
    n += 1
    mbarrier.wait(shared.full.index(s), phase)
    S = delta_tiles.issue_scores(shared, s, half, config)
    squares = S
    if config.NORMALIZED:
        squares = issue_squares(shared, s, half, config)
    # (10) The output, over v and on its way to memory.
    still: gl.constexpr = 2 if config.NORMALIZED else 1  # S and the squares still run
    C, U, U_low, out, A, A_low = warpgroup_mma_wait(still, deps=[C, U, U_low, out, A, A_low])
    if config.NORMALIZED:
        norms = shared.norms.index(pipe_state.count % 2)
        out *= delta_tiles.load_vector(norms, 0, L, of_out) + delta_tiles.load_vector(norms, 1, L, of_out)  # (1, L)
        if config.SAVE and half == 0:
            store_query_norms(norms, t, work_tile, gmem, params, config)
    v.store((out * gmem.scale).to(dtype))
    fence_async_shared()
    pipeline.async_store(gmem.out, coordinates, shared.v.index(2 * pipe_state.index + half))
    # (11) P of the next tile
    prepare_tile(S, squares, s, n, ids, shared, half, config)
    return C, pipeline.PipelineState(s, phase, n)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    ids = delta_tiles.fragment_ids(half, config)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    # (9) and (11) of the first tile, which no earlier tile has done
    mbarrier.wait(shared.full.index(0), 0)
    S = delta_tiles.issue_scores(shared, 0, half, config)
    squares = S
    if config.NORMALIZED:
        squares = issue_squares(shared, 0, half, config)
    prepare_tile(S, squares, 0, 0, ids, shared, half, config)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False, True)
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps)
        C = delta_tiles.load_state(index, ids, gmem, params, config)
        for step in range(0, (steps + L - 1) // L):
            C, pipe_state = process_tile(C, pipe_state, step * L, work_tile, ids, gmem, shared, params, half, config)
        delta_tiles.store_state(C, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=delta_tiles.RUNTIME_SCALARS)
def delta_h_kernel(
    Q, K, V, X, Out, E, gates, beta, norms, query_norms, state_in, state_out, schedule, T, tiles_per_head, H,
    group_size, num_work_tiles, stride_b, stride_t, stride_h, scale,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, GATED: gl.constexpr, SAVE: gl.constexpr,
    NORMALIZED: gl.constexpr, IS_VARLEN: gl.constexpr, USE_INITIAL_STATE: gl.constexpr,
    STORE_FINAL_STATE: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Compute h, and with SAVE E.

    Tensors that the constants say are not used may be any.

    Args:
        Q, K: TMA descriptors of the queries and keys, in tiles (L, ROWS).
        V: TMA descriptor of the values, in tiles (L, 64).
        X: TMA descriptor of the result of `solve_kernel`, (B, T, H, L), in tiles (L, L).
        Out: TMA descriptor of h, in tiles like those of v.
        E: TMA descriptor of the prediction errors, in tiles like those of v; unused without SAVE.
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
        norms: r from `solve_kernel`, (B, T, H) float32, with NORMALIZED.
        query_norms: Output for 1 / |q|, (B, T, H) float32, with NORMALIZED and SAVE.
        state_in: Initial states, (sequences, H, dqk, dhv), with USE_INITIAL_STATE; with INDEXED a pool.
        state_out: Final states, (sequences, H, dqk, dhv), with STORE_FINAL_STATE; with INDEXED a pool.
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
        (Q, K, V, X),
        delta_tiles.WriteSource(
            vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
            tiles_per_head=tiles_per_head, key_norms=norms,
        ),
        group_size,
        GlobalPointers(
            out=Out, e=E, query_norms=query_norms, state_in=state_in, state_out=state_out, scale=scale
        ),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=False, SAVE=SAVE, USE_INITIAL_STATE=USE_INITIAL_STATE,
            STORE_FINAL_STATE=STORE_FINAL_STATE, NORMALIZED=NORMALIZED, INDEXED=INDEXED,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: consumers, load and gate warp."""
    Q, K, V, X = tensors
    L: gl.constexpr = config.L
    full, empty = pipeline.allocate_full_empty(STAGES, 2, 2)
    shared = SharedStorage(
        q=pipeline.allocate_tiles(Q, STAGES),
        k=pipeline.allocate_tiles(K, STAGES),
        v=pipeline.allocate_tiles(V, 2 * STAGES),
        x=pipeline.allocate_tiles(X, STAGES),
        g=pipeline.allocate_vectors(gl.float32, STAGES, delta_tiles.count_vectors(config.NORMALIZED) * L),
        full=full,
        empty=empty,
        p=pipeline.allocate_operands(Q.dtype, 2, L, L),
        norms=pipeline.allocate_vectors(gl.float32, 2, 2 * L) if config.NORMALIZED else None,
        ready=pipeline.allocate_barriers(2, 2),
        e=pipeline.allocate_tiles(gmem.e, 2) if config.SAVE else None,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (Q, K, V, X, shared, params, group_size, config)),
            (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, config)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def launch(
    ctx: "DeltaContext", gates: Tensor, X: Tensor, h: Tensor, E: Tensor | None, initial: Tensor | None,
    final: Tensor | None,
) -> None:  # fmt: skip
    """Compute h, the prediction errors and the final states, like `launch_h` of the Triton kernels.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        X: The result of `launch_solve`.
        h: Output, (B, T, H, dhv).
        E: Output for the prediction errors, (B, T, H, dhv), or None.
        initial: The initial states, (N, H, dqk, dhv), or None for zeros. Where the context has rows, it is the pool.
        final: Output for the final states, which may be the pool, or None.
    """
    base, x = scheduler.launch(ctx.base), ctx.x
    rows, half = ROWS.value, COLUMNS.value // 2
    base.launch(delta_h_kernel, host.grid(base, ceil_div(base.V, COLUMNS.value)),
        host.descriptor(base, x.q, rows), host.descriptor(base, x.k, rows), host.descriptor(base, x.v, half),
        host.descriptor(base, X, base.L), host.descriptor(base, h, half),
        gates if E is None else host.descriptor(base, E, half), gates, ctx.beta,
        *(ctx.norms_apart or (gates, gates)),
        gates if initial is None else initial, gates if final is None else final, base.schedule,
        *delta_tiles.kernel_scalars(ctx), DK=base.K, DV=base.V, L=base.L, GATED=ctx.gated, SAVE=E is not None,
        NORMALIZED=ctx.norms is not None, IS_VARLEN=base.packed, USE_INITIAL_STATE=initial is not None,
        STORE_FINAL_STATE=final is not None, INDEXED=base.rows is not None, num_warps=4,
    )  # fmt: skip
