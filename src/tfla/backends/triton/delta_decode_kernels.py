"""The decoding kernel of the delta rule and of gates for each key channel.

One launch computes one step, or a few steps, of every sequence; it reads and writes the state once. A program computes
some columns of the state of one head and all of their rows, because an error of prediction is a sum over the rows:

    C' = diag(f) C,    E = v - C'^T r    or, read before the decay, v - C^T r,                           (S1)
    h = scale (C'^T q + beta (k . q) E),                                                                 (S2)
    C <- C' + (beta k) E^T                                                                               (S3)

(S2) is the read of the new state in terms of the old one, so that both reads are one pass over the state. Inputs are
read as the caller gives them; every program applies the activations of the keys, of beta and of the gates.
"""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_activations import activated_gate, sigmoid
from tfla.backends.gpu.gate_kernels import clamp_gate
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.decode_kernels import output_without_state

EPS = tl.constexpr(1e-6)  # added to the squared norm of q and k, as in tfla.ops.delta_activations
SIGMOID, TWO_SIGMOID = tl.constexpr(1), tl.constexpr(2)  # activations of beta
LOG_GATES, SOFTPLUS = tl.constexpr(0), tl.constexpr(1)  # activations of gates: none, (2); others are (3)
PER_STEP, PER_CHANNEL = tl.constexpr(1), tl.constexpr(2)  # one gate for each step, or for each key channel


@triton.jit
def load_key(at, rk, DK: tl.constexpr, NORMALIZE: tl.constexpr):
    """Load the DK elements of a query or key in float32, with NORMALIZE divided by sqrt(their squared norm + EPS)."""
    x = tl.load(at + rk, rk < DK, 0.0).to(tl.float32)
    if NORMALIZE:
        x *= tl.rsqrt(tl.sum(rounded_product(x, x), 0) + EPS)
    return x


@triton.jit
def decay(x, bias, rate, lower_bound, ACTIVATION: tl.constexpr):
    """Return exp(log_f) of gates x: clamped log-gates, or pre-activations of them, see `activated_gate`."""
    x = x.to(tl.float32)
    if ACTIVATION != LOG_GATES:
        x = activated_gate(x + bias, rate, lower_bound, ACTIVATION == SOFTPLUS)
    return tl.exp(clamp_gate(x))


