"""What a block does to one token, as products of weight matrices with a vector, fused with what is before and after.

At batch 1 a step reads every weight once and does next to nothing else, so that time goes where a launch ends and the
next begins. A program has one row of a weight matrix, all its columns at once: no loop, all loads at once.
"""

import triton
import triton.language as tl


@triton.jit
def vector(at, K: tl.constexpr, BK: tl.constexpr):
    r = tl.arange(0, BK)
    return tl.load(at + r, r < K, 0.0).to(tl.float32)


@triton.jit
def inverse_rms(x, eps, K: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def normed_product(W, row, X, norm, eps, K: tl.constexpr, BK: tl.constexpr):
    """One row of W (…, K) with RMSNorm(x). The row, which comes from furthest away, is asked for first."""
    w = vector(W + row.to(tl.int64) * K, K, BK)
    x = vector(X, K, BK)
    y = tl.sum(w * (x * vector(norm, K, BK)), 0)
    return y * inverse_rms(x, eps, K)


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap), (110)."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))


@triton.jit
def mixer_inputs(
    X, norm, eps, Q, K, V, O, I, I_bias, F, F_bias, cap, Out, Gates,
    D: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of RMSNorm(x): queries, keys, values and the output gate one behind the other, and both gates, (5)."""
    row = tl.program_id(0)
    if row < 2 * H:
        if row < H:
            y = normed_product(I, row, X, norm, eps, D, BD) + tl.load(I_bias + row).to(tl.float32)
        else:
            y = normed_product(F, row - H, X, norm, eps, D, BD) + tl.load(F_bias + row - H).to(tl.float32)
        tl.store(Gates + row, capped(y, cap))
    else:
        row -= 2 * H
        if row < DQ:
            y = normed_product(Q, row, X, norm, eps, D, BD)
        elif row < 2 * DQ:
            y = normed_product(K, row - DQ, X, norm, eps, D, BD)
        elif row < 2 * DQ + DV:
            y = normed_product(V, row - 2 * DQ, X, norm, eps, D, BD)
        else:
            y = normed_product(O, row - 2 * DQ - DV, X, norm, eps, D, BD)
        tl.store(Out + row, y.to(Out.dtype.element_ty))


@triton.jit
def gated_heads(h, o, weight, eps, Out, D: tl.constexpr, BD: tl.constexpr, LAYER: tl.constexpr):
    """sigmoid(o) NORM(h) of one head, (8)."""
    at = tl.program_id(0) * D
    x = vector(h + at, D, BD)
    if LAYER:
        x = tl.where(tl.arange(0, BD) < D, x - tl.sum(x, 0) / D, 0.0)
    x *= inverse_rms(x, eps, D) * vector(weight + at, D, BD) * tl.sigmoid(vector(o + at, D, BD))
    r = tl.arange(0, BD)
    tl.store(Out + at + r, x.to(Out.dtype.element_ty), r < D)


@triton.jit
def swiglu(X, norm, eps, W_gate, W_up, Out, D: tl.constexpr, BD: tl.constexpr):
    """silu(W_gate RMSNorm(x)) * W_up RMSNorm(x)."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * D
    gate = vector(W_gate + at, D, BD)
    up = vector(W_up + at, D, BD)
    x = vector(X, D, BD)
    y = x * vector(norm, D, BD)
    scale = inverse_rms(x, eps, D)
    gate = tl.sum(gate * y, 0) * scale
    up = tl.sum(up * y, 0) * scale
    tl.store(Out + row, (gate * tl.sigmoid(gate) * up).to(Out.dtype.element_ty))


@triton.jit
def add_product(W, Z, X, D: tl.constexpr, BD: tl.constexpr):
    """x += W z: the residual stream, in place."""
    row = tl.program_id(0)
    w = vector(W + row.to(tl.int64) * D, D, BD)
    y = tl.sum(w * vector(Z, D, BD), 0) + tl.load(X + row).to(tl.float32)
    tl.store(X + row, y.to(X.dtype.element_ty))


@triton.jit
def logits(X, norm, eps, W, cap, Out, D: tl.constexpr, BD: tl.constexpr):
    """Soft-capped W RMSNorm(x), float32."""
    row = tl.program_id(0)
    tl.store(Out + row, capped(normed_product(W, row, X, norm, eps, D, BD), cap))
