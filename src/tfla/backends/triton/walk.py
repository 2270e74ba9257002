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
"""

import triton
import triton.language as tl

from tfla.backends.triton.gates import COLUMN, COLUMN_LOW, DECAY, FLOOR, INTER, ROW, ROW_LOW, UPDATE


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
def weights(gates, size, r, inside, BACK: tl.constexpr, EXACT: tl.constexpr):
    """The gate matrix as [update, read]: zero where the reading step does not see the update."""
    update: tl.constexpr = ROW if BACK else COLUMN
    read: tl.constexpr = COLUMN if BACK else ROW
    u = tl.load(gates + update * size + r, mask=inside, other=-1e9)
    z = tl.load(gates + read * size + r, mask=inside, other=-1e9)
    e = u[:, None] + z[None, :]
    if EXACT:
        u = tl.load(gates + (ROW_LOW if BACK else COLUMN_LOW) * size + r, mask=inside, other=0.0)
        z = tl.load(gates + (COLUMN_LOW if BACK else ROW_LOW) * size + r, mask=inside, other=0.0)
        e += u[:, None] + z[None, :]
    if BACK:
        return tl.where(r[:, None] >= r[None, :], tl.exp2(e), 0.0)
    else:
        return tl.where(r[:, None] <= r[None, :], tl.exp2(e), 0.0)


@triton.jit
def sequence(cu, s, T, PACKED: tl.constexpr):
    """First token and length of sequence s; batch row and step of its first token."""
    if PACKED:
        first = tl.load(cu + s).to(tl.int64)
        return first, tl.load(cu + s + 1).to(tl.int64) - first, first * 0, first
    else:
        b = s.to(tl.int64)
        return b * T, T.to(tl.int64), b, b * 0


@triton.jit
def columns(
    X, Y, Z, Out, gates, cu, d_out, state_in, state_out, n_in, n_out, T, tokens, H, GROUP,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, ob, ot, oh, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, BACK: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, SAVE_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o, or walking back dv: one program has BV columns of one head of one sequence.

    The output is made transposed, so that the state is the left operand and comes from registers.
    """
    part = tl.program_id(0)
    s = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, length, b, t_first = sequence(cu, s, T, PACKED)
    col = part * BV
    hx = (h // GROUP).to(tl.int64)
    x_at = rows_of(X + b * xb + t_first * xt + hx * xh, length, DK, xt, L, BK, TMA)
    z_at = rows_of(Z + b * zb + t_first * zt + hx * zh, length, DK, zt, L, BK, TMA)
    y_at = rows_of(Y + b * yb + t_first * yt + h.to(tl.int64) * yh, length, DV, yt, L, BV, TMA)
    o_at = rows_of(Out + b * ob + t_first * ot + h.to(tl.int64) * oh, length, DV, ot, L, BV, TMA)
    size = H.to(tl.int64) * tokens
    gates += h.to(tl.int64) * tokens + first
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    state_at = (tl.program_id(1).to(tl.int64) * DK + rk[None, :]) * DV + rv[:, None]
    state_mask = (rv < DV)[:, None] & (rk < DK)[None, :]
    n_at = tl.program_id(1).to(tl.int64) * DK + rk
    S = tl.zeros([BV, BK], tl.float32)
    n = tl.zeros([BK], tl.float32)
    if STATE:
        S = tl.load(state_in + state_at, mask=state_mask, other=0.0)
        if NORMALIZE:
            n = tl.load(n_in + n_at, mask=rk < DK, other=0.0)
    tiles = tl.cdiv(length, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES):
        t = (tiles - 1 - step if BACK else step) * L
        r = t + tl.arange(0, L)
        inside = r < length
        x = load_tile(x_at, t, 0, length, DK, xt, L, BK, TMA)
        z = load_tile(z_at, t, 0, length, DK, zt, L, BK, TMA)
        y = load_tile(y_at, t, col, length, DV, yt, L, BV, TMA)
        wx = tl.load(gates + (INTER if BACK else UPDATE) * size + r, mask=inside, other=0.0)
        wz = tl.load(gates + (UPDATE if BACK else INTER) * size + r, mask=inside, other=0.0)
        decay = tl.load(gates + DECAY * size + t)
        x_up = (x * wx[:, None]).to(x.dtype)
        P = tl.dot(x, tl.trans(z), input_precision=PRECISION) * weights(gates, size, r, inside, BACK, EXACT) * scale
        out = tl.dot(S.to(x.dtype), tl.trans(z), input_precision=PRECISION) * wz[None, :]
        out = tl.dot(tl.trans(y), P.to(x.dtype), out, input_precision=PRECISION)
        if NORMALIZE:
            d = tl.sum(P, 0) + tl.sum(z * n[None, :], 1) * wz
            if SAVE_D and part == 0:
                tl.store(d_out + (first + r) * H + h, d, mask=inside)
            floor = tl.load(gates + FLOOR * size + r, mask=inside, other=1.0)
            out = out / tl.maximum(tl.abs(d), floor)[None, :]
            n = n * decay + tl.sum(x * wx[:, None], 0)
        store_tile(o_at, tl.trans(out).to(x.dtype), t, col, length, DV, ot, L, BV, TMA)
        S = tl.dot(tl.trans(y), x_up, S * decay, input_precision=PRECISION)
    if FINAL:
        tl.store(state_out + state_at, S, mask=state_mask)
        if NORMALIZE and part == 0:
            tl.store(n_out + n_at, n, mask=rk < DK)


@triton.jit
def rows(
    X, Y, Z, W, Out, gates, delta, cu, w_out, state_in, state_out, n_in, n_out, T, tokens, H, GROUP,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, wb, wt, wh, ob, ot, oh, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, NP: tl.constexpr,
    BACK: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
    FINAL: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, or walking back dk: one program has BK of the key dims of one head of one sequence.

    w is q for dq and k for dk: w_out gets the sums of w . out over 16 dims each, (NP, H, tokens) for every program.
    """
    part = tl.program_id(0)
    s = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, length, b, t_first = sequence(cu, s, T, PACKED)
    col = part * BK
    hx = (h // GROUP).to(tl.int64)
    hv = h.to(tl.int64)
    x_at = rows_of(X + b * xb + t_first * xt + hx * xh, length, DK, xt, L, BK, TMA)
    w_at = rows_of(W + b * wb + t_first * wt + hx * wh, length, DK, wt, L, BK, TMA)
    y_at = rows_of(Y + b * yb + t_first * yt + hv * yh, length, DV, yt, L, BV, TMA)
    z_at = rows_of(Z + b * zb + t_first * zt + hv * zh, length, DV, zt, L, BV, TMA)
    o_at = rows_of(Out + b * ob + t_first * ot + hv * oh, length, DK, ot, L, BK, TMA)
    size = H.to(tl.int64) * tokens
    gates += hv * tokens + first
    delta += hv * tokens + first
    w_out += part * NP * size + hv * tokens + first
    rk = col + tl.arange(0, BK)
    rv = tl.arange(0, BV)
    state_at = (tl.program_id(1).to(tl.int64) * DK + rk[:, None]) * DV + rv[None, :]
    state_mask = (rk < DK)[:, None] & (rv < DV)[None, :]
    n_at = tl.program_id(1).to(tl.int64) * DK + rk
    S = tl.zeros([BK, BV], tl.float32)
    n = tl.zeros([BK], tl.float32)
    if STATE:
        S = tl.load(state_in + state_at, mask=state_mask, other=0.0)
        if NORMALIZE:
            n = tl.load(n_in + n_at, mask=rk < DK, other=0.0)
    tiles = tl.cdiv(length, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES):
        t = (tiles - 1 - step if BACK else step) * L
        r = t + tl.arange(0, L)
        inside = r < length
        x = load_tile(x_at, t, col, length, DK, xt, L, BK, TMA)
        y = load_tile(y_at, t, 0, length, DV, yt, L, BV, TMA)
        z = load_tile(z_at, t, 0, length, DV, zt, L, BV, TMA)
        wx = tl.load(gates + (INTER if BACK else UPDATE) * size + r, mask=inside, other=0.0)
        wz = tl.load(gates + (UPDATE if BACK else INTER) * size + r, mask=inside, other=0.0)
        decay = tl.load(gates + DECAY * size + t)
        x_up = (tl.trans(x) * wx[None, :]).to(x.dtype)
        P = tl.dot(y, tl.trans(z), input_precision=PRECISION)
        if DELTA:
            dd = tl.load(delta + r, mask=inside, other=0.0)
            if BACK:
                P += dd[:, None]
            else:
                P += dd[None, :]
        P = P * weights(gates, size, r, inside, BACK, EXACT) * scale
        out = tl.dot(S.to(x.dtype), tl.trans(z), input_precision=PRECISION)
        if NORMALIZE:
            if BACK:
                out += n[:, None]
            elif DELTA:
                out += n[:, None] * dd[None, :]
        out = out * wz[None, :]
        out = tl.dot(tl.trans(x), P.to(x.dtype), out, input_precision=PRECISION)
        out = tl.trans(out)
        store_tile(o_at, out.to(Out.dtype.element_ty), t, col, length, DK, ot, L, BK, TMA)
        w = load_tile(w_at, t, col, length, DK, wt, L, BK, TMA)
        sums = tl.sum(tl.reshape(out * w, (L, NP, BK // NP)), 2)
        to = w_out + r.to(tl.int64)[:, None] + tl.arange(0, NP)[None, :] * size
        tl.store(to, sums, mask=inside[:, None] & (tl.arange(0, NP) >= 0)[None, :])
        if NORMALIZE:
            if BACK:
                if DELTA:
                    n = n * decay + tl.sum(tl.trans(x) * (wx * dd)[None, :], 1)
                else:
                    n = n * decay
            else:
                n = n * decay + tl.sum(tl.trans(x) * wx[None, :], 1)
        S = tl.dot(x_up, y, S * decay, input_precision=PRECISION)
    if FINAL:
        tl.store(state_out + state_at, S, mask=state_mask)
        if NORMALIZE:
            tl.store(n_out + n_at, n, mask=rk < DK)