@triton.jit(do_not_specialize=["H", "GROUP", "ROWS"])
def delta_steps(
    Q, K, R, V, BETA, F, A_log, dt_bias, C, indices, lengths, Out, C_out, H, GROUP, scale, lower_bound, ROWS,
    qb, qt, qh, kb, kt, kh, rb, rt, rh, vb, vt, vh, bb, bt, bh, fb, ft, fh, cb, ch, ck, cv, sb, sh, sk, sv,
    DK: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CORRECT: tl.constexpr,
    READ_KEY: tl.constexpr, READ_BEFORE_DECAY: tl.constexpr, NORMALIZE_QK: tl.constexpr, HAS_BETA: tl.constexpr,
    BETA_ACTIVATION: tl.constexpr, GATES: tl.constexpr, GATE_ACTIVATION: tl.constexpr, HAS_A_LOG: tl.constexpr,
    BIAS_DIMS: tl.constexpr, INDEXED: tl.constexpr, LENGTHS: tl.constexpr, STORE_FINAL_STATE: tl.constexpr,
):  # fmt: skip
    """Compute T steps: Out, (B, T, H, DV), and the state after step lengths[b] of sequence b, or after step T.

    The grid is (B * H * DV / BV). Q, K and R are (B, T, H / GROUP, DK), V (B, T, H, DV), BETA (B, T, H), F (B, T, H) or
    (B, T, H, DK), A_log (H), dt_bias (H) or (H, DK), C and C_out (B, H, DK, DV). C_out may be None for C. With INDEXED,
    C has ROWS rows in place of B, sequence b has row indices[b], and C_out is C.
    """
    if C_out is None:  # in place
        C_out = C
    parts: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    b = row // H
    h = row % H
    hq = h // GROUP
    rows = tl.arange(0, BK)
    columns = part * BV + tl.arange(0, BV)
    in_k = rows < DK
    in_v = columns < DV
    inside = in_k[:, None] & in_v[None, :]
    state = b
    if INDEXED:
        state = tl.load(indices + b).to(tl.int64)
        if (state < 0) | (state >= ROWS):
            nothing = output_without_state(state, tl.zeros([BV], tl.float32)).to(Out.dtype.element_ty)
            for t in range(T):
                tl.store(Out + ((b * T + t) * H + h) * DV + columns, nothing, in_v)
            return
    rate = 1.0
    if HAS_A_LOG:
        rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = 0.0
    if BIAS_DIMS == 1:
        bias = tl.load(dt_bias + h).to(tl.float32)
    if BIAS_DIMS == 2:
        bias = tl.load(dt_bias + h * DK + rows, in_k, 0.0).to(tl.float32)
    # Each state is read and written once: hints to caches let loads and stores of a large batch disturb each other less
    c_at = C + state * cb + h * ch + rows[:, None] * ck + columns[None, :] * cv
    c = tl.load(c_at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    out_at = C_out + state * sb + h * sh + rows[:, None] * sk + columns[None, :] * sv
    length = T
    if LENGTHS:
        # The host does not read the lengths, so they are clamped here, before they are converted to 32 bits.
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), T).to(tl.int32)
        if STORE_FINAL_STATE and length == 0:
            tl.store(out_at, c.to(C_out.dtype.element_ty), inside)
    for t in range(T):
        q = load_key(Q + b * qb + t * qt + hq * qh, rows, DK, NORMALIZE_QK)
        k = load_key(K + b * kb + t * kt + hq * kh, rows, DK, NORMALIZE_QK)
        v = tl.load(V + b * vb + t * vt + h * vh + columns, in_v, 0.0).to(tl.float32)
        beta = 1.0
        if HAS_BETA:
            beta = tl.load(BETA + b * bb + t * bt + h * bh).to(tl.float32)
            if BETA_ACTIVATION != 0:
                beta = sigmoid(beta)
            if BETA_ACTIVATION == TWO_SIGMOID:
                beta *= 2.0
        write = beta * k
        r = k
        if READ_KEY:
            r = load_key(R + b * rb + t * rt + hq * rh, rows, DK, NORMALIZE_QK)
        before = c  # what r reads
        if GATES == PER_STEP:
            c *= decay(tl.load(F + b * fb + t * ft + h * fh), bias, rate, lower_bound, GATE_ACTIVATION)
        if GATES == PER_CHANNEL:
            f_at = F + b * fb + t * ft + h * fh + rows
            c *= decay(tl.load(f_at, in_k, 0.0), bias, rate, lower_bound, GATE_ACTIVATION)[:, None]
        E = v
        if CORRECT:  # (S1)
            if READ_BEFORE_DECAY:
                E -= tl.sum(rounded_product(before, r[:, None]), 0)
            else:
                E -= tl.sum(rounded_product(c, r[:, None]), 0)
        num = tl.sum(rounded_product(c, q[:, None]), 0) + tl.sum(rounded_product(write, q), 0) * E  # (S2), (BV)
        out = Out + ((b * T + t) * H + h) * DV + columns
        tl.store(out, (num * scale).to(Out.dtype.element_ty), in_v)
        c += write[:, None] * E[None, :]  # (S3), (BK, BV)
        if STORE_FINAL_STATE and LENGTHS and t + 1 == length:
            tl.store(out_at, c.to(C_out.dtype.element_ty), inside)
    if STORE_FINAL_STATE and not LENGTHS:
        tl.store(out_at, c.to(C_out.dtype.element_ty), inside, cache_modifier=".cs")
