"""The operator and its gradients as walks: tile after tile in one direction, the state on chip.

All four large results have one shape. Per tile of L steps, x updates the state, z reads it, y is the other side of it,
and P = x z^T (or y z^T) is weighted by the gate matrix and masked to the past (or, walking back, to the future):

    result | kernel  | direction | x, y, z   | state          | split over
    o      | columns | forward   | k, v, q   | C^T (dhv, dqk) | dhv
    dv     | columns | back      | q, do, k  | dC^T           | dhv
    dq     | rows    | forward   | k, v, do  | C (dqk, dhv)   | dqk
    dk     | rows    | back      | q, do, v  | dC             | dqk

No split needs partial results of another. `rows` also leaves q . dq and k . dk, which the gate gradients are made of.
The normaliser is one more column of v, all ones, and its cotangent (delta) one more column of do.

A program walks one sequence, or one segment of it from the state at the segment's start. Those states come from
`columns` without outputs, which leaves what a segment adds to the state, and from `join`.

The state is two blocks of columns, S0 and S1, where it is wide (BLOCKS = 2): each is the left operand of an MMA, from
registers, and the output is made transposed. Gates are loaded just before their use: registers are what is scarce.
"""

import triton
import triton.language as tl

from tfla.backends.triton.gates import COLUMN, COLUMN_LOW, DECAY, FLOOR, INTER, ROW, ROW_LOW, UPDATE, segment


