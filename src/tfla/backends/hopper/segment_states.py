"""A fused scan of every segment from zeros, without outputs: what each segment adds to the state.

For each segment the kernel stores the state that its steps alone leave, (dqk, dhv), and the decay over the segment: S
and exp(g) of (S1) in `docs/mathematics.md`. With NORMALIZE it does the same for n. `state_passing.py` computes from
these the states at the segment boundaries. A program computes 128 rows of the state by WIDTH columns, 128 or 256, of
each of its work tiles. Two consumers hold 64 of the rows each, in registers. The operands, with the gate weights:

    state   scan           x    y     w
    C       with time      k    v     UPDATE
    dC      against time   q    do    INTER (a')

The steps of a tile n:

    (1)  total <- g total                  the decay from the start of the work tile
    (2)  n <- g n + x^T w                  (64), only with NORMALIZE, (T6)
    (3)  C <- g C + (x * w)^T y            (64, WIDTH) = (64, L) (L, WIDTH), (T5), (T12)
    (4)  (x * w)^T and x^T w of tile n + 1 (64, L) and (64), while the product of step (3) runs
    (5)  the stage of tile n is empty

Which partition waits for which:

    load warp, gate warps --full[s]--> consumers 0 and 1 --empty[s]--> load warp, gate warps
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.results import new_segment_n, new_segment_states
from tfla.backends.hopper import gate_warp, host, mma, pipeline, scheduler
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    STATE_WEIGHT,
    TILE_DECAY,
)


class Config(NamedTuple):
    """The constants of the kernel."""

    DX: Any  # rows of the state, dqk
    DY: Any  # columns of the state, dhv
    NUM_SPLITS: Any  # programs that share the columns of the state
    L: Any  # steps of a tile
    STAGES: Any  # stages of the ring
    REVERSE: Any  # scan against time, for dC
    IS_SEGMENTED: Any  # sequences are cut into segments, each a work tile
    NORMALIZE: Any  # compute n
    SKIP_LAST: Any  # the last segment of a sequence has no tiles, see `num_tiles`


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers write."""

    state_out: Any  # (segments, H, dqk, dhv)
    n_out: Any  # (segments, H, dqk)
    decays: Any  # (segments, H)


class SharedStorage(NamedTuple):
    """The shared memory of a program, a ring of STAGES stages."""

    x: Any  # (STAGES, L, 128)
    y: Any  # (STAGES, L, WIDTH)
    g: Any  # gate vectors, (STAGES, NUM_GATE_VECTORS L); STATE_WEIGHT has w in float32
    u: Any  # update weights w, (STAGES, 2 L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)


