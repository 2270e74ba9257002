"""Gate kernels: the max state, the decays inside tiles, the denominator folded into them, the gradients of the gates.

With F_t = log_f_t + m_{t-1} - m_t and I_t = log_i_t - m_t, (6) and (7), the stabilised operator is one without max
state, so the walks of :mod:`.walk` know none. Both are at most 0: what is below CLOSED is zero in float32 however the
rest adds up. Sums are float64, exponents base 2. Gate vectors are (vectors, H, tokens) float32, tokens of all sequences
in a row.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-150.0)
# Rows of the gate vectors. The gate matrix of a tile is exp2(ROW_i + COLUMN_j); LOW parts are what float32 cuts off.
ROW = tl.constexpr(0)
COLUMN = tl.constexpr(1)
INTER = tl.constexpr(2)  # weight of the state before the tile in an output, times scale
UPDATE = tl.constexpr(3)  # weight of a step in the state behind the tile
DECAY = tl.constexpr(4)  # of the state over the whole tile, the same at each of its steps
ROW_LOW = tl.constexpr(5)
COLUMN_LOW = tl.constexpr(6)
FLOOR = tl.constexpr(7)  # exp(-m), the least denominator
VECTORS = 8


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def find_sequence(cu, sequences, slot, CHUNK: tl.constexpr):
    """The packed sequence a chunk slot belongs to: the last s with cu[s] // CHUNK + s <= slot."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle).to(tl.int64) // CHUNK + middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def locate(cu, sequences, T, slot, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Of a chunk slot: sequence, its first token, its length, the chunk's first step, the slot of its first chunk."""
    if PACKED:
        s = find_sequence(cu, sequences, slot, CHUNK)
        first = tl.load(cu + s).to(tl.int64)
        length = tl.load(cu + s + 1).to(tl.int64) - first
        slot0 = first // CHUNK + s
    else:
        chunks = tl.cdiv(T, CHUNK)
        s = slot // chunks
        first = s.to(tl.int64) * T
        length = T.to(tl.int64)
        slot0 = (s * chunks).to(tl.int64)
    return s, first, length, (slot - slot0) * CHUNK, slot0


