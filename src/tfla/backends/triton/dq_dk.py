"""The fused scan of dq and dk, :func:`dq_dk_scan`, and its launcher.

:mod:`.scan_tiles` has the table of operands and what a program scans. In a tile of L steps, of which `P` in the code is
P^T:

    (1)  P^T <- (y z^T + delta) * D^T              (L, L), (T8)
    (2)  out^T <- (S z^T + n) * a                  (BK, L), first term of (T10), or with n delta^T for n of (T9)
    (3)  w . (what (2) has found), in float32      (L), and the sums of pairs of steps of the tile, of (B6)
    (4)  out^T <- out^T + x^T P^T                  (BK, L), second term of (T9), (T10); to memory
    (5)  w . out, in 16-bit dtypes                 (L), q . dq or k . dk of (B5)
    (6)  N <- g N + x^T w                          the normalizer state n, (T6), or dn, (T13)
    (7)  S <- g S + (x * w)^T y                    (BK, dhv), the state C, (T5), or dC, (T12)

`w` in (3) and (5) is the operand q or k, in (6) and (7) the gate vector. The state is stored where a tile ends at a
checkpoint; n is stored by the tile after it, in (2), which has it at hand. :mod:`tfla.backends.gpu.gate_gradients`
reads the sums and the checkpoints. The normalizer acts as one more column of v of all ones, whose cotangent is delta,
(T7).
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.checkpoints import new_checkpoints
from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext, Pair, time_strides
from tfla.backends.gpu.gate_gradients import COLUMN_SUM, OTHER_TILES, PAIR_SUMS, ROW_SUM, SAME_STEP
from tfla.backends.gpu.gate_kernels import DECAY, DELTA_P, INTER, UPDATE, VECTORS, locate_segment
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.scan_tiles import (
    complete_mmas,
    describable,
    gate_matrix,
    keep_reads,
    load_opaque,
    load_tile,
    matmul,
    scale_to_range,
    split_rounding,
    store_checkpoint,
    store_tile,
    tile_access,
    touch_tile,
    wide_heads,
    without_unknown_options,
)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def dq_dk_scan(
    X, Y, Z, W, Out, gates, cu, w_out, state_in, state_out, n_in, n_out, checkpoints, n_checkpoints,
    sequences, T, tiles_of_head, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, wb, wt, wh, ob, ot, oh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    NP: tl.constexpr, REVERSE: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, IS_VARLEN: tl.constexpr,
    IS_SEGMENTED: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, WGMMA: tl.constexpr,
    CHECKPOINT_STEPS: tl.constexpr,
):  # fmt: skip
    """Compute dq, or with REVERSE dk: a program computes BK of the dims of dqk of one head of one segment.

    The grid is (dqk / BK, segments * H). The operands are in the table of `scan_tiles`.

    Args:
        X, W: x, and the operand w of the sums w . out, which is q for dq and k for dk, (B, T, H / GROUP, DK).
        Y, Z: y and z, (B, T, H, DV).
        Out: the output, (B, T, H, DK).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1).
        w_out: the sums w . out over NP parts of the BK dims of each program, (dqk / BK, H, tiles, NP, L) float32. With
            EXACT only terms of other tiles (NP = 1), for dk beside those of the tile's pairs of steps (NP = PAIR_SUMS).
        state_in, n_in: the states that scans start from, (segments, H, DK, DV) and (segments, H, DK).
        state_out, n_out: the states that scans end with, of the same shapes.
        checkpoints, n_checkpoints: the state before, or with REVERSE its cotangent at, every CHECKPOINT_STEPS-th step
            of the segment but the first, (checkpoints, H, DK, DV) and (checkpoints, H, DK).
        tiles_of_head: the number of tiles of one head.
        GROUP: the number of heads of v that share a head of q and k.
        length: the number of steps of a segment.
        xb, xt, xh: the strides of X by batch row, step and head; the others are those of Y, Z, W and Out.
        BK, BV, BLOCKS: the rows of the state of a program, and its columns, BLOCKS blocks of BV.
        DELTA: whether the normalizer adds delta to P.
        NEGATIVE: whether the scale is negative; the gate vectors hold its absolute value.
        WGMMA: whether two programs share a multiprocessor of Hopper, see `scan_tiles`.
    """
    part = tl.program_id(0)
    segment = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, segment, length, L, IS_SEGMENTED, IS_VARLEN)
    col = part * BK
    hx, hv = wide_heads(h, GROUP)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    w_at = tile_access(W + b * wb + t_first * wt + hx * wh, steps, DK, wt, L, BK, TMA)
    y_at = tile_access(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hv * zh, steps, DV, zt, L, BV, TMA)
    o_at = tile_access(Out + b * ob + t_first * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    w_out += ((part * H + hv) * tiles_of_head + tile0) * NP * L
    checkpoint0 = first // CHECKPOINT_STEPS - 1
    state_row = tl.program_id(1).to(tl.int64)
    rk = col + tl.arange(0, BK)
    rv = tl.arange(0, BV)
    state_at = (state_row * DK + rk[:, None]) * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    inside1 = (rk < DK)[:, None] & (rv + BV < DV)[None, :]
    n_at = state_row * DK + rk
    S0 = tl.zeros([BK, BV], tl.float32)  # a block of C or dC
    S1 = tl.zeros([BK, BV], tl.float32)
    rc = tl.arange(0, 16)
    N = tl.zeros([BK, 16], tl.float32)  # n is the sum of the columns: an MMA has at least 16 columns
    if USE_INITIAL_STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0).to(tl.float32)
        if NORMALIZE:
            N = tl.where(rc[None, :] == 0, tl.load(n_in + n_at, mask=rk < DK, other=0.0)[:, None], 0.0)
    r = tl.arange(0, L)
    if not EXACT:
        rp = tl.arange(0, NP)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        # T is never smaller. The minimum hides the induction variable from LLVM, which otherwise steps each address in
        # registers of its own.
        t = tl.minimum((tiles - 1 - step if REVERSE else step) * L, T)
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, col, steps, DK, xt, L, BK, TMA)  # (L, BK)
        if EXACT and REVERSE:  # before y and z take shared memory
            pairs = matmul(x, tl.trans(load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)), PRECISION)  # (L, L), q k^T
        y0 = load_tile(y_at, t, 0, steps, DV, yt, L, BV, TMA)  # (L, BV)
        z0 = load_tile(z_at, t, 0, steps, DV, zt, L, BV, TMA)  # (L, BV)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, BV, steps, DV, yt, L, BV, TMA)  # (L, BV)
            z1 = load_tile(z_at, t, BV, steps, DV, zt, L, BV, TMA)  # (L, BV)
        decay = tl.load(gate + DECAY * L)
        if WGMMA:  # see `scan_tiles`
            touched = touch_tile(y0 + z0)
            if BLOCKS == 2:
                touched += touch_tile(y1 + z1)
            decay = keep_reads(decay, touched, T)
        if WGMMA:
            wx = load_opaque(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L), w
        else:
            wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L), w
        x_up = (tl.trans(x) * wx[None, :]).to(x.dtype)  # (x * w)^T, (BK, L)
        # (1) P^T <- (y z^T + delta) * D^T
        P = matmul(y0, tl.trans(z0), PRECISION)  # (L, L)
        if BLOCKS == 2:
            P += matmul(y1, tl.trans(z1), PRECISION)
        if DELTA:
            if REVERSE:
                P += tl.load(gate + DELTA_P * L + r)[:, None]
            else:
                P += tl.load(gate + DELTA_P * L + r)[None, :]
        P = P * gate_matrix(gate, r, L, REVERSE, EXACT)
        if NEGATIVE:
            P = -P
        P = P.to(x.dtype)
        # (2) out^T <- (S z^T + n) * a
        out = matmul(S0.to(x.dtype), tl.trans(z0), PRECISION)  # (BK, L)
        if BLOCKS == 2:
            out += matmul(S1.to(x.dtype), tl.trans(z1), PRECISION)
        if NORMALIZE:
            n = tl.sum(N, 1)  # (BK)
            # Checkpoint of n before this tile in the order of the scan.
            before = t + L if REVERSE else t
            if before % CHECKPOINT_STEPS == 0 and before > 0 and before < steps:
                tl.store(
                    n_checkpoints + ((checkpoint0 + before // CHECKPOINT_STEPS) * H + h) * DK + rk, n, mask=rk < DK
                )
            n = n[:, None]
            if REVERSE:
                out += n
            elif DELTA:
                out += n * tl.load(gate + DELTA_P * L + r)[None, :]
        out = out * tl.load(gate + (UPDATE if REVERSE else INTER) * L + r)[None, :]
        # (3) w . out of other tiles, and pairs of steps in the tile: SAME_STEP is the diagonal
        if EXACT:
            w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)  # (L, BK)
            sum_at = w_out + t * NP + r
            tl.store(sum_at + OTHER_TILES * L, tl.sum(rounded_product(out, tl.trans(w)), 0))
            if REVERSE:
                pairs = rounded_product(P, pairs)
                same = r[:, None] == r[None, :]
                tl.store(sum_at + SAME_STEP * L, tl.sum(tl.where(same, pairs, 0.0), 0))
                pairs = tl.where(same, 0.0, pairs)
                tl.store(sum_at + ROW_SUM * L, tl.sum(pairs, 1))
                tl.store(sum_at + COLUMN_SUM * L, tl.sum(pairs, 0))
        # (4) out^T <- out^T + x^T P^T
        out = tl.dot(tl.trans(x), P, out, input_precision=PRECISION)
        out = tl.trans(out)  # (L, BK)
        store_tile(o_at, out.to(Out.dtype.element_ty), t, col, steps, DK, ot, L, BK, TMA)
        # (5) w . out
        if not EXACT:
            w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)  # (L, BK)
            sums = tl.sum(tl.reshape(rounded_product(out, w), (L, NP, BK // NP)), 2)
            tl.store(w_out + t * NP + r[:, None] + rp[None, :] * L, sums)
        # (6) N <- g N + x^T w, or for dn with w * delta for w
        if NORMALIZE:
            N = N * decay
            if DELTA or not REVERSE:
                wn = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L)
                if REVERSE:
                    wn *= tl.load(gate + DELTA_P * L + r)
                wn, top = scale_to_range(wn, x.dtype, REVERSE)
                split = tl.trans(split_rounding(wn, rc[:, None], x.dtype))  # (L, 16), w in two columns
                N += top * tl.dot(tl.trans(x), split, input_precision=PRECISION)
        # (7) S <- g S + (x * w)^T y
        S0 = tl.dot(x_up, y0, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(x_up, y1, S1 * decay, input_precision=PRECISION)
        S0, S1 = complete_mmas(S0, S1, BLOCKS, WGMMA)
        # Checkpoint of the state after this tile in the order of the scan.
        passed = t if REVERSE else t + L
        if passed % CHECKPOINT_STEPS == 0 and passed > 0 and passed < steps:
            at = ((checkpoint0 + passed // CHECKPOINT_STEPS) * H + h) * DK
            store_checkpoint(checkpoints, at, S0, rk, rv, DK, DV)
            if BLOCKS == 2:
                store_checkpoint(checkpoints, at, S1, rk, rv + BV, DK, DV)
    if STORE_FINAL_STATE:
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if NORMALIZE:
            tl.store(n_out + n_at, tl.sum(N, 1), mask=rk < DK)


def launch(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, *, reverse: bool,
    delta: bool, initial: Pair, final: Pair, memory: Tensor, offset: int = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Launch `dq_dk_scan`: compute dq or dk into `out`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z: The operands, in the table of `scan_tiles`: k, v, do for dq; q, do, v for dk.
        w: q for dq, k for dk.
        out: Output, (B, T, H, dqk).
        reverse: Whether the scan runs against time.
        delta: Whether the normalizer adds delta to P.
        initial: The states that scans start from, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for the states that scans end with, or None.
        memory: A tensor whose memory holds checkpoints, see `new_checkpoints`.
        offset: Elements of `memory` that are in use.

    Returns:
        The sums w . out, (programs of a head, H, tiles, NP, L), and the checkpoints of the state and of n.
    """
    config, normalize = ctx.config, ctx.spec.normalize
    tiles = config.dq_dk if normalize else config.dq_dk_unnormalized or config.dq_dk
    programs = ceil_div(ctx.K, tiles.split)
    # Sums over the 16 dims of one warp need no exchange between warps.
    parts = tiles.split // 16 if config.wgmma_dq_dk else 1
    if ctx.exact and reverse:
        parts = PAIR_SUMS.value
    sums = ctx.new(programs, ctx.H, ctx.tiles, parts, ctx.L)
    checkpoints = new_checkpoints(ctx, sums, memory, offset)
    (C, n), (C_final, n_final) = initial, final
    ctx.launch(dq_dk_scan, (programs, ctx.segments * ctx.H),
        x, y, z, w, out, gates, ctx.cu_seqlens, sums, *(gates if t is None else t for t in (C, C_final, n, n_final)),
        *checkpoints, ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.group, ctx.segment_steps,
        *time_strides(x), *time_strides(y), *time_strides(z), *time_strides(w), *time_strides(out),
        DK=ctx.K, DV=ctx.V, BK=tiles.split, BV=tiles.block, BLOCKS=tiles.blocks, L=ctx.L, NP=parts, REVERSE=reverse,
        NORMALIZE=normalize, DELTA=delta, IS_VARLEN=ctx.packed, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=C is not None, STORE_FINAL_STATE=C_final is not None, EXACT=ctx.exact,
        NEGATIVE=ctx.spec.scale < 0, PRECISION=ctx.precision,
        TMA=config.wgmma_dq_dk and describable(x, y, z, w, out), STAGES=tiles.stages, WGMMA=config.wgmma_dq_dk,
        CHECKPOINT_STEPS=ctx.checkpoint_steps, num_warps=tiles.num_warps, tunable=True,
    )  # fmt: skip
    return sums, checkpoints
