"""How spans of steps act on the state with at most one forget gate a step: C_end = A C_start + S.

S (dqk, dhv) is the state after a span that starts from zeros, and A (dqk, dqk) that after one without values that
starts from I (D19 of docs/delta-rule.md). A program computes 128 columns of S or of A for each of its work tiles, which
are sequences or the segments that sequences are cut into. Two consumers share the columns and need nothing of each
other. Each holds 64 of them, transposed, in registers, as :mod:`.delta_h` does; X comes from `solve_kernel`. The values
that programs of A load lie outside of the tensor of values, where TMA reads zeros.

The steps of a tile (`process_tile`), each of which reads the result of the one before it from registers:

    (1)   R^T <- C^T k^T                                (64, L) = (64, dqk) (dqk, L)
    (2)   the stage of the tile before is empty         all warps of the consumer have read it
    (3)   R^T <- V^T - R^T * a                          (64, L), (R2)
    (4)   E^T <- R^T - (R^T * beta) X^T                 (64, L) = (64, L) (L, L), (R2), in float16
    (5)   C^T <- g C^T + (E^T * (w beta)) k             (64, dqk) = (64, L) (L, dqk), (R4), E^T split in two

With NORMALIZED keys are divided by their norms: a in (3) and w beta in (5) have the factor r = 1 / |k|, as X has.

Which partition waits for which:

    load and gate warp --full[s]--> consumers 0 and 1 --empty[s]--> load and gate warp
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

from tfla.backends.gpu.config import ceil_div
from tfla.backends.hopper import delta_tiles, host, mma, pipeline, scheduler
from tfla.backends.hopper.delta_tiles import (
    COLUMNS,
    KEY_READ_WEIGHT,
    READ_WEIGHT,
    ROWS,
    UPDATE_WEIGHT,
    WRITE,
    Config,
)
from tfla.backends.hopper.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

STAGES = gl.constexpr(4)  # stages of the ring; a stage has 40 KiB of tiles


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    state_in: Any  # the states before whole sequences, (sequences / segments, H, dqk, dhv), or with INDEXED a pool
    cu_seqlens: Any  # the bounded offsets of segments, which the places of states in the pool follow
    added: Any  # S, (sequences, H, dqk, dhv)
    transitions: Any  # A, (sequences, H, dqk, dqk)


class SharedStorage(NamedTuple):
    """The shared memory of a program: the ring."""

    k: Any  # (STAGES, L, dqk)
    v: Any  # (2 STAGES, L, 64): one tile for each consumer
    x: Any  # X, (STAGES, L, L)
    g: Any  # the vectors of each tile, (STAGES, `delta_tiles.count_vectors` L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)


@gluon.jit
def run_load_warp(K, V, X, shared, params, group_size, config):
    """Load the tiles of k, v and X to shared memory by TMA.

    Args:
        K: TMA descriptor of k, in tiles (L, ROWS).
        V: TMA descriptor of v, in tiles (L, 64), two a program.
        X: TMA descriptor of X, in tiles (L, L).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    nbytes: gl.constexpr = K.block_type.nbytes + 2 * V.block_type.nbytes + X.block_type.nbytes
    n = 0
    column = gl.program_id(0) * COLUMNS
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        for i in range(0, delta_tiles.count_tiles(index, steps, params, config)):
            t = start + i * L
            end = start + steps
            s, bar = pipeline.acquire(n, shared.full, shared.empty, STAGES)
            mbarrier.expect(bar, nbytes)
            keys = scheduler.tile_coordinates(b, h // group_size, t, 0, end, params)
            pipeline.async_load(K, keys, bar, shared.k.index(s))
            for half in gl.static_range(2):
                values = scheduler.tile_coordinates(b, h, t, column + half * 64, end, params)
                pipeline.async_load(V, values, bar, shared.v.index(2 * s + half))
            pipeline.async_load(X, scheduler.tile_coordinates(b, h, t, 0, end, params), bar, shared.x.index(s))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, STAGES)


