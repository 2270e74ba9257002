"""The recurrent kernel of the paper: states at the starts of chunks, (39)-(43), and walking back their cotangents.

direction | x, y  | weight of a step | left at each chunk
forward   | k, v  | UPDATE           | C, n before its first step
back      | q, dh | INTER            | dC, dn behind its last step
"""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_kernels import DECAY, DELTA_P, INTER, UPDATE, VECTORS, locate_segment
from tfla.backends.triton.fused_kernels import load_tile


@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "steps"])
def states(
    X, Y, gates, cu, C_given, n_given, C_chunks, n_chunks, C_final, n_final,
    sequences, T, tiles_of_head, H, GROUP, steps, xb, xt, xh, yb, yt, yh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, DELTA: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program has BK x BV of the state of one head and sequence, and walks its chunks one after another.

    n is kept as L rows, of which it is the sum: rows of different steps need not meet in every tile.
    """
    PARTS: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0) % (PARTS * ((DK + BK - 1) // BK))
    state = tl.program_id(0) // (PARTS * ((DK + BK - 1) // BK))
    s = state // H
    h = (state % H).to(tl.int64)
    k0 = part // PARTS * BK
    v0 = part % PARTS * BV
    first, length, b, t_first, tile0 = locate_segment(cu, sequences, T, s, steps, L, False, IS_VARLEN)
    if IS_VARLEN:
        slot0 = first // steps + s
    else:
        slot0 = s.to(tl.int64) * tl.cdiv(T, steps)
    x_at = X + b * xb + t_first * xt + h // GROUP * xh
    y_at = Y + b * yb + t_first * yt + h * yh
    gates += (h * tiles_of_head + tile0) * VECTORS * L
    r = tl.arange(0, L)
    rk = k0 + tl.arange(0, BK)
    rv = v0 + tl.arange(0, BV)
    at = rk.to(tl.int64)[:, None] * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    owner = (rk < DK) & (rk * 0 + v0 == 0)  # of n
    C = tl.zeros([BK, BV], tl.float32)
    N = tl.zeros([L, BK], tl.float32)
    if USE_INITIAL_STATE:
        C = tl.load(C_given + state.to(tl.int64) * DK * DV + at, mask=inside, other=0.0)
        if NORMALIZE:
            n = tl.load(n_given + state.to(tl.int64) * DK + rk, mask=rk < DK, other=0.0)
            N = tl.where(r[:, None] == 0, n[None, :], 0.0)
    chunks = tl.cdiv(length, steps).to(tl.int32)
    for c in range(0, chunks):
        slot = slot0 + (chunks - 1 - c if REVERSE else c)
        row = slot * H + h
        tl.store(C_chunks + row * DK * DV + at, C, mask=inside)
        if NORMALIZE:
            tl.store(n_chunks + row * DK + rk, tl.sum(N, 0), mask=owner)
        begin = (slot - slot0) * steps
        tiles = tl.cdiv(tl.minimum(length - begin, steps), L).to(tl.int32)
        for step in tl.range(0, tiles, num_stages=STAGES):
            t = begin + (tiles - 1 - step if REVERSE else step) * L
            gate = gates + t * VECTORS
            x = load_tile(x_at, t, k0, length, DK, xt, L, BK, False)
            y = load_tile(y_at, t, v0, length, DV, yt, L, BV, False)
            decay = tl.load(gate + DECAY * L)
            w = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)
            x_up = (tl.trans(x) * w[None, :]).to(x.dtype)
            C = tl.dot(x_up, y, C * decay, input_precision=PRECISION)
            if NORMALIZE:
                N = N * decay
                if DELTA:
                    w *= tl.load(gate + DELTA_P * L + r)
                if DELTA or not REVERSE:
                    N += x * w[:, None]
    if STORE_FINAL_STATE:
        tl.store(C_final + state.to(tl.int64) * DK * DV + at, C, mask=inside)
        if NORMALIZE:
            tl.store(n_final + state.to(tl.int64) * DK + rk, tl.sum(N, 0), mask=owner)
