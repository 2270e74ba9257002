"""Kernels for one token of one sequence: matrix-vector products fused with the operations before and after them.

For the residual stream x (D,), a block computes

    y = RMSNorm(x)                                                                 (1)
    q, k, v, o = W_q y, W_k y, W_v y, W_o y                                        (2)
    i, f = softcap(W_i y + b_i), softcap(W_f y + b_f)                              (3)   (5) and (110) of the paper
    h = mlstm_step(q, k, v, i, f)                  not here: tfla.mlstm_step
    x <- x + W_out (sigmoid(o) * NORM(h))                                          (4)   (8) of the paper
    z = RMSNorm(x)                                                                 (5)
    x <- x + W_down (silu(W_gate z) * W_up z)                                      (6)

and after the last block the logits are softcap(W RMSNorm(x)) (7).

At batch size 1 a step reads every weight once and is bound by memory latency: most of its time would pass while one
launch drains and the next one starts. A program therefore computes one row of a product and loads all columns of that
row at once, without a loop. The RMSNorm scales a token by one factor, which each program applies after its own product.
"""

import triton
import triton.language as tl


@triton.jit
def load_vector(pointer, K: tl.constexpr, BK: tl.constexpr):
    """Return K numbers as float32, padded with zeros to the power of two BK."""
    r = tl.arange(0, BK)
    return tl.load(pointer + r, r < K, 0.0).to(tl.float32)  # (BK,)


@triton.jit
def inverse_rms(x, eps, K: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of x (BK,), whose first K entries count."""
    return tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def normed_product(W, row, X, norm, eps, K: tl.constexpr, BK: tl.constexpr):
    """Return the product of a row of W (rows, K) with RMSNorm(x), for x (K,) and the weight ``norm`` (K,).

    The row of W comes from device memory and is loaded first; x and norm are in the cache.
    """
    w = load_vector(W + row.to(tl.int64) * K, K, BK)  # (BK,)
    x = load_vector(X, K, BK)  # (BK,)
    y = tl.sum(w * (x * load_vector(norm, K, BK)), 0)
    return y * inverse_rms(x, eps, K)


@triton.jit
def capped(x, cap):
    """Return cap tanh(x / cap), equation (110) of the paper."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))


@triton.jit
def mixer_inputs(
    X, norm, eps, Q, K, V, O, I, I_bias, F, F_bias, cap, Out, Gates,
    D: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute one entry of (1)-(3): the first 2 H programs the gates, the others q, k, v and o.

    X is x (D,); norm (D,) and eps belong to the RMSNorm. Q, K (DQ, D), V and O (DV, D) are the weights of the
    projections; I and F (H, D), I_bias and F_bias (H,) those of the gates, and cap is their soft cap. Out
    (2 DQ + 2 DV,) receives q, k, v and o, one after the other, and Gates (2 H,) float32 receives i and f.
    """
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
def gated_heads(h, o, weight, eps, Out, D: tl.constexpr, BD: tl.constexpr, H: tl.constexpr, LAYER: tl.constexpr):
    """Compute sigmoid(o) * NORM(h) of one head of one sequence, in (4).

    h, o and Out are (H D,) for each sequence, for D channels per head, and the weight of the norm is (H D,). With
    LAYER, NORM is LayerNorm, else RMSNorm.
    """
    at = tl.program_id(0) * D
    channel = tl.program_id(0) % H * D
    x = load_vector(h + at, D, BD)  # (BD,)
    if LAYER:
        x = tl.where(tl.arange(0, BD) < D, x - tl.sum(x, 0) / D, 0.0)
    x *= inverse_rms(x, eps, D) * load_vector(weight + channel, D, BD) * tl.sigmoid(load_vector(o + at, D, BD))
    r = tl.arange(0, BD)
    tl.store(Out + at + r, x.to(Out.dtype.element_ty), r < D)


@triton.jit
def swiglu(X, norm, eps, W_gate, W_up, Out, D: tl.constexpr, BD: tl.constexpr):
    """Compute one entry of silu(W_gate z) * W_up z for z = RMSNorm(x), (5) and (6).

    X and norm are (D,), W_gate and W_up (hidden, D), and Out is (hidden,).
    """
    row = tl.program_id(0)
    at = row.to(tl.int64) * D
    gate = load_vector(W_gate + at, D, BD)  # (BD,)
    up = load_vector(W_up + at, D, BD)  # (BD,)
    x = load_vector(X, D, BD)  # (BD,)
    y = x * load_vector(norm, D, BD)
    scale = inverse_rms(x, eps, D)
    gate = tl.sum(gate * y, 0) * scale
    up = tl.sum(up * y, 0) * scale
    tl.store(Out + row, (gate * tl.sigmoid(gate) * up).to(Out.dtype.element_ty))


@triton.jit
def add_product(W, Z, X, D: tl.constexpr, BD: tl.constexpr):
    """Add one entry of W z to the residual stream x in place, (4) and (6): W (rows, D), z (D,), x (rows,)."""
    row = tl.program_id(0)
    w = load_vector(W + row.to(tl.int64) * D, D, BD)  # (BD,)
    y = tl.sum(w * load_vector(Z, D, BD), 0) + tl.load(X + row).to(tl.float32)
    tl.store(X + row, y.to(X.dtype.element_ty))


@triton.jit
def logits(X, norm, eps, W, cap, Out, D: tl.constexpr, BD: tl.constexpr):
    """Compute one logit, (7): x (D,), W (vocab_size, D) -> Out (vocab_size,) float32."""
    row = tl.program_id(0)
    tl.store(Out + row, capped(normed_product(W, row, X, norm, eps, D, BD), cap))