@gluon.jit
def run_load_warp(X, Y, shared, params, group_size, config):
    """Load the tiles of x and y to shared memory by TMA.

    Args:
        X: TMA descriptor of x, in tiles (L, 128).
        Y: TMA descriptor of y, in tiles (L, WIDTH).
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of y that share a head of x.
        config: Constants.
    """
    L: gl.constexpr = config.L
    n = 0
    row, column = scheduler.state_block(config.NUM_SPLITS, Y.block_type.shape[-1])
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = scheduler.num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        for i in range(0, tiles):
            t, end = scheduler.tile_rows(i, start, steps, L, config.REVERSE)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes)
            pipeline.async_load(
                X, scheduler.tile_coordinates(b, h // group_size, t, row, end, params), bar, shared.x.index(s)
            )
            pipeline.async_load(Y, scheduler.tile_coordinates(b, h, t, column, end, params), bar, shared.y.index(s))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def load_left_operand(shared, s, half: gl.constexpr, config):
    """Return (x * w)^T of the tile in stage s, (64, L), and with NORMALIZE x^T w, (64), else zeros, step (4)."""
    L: gl.constexpr = config.L
    # (64, L)
    x_t = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0)).load(mma.accumulator_layout(L))
    sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma.accumulator_layout(L)))
    if config.NORMALIZE:
        # From w in float32: outputs are divided by q . n, which can be far smaller than q and n.
        w = shared.g.index(s).slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, mma.accumulator_layout(L)))  # (L)
        sums = gl.sum(x_t.to(gl.float32) * gl.expand_dims(w, 0), 1)
    return mma.scale_by_gates(x_t, shared.u.index(s), L, gl.DotOperandLayout(0, mma.accumulator_layout(128), 2)), sums


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup, with 64 rows of the state, over all work tiles of the program.

    It computes the left operand of a tile while the product of the tile before runs, also across work tiles.
    """
    L: gl.constexpr = config.L
    WIDTH: gl.constexpr = config.DY // config.NUM_SPLITS
    of_state: gl.constexpr = mma.accumulator_layout(128)
    row = gl.program_id(0) // config.NUM_SPLITS * 128 + half * 64
    column = gl.program_id(0) % config.NUM_SPLITS * WIDTH
    one = gl.arange(0, 1, gl.SliceLayout(0, of_state))
    s = 0
    phase = 0
    mbarrier.wait(shared.full.index(0), 0)
    B, sums = load_left_operand(shared, 0, half, config)
    index = gl.program_id(1)
    while index < params.num_work_tiles:
        _b, _h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        C0 = gl.zeros([64, 128], gl.float32, of_state)
        C1 = gl.zeros([64, 128], gl.float32, of_state)
        N = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma.accumulator_layout(L)))
        total = one.to(gl.float32) + 1.0
        for _ in range(0, scheduler.num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)):
            y = shared.y.index(s).reshape([L, WIDTH])
            # (1) total <- g total
            shared_decay = shared.g.index(s).slice(TILE_DECAY * L, 1, 0)
            decay = shared_decay.load(gl.SliceLayout(0, of_state))  # g, (1)
            tile_decay = gl.expand_dims(decay, 0)  # (1, 1)
            total = total * decay
            # (2) n <- g n + x^T w
            if config.NORMALIZE:
                N = N * gl.max(shared_decay.load(gl.SliceLayout(0, mma.accumulator_layout(L))), 0) + sums
            # (3) C <- g C + (x * w)^T y
            C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * tile_decay, is_async=True)
            if WIDTH == 256:
                C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * tile_decay, is_async=True)
            # (4) The left operand of the next tile, or of the stage without data after the last one.
            done = s
            s, phase = pipeline.advance(s, phase, config.STAGES)
            mbarrier.wait(shared.full.index(s), phase)
            next_B, sums = load_left_operand(shared, s, half, config)
            if WIDTH == 256:
                C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            else:
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            B = next_B
            # (5) The stage is empty: all warps have read the tile.
            pipeline.barrier()
            mbarrier.arrive(shared.empty.index(done), count=1)
        store_segment_state(C0, C1, N, total, one, scheduler.state_index(index, params), row, column, gmem, config)
        index = scheduler.next_work_tile(index)


@gluon.jit
def store_segment_state(C0, C1, N, total, one, at, row, column, gmem, config):
    """Store what a segment adds to C, to n, and its decay.

    Of the programs that share a state, those with the first columns store n, and one consumer stores the decay.

    Args:
        C0: The first 128 columns of the consumer's rows, (64, 128).
        C1: The columns after these, (64, 128), with WIDTH 256.
        N: The consumer's elements of n, (64).
        total: The decay over the segment, (1).
        one: The index of its only element, 0, (1).
        at: Index of the states of the work tile.
        row: First row of the consumer.
        column: First column of the program.
        gmem: Tensors in global memory.
        config: Constants.
    """
    state_out = gmem.state_out
    dtype: gl.constexpr = state_out.dtype.element_ty
    of_state: gl.constexpr = C0.type.layout
    gl.store(mma.state_pointers(state_out, at, row, column, config.DX, config.DY, False, of_state), C0.to(dtype))
    if config.DY == 256 * config.NUM_SPLITS:
        gl.store(
            mma.state_pointers(state_out, at, row, column + 128, config.DX, config.DY, False, of_state), C1.to(dtype)
        )
    if config.NORMALIZE:
        rk = row + gl.arange(0, 64, N.type.layout)
        gl.store(gmem.n_out + at.to(gl.int64) * config.DX + rk, N, mask=rk * 0 + column == 0)
    gl.store(gmem.decays + at + one, total, mask=one + row + column == 0)


@gluon.jit(do_not_specialize=scheduler.RUNTIME_SCALARS)
def segment_states_kernel(
    X, Y, gates, i_gate, f_gate, state_out, n_out, decays, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, NUM_SPLITS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, NORMALIZE: gl.constexpr, SKIP_LAST: gl.constexpr,
    IS_VARLEN: gl.constexpr, GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr,
    SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Compute what segments add to the state, and with NORMALIZE to n, and the decay over each.

    Args:
        X: TMA descriptor of x, in tiles (L, 128).
        Y: TMA descriptor of y, in tiles (L, WIDTH).
        gates: Gate vectors, (H, tiles, VECTORS, L).
        i_gate: Input gates, (B, T, H).
        f_gate: Forget gates, (B, T, H).
        state_out: Output, (segments, H, dqk, dhv).
        n_out: Output, (segments, H, dqk), with NORMALIZE.
        decays: Output, (segments, H).
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
        X, Y,
        gate_warp.GateSource(
            vectors=gates, i_gate=i_gate, f_gate=f_gate, stride_ib=stride_ib, stride_it=stride_it, stride_ih=stride_ih,
            stride_fb=stride_fb, stride_ft=stride_ft, stride_fh=stride_fh, scale=scale, log_scale=log_scale,
            GATES=GATES, INPUT_GATE=INPUT_GATE, SIGMOID_I=SIGMOID_I, SIGMOID_F=SIGMOID_F,
        ),
        tiles_per_head, group_size, GlobalPointers(state_out=state_out, n_out=n_out, decays=decays),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=segment_steps, num_work_tiles=num_work_tiles,
            schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DX=DX, DY=DY, NUM_SPLITS=NUM_SPLITS, L=L, STAGES=STAGES, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED,
            NORMALIZE=NORMALIZE, SKIP_LAST=SKIP_LAST,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, source, tiles_per_head, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: consumers, load and gate warps."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    x = pipeline.allocate_tiles(X, STAGES)
    y = pipeline.allocate_tiles(Y, STAGES)
    g = pipeline.allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    u = pipeline.allocate_vectors(X.dtype, STAGES, 2 * L)
    full, empty = pipeline.allocate_full_empty(STAGES, 2, 2)
    fence_async_shared()
    shared = SharedStorage(x=x, y=y, g=g, u=u, full=full, empty=empty)
    buffers = gate_warp.GateBuffers(g, u)
    gate_config: gl.constexpr = gate_warp.GateWarpConfig(
        L=L,
        STAGES=STAGES,
        REVERSE=config.REVERSE,
        IS_SEGMENTED=config.IS_SEGMENTED,
        SKIP_LAST=config.SKIP_LAST,
        GATE_WARPS=2,
        HAS_OUTPUT=False,
    )
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, shared, params, group_size, config)),
            (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (gate_warp.run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


RING_STAGES = 4  # x and y take up to 48 KiB a stage, so that no fifth one would fit


def launch(
    ctx: LaunchContext,
    gates: gate_warp.GateVectors,
    x: Tensor,
    y: Tensor,
    *,
    reverse: bool,
    normalize: bool,
    skip_last: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what each segment adds to C, or with `reverse` to dC, and the decays over segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y: k and v, or with `reverse` q and do.
        reverse: Whether the scan goes against time.
        normalize: Whether what segments add to n is computed as well.
        skip_last: Whether the last segments of sequences have no work: the states after them are not read.

    Returns:
        The states, (segments, H, K, V), n, (segments, H, K), or None, and the decays, (segments, H) float32.
    """
    C = new_segment_states(ctx)
    n = new_segment_n(ctx) if normalize else None
    decays = ctx.new(ctx.segments, ctx.H)
    splits, grid = _splits_and_grid(ctx, skip_last)
    ctx.launch(segment_states_kernel, grid,
        host.descriptor(ctx, x, host.STATE_ROWS), host.descriptor(ctx, y, ctx.V // splits), gates.vectors,
        *ctx.gate_inputs, C, decays if n is None else n, decays, ctx.schedule, *host.kernel_scalars(ctx),
        DX=ctx.K, DY=ctx.V, NUM_SPLITS=splits, L=ctx.L, STAGES=RING_STAGES, REVERSE=reverse,
        IS_SEGMENTED=ctx.segmented, NORMALIZE=normalize, SKIP_LAST=skip_last, IS_VARLEN=ctx.packed, **gates.constants,
        num_warps=4,
    )  # fmt: skip
    return C, n, decays


def _splits_and_grid(ctx: LaunchContext, skip_last: bool) -> tuple[int, tuple[int, int]]:
    """Return how many programs share the columns of a state, and the grid.

    Twice as many share them where at least half of the multiprocessors would be idle otherwise. With `skip_last` the
    last segments of sequences have no work and do not count.
    """
    segments = ctx.segments - (ctx.x.sequences if skip_last else 0)
    splits, of_rows = host.num_splits(ctx.V), ctx.K // host.STATE_ROWS
    halves = ctx.V // splits == host.MAX_STATE_COLUMNS and not ctx.packed
    if halves and 2 * segments * ctx.H * of_rows * splits <= host.processors(ctx.x.q.device):
        return 2 * splits, (of_rows * 2 * splits, ctx.segments * ctx.H)
    return splits, host.grid(ctx, of_rows * splits)
