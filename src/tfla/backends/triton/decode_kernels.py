"""Decoding kernels: one step, or a few steps, of every sequence in one launch that reads and writes the state once.

A program computes some columns of the state of one head, all rows, a block of rows at a time. Numbers in parentheses
are the equations of arXiv 2503.14376. Gates are read as the caller gives them; every program computes them, since there
is one number for each head and step. All programs of a head need m and n; each computes the same values, and the first
one stores them. States may be rows of a pool, which are read and written by index; there n and m are stored beside the
pool, since other programs of the head may still read them, and `store_normalizers` of
:mod:`tfla.backends.gpu.normalizer_rows` puts them in afterwards.
"""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_kernels import TINY, clamp_gate, finite_log_gate
from tfla.backends.gpu.state_passing import rounded_product


@triton.jit
def log_gate(at, SIGMOID: tl.constexpr):
    """Load a gate and return its clamped log-gate; with SIGMOID the gate is a pre-activation. NaN stays NaN."""
    return finite_log_gate(tl.load(at).to(tl.float32), SIGMOID)


@triton.jit
def decays(f_at, i_at, m, NORMALIZE: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr,
           SIGMOID_F: tl.constexpr):  # fmt: skip
    """Return for one step the weight of the state before it, the weight of its update, and the max state after it."""
    log_f = log_gate(f_at, SIGMOID_F)
    log_i = 0.0
    if INPUT_GATE:
        log_i = log_gate(i_at, SIGMOID_I)
    if NORMALIZE:
        new = tl.maximum(log_f + m, log_i)  # (1)
        log_f += m - new  # (6)
        log_i -= new  # (7)
        m = new
    return tl.exp(log_f), tl.exp(log_i), m


@triton.jit
def denominator(d, floor, EPS: tl.constexpr):
    """Return max(|d|, floor) + EPS, (4); floor is exp(-m)."""
    d = tl.abs(d)
    floor = tl.maximum(floor, TINY)
    d = tl.where(d > floor, d, floor)
    if EPS != 0:
        d += EPS
    return d


@triton.jit
def locate_program(H, GROUP, DV: tl.constexpr, BV: tl.constexpr):
    """Return what a program computes.

    Returns:
        The index of its block of values; the row of its state in (B, H); the sequence; the head; its head
        of q and k; the values, (BV).
    """
    parts: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    b = row // H
    h = row % H
    return part, row, b, h, h // GROUP, part * BV + tl.arange(0, BV)


@triton.jit
def output_without_state(index, like):
    """Return the output of a sequence without a state, in the shape of `like`: 0 at -1, NaN at other indices."""
    return tl.zeros_like(like) + tl.where(index == -1, 0.0, float("nan"))


