"""Fused scans of the delta rule with one forget gate a step: h, dv, dq and dr, and dk, each by one kernel.

For every head, with a tile of L steps, the state C (dqk, dhv) before it and B = diag(beta) (docs/delta-rule.md):

    P_ij = q_i . k_j D_ij for j <= i,    M_ij = r_i . k_j D_ij for j < i,    X = M (I + B M)^-1          (R1)
    R = V - (r a) C,    E = R - X B R                                                                    (R2)
    h = scale ((q a) C + P B E)                                                                          (R3)
    C <- g C + (k w B)^T E                                                                               (R4)

Here D is the gate matrix, a the inter weight of a step, w its update weight and g the decay of the tile (equations (G2)
to (G5) of :mod:`tfla.backends.gpu.gate_kernels`); r is the read key, k unless another one is given. Given E and dv, the
backward is that of a linear attention with two readers, q with do and r with -dv, and one writer, k with E:

    dU = scale P^T do + (k w) dC,    Z = dU - X^T B dU,    dv = B Z,    dbeta_t = Z_t . E_t              (R5)
    dC <- g dC + (scale q a)^T do - (r a)^T dv                                                           (R6)
    dq = scale ((do C^T) a + <do E^T> B k),    dr = -((dv C^T) a + <dv E^T> B k)                         (R7)
    dk = B ((E dC^T) w + scale <do E^T>^T q - <dv E^T>^T r)                                              (R8)

where <S> is S * D, masked like P, or for dv like M.

Without gates the state forgets nothing, so that what the backward rounds otherwise than the forward adds up over the
whole sequence. (R3) and (R4) then take E as it is stored, because the backward computes C from that: later steps
correct for its rounding. Likewise, where dhv is at most 128, (R6) in the scan for dv gets scale do as two 16-bit
numbers, so that its dC is the one of the scans for dk. What one reader adds to dC grows with time, although the sum of
both does not: the scans for dk therefore split their state as an operand, and what queries contribute to dk is stored
in float32.

The gradient of a gate is the sum over all pairs of a write and a later read that the gate lies between, (B7) of
docs/mathematics.md. What a step reads of earlier tiles is q . dq or r . dr with the first term of (R7) alone, what
later tiles read of it k . dk with the first term of (R8). Pairs inside a tile are
W_ij = (scale do_i . E_j q_i . k_j - dv_i . E_j r_i . k_j) D_ij beta_j for j < i. No decay lies between a write and a
read of one step.

The kernels and their launch order; as in :mod:`.scan_tiles` products are transposed, so that the state is the left
operand of an MMA, from registers:

    solve_tiles          k, r -> X                        one program a tile
    delta_h_scan         q, k, r, v, X -> h, E            with time, the programs of a head split dhv
    delta_dv_scan        q, k, r, do, X, E -> dv, dbeta   against time, the programs of a head split dhv
    delta_dq_dk_scan     k, E, do or dv -> dq, dr         with time, the programs of a head split dqk; a launch each
                         q, do, E or r, dv, E -> dk       against time, likewise; dk is the sum of both launches
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ampere_mmas, ceil_div, power_of_two
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_gradients import COLUMN_SUM, OTHER_TILES, PAIR_SUMS, ROW_SUM
from tfla.backends.gpu.gate_kernels import (
    COLUMN,
    DECAY,
    INTER,
    ROW,
    UPDATE,
    VECTORS,
    first_tile,
    locate_chunk,
)
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.correction_dtype import correction_dtype
from tfla.backends.triton.precise_products import add_split_product, nearest_tf32, scaled_product, split
from tfla.backends.triton.scan_tiles import (
    describable,
    load_initial_columns,
    load_keys,
    load_tile,
    locate_scan,
    locate_tile,
    matmul,
    store_checkpoint,
    store_final_columns,
    store_tile,
    tile_access,
    touch_tile,
    wait_for_mma,
    wide_heads,
    without_unknown_options,
)

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext

NO_CHECKPOINTS = 1 << 30  # a distance of checkpoints that no sequence reaches
AFTER_TRITON_3_7 = tuple(int(n) for n in triton.__version__.split(".")[:2]) > (3, 7)


@triton.jit
def decay_matrix(gate, r, L: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr, STRICT: tl.constexpr):
    """Return D, (L, L), as [reading step, writing step], or with TRANSPOSED as [writing step, reading step].

    It is 0 where the write comes after the read, with STRICT also where both are of one step. Without gates it is a
    mask.
    """
    i = r[None, :] if TRANSPOSED else r[:, None]
    j = r[:, None] if TRANSPOSED else r[None, :]
    inside = j < i if STRICT else j <= i
    if GATED:
        e = tl.load(gate + ROW * L + i) + tl.load(gate + COLUMN * L + j)
        return tl.where(inside, tl.exp2(e), 0.0)
    else:
        return tl.where(inside, 1.0, 0.0)


@triton.jit
def gate_vector(gate, r, WHICH: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr):
    """Return a gate vector of the tile, (L); ones without gates."""
    if GATED:
        return tl.load(gate + WHICH * L + r)
    else:
        return tl.full([L], 1.0, tl.float32)


@triton.jit
def tile_decay(gate, L: tl.constexpr, GATED: tl.constexpr):
    """Return the decay of the tile; 1 without gates."""
    if GATED:
        return tl.load(gate + DECAY * L)
    else:
        return 1.0


@triton.jit
def solve_diagonal(m, b, SIDE: tl.constexpr):
    """Return x = m (I + diag(b) m)^-1 of strictly lower triangular blocks m, (blocks, SIDE, SIDE), row by row.

    b is (blocks, SIDE). Row i is m_i - sum over j < i of m_ij b_j x_j.
    """
    row = tl.arange(0, SIDE)[None, :, None]
    x = tl.zeros_like(m)
    for i in range(1, SIDE):
        m_i = tl.sum(tl.where(row == i, m, 0.0), 1)  # (blocks, SIDE)
        x_i = m_i - tl.sum(rounded_product((m_i * b)[:, :, None], x), 1)
        x = tl.where(row == i, x_i[:, None, :], x)
    return x


@triton.jit
def corrections(M, b, L: tl.constexpr, PRECISION: tl.constexpr, BASE: tl.constexpr, LEVELS: tl.constexpr):
    """Return X = M (I + diag(b) M)^-1 of a strictly lower triangular M, (L, L), by block inversion.

    The diagonal blocks of side BASE are solved row by row; LEVELS says how often this side is doubled to L.
    """
    r = tl.arange(0, L)
    # (1) The diagonal blocks of X, (L / BASE, BASE, BASE)
    BLOCKS: tl.constexpr = L // BASE
    n = tl.arange(0, BLOCKS)
    diagonal = n[:, None, None, None] == n[None, None, :, None]
    m = tl.sum(tl.where(diagonal, tl.reshape(M, (BLOCKS, BASE, BLOCKS, BASE)), 0.0), 2)
    x = solve_diagonal(m, tl.reshape(b, (BLOCKS, BASE)), BASE)
    X = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (L, L))
    # (2) Blocks of twice the side: X21 <- Y - X22 B Y with Y = M21 - M21 B X11
    for level in tl.static_range(LEVELS):
        block = r // (BASE << level)
        lower = (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)
        M21 = tl.where(lower, M, 0.0)
        rounded = nearest_tf32(X, PRECISION)
        Y = M21 - tl.dot(nearest_tf32(M21 * b[None, :], PRECISION), rounded, input_precision=PRECISION)
        X += Y - tl.dot(rounded, nearest_tf32(Y * b[:, None], PRECISION), input_precision=PRECISION)
    return X


@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def solve_tiles(
    K, R, beta, gates, cu, X, sequences, T, tiles_of_head, H, GROUP, kb, kt, kh, rb, rt, rh, bb, bt, bh,
    DK: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr, IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr, BASE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute X, (R1), of every tile. The grid is (tiles, H).

    Args:
        K, R: the write keys and the read keys, (B, T, H / GROUP, DK).
        beta: (B, T, H), any float dtype.
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1).
        X: the output, (B, T, H, L).
        BASE, LEVELS: the side of the diagonal blocks that are solved row by row, and how often it is doubled to L.
    """
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, tl.program_id(0), L, IS_VARLEN)
    if start < length:
        hx = h // GROUP
        row, t0, steps = locate_tile(s, first, length, start, IS_VARLEN)
        r = tl.arange(0, L)
        c = tl.arange(0, BK)
        inside = (r < steps)[:, None] & (c < DK)[None, :]
        at = (t0 + r).to(tl.int64)[:, None]
        k = tl.load(K + row * kb + hx * kh + at * kt + c[None, :], inside, 0.0)  # (L, BK)
        read = tl.load(R + row * rb + hx * rh + at * rt + c[None, :], inside, 0.0)  # (L, BK)
        b = tl.load(beta + row * bb + h * bh + (t0 + r) * bt, r < steps, 0.0).to(tl.float32)  # (L)
        gate = gates + (h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L) * VECTORS * L
        M = tl.dot(read, tl.trans(k), input_precision=PRECISION) * decay_matrix(gate, r, L, GATED, False, True)
        Xs = corrections(M, b, L, SOLVE_PRECISION, BASE, LEVELS)
        to = X + ((first + start + r) * H + h)[:, None] * L + r[None, :]
        tl.store(to, Xs.to(X.dtype.element_ty), (r < steps)[:, None])


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def delta_h_scan(
    Q, K, R, V, X, beta, gates, cu, Out, E, state_in, state_out, scale,
    sequences, T, tiles_of_head, H, GROUP, qb, qt, qh, kb, kt, kh, rb, rt, rh, vb, vt, vh, bb, bt, bh, eb, et, eh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr,
    READ_KEY: tl.constexpr, SAVE: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h, and with SAVE E: a program computes BV columns of dhv of one head of one sequence.

    The grid is (dhv / BV, sequences * H). S holds BV columns of C, transposed, (BV, BK).

    Args:
        Q, K, R: queries, write keys and read keys, (B, T, H / GROUP, DK). R is read with READ_KEY; else it is K.
        V: the values, (B, T, H, DV).
        X: the result of `solve_tiles`, (B, T, H, L).
        beta: (B, T, H), any float dtype.
        gates: the gate vectors, (H, tiles, VECTORS, L) float32, read with GATED.
        cu: the offsets of packed sequences, (sequences + 1).
        Out, E: the outputs, (B, T, H, DV), with the strides eb, et, eh.
        state_in, state_out: the initial and final states, (sequences, H, DK, DV); with INDEXED rows of pools.
        scale: the factor of the queries.
    """
    part = tl.program_id(0)
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    col = part * BV
    hx, hv = wide_heads(h, GROUP)
    q_at = tile_access(Q + b * qb + t0 * qt + hx * qh, steps, DK, qt, L, BK, TMA)
    k_at = tile_access(K + b * kb + t0 * kt + hx * kh, steps, DK, kt, L, BK, TMA)
    r_at = tile_access(R + b * rb + t0 * rt + hx * rh, steps, DK, rt, L, BK, TMA)
    v_at = tile_access(V + b * vb + t0 * vt + hv * vh, steps, DV, vt, L, BV, TMA)
    o_at = tile_access(Out + b * eb + t0 * et + hv * eh, steps, DV, et, L, BV, TMA)
    e_at = tile_access(E + b * eb + t0 * et + hv * eh, steps, DV, et, L, BV, TMA)
    x_at = tile_access(X + (first * H + hv) * L, steps, L, H * L, L, L, TMA)
    beta += b * bb + t0 * bt + hv * bh
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    S, state_at, inside = load_initial_columns(
        state_in, cu, sequences, H, col, DK, DV, BK, BV, USE_INITIAL_STATE, INDEXED
    )
    r = tl.arange(0, L)
    for step in tl.range(0, tl.cdiv(steps, L).to(tl.int32), num_stages=STAGES, disable_licm=True):
        t = step * L
        gate = gates + t * VECTORS
        # (L, BK) each
        q, k, read = load_keys(q_at, k_at, r_at, t, steps, qt, kt, rt, DK, L, BK, READ_KEY, TMA)
        v = load_tile(v_at, t, col, steps, DV, vt, L, BV, TMA)  # (L, BV)
        x = load_tile(x_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
        beta_t = tl.load(beta + (t + r) * bt, t + r < steps, 0.0).to(tl.float32)  # (L)
        a = gate_vector(gate, r, INTER, L, GATED)  # (L)
        w = gate_vector(gate, r, UPDATE, L, GATED)  # (L)
        # (1) R^T <- V^T - (C^T r^T) a, (BV, L)
        S16 = S.to(k.dtype)
        res = tl.trans(v).to(tl.float32) - tl.dot(S16, tl.trans(read), input_precision=PRECISION) * a[None, :]
        # (2) E^T <- R^T - (B R)^T X^T, (BV, L)
        res -= scaled_product(res * beta_t[None, :], tl.trans(x), PRECISION)
        if not GATED:  # the backward reads E as it is stored
            res = res.to(E.dtype.element_ty).to(tl.float32)
        if SAVE:
            store_tile(e_at, tl.trans(res).to(E.dtype.element_ty), t, col, steps, DV, et, L, BV, TMA)
        res *= beta_t[None, :]
        # (3) h^T <- scale ((C^T q^T) a + (B E)^T P^T), (BV, L)
        P = tl.dot(k, tl.trans(q), input_precision=PRECISION) * decay_matrix(gate, r, L, GATED, True, False)
        out = tl.dot(S16, tl.trans(q), input_precision=PRECISION) * a[None, :]
        out = add_split_product(out, res, P.to(k.dtype), PRECISION) * scale
        store_tile(o_at, tl.trans(out).to(Out.dtype.element_ty), t, col, steps, DV, et, L, BV, TMA)
        # (4) C^T <- g C^T + (w B E)^T k, (BV, BK)
        S = S * tile_decay(gate, L, GATED)
        S = add_split_product(S, res * w[None, :], k, PRECISION)
    if STORE_FINAL_STATE:
        store_final_columns(S, state_out, state_at, inside, cu, sequences, H, col, DK, DV, BK, BV, INDEXED)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def delta_dv_scan(
    Q, K, R, DO, X, E, beta, gates, cu, Out, dots, state_in, state_out, scale,
    sequences, T, tiles_of_head, H, GROUP, qb, qt, qh, kb, kt, kh, rb, rt, rh, gb, gt, gh, bb, bt, bh, eb, et, eh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr,
    READ_KEY: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dv and parts of dbeta against time: a program computes BV columns of dhv of one head of one sequence.

    The grid is (dhv / BV, sequences * H). S holds BV columns of dC, transposed, (BV, BK).

    Args:
        Q, K, R, X, beta, gates, cu, scale: as in `delta_h_scan`.
        DO: the cotangent of h, (B, T, H, DV).
        E, Out: E and dv, (B, T, H, DV), with the strides eb, et, eh.
        dots: Z . E, which is dbeta, and do . E over the columns of each program, (2, dhv / BV, B, T, H) float32.
        state_in: the cotangents of the final states, (sequences, H, DK, DV); read with USE_INITIAL_STATE.
        state_out: the cotangents of the initial states; written with STORE_FINAL_STATE.
    """
    part = tl.program_id(0)
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    col = part * BV
    hx, hv = wide_heads(h, GROUP)
    q_at = tile_access(Q + b * qb + t0 * qt + hx * qh, steps, DK, qt, L, BK, TMA)
    k_at = tile_access(K + b * kb + t0 * kt + hx * kh, steps, DK, kt, L, BK, TMA)
    r_at = tile_access(R + b * rb + t0 * rt + hx * rh, steps, DK, rt, L, BK, TMA)
    g_at = tile_access(DO + b * gb + t0 * gt + hv * gh, steps, DV, gt, L, BV, TMA)
    o_at = tile_access(Out + b * eb + t0 * et + hv * eh, steps, DV, et, L, BV, TMA)
    e_at = tile_access(E + b * eb + t0 * et + hv * eh, steps, DV, et, L, BV, TMA)
    x_at = tile_access(X + (first * H + hv) * L, steps, L, H * L, L, L, TMA)
    beta += b * bb + t0 * bt + hv * bh
    tokens = T.to(tl.int64) * (1 if IS_VARLEN else sequences)  # of all batch rows
    dots += (part * tokens + first) * H + hv
    do_e = dots + tl.num_programs(0) * tokens * H
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    S, state_at, inside = load_initial_columns(
        state_in, cu, sequences, H, col, DK, DV, BK, BV, USE_INITIAL_STATE, False
    )
    r = tl.arange(0, L)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        t = (tiles - 1 - step) * L
        gate = gates + t * VECTORS
        # (L, BK) each
        q, k, read = load_keys(q_at, k_at, r_at, t, steps, qt, kt, rt, DK, L, BK, READ_KEY, TMA)
        do = load_tile(g_at, t, col, steps, DV, gt, L, BV, TMA)  # (L, BV)
        e = load_tile(e_at, t, col, steps, DV, et, L, BV, TMA)  # (L, BV)
        x = load_tile(x_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
        beta_t = tl.load(beta + (t + r) * bt, t + r < steps, 0.0).to(tl.float32)  # (L)
        a = gate_vector(gate, r, INTER, L, GATED)  # (L)
        w = gate_vector(gate, r, UPDATE, L, GATED)  # (L)
        # (1) dU^T <- (dC^T k^T) w + do^T scale P, (BV, L)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay_matrix(gate, r, L, GATED, False, False) * scale
        U = tl.dot(S.to(k.dtype), tl.trans(k), input_precision=PRECISION) * w[None, :]
        U = tl.dot(tl.trans(do), P.to(k.dtype), U, input_precision=PRECISION)
        # (2) Z^T <- dU^T - (B dU)^T X, (BV, L)
        U -= scaled_product(U * beta_t[None, :], x, PRECISION)
        sums = tl.sum(rounded_product(tl.trans(U), e.to(tl.float32)), 1)  # (L)
        tl.store(dots + (t + r) * H, sums, t + r < steps)
        sums = tl.sum(rounded_product(do.to(tl.float32), e.to(tl.float32)), 1)  # (L)
        tl.store(do_e + (t + r) * H, sums, t + r < steps)
        # (3) dv^T <- Z^T B, (BV, L)
        dv = (U * beta_t[None, :]).to(k.dtype)
        store_tile(o_at, tl.trans(dv), t, col, steps, DV, et, L, BV, TMA)
        # (4) dC^T <- g dC^T + (scale a do)^T q - (a dv)^T r, (BV, BK)
        S = S * tile_decay(gate, L, GATED)
        reads = tl.trans(do) * (a * scale)[None, :]
        if GATED or DV > 128:
            S = tl.dot(reads.to(k.dtype), q, S, input_precision=PRECISION)
        else:
            S = add_split_product(S, reads, q, PRECISION)
        S = tl.dot((U * (-a * beta_t)[None, :]).to(k.dtype), read, S, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        tl.store(state_out + state_at, S, mask=inside)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def delta_dq_dk_scan(
    X, Y, Z, W, Out, Add0, Add1, beta, do_e, gates, cu, reads, pair_sums, state_in, state_out, checkpoints, factor,
    sequences, T, tiles_of_head, H, GROUP, xb, xt, xh, yb, yt, yh, zb, zt, zh, wb, wt, wh, ob, ot, oh, bb, bt, bh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    REVERSE: tl.constexpr, GATED: tl.constexpr, SAME_STEP: tl.constexpr, NUM_ADDED: tl.constexpr,
    IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, WGMMA: tl.constexpr, CHECKPOINT_STEPS: tl.constexpr,
):  # fmt: skip
    """Compute dq or dr, or with REVERSE what one reader contributes to dk, for BK of the dims of dqk of one head.

    The grid is (dqk / BK, sequences * H). S holds BK rows of C, or of dC / factor, in BLOCKS blocks, (BK, BV) each.

        result          order    x  y   z   w  factor  SAME_STEP
        dq              forward  k  E   do  q  scale   yes
        dr              forward  k  E   dv  r  -1      no
        dk by queries   REVERSE  q  do  E   k  scale   yes
        dk by reads     REVERSE  r  dv  E   k  -1      no

    Args:
        X, W: x, and the operand w of the sums, (B, T, H / GROUP, DK).
        Y, Z: y and z, (B, T, H, DV).
        Out: the output, (B, T, H, DK).
        Add0, Add1: tensors of the shape and strides of Out, of any float dtype; NUM_ADDED of them are added to it.
        beta: (B, T, H), any float dtype.
        do_e: do . E, (B, T, H) float32, read with SAME_STEP.
        gates: the gate vectors, (H, tiles, VECTORS, L) float32, read with GATED.
        cu: the offsets of packed sequences, (sequences + 1).
        reads: what each step reads of earlier tiles, over the dims of each program, (dqk / BK, H, tiles, L) float32;
            written without REVERSE.
        pair_sums: (dqk / BK, H, tiles, PAIR_SUMS, L) float32, with REVERSE written to OTHER_TILES, else to ROW_SUM and
            COLUMN_SUM, see :mod:`tfla.backends.gpu.gate_gradients`.
        state_in: the state that scans start from, (sequences, H, DK, DV); read with USE_INITIAL_STATE.
        state_out: S times factor after all steps, of the same shape; written with STORE_FINAL_STATE.
        checkpoints: (checkpoints, H, DK, DV): S before every CHECKPOINT_STEPS-th step but the first.
        factor: the factor of the output.
        SAME_STEP: whether step i reads the write of step i.
    """
    part = tl.program_id(0)
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    col = part * BK
    hx, hv = wide_heads(h, GROUP)
    x_at = tile_access(X + b * xb + t0 * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    w_at = tile_access(W + b * wb + t0 * wt + hx * wh, steps, DK, wt, L, BK, TMA)
    y_at = tile_access(Y + b * yb + t0 * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    z_at = tile_access(Z + b * zb + t0 * zt + hv * zh, steps, DV, zt, L, BV, TMA)
    o_at = tile_access(Out + b * ob + t0 * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    add0_at = tile_access(Add0 + b * ob + t0 * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    add1_at = tile_access(Add1 + b * ob + t0 * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    beta += b * bb + t0 * bt + hv * bh
    do_e += first * H + hv
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    tile_row = (part * H + hv) * tiles_of_head + tile0
    reads += tile_row * L
    pair_sums += tile_row * (PAIR_SUMS * L)
    checkpoint0 = first // CHECKPOINT_STEPS - 1
    rk = col + tl.arange(0, BK)
    rv = tl.arange(0, BV)
    S0 = tl.zeros([BK, BV], tl.float32)
    S1 = tl.zeros([BK, BV], tl.float32)
    if USE_INITIAL_STATE:
        state_at = state_in + (tl.program_id(1).to(tl.int64) * DK + rk[:, None]) * DV + rv[None, :]
        S0 = tl.load(state_at, mask=(rk < DK)[:, None] & (rv < DV)[None, :], other=0.0).to(tl.float32)
        if BLOCKS == 2:
            S1 = tl.load(state_at + BV, mask=(rk < DK)[:, None] & (rv + BV < DV)[None, :], other=0.0).to(tl.float32)
        if REVERSE:
            S0 /= factor
            S1 /= factor
    r = tl.arange(0, L)
    # Operands that are split into two 16-bit numbers: against time without gates S, else x times its weights.
    CAN_SPLIT: tl.constexpr = X.dtype.element_ty != tl.float32 and BLOCKS == 1
    SPLIT_STATE: tl.constexpr = CAN_SPLIT and REVERSE and not GATED
    SPLIT: tl.constexpr = CAN_SPLIT and not SPLIT_STATE
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        # T is never smaller: the minimum is for the compiler, as in `dq_dk_scan`.
        t = tl.minimum((tiles - 1 - step if REVERSE else step) * L, T)
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, col, steps, DK, xt, L, BK, TMA)  # (L, BK)
        y0 = load_tile(y_at, t, 0, steps, DV, yt, L, BV, TMA)  # (L, BV)
        z0 = load_tile(z_at, t, 0, steps, DV, zt, L, BV, TMA)  # (L, BV)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, BV, steps, DV, yt, L, BV, TMA)
            z1 = load_tile(z_at, t, BV, steps, DV, zt, L, BV, TMA)
        decay = tile_decay(gate, L, GATED)
        if WGMMA:  # reads y and z outside of MMAs, see `touch_tile`
            u = touch_tile(y0 + z0)
            if BLOCKS == 2:
                u += touch_tile(y1 + z1)
            if T < 0:
                decay += tl.sum(u.to(tl.float32), 0)
        beta_t = tl.load(beta + (t + r) * bt, t + r < steps, 0.0).to(tl.float32)  # (L)
        # The weights of x in (4): those of writes, w B, or against time those of a reader, a, because S is dC / factor.
        wx = gate_vector(gate, r, INTER if REVERSE else UPDATE, L, GATED)  # (L)
        if not REVERSE:
            wx *= beta_t
        if not SPLIT:
            x_up = (tl.trans(x) * wx[None, :]).to(x.dtype)  # (BK, L)
        # (1) P^T <- <y z^T>, [step of x, step of z], (L, L)
        P = matmul(y0, tl.trans(z0), PRECISION)
        if BLOCKS == 2:
            P += matmul(y1, tl.trans(z1), PRECISION)
        P *= decay_matrix(gate, r, L, GATED, not REVERSE, True)
        if not REVERSE:
            P *= beta_t[:, None]
        if GATED:
            w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)  # (L, BK)
            sums_at = pair_sums + t * PAIR_SUMS + r
            if not REVERSE:
                # (2) W of the pairs of a read and a write inside the tile, [write, read], (L, L)
                pairs = rounded_product(P, matmul(x, tl.trans(w), PRECISION))
                tl.store(sums_at + ROW_SUM * L, tl.sum(pairs, 0) * factor)
                tl.store(sums_at + COLUMN_SUM * L, tl.sum(pairs, 1) * factor)
        # (3) out^T <- ((S z^T) a + x^T P^T) factor, (BK, L); with REVERSE w for a, and times B
        if SPLIT_STATE:
            out = add_split_product(tl.zeros([BK, L], tl.float32), S0, tl.trans(z0), PRECISION)
        else:
            out = matmul(S0.to(x.dtype), tl.trans(z0), PRECISION)
        if BLOCKS == 2:
            out += matmul(S1.to(x.dtype), tl.trans(z1), PRECISION)
        out *= gate_vector(gate, r, UPDATE if REVERSE else INTER, L, GATED)[None, :]
        if GATED:  # w . out, which pairs of a read and a write in different tiles add to the gradients of the gates
            sums = tl.sum(rounded_product(out, tl.trans(w).to(tl.float32)), 0)
            if REVERSE:
                tl.store(sums_at + OTHER_TILES * L, sums * beta_t * factor)
            else:
                tl.store(reads + t + r, sums * factor)
        if SAME_STEP:  # the diagonal of P, do . E of each step
            same = tl.load(do_e + (t + r) * H, t + r < steps, 0.0)  # (L)
            P = tl.where(r[:, None] == r[None, :], (same if REVERSE else same * beta_t)[None, :], P)
        if SAME_STEP and SPLIT and not REVERSE:
            P, P_low = split(P, x.dtype)
            out = tl.dot(tl.trans(x), P_low, out)
        out = tl.dot(tl.trans(x), P.to(x.dtype), out, input_precision=PRECISION)
        out *= (beta_t * factor)[None, :] if REVERSE else factor
        out = tl.trans(out)  # (L, BK)
        if NUM_ADDED > 0:
            out += load_tile(add0_at, t, col, steps, DK, ot, L, BK, TMA)
        if NUM_ADDED > 1:
            out += load_tile(add1_at, t, col, steps, DK, ot, L, BK, TMA)
        store_tile(o_at, out.to(Out.dtype.element_ty), t, col, steps, DK, ot, L, BK, TMA)
        # (4) S <- g S + (x w)^T y, (BK, BV)
        if SPLIT:
            x_up, x_low = split(tl.trans(x) * wx[None, :], x.dtype)
            S0 = tl.dot(x_up, y0, S0 * decay)
            S0 = tl.dot(x_low, y0, S0)
        else:
            S0 = tl.dot(x_up, y0, S0 * decay, input_precision=PRECISION)
            if BLOCKS == 2:
                S1 = tl.dot(x_up, y1, S1 * decay, input_precision=PRECISION)
        if WGMMA:
            S0 = wait_for_mma(S0)
            if BLOCKS == 2:
                S1 = wait_for_mma(S1)
        passed = t if REVERSE else t + L
        if GATED and passed % CHECKPOINT_STEPS == 0 and passed > 0 and passed < steps:
            at = ((checkpoint0 + passed // CHECKPOINT_STEPS) * H + h) * DK
            store_checkpoint(checkpoints, at, S0, rk, rv, DK, DV)
            if BLOCKS == 2:
                store_checkpoint(checkpoints, at, S1, rk, rv + BV, DK, DV)
    if STORE_FINAL_STATE:
        at = tl.program_id(1).to(tl.int64) * DK
        store_checkpoint(state_out, at, S0 * factor, rk, rv, DK, DV)
        if BLOCKS == 2:
            store_checkpoint(state_out, at, S1 * factor, rk, rv + BV, DK, DV)


def solve_precision(dtype: torch.dtype) -> str:
    """Return the precision of the products that solve for X, which in float16 has more digits than tf32 keeps."""
    return {torch.float32: "ieee", torch.float16: "tf32x3"}.get(dtype, "tf32")


def launch_solve(ctx: DeltaContext, gates: Tensor) -> Tensor:
    """Return X, (B, T, H, L)."""
    base, x = ctx.base, ctx.x
    X = base.new(base.B, base.T, base.H, base.L, dtype=correction_dtype(x))
    base.launch(solve_tiles, (base.tiles, base.H),
        x.k, ctx.read_key, ctx.beta, gates, base.cu_seqlens, X, x.sequences, base.T, base.tiles, base.H, base.group,
        *time_strides(x.k), *time_strides(ctx.read_key), *time_strides(ctx.beta),
        DK=base.K, BK=power_of_two(base.K), L=base.L, GATED=ctx.gated, IS_VARLEN=base.packed, PRECISION=base.precision,
        SOLVE_PRECISION=solve_precision(x.q.dtype), BASE=8, LEVELS=3, num_warps=4,
    )  # fmt: skip
    return X


def launch_h(
    ctx: DeltaContext, gates: Tensor, X: Tensor, h: Tensor, E: Tensor | None, initial: Tensor | None,
    final: Tensor | None,
) -> None:  # fmt: skip
    """Launch `delta_h_scan`: compute h, the prediction errors and the final states.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        X: The result of `launch_solve`.
        h: Output, (B, T, H, dhv).
        E: Output for the prediction errors, (B, T, H, dhv), or None.
        initial: The initial states, (N, H, dqk, dhv), or None for zeros. Where the context has rows, it is the pool.
        final: Output for the final states, which may be the pool, or None.
    """
    base, x, tiles = ctx.base, ctx.x, ctx.config.h
    errors = h if E is None else E
    base.launch(delta_h_scan, (ceil_div(base.V, tiles.split), x.sequences * base.H),
        x.q, x.k, ctx.read_key, x.v, X, ctx.beta, gates, base.cu_seqlens, h, errors,
        gates if initial is None else initial, gates if final is None else final, ctx.spec.scale, x.sequences, base.T,
        base.tiles, base.H, base.group, *time_strides(x.q), *time_strides(x.k), *time_strides(ctx.read_key),
        *time_strides(x.v), *time_strides(ctx.beta), *time_strides(h), BV=tiles.split, SAVE=E is not None,
        USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None, INDEXED=base.rows is not None,
        TMA=ctx.config.descriptors and describable(x.q, x.k, ctx.read_key, x.v, h), STAGES=tiles.stages,
        num_warps=tiles.num_warps, **ctx.constants,
    )  # fmt: skip


def launch_dv(
    ctx: DeltaContext, gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, final: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `delta_dv_scan`: compute dv and the cotangents of the initial states.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        X, E: What the forward stored.
        dh: The cotangent of h, (B, T, H, dhv).
        dv: Output, (B, T, H, dhv).
        final: The cotangents of the final states, (N, H, dqk, dhv), or None for zeros.
        initial: Output for the cotangents of the initial states, or None.

    Returns:
        dbeta and do . E, (B, T, H) float32.
    """
    base, x, tiles = ctx.base, ctx.x, ctx.config.dv
    if tiles.split == 128 and not ctx.gated and AFTER_TRITON_3_7:
        # Of what Triton 3.9 makes of 128 columns without gates, ptxas leaves matrix descriptors unset.
        tiles = dataclasses.replace(tiles, split=64, block=64, num_warps=4)
    programs = ceil_div(base.V, tiles.split)
    dots = (base.zeros if base.packed else base.new)(2, programs, base.B, base.T, base.H)
    base.launch(delta_dv_scan, (programs, x.sequences * base.H),
        x.q, x.k, ctx.read_key, dh, X, E, ctx.beta, gates, base.cu_seqlens, dv, dots, gates if final is None else final,
        gates if initial is None else initial, ctx.spec.scale, x.sequences, base.T, base.tiles, base.H, base.group,
        *time_strides(x.q), *time_strides(x.k), *time_strides(ctx.read_key), *time_strides(dh), *time_strides(ctx.beta),
        *time_strides(dv), BV=tiles.split, USE_INITIAL_STATE=final is not None, STORE_FINAL_STATE=initial is not None,
        TMA=ctx.config.descriptors and describable(x.q, x.k, ctx.read_key, dh, dv), STAGES=tiles.stages,
        num_warps=tiles.num_warps, **ctx.constants,
    )  # fmt: skip
    return base.recorder.sum_of(dots, 0), base.recorder.sum_of(dots, 1)


def launch_dq_dk(
    ctx: DeltaContext, gates: Tensor, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, do_e: Tensor | None,
    reads: Tensor, pair_sums: Tensor, *, factor: float, reverse: bool, initial: Tensor | None,
    checkpoints: Tensor | None, final: Tensor | None = None, add: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    """Launch `delta_dq_dk_scan`: compute dq, dr, or what one reader contributes to dk.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        x, y, z, w: The operands, in the table of `delta_dq_dk_scan`.
        out: Output, (B, T, H, dqk).
        do_e: do . E, (B, T, H), for the results of queries, which read the write of the same step; else None.
        reads, pair_sums: Outputs, see `delta_dq_dk_scan`.
        factor: The factor of the output.
        reverse: Whether the scan runs against time, for dk.
        initial: The states that scans start from, (N, H, dqk, dhv), or None for zeros.
        checkpoints: Output for the states at checkpoints, (checkpoints, H, dqk, dhv), or None.
        final: Output for the states after the scans, times the factor, (N, H, dqk, dhv), or None.
        add: At most two tensors of the shape of `out`, of any float dtype, that are added to it.
    """
    base, tiles = ctx.base, ctx.config.dq_dk
    added = (*add, out, out)[:2]
    steps = NO_CHECKPOINTS if checkpoints is None else base.checkpoint_steps
    if checkpoints is None:  # a store to them is compiled, which never runs
        checkpoints = base.new(1, dtype=gates.dtype) if base.recorder.one_pointer_each else gates
    descriptors = ctx.config.descriptors and describable(x, y, z, w, out)
    # Of wide heads without TMA descriptors ptxas leaves matrix descriptors of wgmma unset, as in `ampere_mmas`.
    wgmma = descriptors or tiles.blocks == 1
    base.launch(delta_dq_dk_scan, (ceil_div(base.K, tiles.split), ctx.x.sequences * base.H),
        x, y, z, w, out, *added, ctx.beta, gates if do_e is None else do_e, gates, base.cu_seqlens, reads,
        pair_sums, gates if initial is None else initial, gates if final is None else final, checkpoints, factor,
        ctx.x.sequences, base.T, base.tiles, base.H, base.group, *time_strides(x), *time_strides(y), *time_strides(z),
        *time_strides(w), *time_strides(out), *time_strides(ctx.beta),
        DK=base.K, DV=base.V, BK=tiles.split, BV=tiles.block, BLOCKS=tiles.blocks, L=base.L, REVERSE=reverse,
        GATED=ctx.gated, SAME_STEP=do_e is not None, NUM_ADDED=len(add), IS_VARLEN=base.packed,
        USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None, PRECISION=base.precision,
        TMA=descriptors, STAGES=tiles.stages if wgmma else 1, WGMMA=ctx.config.wgmma and wgmma, CHECKPOINT_STEPS=steps,
        num_warps=tiles.num_warps, compilation={} if wgmma else ampere_mmas(x.device),
    )  # fmt: skip