@gluon.jit
def process_tile(C, s, n, shared, half: gl.constexpr, config):
    """Process the tile in stage s, which is full: steps (1) to (5) of the module's docstring.

    Args:
        C: The columns before the tile, transposed, (64, ROWS).
        s: The stage.
        n: The number of the tile, over all work tiles of the program.
        shared: Shared memory.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The columns after the tile.
    """
    L: gl.constexpr = config.L
    columns: gl.constexpr = mma.accumulator_layout(L)
    dtype: gl.constexpr = shared.k.dtype
    k = shared.k.index(s).reshape([L, ROWS])
    x = shared.x.index(s).reshape([L, L]).permute((1, 0))
    g = shared.g.index(s)
    # (1) R^T <- C^T k^T
    A = mma.to_left_operand(C.to(dtype), L)
    R = mma.issue_mma(A, k.permute((1, 0)))
    # (2) The stage of the tile before is empty.
    pipeline.barrier()
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    v = shared.v.index(2 * s + half).reshape([L, 64]).permute((1, 0)).load(columns).to(gl.float32)  # (64, L)
    R, A = warpgroup_mma_wait(0, deps=[R, A])
    # (3) R^T <- V^T - R^T * a
    of_key: gl.constexpr = KEY_READ_WEIGHT if config.NORMALIZED else READ_WEIGHT
    R = v - R * delta_tiles.load_vector(g, of_key, L, columns)
    # (4) E^T <- R^T - (R^T * beta) X^T
    E, B, up = delta_tiles.issue_correction(R, delta_tiles.load_vector(g, WRITE, L, columns), x, L)
    C = C * delta_tiles.load_tile_decay(g, L)
    E, B = warpgroup_mma_wait(0, deps=[E, B])
    E = E * up
    if not config.GATED:  # as the scan for h does
        E = E.to(dtype).to(gl.float32)
    # (5) C^T <- g C^T + (E^T * (w beta)) k
    U, U_low = mma.split_left_operand(E * delta_tiles.load_vector(g, UPDATE_WEIGHT, L, columns), ROWS, dtype)
    C = warpgroup_mma(U, k, C, is_async=True)
    C = warpgroup_mma(U_low, k, C, is_async=True)
    C, U, U_low = warpgroup_mma_wait(0, deps=[C, U, U_low])
    return C


@gluon.jit
def ceil_to_programs(DV: gl.constexpr):
    """Return the number of the first column of A: those of S, dhv, are rounded up to whole programs."""
    return (DV + COLUMNS - 1) // COLUMNS * COLUMNS


@gluon.jit
def load_start(index, column, gmem, params, config):
    """Return what a consumer starts from, 64 columns from `column` on, (64, ROWS): of a given state, zeros, or I."""
    layout: gl.constexpr = mma.accumulator_layout(ROWS)
    c = column + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)  # (64, 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)  # (1, ROWS)
    C = gl.where(c == row + ceil_to_programs(config.DV), 1.0, 0.0)
    if config.USE_INITIAL_STATE:
        at = scheduler.state_index(index, params)
        segment = at // params.H
        sequence = segment // params.segments
        place = sequence
        if config.INDEXED:  # the place of the final state of the last segment of the sequence
            count = params.num_work_tiles // params.H
            place = gl.load(gmem.cu_seqlens + 2 * count + (sequence + 1) * params.segments).to(gl.int32)
        whole = place * params.H + at % params.H
        pointers = mma.state_pointers(gmem.state_in, whole, column, 0, config.DV, config.DK, True, layout)
        is_given = (c < config.DV) & (row < config.DK) & (segment % params.segments == 0)
        if config.INDEXED:
            C = gl.where(is_given & (place < -1), float("nan"), C)  # the pool lacks the row
            is_given = is_given & (place >= 0)
        C += gl.load(pointers, mask=is_given, other=0.0).to(gl.float32)
    return C


@gluon.jit
def store_end(C, index, column, gmem, params, config):
    """Store what the consumer holds after work tile `index`, columns of S or of A."""
    layout: gl.constexpr = mma.accumulator_layout(ROWS)
    at = scheduler.state_index(index, params)
    c = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)  # (64, 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)  # (1, ROWS)
    if column < config.DV:
        pointers = mma.state_pointers(gmem.added, at, column, 0, config.DV, config.DK, True, layout)
        gl.store(pointers, C, mask=(column + c < config.DV) & (row < config.DK))
    own = column - ceil_to_programs(config.DV)
    if own >= 0:
        pointers = mma.state_pointers(gmem.transitions, at, own, 0, config.DK, config.DK, True, layout)
        gl.store(pointers, C, mask=(own + c < config.DK) & (row < config.DK))


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    column = gl.program_id(0) * COLUMNS + half * 64
    s = 0
    phase = 0
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        _b, _h, _start, steps, _first_tile = scheduler.get_work_tile(index, params, L, False)
        C = load_start(index, column, gmem, params, config)
        for _step in range(0, delta_tiles.count_tiles(index, steps, params, config)):
            mbarrier.wait(shared.full.index(s), phase)
            C = process_tile(C, s, n, shared, half, config)
            s, phase = pipeline.advance(s, phase, STAGES)
            n += 1
        store_end(C, index, column, gmem, params, config)


