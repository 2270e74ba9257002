"""Decoding: one step, or a few, of every sequence in one launch that reads and writes the state once.

A program has some columns of the state of one head and all its rows, in blocks that stay in registers while the steps
go over them. Gates come as the model has them: there is one number a head and step, every program works them out.
The max state and n are wanted by all programs of a head, which compute them alike; the first of them writes them.
"""

import triton
import triton.language as tl

from tfla.backends.triton.gates import HIGHEST, LOWEST, TINY, finite_log_gate


@triton.jit
def log_gate(at, SIGMOID: tl.constexpr):
    """The clamped log-gate, from itself or from its pre-activation; NaN stays."""
    return finite_log_gate(tl.load(at).to(tl.float32), SIGMOID)


@triton.jit(do_not_specialize=["H", "GROUP"])
def steps(
    Q, K, V, I, F, C, N, M, Out, C_out, N_out, M_out, lengths, H, GROUP, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ib, it, ih, fb, ft, fh, cb, ch, ck, sb, sh, sk,
    DK: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    NORMALIZE: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
    LENGTHS: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Out (B, T, H, DV) and the state behind step T, or behind the step that `lengths` says of each sequence."""
    parts: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    b = row // H
    h = row % H
    hq = h // GROUP
    rv = part * BV + tl.arange(0, BV)
    rt = tl.arange(0, BT)
    in_v = rv < DV
    length = T
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    num = tl.zeros([BT, BV], tl.float32)
    den = tl.zeros([BT], tl.float32)
    floor = tl.zeros([BT], tl.float32)
    for first in range(0, DK, BK):
        rk = first + tl.arange(0, BK)
        in_k = rk < DK
        inside = in_k[:, None] & in_v[None, :]
        c = tl.load(C + b * cb + h * ch + rk[:, None] * ck + rv[None, :], inside, 0.0).to(tl.float32)
        at = C_out + b * sb + h * sh + rk[:, None] * sk + rv[None, :]
        n = tl.zeros([BK], tl.float32)
        m = 0.0
        if NORMALIZE:
            n = tl.load(N + row * DK + rk, in_k, 0.0).to(tl.float32)
            m = tl.load(M + row).to(tl.float32)
            m = tl.where(m < LOWEST, LOWEST, m)
            m = tl.where(m > HIGHEST, HIGHEST, m)
        if LENGTHS and FINAL and length == 0:
            tl.store(at, c.to(C_out.dtype.element_ty), inside)
            if NORMALIZE and part == 0:
                tl.store(N_out + row * DK + rk, n.to(N_out.dtype.element_ty), in_k)
                tl.store(M_out + row, m)
        for t in range(T):
            k = tl.load(K + b * kb + t * kt + hq * kh + rk, in_k, 0.0).to(tl.float32)
            q = tl.load(Q + b * qb + t * qt + hq * qh + rk, in_k, 0.0).to(tl.float32)
            v = tl.load(V + b * vb + t * vt + h * vh + rv, in_v, 0.0).to(tl.float32)
            log_f = log_gate(F + b * fb + t * ft + h * fh, SIGMOID_F)
            log_i = 0.0
            if INPUT_GATE:
                log_i = log_gate(I + b * ib + t * it + h * ih, SIGMOID_I)
            if NORMALIZE:
                new = tl.maximum(log_f + m, log_i)  # (1)
                log_f += m - new  # (6)
                log_i -= new  # (7)
                m = new
            f = tl.exp(log_f)
            ik = tl.exp(log_i) * k
            c = f * c + ik[:, None] * v[None, :]  # (2)
            now = rt == t
            num += tl.where(now[:, None], tl.sum(c * q[:, None], 0)[None, :], 0.0)
            if NORMALIZE:
                n = f * n + ik  # (3)
                den += tl.where(now, tl.sum(n * q, 0), 0.0)
                floor = tl.where(now, tl.exp(-m), floor)
            if FINAL and t + 1 == length:
                tl.store(at, c.to(C_out.dtype.element_ty), inside)
                if NORMALIZE and part == 0:
                    tl.store(N_out + row * DK + rk, n.to(N_out.dtype.element_ty), in_k)
                    tl.store(M_out + row, m)
    num *= scale
    if NORMALIZE:
        den = tl.abs(den * scale)
        floor = tl.maximum(floor, TINY)
        num = num / tl.where(den > floor, den, floor)[:, None]  # (4)
    # (B, T, H, DV), dense
    out = Out + ((b * T + rt[:, None]) * H + h) * DV + rv[None, :]
    tl.store(out, num.to(Out.dtype.element_ty), (rt < T)[:, None] & in_v[None, :])
