"""The gradients of the gates: of sums of q . dq and k . dk, which the walks leave, and of <C, dC> where it is known."""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_kernels import HIGHEST, LOWEST, locate_chunk, locate_segment
from tfla.backends.gpu.state_passing import rounded_product


@triton.jit
def gate_gradient_of(grad, x, SIGMOID: tl.constexpr):
    """The gradient of a gate x from that of its finite log-gate."""
    x = x.to(tl.float32)
    if SIGMOID:
        grad = grad / (1.0 + tl.exp(x))
    return tl.where((x < LOWEST) | (x > HIGHEST), 0.0, grad)


@triton.jit
def checkpoint_dot(
    states, n, cotangents, dn, mark, there, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, C_AS: tl.constexpr = tl.float32,
    DC_AS: tl.constexpr = tl.float32,
):  # fmt: skip
    """<C, dC> of some marks, (HEADS, 1), of those that are there; C and dC rounded to C_AS and DC_AS."""
    total = tl.zeros([mark.shape[0], BLOCK], tl.float32)
    for c in range(0, SIZE, BLOCK):
        e = c + tl.arange(0, BLOCK)[None, :]
        mask = there & (e < SIZE)
        state = tl.load(states + mark * SIZE + e, mask, 0.0).to(C_AS).to(tl.float32)
        total += state * tl.load(cotangents + mark * SIZE + e, mask, 0.0).to(DC_AS).to(tl.float32)
    dot = tl.sum(total, 1).to(tl.float64)[:, None]
    if NORMALIZE:
        e = tl.arange(0, BLOCK_N)[None, :]
        mask = there & (e < SIZE_N)
        of_n = tl.load(n + mark * SIZE_N + e, mask, 0.0)
        dot += tl.sum(rounded_product(of_n, tl.load(dn + mark * SIZE_N + e, mask, 0.0)), 1)[:, None]
    return dot


