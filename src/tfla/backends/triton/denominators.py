"""The scan of n and of the denominators, :func:`normalizer_scan`, and its launchers.

The denominators (T3) are folded into the gate vectors before o is computed. The same scan computes the states n, (T6),
or in reverse order dn, (T13), at segment boundaries. In a tile of L steps:

    (1)  d <- a * (z n) + P 1                      (L), (T3)
    (2)  ROW, INTER <- divided by max(|d|, exp(-m)), so that the scan for o computes (T4) without a division
    (3)  N <- g N + w^T x                          (16, BK), n as rows that add up to it, (T6), (T13)

Where several programs share the keys of a head, each stores its part of d, and `sum_denominators` does (2).
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu import state_passing
from tfla.backends.gpu.config import SHORTEST_SEGMENT, ceil_div, power_of_two, processors
from tfla.backends.gpu.context import LaunchContext, time_strides
from tfla.backends.gpu.gate_kernels import (
    DECAY,
    DELTA_P,
    FLOOR,
    INTER,
    ROW,
    ROW_LOW,
    UPDATE,
    VECTORS,
    first_tile,
    locate_chunk,
    locate_segment,
)
from tfla.backends.gpu.results import new_segment_n
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.scan_tiles import (
    count_tiles,
    describable,
    gate_matrix,
    load_tile,
    matmul,
    scale_to_range,
    split_rounding,
    tile_access,
    without_unknown_options,
)

MAX_N = 512  # elements of n of one program of `normalizer_scan`; float32 takes twice the shared memory


@triton.jit
def fold_denominators(gate, r, inter, d, L: tl.constexpr, EXACT: tl.constexpr):
    """Divide the gate matrix of a tile and INTER by the denominators max(|d|, exp(-m)), in the gate vectors in memory.

    Args:
        gate: where the gate vectors of the tile are.
        r: indices of the steps, (L).
        inter: INTER, (L).
        d: the denominators before the lower bound, (L).
        L: the steps of a tile.
        EXACT: whether there are LOW vectors.
    """
    D = tl.maximum(tl.abs(d), tl.load(gate + FLOOR * L + r))
    row_at = gate + (ROW_LOW if EXACT else ROW) * L + r  # ROW can be so large that adding to it loses digits
    tl.store(row_at, tl.load(row_at) - tl.log2(D))
    tl.store(gate + INTER * L + r, inter / D)


@triton.jit(do_not_specialize=["sequences", "T", "tiles"])
def sum_denominators(
    parts, gates, d_out, cu, sequences, T, tiles, H,
    PARTS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr, SAVE_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum the partial denominators of :func:`normalizer_scan` and fold them into the gate vectors.

    The grid is (tiles, H). parts is (PARTS, H, tiles, L) float32, d_out (B, T, H), written with SAVE_D.
    """
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, tl.program_id(0), L, IS_VARLEN)
    if start < length:
        r = tl.arange(0, L)
        row = h * tiles + first_tile(first, s, T, L, IS_VARLEN) + start // L
        d = tl.zeros([L], tl.float32)
        for part in tl.static_range(PARTS):
            d += tl.load(parts + (part * H * tiles + row) * L + r)
        if SAVE_D:
            tl.store(d_out + (first + start + r) * H + h, d, mask=start + r < length)
        gate = gates + row * VECTORS * L
        fold_denominators(gate, r, tl.load(gate + INTER * L + r), d, L, EXACT)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def normalizer_scan(
    X, Z, gates, cu, parts, d_out, n_in, n_out, sequences, T, tiles_of_head, H, GROUP, length, xb, xt, xh, zb, zt, zh,
    DK: tl.constexpr, DN: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, REVERSE: tl.constexpr, OUTPUT: tl.constexpr,
    DELTA: tl.constexpr, IS_VARLEN: tl.constexpr, IS_SEGMENTED: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, SAVE_D: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, SKIP_LAST: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Compute the denominators d, (T3), fold them into the gate vectors, and compute the states n, (T6), or dn, (T13).

    The grid is (segments * H, DN / BK). Without OUTPUT the kernel computes only what a segment adds to n, or with
    REVERSE to dn, and with DECAYS stores the decay over each segment in `parts`.

    N, (16, BK), holds n as a sum of rows, because an MMA takes at least 16 rows. Rows 0 and 1 are updated with the
    weights rounded to the inputs' dtype and with the rounding errors of the weights. Rows 8 and 9 are copies of these:
    the product z N^T reads rows below 8 rounded to the inputs' dtype and the copies as what the rounding cuts off, so
    that it has n in twice the precision.

    Args:
        X, Z: x (k, or q with REVERSE) and z (q), (B, T, H / GROUP, DK).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32, updated in place.
        cu: the offsets of packed sequences, (sequences + 1).
        parts: partial denominators, (DN / BK, H, tiles, L) float32, where several programs share the keys (BK < DN);
            :func:`sum_denominators` sums them.
        d_out: d, (B, T, H); written with SAVE_D.
        n_in, n_out: the states n before and after the scans, (segments, H, DN); zero from DK on.
        length: the number of steps of a segment.
        DELTA: whether updates are weighted by delta as well, as those of dn are.
    """
    segment = tl.program_id(0) // H
    h = tl.program_id(0) % H
    first, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, segment, length, L, IS_SEGMENTED, IS_VARLEN)
    hx = (h // GROUP).to(tl.int64)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hx * zh, steps, DK, zt, L, BK, TMA)
    gates += (h.to(tl.int64) * tiles_of_head + tile0) * VECTORS * L
    k0 = 0
    if BK < DN:
        k0 = tl.program_id(1) * BK
    rk = k0 + tl.arange(0, BK)
    row = tl.arange(0, 16)[:, None]
    n_at = tl.program_id(0).to(tl.int64) * DN + rk
    N = tl.zeros([16, BK], tl.float32)
    if USE_INITIAL_STATE:
        N = tl.where(row % 8 == 0, tl.load(n_in + n_at, mask=rk < DN, other=0.0)[None, :], 0.0)
    r = tl.arange(0, L)
    total = 1.0
    tiles = count_tiles(cu, sequences, T, segment, length, steps, L, REVERSE, IS_VARLEN, SKIP_LAST)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        t = (tiles - 1 - step if REVERSE else step) * L
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, k0, steps, DK, xt, L, BK, TMA)  # (L, BK)
        wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L)
        if DELTA:
            wx *= tl.load(gate + DELTA_P * L + r)
        if OUTPUT:
            z = load_tile(z_at, t, k0, steps, DK, zt, L, BK, TMA)  # (L, BK)
            inter = tl.load(gate + INTER * L + r)  # (L)
            # (1) d <- a * (z n) + P 1. P is not transposed here: (L, L), [reading step, updating step]
            P = rounded_product(tl.dot(z, tl.trans(x), input_precision=PRECISION), gate_matrix(gate, r, L, True, EXACT))
            if NEGATIVE:
                P = -P
            high = N.to(x.dtype)
            low = (N - high).to(x.dtype)
            read_n = matmul(z, tl.trans(tl.where(row < 8, high, low)), PRECISION)
            d = tl.sum(P, 1) + tl.sum(read_n, 1) * inter
            # (2) Fold max(|d|, exp(-m)) into the gate vectors
            if BK < DN:
                tl.store(parts + ((tl.program_id(1) * H + h).to(tl.int64) * tiles_of_head + tile0) * L + t + r, d)
            else:
                if SAVE_D:
                    tl.store(d_out + (first + t + r) * H + h, d, mask=t + r < steps)
                fold_denominators(gate, r, inter, d, L, EXACT)
        # (3) N <- g N + w^T x
        decay = tl.load(gate + DECAY * L)
        N = N * decay
        if DECAYS:
            total *= decay
        wx, top = scale_to_range(wx, x.dtype, DELTA)
        N += top * tl.dot(split_rounding(wx, row % 8, x.dtype), x, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        tl.store(n_out + n_at, tl.sum(tl.where(row < 8, N, 0.0), 0), mask=rk < DN)
    if DECAYS:
        tl.store(parts + tl.program_id(0), total, mask=k0 == 0)


def programs_per_n(ctx: LaunchContext) -> int:
    """Return how many programs of `normalizer_scan` share the elements of one n."""
    return ceil_div(ctx.K, MAX_N // 2 if ctx.exact else MAX_N)


def launch_scan(
    ctx: LaunchContext, gates: Tensor, x: Tensor, z: Tensor, *, reverse: bool, initial: Tensor | None,
    final: Tensor | None, d: Tensor | None = None, output: bool = True, skip_last: bool = False, steps: int = 0,
    decays: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `normalizer_scan`: fold the denominators into the gate vectors; without `output` only compute n or dn.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, z: k and q, or for dn q twice.
        reverse: Whether the scan runs against time, for dn.
        initial: The states n that scans start from, (segments, H, K), or None for zeros.
        final: Output for the states that scans end with, or None.
        d: Output for the denominators, (B, T, H), or None.
        output: Whether denominators are computed.
        skip_last: Whether the segments that end a scan are left out.
        steps: The number of steps of a segment, if it is not that of the context.
        decays: Output for the decays over segments, (segments, H), or None.
    """
    segmented, segments = (True, ctx.count(steps)) if steps else (ctx.segmented, ctx.segments)
    stages = 1 if ctx.exact else 2  # limited by registers and shared memory
    if ctx.config.descriptors:
        stages = 3 if ctx.K <= 256 else 1
    most = 128 if output and not ctx.config.descriptors else 256  # keys for which four warps have registers
    programs = programs_per_n(ctx)
    partial = output and programs > 1
    parts = ctx.new(programs, ctx.H, ctx.tiles, ctx.L) if partial else gates
    ctx.launch(normalizer_scan, (segments * ctx.H, programs),
        x, z, gates, ctx.cu_seqlens, parts if decays is None else decays,
        *(gates if t is None else t for t in (d, initial, final)), ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.group,
        steps or ctx.segment_steps, *time_strides(x), *time_strides(z),
        DK=x.shape[3], DN=ctx.K, BK=power_of_two(ctx.K) // programs, L=ctx.L, REVERSE=reverse, OUTPUT=output,
        DELTA=reverse, IS_VARLEN=ctx.packed, IS_SEGMENTED=segmented, USE_INITIAL_STATE=initial is not None,
        STORE_FINAL_STATE=final is not None, SAVE_D=d is not None, EXACT=ctx.exact, NEGATIVE=ctx.spec.scale < 0,
        PRECISION=ctx.precision, TMA=ctx.config.descriptors and describable(x, z), STAGES=stages, SKIP_LAST=skip_last,
        DECAYS=decays is not None, num_warps=8 if ctx.exact or most < ctx.K else 4,
    )  # fmt: skip
    if partial:
        ctx.launch(sum_denominators, (ctx.tiles, ctx.H),
            parts, gates, gates if d is None else d, ctx.cu_seqlens, ctx.x.sequences, ctx.T, ctx.tiles, ctx.H,
            PARTS=programs, L=ctx.L, IS_VARLEN=ctx.packed, SAVE_D=d is not None, EXACT=ctx.exact, num_warps=2,
        )  # fmt: skip


def launch_segment_n(ctx: LaunchContext, gates: Tensor, x: Tensor, *, reverse: bool, skip_last: bool) -> Tensor:
    """Return what each segment adds to n, or with `reverse` to dn, (segments, H, K); x is k, or with `reverse` q."""
    n = new_segment_n(ctx)
    launch_scan(
        ctx, gates, x, x, reverse=reverse, initial=None, final=n, output=False, skip_last=skip_last
    )  # fmt: skip
    return n


def launch_segment_dn(ctx: LaunchContext, gates: Tensor, *, delta: bool, skip_last: bool) -> Tensor:
    """Return what each segment adds to dn, (segments, H, K), which is nothing without delta."""
    if delta:
        return launch_segment_n(ctx, gates, ctx.x.q, reverse=True, skip_last=skip_last)
    return ctx.zeros(ctx.segments, ctx.H, ctx.K)


def launch(ctx: LaunchContext, gates: Tensor, initial: Tensor | None, final: Tensor | None, d: Tensor | None) -> None:
    """Compute the denominators (T3) and fold them into the gate vectors.

    Where whole sequences leave most multiprocessors idle, this scan alone is cut into segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        initial: The states n that scans start from, (segments, H, K), or None for zeros.
        final: Output for the states that scans end with, or None.
        d: Output for the denominators, (B, T, H), or None.
    """
    k, q = ctx.x.k, ctx.x.q
    programs, available = ctx.B * ctx.H * programs_per_n(ctx), processors(q.device)
    if ctx.segmented or (ctx.packed and 2 * programs > available):
        launch_scan(ctx, gates, k, q, reverse=False, initial=initial, final=final, d=d)
        return
    steps = ceil_div(max(ceil_div(ctx.T * programs, available), SHORTEST_SEGMENT), ctx.L) * ctx.L
    if 2 * steps > ctx.T and not ctx.packed:  # one segment, with the kernel for segments
        starts = ctx.zeros(ctx.B, ctx.H, ctx.K) if initial is None else initial
        steps = ceil_div(ctx.T, ctx.L) * ctx.L
        launch_scan(ctx, gates, k, q, reverse=False, initial=starts, final=final, d=d, steps=steps)
        return
    segments = ctx.count(steps)
    starts, decays = ctx.new(segments, ctx.H, ctx.K), ctx.new(segments, ctx.H)
    launch_scan(
        ctx, gates, k, k, reverse=False, initial=None, final=starts, output=False, skip_last=final is None,
        steps=steps, decays=decays,
    )  # fmt: skip
    state_passing.launch(ctx, starts, decays, initial, final, reverse=False, steps=steps)
    ends = None if final is None else ctx.new(segments, ctx.H, ctx.K)  # written but not read
    launch_scan(ctx, gates, k, q, reverse=False, initial=starts, final=ends, d=d, steps=steps)