@triton.jit
def rows_of(base, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Where tiles of a (length, width) matrix are read and written: a tensor descriptor if strides allow one."""
    if TMA:
        return tl.make_tensor_descriptor(base, [length.to(tl.int32), width], [stride, 1], [L, W])
    else:
        return base


@triton.jit
def load_tile(at, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """(L, W) from row t, column c; zero outside."""
    if TMA:
        return at.load([t, c])
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        return tl.load(
            at + r.to(tl.int64)[:, None] * stride + w[None, :], (r < length)[:, None] & (w < width)[None, :], 0.0
        )


@triton.jit
def store_tile(at, x, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        at.store([t, c], x)
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        tl.store(at + r.to(tl.int64)[:, None] * stride + w[None, :], x, (r < length)[:, None] & (w < width)[None, :])


@triton.jit
def weights(gates, size, r, BACK: tl.constexpr, EXACT: tl.constexpr):
    """The gate matrix as [update, read]: zero where the reading step does not see the update."""
    update: tl.constexpr = ROW if BACK else COLUMN
    read: tl.constexpr = COLUMN if BACK else ROW
    e = tl.load(gates + update * size + r)[:, None] + tl.load(gates + read * size + r)[None, :]
    if EXACT:
        u = tl.load(gates + (ROW_LOW if BACK else COLUMN_LOW) * size + r)
        e += u[:, None] + tl.load(gates + (COLUMN_LOW if BACK else ROW_LOW) * size + r)[None, :]
    if BACK:
        return tl.where(r[:, None] >= r[None, :], tl.exp2(e), 0.0)
    else:
        return tl.where(r[:, None] <= r[None, :], tl.exp2(e), 0.0)


@triton.jit
def _first(a, b):
    return a


@triton.jit
def pin(x):
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["sequences", "T", "padded", "H", "GROUP", "length"])
def columns(
    X, Y, Z, Out, gates, delta, cu, d_out, state_in, state_out, n_in, n_out, decays,
    sequences, T, padded, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, ob, ot, oh, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    BACK: tl.constexpr, OUTPUT: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTED: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, SAVE_D: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    """o, or walking back dv: one program has BLOCKS x BV columns of one head of one segment."""
    part = tl.program_id(0)
    slot = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, steps, b, t_first, gate0 = segment(cu, sequences, T, slot, length, L, SEGMENTED, PACKED)
    size = H.to(tl.int64) * padded
    col = part * BV * BLOCKS
    hx = (h // GROUP).to(tl.int64)
    hv = h.to(tl.int64)
    x_at = rows_of(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    z_at = rows_of(Z + b * zb + t_first * zt + hx * zh, steps, DK, zt, L, BK, TMA)
    y_at = rows_of(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    o_at = rows_of(Out + b * ob + t_first * ot + hv * oh, steps, DV, ot, L, BV, TMA)
    gates += hv * padded + gate0
    delta += hv * padded + gate0
    state_row = tl.program_id(1).to(tl.int64)
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    state_at = (state_row * DK + rk[None, :]) * DV + rv[:, None]
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    inside1 = (rv + BV < DV)[:, None] & (rk < DK)[None, :]
    n_at = state_row * DK + rk
    S0 = tl.zeros([BV, BK], tl.float32)
    S1 = tl.zeros([BV, BK], tl.float32)
    n = tl.zeros([BK], tl.float32)
    r16 = tl.arange(0, 16)
    N = tl.zeros([16, BK], tl.float32)
    if STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0)
        if NORMALIZE:
            n = tl.load(n_in + n_at, mask=rk < DK, other=0.0)
            N = tl.where(r16[:, None] == 0, n[None, :], 0.0)
    r = tl.arange(0, L)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    total = 1.0
    for step in tl.range(0, tiles, num_stages=STAGES):
        t = (tiles - 1 - step if BACK else step) * L
        gate = gates + t
        x = load_tile(x_at, t, 0, steps, DK, xt, L, BK, TMA)
        if OUTPUT:
            z = load_tile(z_at, t, 0, steps, DK, zt, L, BK, TMA)
        y0 = load_tile(y_at, t, col, steps, DV, yt, L, BV, TMA)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, col + BV, steps, DV, yt, L, BV, TMA)
        decay = tl.load(gate + DECAY * size)
        if ONE:
            u = tl.reduce(z, 1, _first).to(tl.float32) + tl.reduce(y0, 1, _first).to(tl.float32)
            if BLOCKS == 2:
                u += tl.reduce(y1, 1, _first).to(tl.float32)
            if T < 0:
                decay += tl.sum(u, 0)
        wx = tl.load(gate + (INTER if BACK else UPDATE) * size + r)
        x_up = (x * wx[:, None]).to(x.dtype)
        if OUTPUT:
            P = tl.dot(x, tl.trans(z), input_precision=PRECISION)
            P = P * weights(gate, size, r, BACK, EXACT) * scale
            if NORMALIZE:
                wz = tl.load(gate + (UPDATE if BACK else INTER) * size + r)
                if NV == 0:
                    d = tl.sum(P, 0) + tl.sum(z * n[None, :], 1) * wz
                elif NV == 1:
                    hi = N.to(x.dtype)
                    d16 = tl.dot(hi, tl.trans(z), input_precision=PRECISION)
                    d16 = tl.dot((N - hi).to(x.dtype), tl.trans(z), d16, input_precision=PRECISION)
                    d = tl.sum(d16 * wz[None, :], 0) + tl.sum(P, 0)
                else:
                    hi = N.to(x.dtype)
                    d16 = tl.dot(hi, tl.trans(z), input_precision=PRECISION)
                    d16 = tl.dot((N - hi).to(x.dtype), tl.trans(z), d16, input_precision=PRECISION)
                    d16 = d16 * wz[None, :]
                    d16 = tl.dot(tl.where((r16 == 0)[:, None], tl.full([16, L], 1.0, tl.float32), 0.0).to(x.dtype), P.to(x.dtype), d16, input_precision=PRECISION)
                    d = tl.sum(d16, 0)
                floor = tl.load(gate + FLOOR * size + r)
                if SAVE_D and part == 0:
                    tl.store(d_out + (first + t + r) * H + h, d, mask=t + r < steps)
                inv = 1.0 / tl.maximum(tl.abs(d), floor)
            P = P.to(x.dtype)
            out = tl.dot(S0.to(x.dtype), tl.trans(z), input_precision=PRECISION)
            wz = tl.load(gate + (UPDATE if BACK else INTER) * size + r)
            out = tl.dot(tl.trans(y0), P, out * wz[None, :], input_precision=PRECISION)
            if NORMALIZE:
                out = out * inv[None, :]
            store_tile(o_at, tl.trans(out).to(x.dtype), t, col, steps, DV, ot, L, BV, TMA)
            if BLOCKS == 2:
                out = tl.dot(S1.to(x.dtype), tl.trans(z), input_precision=PRECISION)
                out = tl.dot(tl.trans(y1), P, out * wz[None, :], input_precision=PRECISION)
                if NORMALIZE:
                    out = out * inv[None, :]
                store_tile(o_at, tl.trans(out).to(x.dtype), t, col + BV, steps, DV, ot, L, BV, TMA)
        else:
            total *= decay
        if NORMALIZE:
            if NV == 0:
                n = n * decay + tl.sum(x * wx[:, None], 0)
            else:
                wn = tl.load(gate + (INTER if BACK else UPDATE) * size + r)
                if DELTA:
                    wn *= tl.load(delta + t + r)
                whi = wn.to(x.dtype)
                wlo = (wn - whi).to(x.dtype)
                w16 = tl.where((r16 == 0)[:, None], whi[None, :], tl.where((r16 == 1)[:, None], wlo[None, :], 0.0)).to(x.dtype)
                N = tl.dot(w16, x, N * decay, input_precision=PRECISION)
        S0 = tl.dot(tl.trans(y0), x_up, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(tl.trans(y1), x_up, S1 * decay, input_precision=PRECISION)
        if ONE:
            S0 = pin(S0)
            if BLOCKS == 2:
                S1 = pin(S1)
    if FINAL:
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if NORMALIZE and part == 0:
            if NV > 0:
                n = tl.sum(N, 0)
            tl.store(n_out + n_at, n, mask=rk < DK)
        if not OUTPUT and part == 0:
            tl.store(decays + state_row, total)


@triton.jit(do_not_specialize=["sequences", "T", "padded", "H", "GROUP", "length"])
def rows(
    X, Y, Z, W, Out, gates, delta, cu, w_out, state_in, state_out, n_in, n_out,
    sequences, T, padded, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, wb, wt, wh, ob, ot, oh, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    NP: tl.constexpr, BACK: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTED: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """dq, or walking back dk: one program has BK of the key dims of one head of one segment.

    w is q for dq and k for dk: w_out gets the sums of w . out over 16 dims each, (NP, H, tokens) for every program.
    """
    part = tl.program_id(0)
    slot = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, steps, b, t_first, gate0 = segment(cu, sequences, T, slot, length, L, SEGMENTED, PACKED)
    size = H.to(tl.int64) * padded
    col = part * BK
    hx = (h // GROUP).to(tl.int64)
    hv = h.to(tl.int64)
    x_at = rows_of(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    w_at = rows_of(W + b * wb + t_first * wt + hx * wh, steps, DK, wt, L, BK, TMA)
    y_at = rows_of(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    z_at = rows_of(Z + b * zb + t_first * zt + hv * zh, steps, DV, zt, L, BV, TMA)
    o_at = rows_of(Out + b * ob + t_first * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    gates += hv * padded + gate0
    delta += hv * padded + gate0
    w_out += part * NP * size + hv * padded + gate0
    state_row = tl.program_id(1).to(tl.int64)
    rk = col + tl.arange(0, BK)
    rv = tl.arange(0, BV)
    state_at = (state_row * DK + rk[:, None]) * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    inside1 = (rk < DK)[:, None] & (rv + BV < DV)[None, :]
    n_at = state_row * DK + rk
    S0 = tl.zeros([BK, BV], tl.float32)
    S1 = tl.zeros([BK, BV], tl.float32)
    n = tl.zeros([BK], tl.float32)
    if STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0)
        if NORMALIZE:
            n = tl.load(n_in + n_at, mask=rk < DK, other=0.0)
    r = tl.arange(0, L)
    rp = tl.arange(0, NP)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES):
        t = (tiles - 1 - step if BACK else step) * L
        gate = gates + t
        x = load_tile(x_at, t, col, steps, DK, xt, L, BK, TMA)
        y0 = load_tile(y_at, t, 0, steps, DV, yt, L, BV, TMA)
        z0 = load_tile(z_at, t, 0, steps, DV, zt, L, BV, TMA)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, BV, steps, DV, yt, L, BV, TMA)
            z1 = load_tile(z_at, t, BV, steps, DV, zt, L, BV, TMA)
        decay = tl.load(gate + DECAY * size)
        if ONE:
            u = tl.reduce(y0 + z0, 1, _first)
            if BLOCKS == 2:
                u += tl.reduce(y1 + z1, 1, _first)
            if T < 0:
                decay += tl.sum(u.to(tl.float32), 0)
        wx = tl.load(gate + (INTER if BACK else UPDATE) * size + r)
        x_up = (tl.trans(x) * wx[None, :]).to(x.dtype)
        P = tl.dot(y0, tl.trans(z0), input_precision=PRECISION)
        if BLOCKS == 2:
            P = tl.dot(y1, tl.trans(z1), P, input_precision=PRECISION)
        if DELTA:
            if BACK:
                P += tl.load(delta + t + r)[:, None]
            else:
                P += tl.load(delta + t + r)[None, :]
        P = (P * weights(gate, size, r, BACK, EXACT) * scale).to(x.dtype)
        out = tl.dot(S0.to(x.dtype), tl.trans(z0), input_precision=PRECISION)
        if BLOCKS == 2:
            out = tl.dot(S1.to(x.dtype), tl.trans(z1), out, input_precision=PRECISION)
        if NORMALIZE:
            if BACK:
                out += n[:, None]
            elif DELTA:
                out += n[:, None] * tl.load(delta + t + r)[None, :]
        out = out * tl.load(gate + (UPDATE if BACK else INTER) * size + r)[None, :]
        out = tl.dot(tl.trans(x), P, out, input_precision=PRECISION)
        out = tl.trans(out)
        store_tile(o_at, out.to(Out.dtype.element_ty), t, col, steps, DK, ot, L, BK, TMA)
        w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)
        sums = tl.sum(tl.reshape(out * w, (L, NP, BK // NP)), 2)
        tl.store(w_out + (t + r)[:, None] + rp[None, :] * size, sums)
        if NORMALIZE:
            if DELTA and BACK:
                wd = tl.load(gate + INTER * size + r) * tl.load(delta + t + r)
                n = n * decay + tl.sum(tl.trans(x) * wd[None, :], 1)
            elif BACK:
                n = n * decay
            elif DELTA:
                n = n * decay + tl.sum(tl.trans(x) * wx[None, :], 1)
        S0 = tl.dot(x_up, y0, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(x_up, y1, S1 * decay, input_precision=PRECISION)
        if ONE:
            S0 = pin(S0)
            if BLOCKS == 2:
                S1 = pin(S1)
    if FINAL:
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if NORMALIZE:
            tl.store(n_out + n_at, n, mask=rk < DK)