@triton.jit
def mark_dots(
    states, n, cotangents, dn, dots, SIZE, SIZE_N, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr
):  # fmt: skip
    """<C, dC> at each mark of each head."""
    mark = tl.zeros([1, 1], tl.int64) + tl.program_id(0)
    dot = checkpoint_dot(states, n, cotangents, dn, mark, mark >= 0, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
    tl.store(dots + mark, dot)


@triton.jit
def segment_start_dot(
    C, n, dC, dn, dC_first, dn_first, s, slot, slot0, h, H, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    C_AS: tl.constexpr = tl.float32,
):  # fmt: skip
    """<C, dC> where a segment starts: there the one before it ends, or the sequence starts, zero by default.

    C, n are those before each segment, dC, dn those behind each, dC_first, dn_first those before each sequence.
    """
    row = H.to(tl.int64)  # of states
    mark = slot * row + h
    dot = tl.zeros([h.shape[0], 1], tl.float64)
    if slot > slot0:
        behind, n_behind = dC - row * SIZE, dn - row * SIZE_N  # in another dtype, maybe, than the cotangents below
        dot = checkpoint_dot(C, n, behind, n_behind, mark, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, C_AS)
    elif USE_INITIAL_STATE:
        shift = (s - slot) * row
        dC_at, dn_at = dC_first + shift * SIZE, dn_first + shift * SIZE_N
        dot = checkpoint_dot(C, n, dC_at, dn_at, mark, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, C_AS)
    return dot


@triton.jit
def sum_parts(x, row, there, PARTS: tl.constexpr):
    parts = tl.load(x + row * PARTS + tl.arange(0, PARTS)[None, :], there, 0.0)
    return tl.sum(parts.to(tl.float64), 1)[:, None]


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "steps", "ib", "it", "ih", "fb", "ft", "fh"])
def gate_gradients(
    q_dq, k_dk, dots, C, n_start, dC, dn_end, dC_first, dn_first, cu, i_gate, f_gate, di, df,
    sequences, T, tiles, H, steps, SIZE, SIZE_N, ib, it, ih, fb, ft, fh,
    PARTS: tl.constexpr, NP: tl.constexpr, CHECKPOINT_STEPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    L: tl.constexpr, HEADS: tl.constexpr, DOTS: tl.constexpr, IS_SEGMENTED: tl.constexpr, IS_VARLEN: tl.constexpr,
    NORMALIZE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, USE_FINAL_STATE: tl.constexpr, INPUT_GATE: tl.constexpr,
    SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """dlog_i = k . dk; dlog_f falls by q . dq - k . dk from step to step, at each mark and where segments start
    starting again from <C, dC>.

    What rounding has added up to at the next mark or segment is taken off in even steps; behind a last step whose state
    nobody reads (no USE_FINAL_STATE) the sum is zero.

    q_dq, k_dk (PARTS, H, tiles, NP, L); dots (marks, H, DOTS); C to dn_first as in `start_dot`; outputs (B, T, H).
    """
    slot = tl.program_id(0)
    part = tl.program_id(1)
    if IS_VARLEN and not IS_SEGMENTED:  # of a longest sequence that nobody knows most programs would have nothing
        slot, _, _, begin, _ = locate_chunk(cu, sequences, T, slot, CHECKPOINT_STEPS, IS_VARLEN)
        part = begin // CHECKPOINT_STEPS
    t = (part * CHECKPOINT_STEPS + tl.arange(0, CHECKPOINT_STEPS))[None, :]
    h = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    first, length, b, t_first, tile0 = locate_segment(cu, sequences, T, slot, steps, L, IS_SEGMENTED, IS_VARLEN)
    if part * CHECKPOINT_STEPS < length:
        mark = (first // CHECKPOINT_STEPS + part - 1) * H + h
        start = tl.zeros([HEADS, 1], tl.float64)
        if part > 0:
            start = sum_parts(dots, mark, h < H, DOTS)
        elif IS_SEGMENTED:
            s, _, _, _, slot0 = locate_chunk(cu, sequences, T, slot, steps, IS_VARLEN)
            start = segment_start_dot(
                C, n_start, dC, dn_end, dC_first, dn_first, s, slot, slot0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N,
                NORMALIZE, USE_INITIAL_STATE,
            )  # fmt: skip
        elif USE_INITIAL_STATE:
            row = slot * H + h
            start = checkpoint_dot(C, n_start, dC_first, dn_first, row, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
        size = H.to(tl.int64) * (NP * L) * tiles
        inside = (t < length) & (h < H)
        at = (h * tiles + tile0 + t // L) * NP * L + t % L
        f = tl.load(f_gate + b * fb + (t_first + t) * ft + h * fh, mask=inside, other=0.0)
        if INPUT_GATE:
            i = tl.load(i_gate + b * ib + (t_first + t) * it + h * ih, mask=inside, other=0.0)
        k = tl.zeros([HEADS, CHECKPOINT_STEPS], tl.float32)
        q = tl.zeros([HEADS, CHECKPOINT_STEPS], tl.float32)
        for n in tl.range(0, PARTS * NP, loop_unroll_factor=2):  # with more of them on their way registers run out
            each = n // NP * size + n % NP * L
            k += tl.load(k_dk + each + at, mask=inside, other=0.0)
            q += tl.load(q_dq + each + at, mask=inside, other=0.0)
        falls = (q - k).to(tl.float64)
        to = (first + t) * H + h
        if INPUT_GATE:
            tl.store(di + to, gate_gradient_of(k, i, SIGMOID_I), mask=inside)
        before = start - (tl.cumsum(falls, 1) - falls)
        end = tl.zeros([HEADS, 1], tl.float64)
        known = (part + 1) * CHECKPOINT_STEPS < length
        if known:
            end = sum_parts(dots, mark + H, h < H, DOTS)
        elif IS_SEGMENTED:
            s, _, whole, begin, slot0 = locate_chunk(cu, sequences, T, slot, steps, IS_VARLEN)
            known = begin + length < whole
            if known:
                end = segment_start_dot(
                    C, n_start, dC, dn_end, dC_first, dn_first, s, slot + 1, slot0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N,
                    NORMALIZE, USE_INITIAL_STATE,
                )  # fmt: skip
        if known or not USE_FINAL_STATE:
            rounding = start - tl.sum(falls, 1)[:, None] - end
            share = tl.arange(0, CHECKPOINT_STEPS).to(tl.float64) / tl.minimum(
                length - part * CHECKPOINT_STEPS, CHECKPOINT_STEPS
            )
            before -= rounding * share[None, :]
        tl.store(df + to, gate_gradient_of(before.to(tl.float32), f, SIGMOID_F), mask=inside)
