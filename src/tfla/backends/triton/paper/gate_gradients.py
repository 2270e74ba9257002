"""Gradients of the gates where states are known at the starts of chunks of any length."""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_gradients import checkpoint_dot, gate_gradient_of, segment_start_dot
from tfla.backends.gpu.gate_kernels import first_tile, load_gate, locate_chunk


@triton.jit
def _falls(q_dq, k_dk, at, size, inside, PARTS: tl.constexpr):
    """q . dq and k . dk of steps, summed over the parts of the head dim."""
    q = tl.load(q_dq + at, mask=inside, other=0.0)
    k = tl.load(k_dk + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        q += tl.load(q_dq + part * size + at, mask=inside, other=0.0)
        k += tl.load(k_dk + part * size + at, mask=inside, other=0.0)
    return q, k


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "steps", "ib", "it", "ih", "fb", "ft", "fh"])
def chunk_gate_gradients(
    q, q_dq, k_dk, C, n, dC, dn, dC_first, dn_first, cu, i_gate, f_gate, di, df, sequences, T, tiles, H, steps, SIZE,
    SIZE_N, ib, it, ih, fb, ft, fh,
    PARTS: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, NORMALIZE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, USE_FINAL_STATE: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """dlog_i = k . dk; dlog_f falls by q . dq - k . dk from step to step, from <C, dC> at one end of a chunk to that at
    the other, which takes off in even steps what rounding has added up to. dq is of C, dk of dC, rounded as q is: so
    are C of the one end and dC of the other, else what that cuts off would add up from step to step.

    C to dn_first are as in `segment_start_dot`. A sequence ends with zero unless its final state has a cotangent
    (USE_FINAL_STATE).
    q_dq, k_dk (PARTS, H, tiles, L); outputs (B, T, H).
    """
    slot = tl.program_id(0) // H
    h = tl.zeros([1, 1], tl.int64) + tl.program_id(0) % H
    s, first, length, start, slot0 = locate_chunk(cu, sequences, T, slot, steps, IS_VARLEN)
    count = tl.maximum(tl.minimum(length - start, steps), 0).to(tl.int32)
    if count <= 0:
        return
    mark = slot.to(tl.int64) * H + h
    row = H.to(tl.int64)  # of states
    top = segment_start_dot(
        C, n, dC, dn, dC_first, dn_first, s, slot, slot0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE,
        USE_INITIAL_STATE, q.dtype.element_ty,
    )  # fmt: skip
    end = top * 0
    known = start + steps < length
    if known:
        C_at, n_at = C + row * SIZE, n + row * SIZE_N
        end = checkpoint_dot(
            C_at, n_at, dC, dn, mark, mark >= 0, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, DC_AS=q.dtype.element_ty
        )  # fmt: skip
    at = (h * tiles + first_tile(first, s, T, L, IS_VARLEN)) * L + start
    to = (first + start) * H + h
    r = tl.arange(0, STEPS)[None, :]
    size = H.to(tl.int64) * tiles * L
    total = tl.zeros([1, STEPS], tl.float64)
    for t in range(0, count, STEPS):
        of_q, of_k = _falls(q_dq, k_dk, at + t + r, size, t + r < count, PARTS)
        total += (of_q - of_k).to(tl.float64)
    rounding = top * 0
    if known or not USE_FINAL_STATE:
        rounding = (top - tl.sum(total, 1)[:, None] - end) / count
    for t in range(0, count, STEPS):
        inside = t + r < count
        of_q, of_k = _falls(q_dq, k_dk, at + t + r, size, inside, PARTS)
        falls = (of_q - of_k).to(tl.float64)
        before = top - (tl.cumsum(falls, 1) - falls) - rounding * (t + r).to(tl.float64)
        f = load_gate(f_gate + h * fh, s, first, start + t + r, fb, ft, inside, IS_VARLEN)
        tl.store(df + to + (t + r) * H, gate_gradient_of(before.to(tl.float32), f, SIGMOID_F), mask=inside)
        if INPUT_GATE:
            i = load_gate(i_gate + h * ih, s, first, start + t + r, ib, it, inside, IS_VARLEN)
            tl.store(di + to + (t + r) * H, gate_gradient_of(of_k, i, SIGMOID_I), mask=inside)
        top -= tl.sum(falls, 1)[:, None]
