"""The fused scan of o and dv, :func:`o_dv_scan`, and its launchers.

:mod:`.scan_tiles` has the table of operands and what a program scans. In a tile of L steps, of which `P` in the code is
P^T:

    (1)  P^T <- x z^T * D^T                        (L, L), (T1)
    (2)  out^T <- (S z^T) * a + y^T P^T            (BV, L), (T2), (T11)
    (3)  S <- g S + y^T (x * w)                    (BV, BK), the state C^T, (T5), or dC^T, (T12)

For o the gate vectors have been divided by the denominators (`denominators.py`), so that (2) is (T4). With two blocks
of columns (2) is computed for one after the other. Without outputs only (3) is computed: what each segment adds to the
state.
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext, time_strides
from tfla.backends.gpu.gate_kernels import DECAY, INTER, UPDATE, VECTORS, locate_segment
from tfla.backends.gpu.results import new_segment_states
from tfla.backends.triton.scan_tiles import (
    count_tiles,
    describable,
    gate_matrix,
    load_tile,
    matmul,
    store_tile,
    tile_access,
    wide_heads,
    without_unknown_options,
)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def o_dv_scan(
    X, Y, Z, Out, gates, cu, state_in, state_out, decays,
    sequences, T, tiles_of_head, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, ob, ot, oh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    REVERSE: tl.constexpr, OUTPUT: tl.constexpr, IS_VARLEN: tl.constexpr, IS_SEGMENTED: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, SKIP_LAST: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Compute o, or with REVERSE dv: a program computes BLOCKS * BV columns of dhv of one head of one segment.

    The grid is (dhv / (BLOCKS * BV), segments * H). The operands are in the table of `scan_tiles`.

    Args:
        X, Z: x and z, (B, T, H / GROUP, DK).
        Y: y, (B, T, H, DV).
        Out: the output, (B, T, H, DV); written with OUTPUT.
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1). With INDEXED the indices of the rows of initial and of
            final states in their pools follow them, see `bound_sequences`.
        state_in: the states that scans start from, (segments, H, DK, DV); read with USE_INITIAL_STATE. With INDEXED a
            pool, (rows, H, DK, DV).
        state_out: the states that scans end with, of the same shape; written with STORE_FINAL_STATE. With INDEXED a
            pool.
        decays: the decay over each segment, (segments, H) float32; written without OUTPUT.
        tiles_of_head: the number of tiles of one head.
        GROUP: the number of heads of v that share a head of q and k.
        length: the number of steps of a segment.
        xb, xt, xh: the strides of X by batch row, step and head; the others are those of Y, Z and Out.
        NEGATIVE: whether the scale is negative; the gate vectors hold its absolute value.
        SKIP_LAST: see `count_tiles`.
    """
    part = tl.program_id(0)
    segment = tl.program_id(1) // H
    h = tl.program_id(1) % H
    _, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, segment, length, L, IS_SEGMENTED, IS_VARLEN)
    col = part * BV * BLOCKS
    hx, hv = wide_heads(h, GROUP)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hx * zh, steps, DK, zt, L, BK, TMA)
    y_at = tile_access(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    o_at = tile_access(Out + b * ob + t_first * ot + hv * oh, steps, DV, ot, L, BV, TMA)
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    state_row = tl.program_id(1).to(tl.int64)
    if INDEXED:
        place = tl.load(cu + sequences + 1 + segment).to(tl.int64)
        state_row = place * H + h
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    state_at = (state_row * DK + rk[None, :]) * DV + rv[:, None]
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    inside1 = (rv + BV < DV)[:, None] & (rk < DK)[None, :]
    if INDEXED:
        inside, inside1 = inside & (place >= 0), inside1 & (place >= 0)
    S0 = tl.zeros([BV, BK], tl.float32)  # a block of C^T or dC^T
    S1 = tl.zeros([BV, BK], tl.float32)
    if USE_INITIAL_STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0).to(tl.float32)
        if INDEXED:  # -2 stands for a row that the pool lacks
            S0, S1 = tl.where(place < -1, float("nan"), S0), tl.where(place < -1, float("nan"), S1)
    r = tl.arange(0, L)
    tiles = count_tiles(cu, sequences, T, segment, length, steps, L, REVERSE, IS_VARLEN, SKIP_LAST)
    total = 1.0
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        t = (tiles - 1 - step if REVERSE else step) * L
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, 0, steps, DK, xt, L, BK, TMA)  # (L, BK)
        if OUTPUT:
            z = load_tile(z_at, t, 0, steps, DK, zt, L, BK, TMA)  # (L, BK)
        y0 = load_tile(y_at, t, col, steps, DV, yt, L, BV, TMA)  # (L, BV)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, col + BV, steps, DV, yt, L, BV, TMA)  # (L, BV)
        decay = tl.load(gate + DECAY * L)
        wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L), w
        x_up = (x * wx[:, None]).to(x.dtype)  # x * w, (L, BK)
        if OUTPUT:
            # (1) P^T <- x z^T * D^T
            P = matmul(x, tl.trans(z), PRECISION)  # (L, L)
            P = P * gate_matrix(gate, r, L, REVERSE, EXACT)
            if NEGATIVE:
                P = -P
            P = P.to(x.dtype)
            # (2) out^T <- (S z^T) * a + y^T P^T
            out = matmul(S0.to(x.dtype), tl.trans(z), PRECISION)  # (BV, L)
            wz = tl.load(gate + (UPDATE if REVERSE else INTER) * L + r)  # (L), a
            out = tl.dot(tl.trans(y0), P, out * wz[None, :], input_precision=PRECISION)
            store_tile(o_at, tl.trans(out).to(x.dtype), t, col, steps, DV, ot, L, BV, TMA)
            if BLOCKS == 2:
                out = matmul(S1.to(x.dtype), tl.trans(z), PRECISION)
                out = tl.dot(tl.trans(y1), P, out * wz[None, :], input_precision=PRECISION)
                store_tile(o_at, tl.trans(out).to(x.dtype), t, col + BV, steps, DV, ot, L, BV, TMA)
        else:
            total *= decay
        # (3) S <- g S + y^T (x * w)
        S0 = tl.dot(tl.trans(y0), x_up, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(tl.trans(y1), x_up, S1 * decay, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        if INDEXED:  # the places of final states follow those of the initial ones
            place = tl.load(cu + 2 * sequences + 1 + segment).to(tl.int64)
            state_at = ((place * H + h) * DK + rk[None, :]) * DV + rv[:, None]
            inside = (rv < DV)[:, None] & (rk < DK)[None, :] & (place >= 0)
            inside1 = (rv + BV < DV)[:, None] & (rk < DK)[None, :] & (place >= 0)
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if not OUTPUT and part == 0:
            tl.store(decays + state_row, total)


def launch(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, z: Tensor, out: Tensor | None, *, reverse: bool,
    initial: Tensor | None, final: Tensor | None, decays: Tensor | None = None, skip_last: bool = False,
) -> None:  # fmt: skip
    """Launch `o_dv_scan`: compute o or dv into `out`; with None only the final states of segments and their decays.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z: The operands, in the table of `scan_tiles`: k, v, q for o; q, do, k for dv.
        out: Output, (B, T, H, dhv), or None.
        reverse: Whether the scan runs against time.
        initial: The states C or dC that scans start from, (segments, H, K, V), or None for zeros.
        final: Output for the states that scans end with, or None.
        decays: Output for the decays over segments, (segments, H), without `out`.
        skip_last: Whether the segments that end a scan are left out.
    """
    tiles = ctx.config.o_dv
    written = y if out is None else out
    ctx.launch(o_dv_scan, (ceil_div(ctx.V, tiles.split), ctx.segments * ctx.H),
        x, y, z, written, gates, ctx.cu_seqlens, gates if initial is None else initial,
        gates if final is None else final, gates if decays is None else decays, ctx.x.sequences, ctx.T, ctx.tiles,
        ctx.H, ctx.group, ctx.segment_steps,
        *time_strides(x), *time_strides(y), *time_strides(z), *time_strides(written),
        DK=ctx.K, DV=ctx.V, BK=power_of_two(ctx.K), BV=tiles.block, BLOCKS=tiles.blocks, L=ctx.L, REVERSE=reverse,
        OUTPUT=out is not None, IS_VARLEN=ctx.packed, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None, EXACT=ctx.exact,
        NEGATIVE=ctx.spec.scale < 0, PRECISION=ctx.precision,
        TMA=ctx.config.descriptors and describable(x, y, z, written), STAGES=tiles.stages, SKIP_LAST=skip_last,
        INDEXED=ctx.indexed, num_warps=tiles.num_warps, tunable=not ctx.indexed,
    )  # fmt: skip


def launch_segment_states(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, *, reverse: bool, skip_last: bool
) -> tuple[Tensor, Tensor]:
    """Return what each segment adds to C, or with `reverse` to dC, and the decays over segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y: k and v, or with `reverse` q and do.
        reverse: Whether the scan runs against time.
        skip_last: Whether the segments that end a scan are left out: the states after them are not read.

    Returns:
        The states, (segments, H, K, V), and the decays, (segments, H) float32.
    """
    states, decays = new_segment_states(ctx), ctx.new(ctx.segments, ctx.H)
    launch(
        ctx, gates, x, y, x, None, reverse=reverse, initial=None, final=states, decays=decays, skip_last=skip_last
    )  # fmt: skip
    return states, decays