@triton.jit(do_not_specialize=["H", "GROUP", "ROWS"])
def one_step(
    Q, K, V, I, F, C, N, M, Out, C_out, N_out, M_out, indices, H, GROUP, scale, ROWS,
    qb, qh, kb, kh, vb, vh, ib, ih, fb, fh, nb, mb, cb, ch, ck, cv, sb, sh, sk, sv,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NORMALIZE: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr, EPS: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Compute one step, (1) to (4): Out, (B, H, DV), and the state after it.

    The grid is (B * H * DV / BV). Q and K are (B, H / GROUP, DK), V (B, H, DV), I and F (B, H), C and C_out (B, H, DK,
    DV), N and N_out (B, H, DK), M and M_out (B, H). With INDEXED, C, N and M have ROWS rows in place of B, sequence b
    has row indices[b], and C_out is C.
    """
    if C_out is None:  # in place
        C_out = C
    part, row, b, h, hq, rv = locate_program(H, GROUP, DV, BV)
    in_v = rv < DV
    num = tl.zeros([BV], tl.float32)
    state = b
    if INDEXED:
        state = tl.load(indices + b).to(tl.int64)
        if (state < 0) | (state >= ROWS):
            tl.store(Out + row * DV + rv, output_without_state(state, num).to(Out.dtype.element_ty), in_v)
            return
    m = 0.0
    if NORMALIZE:
        m = clamp_gate(tl.load(M + state * mb + h).to(tl.float32))
    f, i, m = decays(F + b * fb + h * fh, I + b * ib + h * ih, m, NORMALIZE, INPUT_GATE, SIGMOID_I, SIGMOID_F)
    v = tl.load(V + b * vb + h * vh + rv, in_v, 0.0).to(tl.float32)
    d = 0.0
    for first in range(0, DK, BK):
        rk = first + tl.arange(0, BK)
        in_k = rk < DK
        inside = in_k[:, None] & in_v[None, :]
        c = tl.load(C + state * cb + h * ch + rk[:, None] * ck + rv[None, :] * cv, inside, 0.0).to(tl.float32)
        q = tl.load(Q + b * qb + hq * qh + rk, in_k, 0.0).to(tl.float32)
        k = i * tl.load(K + b * kb + hq * kh + rk, in_k, 0.0).to(tl.float32)
        c = f * c + k[:, None] * v[None, :]  # (2), (BK, BV)
        c_at = C_out + state * sb + h * sh + rk[:, None] * sk + rv[None, :] * sv
        tl.store(c_at, c.to(C_out.dtype.element_ty), inside)
        num += tl.sum(rounded_product(c, q[:, None]), 0)
        if NORMALIZE:
            n = f * tl.load(N + state * nb + h * DK + rk, in_k, 0.0).to(tl.float32) + k  # (3)
            d += tl.sum(rounded_product(n, q), 0)
            if part == 0:
                tl.store(N_out + row * DK + rk, n.to(N_out.dtype.element_ty), in_k)
    num *= scale
    if NORMALIZE:
        num /= denominator(d * scale, tl.exp(-m), EPS)  # (4)
        if part == 0:
            tl.store(M_out + row, m)
    tl.store(Out + row * DV + rv, num.to(Out.dtype.element_ty), in_v)


@triton.jit(do_not_specialize=["H", "GROUP", "ROWS"])
def several_steps(
    Q, K, V, I, F, C, N, M, Out, C_out, N_out, M_out, indices, lengths, H, GROUP, scale, ROWS,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ib, it, ih, fb, ft, fh, nb, mb, cb, ch, ck, cv, sb, sh, sk, sv,
    DK: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    NORMALIZE: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
    EPS: tl.constexpr, INDEXED: tl.constexpr, LENGTHS: tl.constexpr, STORE_FINAL_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute T steps: Out, (B, T, H, DV), and the state after step lengths[b] of sequence b, or after step T.

    The steps are one tile, (44) to (56). Its gate matrix is computed row by row by the recurrence of the gates. The
    grid is (B * H * DV / BV); operands are as in `one_step`, with T after B.
    """
    if C_out is None:  # in place
        C_out = C
    part, row, b, h, hq, rv = locate_program(H, GROUP, DV, BV)
    rt = tl.arange(0, BT)
    in_v = rv < DV
    in_t = rt < T
    out = Out + ((b * T + rt[:, None]) * H + h) * DV + rv[None, :]
    num = tl.zeros([BT, BV], tl.float32)
    state = b
    if INDEXED:
        state = tl.load(indices + b).to(tl.int64)
        if (state < 0) | (state >= ROWS):
            tl.store(out, output_without_state(state, num).to(Out.dtype.element_ty), in_t[:, None] & in_v[None, :])
            return
    length = T
    if LENGTHS:
        # The host does not read the lengths, so they are clamped here, before they are converted to 32 bits.
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), T).to(tl.int32)
    m = 0.0
    if NORMALIZE:
        m = clamp_gate(tl.load(M + state * mb + h).to(tl.float32))
    m_last = m
    weight = 1.0  # weight of the initial state in the state after step t; `update` has those of the steps
    update = tl.zeros([BT], tl.float32)
    weight_last = 1.0  # the same for the returned state
    update_last = tl.zeros([BT], tl.float32)
    weights = tl.zeros([BT], tl.float32)
    D = tl.zeros([BT, BT], tl.float32)
    floor = tl.zeros([BT], tl.float32)
    for t in range(T):
        f, i, m = decays(
            F + b * fb + t * ft + h * fh, I + b * ib + t * it + h * ih, m, NORMALIZE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        )
        now = rt == t
        weight *= f
        update = tl.where(now, i, update * f)
        weights = tl.where(now, weight, weights)
        D = tl.where(now[:, None] & (rt <= t)[None, :], update[None, :], D)
        floor = tl.where(now, tl.exp(-m), floor)
        if t + 1 == length:
            m_last = m
            weight_last = weight
            update_last = update
    kept = rt < length
    v = tl.load(V + b * vb + rt[:, None] * vt + h * vh + rv[None, :], in_t[:, None] & in_v[None, :], 0.0)
    v = v.to(tl.float32)
    v_kept = tl.where(kept[:, None], v, 0.0)
    S = tl.zeros([BT, BT], tl.float32)
    den = tl.zeros([BT], tl.float32)
    for first in range(0, DK, BK):
        rk = first + tl.arange(0, BK)
        in_k = rk < DK
        inside = in_k[:, None] & in_v[None, :]
        c = tl.load(C + state * cb + h * ch + rk[:, None] * ck + rv[None, :] * cv, inside, 0.0).to(tl.float32)
        q_at = Q + b * qb + rt[:, None] * qt + hq * qh + rk[None, :]
        q = tl.load(q_at, in_t[:, None] & in_k[None, :], 0.0).to(tl.float32)
        k_at = K + b * kb + rt[None, :] * kt + hq * kh + rk[:, None]
        k = tl.load(k_at, in_k[:, None] & in_t[None, :], 0.0).to(tl.float32)  # (BK, BT), transposed
        S += tl.dot(q, k, input_precision=PRECISION)
        num += tl.dot(q, c, input_precision=PRECISION)
        k = tl.where(kept[None, :], k * update_last[None, :], 0.0)
        if STORE_FINAL_STATE:
            c = weight_last * c + tl.dot(k, v_kept, input_precision=PRECISION)
            c_at = C_out + state * sb + h * sh + rk[:, None] * sk + rv[None, :] * sv
            tl.store(c_at, c.to(C_out.dtype.element_ty), inside)
        if NORMALIZE:
            n = tl.load(N + state * nb + h * DK + rk, in_k, 0.0).to(tl.float32)
            den += tl.sum(rounded_product(q, n[None, :]), 1)
            if STORE_FINAL_STATE and part == 0:
                n = weight_last * n + tl.sum(k, 1)
                tl.store(N_out + row * DK + rk, n.to(N_out.dtype.element_ty), in_k)
    S = tl.where(rt[:, None] >= rt[None, :], S * D, 0.0)
    num = (num * weights[:, None] + tl.dot(S, v, input_precision=PRECISION)) * scale
    if NORMALIZE:
        den = (den * weights + tl.sum(S, 1)) * scale
        num /= denominator(den, floor, EPS)[:, None]
        if STORE_FINAL_STATE and part == 0:
            tl.store(M_out + row, m_last)
    tl.store(out, num.to(Out.dtype.element_ty), in_t[:, None] & in_v[None, :])
