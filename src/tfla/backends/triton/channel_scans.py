"""The scans over tiles whose operands are ready: h, the states before tiles, and dv with the cotangents after tiles.

With the operands of :mod:`.channel_tiles`, the state C before a tile and the cotangent dC after it, a tile computes

    R = V - (r a) C,    E = R - (X B) R,    h = (q a) C + (P B) E,    C <- g C + (k w B)^T E
    Y = (P B)^T do + (k w B) dC,    dv = Y - (X B)^T Y,    dC <- g dC + (q a)^T do - (r a)^T dv
    beta_t dbeta_t = dv_t . E_t

without correction with E = V and dv = Y. Products are transposed, so that the state is the left operand of an MMA, from
registers. The programs of a head split dhv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ampere_mmas, ceil_div
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.channel_tiles import Operands
from tfla.backends.triton.precise_products import scaled_product, split
from tfla.backends.triton.scan_tiles import (
    describable,
    load_initial_columns,
    load_tile,
    locate_scan,
    store_final_columns,
    store_tile,
    tile_access,
    without_unknown_options,
)

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H"])
def channel_h_scan(
    Q, R, K, K_low, V, P, X, decays, cu, Out, E, states, state_in, state_out,
    sequences, T, tiles_of_head, H, vb, vt, vh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, CORRECT: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, SAVE_STATES: tl.constexpr, IS_VARLEN: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h and E, or the states before the tiles: a program computes BV columns of dhv of one head.

    The grid is (dhv / BV, sequences * H). S holds BV columns of C, transposed, (BV, BK).

    Args:
        Q, R, K, K_low, P, X, decays: the operands, see `Operands`; R and X are read with CORRECT, K_low with SPLIT, Q
            and P with OUTPUT.
        V: the values, or without CORRECT and OUTPUT the prediction errors, (B, T, H, DV).
        cu: the offsets of packed sequences, (sequences + 1).
        Out, E: h and the prediction errors, (B, T, H, DV); written with OUTPUT and with SAVE.
        states: the states before the tiles, (H, tiles, DV, DK); written with SAVE_STATES.
        state_in, state_out: the initial and final states, (sequences, H, DK, DV); with INDEXED rows of pools.
    """
    part = tl.program_id(0)
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    col = part * BV
    hv = h.to(tl.int64)
    row = first * H + hv
    q_at = tile_access(Q + row * DK, steps, DK, H * DK, L, BK, TMA)
    r_at = tile_access(R + row * DK, steps, DK, H * DK, L, BK, TMA)
    k_at = tile_access(K + row * DK, steps, DK, H * DK, L, BK, TMA)
    low_at = tile_access(K_low + row * DK, steps, DK, H * DK, L, BK, TMA)
    v_at = tile_access(V + b * vb + t0 * vt + hv * vh, steps, DV, vt, L, BV, TMA)
    p_at = tile_access(P + row * L, steps, L, H * L, L, L, TMA)
    x_at = tile_access(X + row * L, steps, L, H * L, L, L, TMA)
    o_at = tile_access(Out + row * DV, steps, DV, H * DV, L, BV, TMA)
    e_at = tile_access(E + row * DV, steps, DV, H * DV, L, BV, TMA)
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    tile_at = hv * tiles_of_head + tile0
    place = rv[:, None] * DK + rk[None, :]
    S, state_at, exists = load_initial_columns(
        state_in, cu, sequences, H, col, DK, DV, BK, BV, USE_INITIAL_STATE, INDEXED
    )
    for step in tl.range(0, tl.cdiv(steps, L).to(tl.int32), num_stages=STAGES, disable_licm=True):
        t = step * L
        k = load_tile(k_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
        v = load_tile(v_at, t, col, steps, DV, vt, L, BV, TMA)  # (L, BV)
        decay = tl.load(decays + (tile_at + step) * DK + rk, rk < DK, 0.0)  # (BK)
        S16 = S.to(k.dtype)
        if SAVE_STATES:
            tl.store(states + (tile_at + step) * (DV * DK) + place, S16, inside)
        errors = tl.trans(v)  # E^T, (BV, L)
        if CORRECT:
            # (1) R^T <- V^T - C^T (r a)^T, then E^T <- R^T - R^T (X B)^T
            read = load_tile(r_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
            x = load_tile(x_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
            res = errors.to(tl.float32) - tl.dot(S16, tl.trans(read), input_precision=PRECISION)
            res -= scaled_product(res, tl.trans(x), PRECISION)
            if OUTPUT and k.dtype != tl.float32:
                errors, low = split(res, k.dtype)
            else:
                errors = res.to(k.dtype)
            if SAVE:
                store_tile(e_at, tl.trans(errors), t, col, steps, DV, H * DV, L, BV, TMA)
        if OUTPUT:
            # (2) h^T <- C^T (q a)^T + E^T (P B)^T, (BV, L)
            q = load_tile(q_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
            p = load_tile(p_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
            out = tl.dot(S16, tl.trans(q), input_precision=PRECISION)
            out = tl.dot(errors, tl.trans(p), out, input_precision=PRECISION)
            if CORRECT and k.dtype != tl.float32:
                out = tl.dot(low, tl.trans(p), out)
            store_tile(o_at, tl.trans(out).to(Out.dtype.element_ty), t, col, steps, DV, H * DV, L, BV, TMA)
        # (3) C^T <- C^T g + E^T (k w B), (BV, BK)
        S = tl.dot(errors, k, S * decay[None, :], input_precision=PRECISION)
        if SPLIT:
            S = tl.dot(errors, load_tile(low_at, t, 0, steps, DK, H * DK, L, BK, TMA), S)
    if STORE_FINAL_STATE:
        store_final_columns(S, state_out, state_at, exists, cu, sequences, H, col, DK, DV, BK, BV, INDEXED)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H"])
def channel_dv_scan(
    Q, R, K, K_low, dO, E, P, X, decays, cu, Out, dots, cotangents, state_in, state_out,
    sequences, T, tiles_of_head, H, gb, gt, gh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, CORRECT: tl.constexpr,
    DOTS: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dv and the cotangents after the tiles: a program computes BV columns of dhv of one head.

    The grid is (dhv / BV, sequences * H). S holds BV columns of dC, transposed, (BV, BK).

    Args:
        Q, R, K, K_low, P, X, decays: the operands, see `Operands`; R and X are read with CORRECT, K_low with SPLIT.
        dO: the cotangent of h, (B, T, H, DV).
        E: the prediction errors, (B, T, H, DV), read with DOTS.
        cu: the offsets of packed sequences, (sequences + 1).
        Out: dv, (B, T, H, DV).
        dots: dv . E over the columns of each program, (dhv / BV, B, T, H) float32, written with DOTS.
        cotangents: dC after each tile, (H, tiles, DV, DK).
        state_in: the cotangents of the final states, (sequences, H, DK, DV); read with USE_INITIAL_STATE.
        state_out: those of the initial states, of the same shape; written with STORE_FINAL_STATE.
    """
    part = tl.program_id(0)
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    col = part * BV
    hv = h.to(tl.int64)
    row = first * H + hv
    q_at = tile_access(Q + row * DK, steps, DK, H * DK, L, BK, TMA)
    r_at = tile_access(R + row * DK, steps, DK, H * DK, L, BK, TMA)
    k_at = tile_access(K + row * DK, steps, DK, H * DK, L, BK, TMA)
    low_at = tile_access(K_low + row * DK, steps, DK, H * DK, L, BK, TMA)
    g_at = tile_access(dO + b * gb + t0 * gt + hv * gh, steps, DV, gt, L, BV, TMA)
    p_at = tile_access(P + row * L, steps, L, H * L, L, L, TMA)
    x_at = tile_access(X + row * L, steps, L, H * L, L, L, TMA)
    o_at = tile_access(Out + row * DV, steps, DV, H * DV, L, BV, TMA)
    e_at = tile_access(E + row * DV, steps, DV, H * DV, L, BV, TMA)
    tokens = T.to(tl.int64) * (1 if IS_VARLEN else sequences)  # of all batch rows
    dots += part * tokens * H + row
    r = tl.arange(0, L)
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    tile_at = hv * tiles_of_head + tile0
    place = rv[:, None] * DK + rk[None, :]
    state_at = (tl.program_id(1).to(tl.int64) * DK + rk[None, :]) * DV + rv[:, None]
    S = tl.zeros([BV, BK], tl.float32)
    if USE_INITIAL_STATE:
        S = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        tile = tiles - 1 - step
        t = tile * L
        k = load_tile(k_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
        q = load_tile(q_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
        do = load_tile(g_at, t, col, steps, DV, gt, L, BV, TMA)  # (L, BV)
        p = load_tile(p_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
        decay = tl.load(decays + (tile_at + tile) * DK + rk, rk < DK, 0.0)  # (BK)
        S16 = S.to(k.dtype)
        tl.store(cotangents + (tile_at + tile) * (DV * DK) + place, S16, inside)
        # (1) Y^T <- dC^T (k w B)^T + do^T (P B), (BV, L)
        Y = tl.dot(S16, tl.trans(k), input_precision=PRECISION)
        if SPLIT:
            Y = tl.dot(S16, tl.trans(load_tile(low_at, t, 0, steps, DK, H * DK, L, BK, TMA)), Y)
        Y = tl.dot(tl.trans(do), p, Y, input_precision=PRECISION)
        if CORRECT:
            # (2) dv^T <- Y^T - Y^T (X B), (BV, L)
            x = load_tile(x_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
            Y -= scaled_product(Y, x, PRECISION)
        if DOTS:
            e = load_tile(e_at, t, col, steps, DV, H * DV, L, BV, TMA)  # (L, BV)
            sums = tl.sum(rounded_product(tl.trans(Y), e.to(tl.float32)), 1)  # (L)
            tl.store(dots + (t + r) * H, sums, t + r < steps)
        store_tile(o_at, tl.trans(Y).to(Out.dtype.element_ty), t, col, steps, DV, H * DV, L, BV, TMA)
        # (3) dC^T <- dC^T g + do^T (q a) - dv^T (r a), (BV, BK)
        S = tl.dot(tl.trans(do), q, S * decay[None, :], input_precision=PRECISION)
        if CORRECT:
            read = load_tile(r_at, t, 0, steps, DK, H * DK, L, BK, TMA)  # (L, BK)
            S = tl.dot((-Y).to(k.dtype), read, S, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        tl.store(state_out + state_at, S, mask=inside)


def launch_h(
    ctx: ChannelContext, operands: Operands, v: Tensor, h: Tensor | None, E: Tensor | None, states: Tensor | None,
    initial: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Launch `channel_h_scan` for the outputs that are given: h, the states before the tiles, or both.

    Args:
        ctx: The context of the call.
        operands: The result of :func:`.channel_tiles.launch`.
        v: The values, (B, T, H, dhv); without h the prediction errors, which are the values without correction.
        h: Output, (B, T, H, dhv), or None.
        E: Output for the prediction errors, (B, T, H, dhv), or None.
        states: Output for the states before the tiles, (H, tiles, dhv, dqk), or None.
        initial: The initial states, (N, H, dqk, dhv), or None for zeros. Where the context has rows, it is the pool.
        final: Output for the final states, which may be the pool, or None.
    """
    base, config = ctx.base, ctx.config
    tiles = config.states if h is None else config.h
    q, r, k, k_low, P, X, decays, *_ = operands
    unused = q  # stands for tensors that are not read or written
    given = [unused if t is None else t for t in (h, E, states, initial, final)]
    base.launch(channel_h_scan, (ceil_div(base.V, tiles.split), ctx.x.sequences * base.H),
        q, unused if r is None else r, k, k if k_low is None else k_low, v, P, P if X is None else X, decays,
        base.cu_seqlens, *given, ctx.x.sequences, base.T, base.tiles, base.H, *time_strides(v), BV=tiles.split,
        CORRECT=h is not None and ctx.spec.correct, OUTPUT=h is not None, SAVE=E is not None,
        SAVE_STATES=states is not None, USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None,
        INDEXED=base.rows is not None,
        TMA=config.descriptors and describable(v), STAGES=tiles.stages, num_warps=tiles.num_warps,
        **ctx.scan_constants,
    )  # fmt: skip


def launch_dv(
    ctx: ChannelContext, operands: Operands, dh: Tensor, E: Tensor, dv: Tensor, final: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch `channel_dv_scan`: compute dv and the cotangents of the initial states.

    Args:
        ctx: The context of the call.
        operands: The result of :func:`.channel_tiles.launch`.
        dh: The cotangent of h, (B, T, H, dhv).
        E: The prediction errors, (B, T, H, dhv); not read without correction.
        dv: Output, (B, T, H, dhv).
        final: The cotangents of the final states, (N, H, dqk, dhv), or None for zeros.
        initial: Output for the cotangents of the initial states, or None.

    Returns:
        The cotangents of the states after the tiles, (H, tiles, dhv, dqk), and dv . E over the columns of each program,
        (programs, B, T, H) float32, or None where dbeta is not computed from it.
    """
    base, config = ctx.base, ctx.config
    q, r, k, k_low, P, X, decays, *_ = operands
    descriptors = config.descriptors and describable(dh)  # without, ptxas sets too few: see `ampere_mmas`
    cotangents = ctx.new_tile_states()
    programs = ceil_div(base.V, config.dv.split)
    dots = ctx.new_dots(programs)
    base.launch(channel_dv_scan, (programs, ctx.x.sequences * base.H),
        q, q if r is None else r, k, k if k_low is None else k_low, dh, E, P, P if X is None else X, decays,
        base.cu_seqlens, dv, decays if dots is None else dots, cotangents, q if final is None else final,
        q if initial is None else initial, ctx.x.sequences, base.T, base.tiles, base.H, *time_strides(dh),
        BV=config.dv.split, CORRECT=ctx.spec.correct, DOTS=dots is not None, USE_INITIAL_STATE=final is not None,
        STORE_FINAL_STATE=initial is not None, TMA=descriptors, STAGES=config.dv.stages, num_warps=config.dv.num_warps,
        compilation={} if descriptors else ampere_mmas(dh.device), **ctx.scan_constants,
    )  # fmt: skip
    return cotangents, dots