@gluon.jit(do_not_specialize=[*delta_tiles.RUNTIME_SCALARS, "segments"])
def delta_action_kernel(
    K, V, X, gates, beta, norms, state_in, added, transitions, schedule, cu_seqlens, T, tiles_per_head, H, group_size,
    num_work_tiles, stride_b, stride_t, stride_h, scale, segments,
    DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr, GATED: gl.constexpr, LAST: gl.constexpr,
    NORMALIZED: gl.constexpr, IS_VARLEN: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, WHOLE: gl.constexpr,
    INDEXED: gl.constexpr,
):  # fmt: skip
    """Compute S and A of sequences, or of the segments that sequences are cut into.

    The grid is (dhv / 128 + 1, programs), the last ones for A. What is never read is not computed: S of the last
    segment of a sequence, A of the first one, and without LAST that of the last one. With WHOLE each sequence is one
    segment, of which both are computed. Tensors that the constants say are not used may be any.

    Args:
        K: TMA descriptor of the keys, in tiles (L, ROWS).
        V: TMA descriptor of the values, in tiles (L, 64).
        X: TMA descriptor of the result of `solve_kernel`, (B, T, H, L), in tiles (L, L).
        gates: Gate vectors, (H, tiles, VECTORS, L), with GATED.
        beta: (B, T, H), any float dtype.
        norms: r from `solve_kernel`, (B, T, H) float32, with NORMALIZED, where keys are divided by their norms.
        state_in: The states before the first segments, (sequences / segments, H, dqk, dhv), with USE_INITIAL_STATE;
            with INDEXED a pool.
        added: Output for S, (sequences, H, dqk, dhv) float32.
        transitions: Output for A, (sequences, H, dqk, dqk) float32.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        cu_seqlens: Bounded offsets of segments, with INDEXED; the places of final states in the pool follow them.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of k.
        num_work_tiles: Sequences, which are segments, times H.
        stride_b, stride_t, stride_h: Strides of beta.
        scale: Any number.
        segments: Segments of a sequence.
    """
    config: gl.constexpr = Config(
        DK=DK, DV=DV, L=L, GATED=GATED, REVERSE=False, SAVE=LAST, USE_INITIAL_STATE=USE_INITIAL_STATE,
        STORE_FINAL_STATE=True, NORMALIZED=NORMALIZED, INDEXED=INDEXED,
    )  # fmt: skip
    params = scheduler.SchedulerParams(
        T=T, H=H, segment_steps=T, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
        segments=None if WHOLE else segments,
    )  # fmt: skip
    source = delta_tiles.WriteSource(
        vectors=gates, beta=beta, stride_b=stride_b, stride_t=stride_t, stride_h=stride_h,
        tiles_per_head=tiles_per_head, key_norms=norms,
    )  # fmt: skip
    full, empty = pipeline.allocate_full_empty(STAGES, 2, 2)
    shared = SharedStorage(
        k=pipeline.allocate_tiles(K, STAGES),
        v=pipeline.allocate_tiles(V, 2 * STAGES),
        x=pipeline.allocate_tiles(X, STAGES),
        g=pipeline.allocate_vectors(gl.float32, STAGES, delta_tiles.count_vectors(config.NORMALIZED) * L),
        full=full,
        empty=empty,
    )
    gmem = GlobalPointers(state_in=state_in, cu_seqlens=cu_seqlens, added=added, transitions=transitions)
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (K, V, X, shared, params, group_size, config)),
            (delta_tiles.run_gate_warp, (source, shared.g, full, empty, params, STAGES, config)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def launch(
    ctx: "DeltaContext", gates: Tensor, X: Tensor, given: Tensor | None, added: Tensor, transitions: Tensor,
    segments: int,
) -> None:  # fmt: skip
    """Compute S and A, like `launch_action` of :mod:`tfla.backends.triton.delta_segments`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        X: The result of `launch_solve`.
        given: The initial states of whole sequences, (sequences / segments, H, dqk, dhv), or None for zeros. Where the
            context has rows, it is the pool of the final states.
        added: Output for S, (sequences, H, dqk, dhv) float32.
        transitions: Output for A, (sequences, H, dqk, dqk) float32.
        segments: The segments of a sequence; 0 if the sequences are no segments.
    """
    base, x = scheduler.launch(ctx.base), ctx.x
    half = COLUMNS.value // 2
    base.launch(delta_action_kernel, host.grid(base, ceil_div(base.V, COLUMNS.value) + 1),
        host.descriptor(base, x.k, ROWS.value), host.descriptor(base, x.v, half), host.descriptor(base, X, base.L),
        gates, ctx.beta, (ctx.norms_apart or (gates, gates))[0], gates if given is None else given, added,
        transitions, base.schedule, base.cu_seqlens, *delta_tiles.kernel_scalars(ctx), segments, DK=base.K, DV=base.V,
        L=base.L, GATED=ctx.gated, LAST=ctx.spec.save, NORMALIZED=ctx.norms is not None, IS_VARLEN=base.packed,
        USE_INITIAL_STATE=given is not None, WHOLE=not segments, INDEXED=base.rows is not None, num_warps=4,
    )  # fmt: skip