@triton.jit
def _load_gate(gate, token, T, stride_b, stride_t, inside, other):
    return tl.load(gate + (token // T) * stride_b + (token % T) * stride_t, mask=inside, other=other).to(tl.float64)


@triton.jit
def chunk_summary(
    log_i, log_f, cu, summary, sequences, T, ib, it, ih, fb, ft, fh, slots,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, INPUT_GATE: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the sum of log_f, and the max state behind it if it started from minus infinity."""
    slot = tl.program_id(0)
    h = tl.program_id(1)
    _, first, length, start, _ = locate(cu, sequences, T, slot, CHUNK, PACKED)
    t = start + tl.arange(0, CHUNK)
    inside = t < length
    f = _load_gate(log_f + h * fh, first + t, T, fb, ft, inside, 0.0)
    total = tl.sum(f, 0)
    behind = total - tl.cumsum(f, 0)
    if INPUT_GATE:
        behind += _load_gate(log_i + h * ih, first + t, T, ib, it, inside, 0.0)
    top = tl.max(tl.where(inside, behind, float("-inf")), 0)
    at = (h * slots + slot).to(tl.int64) * 2
    tl.store(summary + at, total)
    tl.store(summary + at + 1, top)


@triton.jit
def _max_before(summary, m, slot0, slot, BLOCK: tl.constexpr):
    """The max state before chunk `slot` from that before chunk `slot0` and the summaries between."""
    for c in range(slot0, slot, BLOCK):
        at = c + tl.arange(0, BLOCK)
        total = tl.load(summary + at * 2, mask=at < slot, other=0.0)
        top = tl.load(summary + at * 2 + 1, mask=at < slot, other=float("-inf"))
        total_all = tl.sum(total, 0)
        m = tl.maximum(m + total_all, tl.max(top + (total_all - tl.cumsum(total, 0)), 0))
    return m


@triton.jit
def chunk_gates(
    log_i, log_f, m0, cu, summary, out, m_final, sequences, T, tokens, H, ib, it, ih, fb, ft, fh, scale, slots,
    CHUNK: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INPUT_GATE: tl.constexpr, NORMALIZE: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gate vectors of one chunk of one head; with a normaliser also the max state behind the sequence."""
    slot = tl.program_id(0)
    h = tl.program_id(1)
    s, first, length, start, slot0 = locate(cu, sequences, T, slot, CHUNK, PACKED)
    t = start + tl.arange(0, CHUNK)
    inside = t < length
    f = _load_gate(log_f + h * fh, first + t, T, fb, ft, inside, 0.0)
    if INPUT_GATE:
        i = _load_gate(log_i + h * ih, first + t, T, ib, it, inside, -1e9)
    else:
        i = tl.where(inside, 0.0, -1e9).to(tl.float64)
    if NORMALIZE:
        m_start = 0.0
        if STATE:
            m_start = tl.load(m0 + s * H + h)
        m_start = _max_before(summary + h * slots * 2, m_start.to(tl.float64), slot0, slot, 128)
        b = tl.cumsum(f, 0)
        m = b + tl.maximum(m_start, tl.associative_scan(i - b, 0, _max))
        # Steps shifted by one give the max state before each.
        late = inside & (t > start)
        b_before = b - f
        i_before = tl.full([CHUNK], -1e9, tl.float64)
        if INPUT_GATE:
            i_before = _load_gate(log_i + h * ih, first + t - 1, T, ib, it, late, -1e9)
        else:
            i_before = tl.where(late, 0.0, -1e9).to(tl.float64)
        f_before = _load_gate(log_f + h * fh, first + t - 1, T, fb, ft, late, 0.0)
        b_before = tl.cumsum(f_before, 0)
        m_before = b_before + tl.maximum(m_start, tl.associative_scan(i_before - b_before, 0, _max))
        if FINAL:  # the state leaves with m in float32, so that is the m to scale it by
            last = t == length - 1
            m = tl.where(last, m.to(tl.float32).to(tl.float64), m)
            tl.store(m_final + s * H + h + tl.zeros([CHUNK], tl.int32), m.to(tl.float32), mask=last)
        f = tl.where(inside, f + m_before - m, 0.0)
        i = tl.where(inside, i - m, -1e9)
        at = h.to(tl.int64) * tokens + first + t
        tl.store(out + FLOOR * H * tokens + at, tl.exp(-m).to(tl.float32), mask=inside)
    f = tl.maximum(f * LOG2E, CLOSED)
    i = tl.maximum(i * LOG2E, CLOSED)
    f = tl.reshape(f, (CHUNK // L, L))
    i = tl.reshape(i, (CHUNK // L, L))
    tile = tl.reshape(t, (CHUNK // L, L))
    inside = tile < length
    b = tl.cumsum(f, 1)
    g = tl.sum(f, 1)[:, None]
    column = i - b
    size = H.to(tl.int64) * tokens
    at = out + h.to(tl.int64) * tokens + first + tile
    b_high = b.to(tl.float32)
    column_high = column.to(tl.float32)
    tl.store(at + ROW * size, b_high, mask=inside)
    tl.store(at + COLUMN * size, column_high, mask=inside)
    tl.store(at + INTER * size, tl.exp2(b_high) * scale, mask=inside)
    tl.store(at + UPDATE * size, tl.exp2((g + column).to(tl.float32)), mask=inside)
    tl.store(at + DECAY * size, tl.exp2(g.to(tl.float32)) + tl.zeros_like(b_high), mask=inside)
    if EXACT:
        tl.store(at + ROW_LOW * size, (b - b_high.to(tl.float64)).to(tl.float32), mask=inside)
        tl.store(at + COLUMN_LOW * size, (column - column_high.to(tl.float64)).to(tl.float32), mask=inside)


@triton.jit
def fold_denominator(
    gates, d, h_out, dh, delta, tokens, T, H, D_HV, db, dt, ds_h, hb, ht, hh, gb, gt, gh,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """Divides the rows of the gate matrix by max(|d|, exp(-m)), in place; delta = -u (dh . h) is added to dP."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1).to(tl.int64)
    inside = t < tokens
    size = H.to(tl.int64) * tokens
    at = gates + h * tokens + t
    bounded = tl.load(at + FLOOR * size, mask=inside, other=1.0)
    den = tl.load(d + (t // T) * db + (t % T) * dt + h * ds_h, mask=inside, other=1.0)
    active = tl.abs(den) > bounded
    D = tl.where(active, tl.abs(den), bounded)
    tl.store(at + ROW * size, tl.load(at + ROW * size, mask=inside, other=0.0) - tl.log2(D), mask=inside)
    tl.store(at + INTER * size, tl.load(at + INTER * size, mask=inside, other=0.0) / D, mask=inside)
    if GRAD:
        dot = tl.zeros([BLOCK_T], tl.float32)
        for v in range(0, D_HV, BLOCK_V):
            c = v + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (c < D_HV)[None, :]
            a = tl.load(h_out + ((t // T) * hb + (t % T) * ht + h * hh)[:, None] + c[None, :], mask=mask, other=0.0)
            b = tl.load(dh + ((t // T) * gb + (t % T) * gt + h * gh)[:, None] + c[None, :], mask=mask, other=0.0)
            dot += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
        sign = tl.where(den > 0, -1.0, 1.0)
        tl.store(delta + h * tokens + t, tl.where(active, sign * dot, 0.0), mask=inside)


@triton.jit
def gate_gradients(
    q_dq, k_dk, start, cu, dlog_i, dlog_f, T, tokens, H,
    PARTS_Q: tl.constexpr, PARTS_K: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    START: tl.constexpr, INPUT_GATE: tl.constexpr,
):  # fmt: skip
    """dlog_i = k . dk; dlog_f falls by q . dq - k . dk from step to step, from <C_0, dC_0> on. Outputs (B, T, H)."""
    s = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if PACKED:
        first = tl.load(cu + s).to(tl.int64)
        length = tl.load(cu + s + 1).to(tl.int64) - first
    else:
        first = s.to(tl.int64) * T
        length = T.to(tl.int64)
    running = 0.0
    if START:
        running = tl.load(start + s * H + h)
    running = running.to(tl.float64)
    size = H.to(tl.int64) * tokens
    for t0 in range(0, length, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        inside = t < length
        at = h * tokens + first + t
        k = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS_K):
            k += tl.load(k_dk + part * size + at, mask=inside, other=0.0)
        q = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS_Q):
            q += tl.load(q_dq + part * size + at, mask=inside, other=0.0)
        falls = (q - k).to(tl.float64)
        to = (first + t) * H + h
        before = running - (tl.cumsum(falls, 0) - falls)
        tl.store(dlog_f + to, before.to(tl.float32), mask=inside)
        if INPUT_GATE:
            tl.store(dlog_i + to, k, mask=inside)
        running -= tl.sum(falls, 0)
