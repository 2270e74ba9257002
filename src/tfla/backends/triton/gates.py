"""Gate kernels: the max state, the decays inside tiles, the denominator folded into them, the gradients of the gates.

With F_t = log_f_t + m_{t-1} - m_t and I_t = log_i_t - m_t, (6) and (7), the stabilised operator is one without max
state, so the walks of :mod:`.walk` know none. Both are at most 0, but for the rounding of m, which is float32's: what
is below CLOSED is zero in float32 however the rest adds up. Sums are float64, exponents base 2. Gate vectors are (H,
tiles, VECTORS, L) float32: the tiles of all sequences in a row, the last of each filled up with steps that weigh
nothing, so that walks need no masks and one address.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-150.0)
TINY, HUGE = tl.constexpr(1.1754943508222875e-38), tl.constexpr(3.4028234663852886e38)  # of float32
# Rows of the gate vectors. The gate matrix of a tile is exp2(ROW_i + COLUMN_j); LOW parts are what float32 cuts off.
ROW = tl.constexpr(0)
COLUMN = tl.constexpr(1)
INTER = tl.constexpr(2)  # weight of the state before the tile in an output, times scale
UPDATE = tl.constexpr(3)  # weight of a step in the state behind the tile
DECAY = tl.constexpr(4)  # of the state over the whole tile, the same at each of its steps
ROW_LOW = tl.constexpr(5)
COLUMN_LOW = tl.constexpr(6)
FLOOR = tl.constexpr(7)  # exp(-m), the least denominator, neither 0 nor infinite
DELTA_P = tl.constexpr(7)  # what the normaliser adds to dP, in the place of what the backward has no more use for
VECTORS = tl.constexpr(8)


# As in tfla.ops.gates, for kernels.
LOWEST = tl.constexpr(-1e5)
HIGHEST = tl.constexpr(5e4)


@triton.jit
def clamped(x):
    """NaN stays."""
    x = tl.where(x < LOWEST, LOWEST, x)
    return tl.where(x > HIGHEST, HIGHEST, x)


@triton.jit
def finite_log_gate(x, SIGMOID: tl.constexpr, SERIES: tl.constexpr = False):
    """The clamped log-gate, from itself or from its pre-activation; NaN stays.

    SERIES: without a logarithm, which takes more instructions and mostly fewer registers.
    """
    if SIGMOID:
        x = x.to(tl.float32)
        e = tl.exp(-tl.abs(x))
        if SERIES:  # log(1 + e) = 2 artanh(z) = 2 (z + z^3 / 3 + ...), z^2 being at most 1/9
            z = e / (2.0 + e)
            zz = z * z
            series = 1 / 9 + zz * (1 / 11 + zz * (1 / 13))
            series = 1.0 + zz * (1 / 3 + zz * (1 / 5 + zz * (1 / 7 + zz * series)))
            x = tl.where(x > 0.0, 0.0, x) - 2.0 * z * series
        else:
            u = 1.0 + e  # log(1 + e), to the last digit of a small e
            x = tl.where(x > 0.0, 0.0, x) - tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return clamped(x)


@triton.jit
def exponent(x):
    """That of exp(x), base 2, or CLOSED; unlike a maximum this keeps NaN."""
    return tl.where(x * LOG2E < CLOSED, CLOSED, x * LOG2E)


@triton.jit
def _exp2(x):
    """2^x in float32, of a float64 x."""
    high = x.to(tl.float32)
    return tl.exp2(high) * tl.exp2((x - high.to(tl.float64)).to(tl.float32))


@triton.jit
def of_gate(grad, x, SIGMOID: tl.constexpr):
    """The gradient of a gate x from that of its finite log-gate."""
    x = x.to(tl.float32)
    if SIGMOID:
        grad = grad / (1.0 + tl.exp(x))
    return tl.where((x < LOWEST) | (x > HIGHEST), 0.0, grad)


@triton.jit
def _max_with_before(before_a, upto_a, before_b, upto_b):
    """Joins the maxima of two runs of steps: over all but the last step of each, and over all."""
    return tl.maximum(upto_a, before_b), tl.maximum(upto_a, upto_b)


@triton.jit
def find_sequence(cu, sequences, slot, chunk):
    """The packed sequence a chunk slot belongs to: the last s with cu[s] // chunk + s <= slot."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle).to(tl.int64) // chunk + middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def locate(cu, sequences, T, slot, chunk, PACKED: tl.constexpr):
    """Of a chunk slot: sequence, its first token, its length, the chunk's first step, the slot of its first chunk."""
    if PACKED:
        s = find_sequence(cu, sequences, slot, chunk)
        first = tl.load(cu + s).to(tl.int64)
        length = tl.load(cu + s + 1).to(tl.int64) - first
        slot0 = first // chunk + s
    else:
        chunks = tl.cdiv(T, chunk)
        s = slot // chunks
        first = s.to(tl.int64) * T
        length = T.to(tl.int64)
        slot0 = (s * chunks).to(tl.int64)
    return s, first, length, (slot - slot0) * chunk, slot0


@triton.jit
def first_tile(first, s, T, L: tl.constexpr, PACKED: tl.constexpr):
    """The tile that sequence s begins with, its first token being `first`."""
    if PACKED:
        return first // L + s
    else:
        return s.to(tl.int64) * tl.cdiv(T, L)


@triton.jit
def segment(cu, sequences, T, slot, steps, L: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr):
    """What a walk covers, a whole sequence or `steps` steps of one: its first token, how many, batch row and step of
    the first, its first tile."""
    if SEGMENTED:
        s, first, length, start, _ = locate(cu, sequences, T, slot, steps, PACKED)
        length = tl.maximum(tl.minimum(length - start, steps), 0)
    else:
        s = slot
        if PACKED:
            first = tl.load(cu + s).to(tl.int64)
            length = tl.load(cu + s + 1).to(tl.int64) - first
        else:
            first = s.to(tl.int64) * T
            length = T.to(tl.int64)
        start = first * 0
    tile0 = first_tile(first, s, T, L, PACKED) + start // L
    if PACKED:
        return first + start, length, first * 0, first + start, tile0
    else:
        return first + start, length, s.to(tl.int64), start, tile0


@triton.jit
def load_gate(gate, s, first, t, stride_b, stride_t, inside, PACKED: tl.constexpr):
    """Steps t of sequence s, which begins at token `first`, of the heads gate points to, as the model has them."""
    if PACKED:
        at = gate + (first + t) * stride_t
    else:
        at = gate + s.to(tl.int64) * stride_b + t * stride_t
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_log_gate(gate, s, first, t, stride_b, stride_t, inside, other, PACKED: tl.constexpr, SIGMOID: tl.constexpr):
    x = load_gate(gate, s, first, t, stride_b, stride_t, inside, PACKED)
    return tl.where(inside, finite_log_gate(x, SIGMOID).to(tl.float64), other)


@triton.jit
def summaries(gates, H, tiles, L: tl.constexpr):
    """Where those of chunks are, (H, chunks, 2) float64: behind the gate vectors."""
    return (gates + H.to(tl.int64) * tiles * (VECTORS * L)).to(tl.pointer_type(tl.float64))


# Programs of the gate kernels have several heads of a chunk: (B, T, H) has them side by side.


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "slots"])
def chunk_summary(
    i_gate, f_gate, cu, out, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, slots,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INPUT_GATE: tl.constexpr,
    SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the sum of log_f, and the max state behind it if it started from minus infinity."""
    slot = tl.program_id(0)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    s, first, length, start, _ = locate(cu, sequences, T, slot, CHUNK, PACKED)
    t = (start + tl.arange(0, CHUNK))[None, :]
    inside = (t < length) & (h < H)
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, PACKED, SIGMOID_F)
    total = tl.sum(f, 1)[:, None]
    i = tl.zeros_like(f)
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, 0.0, PACKED, SIGMOID_I)
    top = total + tl.max(tl.where(inside, (i - tl.cumsum(f, 1)).to(tl.float32), float("-inf")), 1)[:, None]
    at = summaries(out, H, tiles, L) + (h * slots + slot).to(tl.int64) * 2
    tl.store(at, total, mask=h < H)
    tl.store(at + 1, top, mask=h < H)


@triton.jit
def _max_before(summary, m, h, H, slot0, slot, slots, BLOCK: tl.constexpr):
    """The max state (HEADS, 1) before chunk `slot` from that before chunk `slot0` and the summaries between."""
    for c in range(slot0, slot, BLOCK):
        at = (c + tl.arange(0, BLOCK))[None, :]
        inside = (at < slot) & (h < H)
        at = summary + (h * slots + at).to(tl.int64) * 2
        total = tl.load(at, mask=inside, other=0.0)
        top = tl.load(at + 1, mask=inside, other=float("-inf"))
        total_all = tl.sum(total, 1)[:, None]
        m = tl.maximum(m + total_all, tl.max(top + (total_all - tl.cumsum(total, 1)), 1)[:, None])
    return m


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "db", "dt", "slots"])
def chunk_gates(
    i_gate, f_gate, m0, cu, d, out, m_final, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, db, dt, dh,
    scale, log_scale, slots, CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr, NORMALIZE: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, FOLD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gate vectors of one chunk of some heads; with a normaliser also the max state behind the sequence.

    FOLD, for the backward: rows of the gate matrix are divided by the denominator max(|d|, exp(-m)), and DELTA_P is -u,
    which times dh . h becomes delta, what is added to dP: -1 or 1 by the sign of d, and 0 where exp(-m) is larger.
    """
    slot = tl.program_id(0)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    s, first, length, start, slot0 = locate(cu, sequences, T, slot, CHUNK, PACKED)
    t = (start + tl.arange(0, CHUNK))[None, :]
    inside = (t < length) & (h < H)
    tile0 = first_tile(first, s, T, L, PACKED) + start // L
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, PACKED, SIGMOID_F)
    if FOLD:
        den = load_gate(d + h * dh, s, first, t, db, dt, inside, PACKED)
    i = tl.where(inside, 0.0, -1e9).to(tl.float64)
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, -1e9, PACKED, SIGMOID_I)
    if NORMALIZE:
        m_start = tl.zeros([HEADS, 1], tl.float64)
        if STATE:
            m_start = tl.load(m0 + s * H + h, mask=h < H, other=0.0).to(tl.float64)
        m_start = _max_before(summaries(out, H, tiles, L), m_start, h, H, slot0, slot, slots, 128)
        # m less the sum of log_f since the chunk's start, and that of the step before.
        b = tl.cumsum(f, 1)
        # Any max state is as good as that in float64, if it is the same in all that follows and in the next chunk.
        before = tl.full([HEADS, CHUNK], float("-inf"), tl.float32)
        before, upto = tl.associative_scan((before, (i - b).to(tl.float32)), 1, _max_with_before)
        m = b + tl.maximum(m_start, upto)
        # The state leaves with m in float32, so that is the m to scale it by.
        last = (t == length - 1) & (h < H)
        m = tl.where(last, m.to(tl.float32).to(tl.float64), m)
        if FINAL:
            tl.store(m_final + s * H + h + t * 0, m.to(tl.float32), mask=last)
        f = tl.where(inside, b + tl.maximum(m_start, before) - m, 0.0)
        i = tl.where(inside, i - m, -1e9)
        at = out + ((h.to(tl.int64) * tiles + tile0 + (t - start) // L) * VECTORS + FLOOR) * L + t % L
        held = (t < tl.cdiv(length, L) * L) & (h < H)
        floor = tl.minimum(tl.maximum(_exp2(m * -LOG2E), TINY), HUGE)
        if FOLD:
            active = inside & (tl.abs(den) > floor)
            tl.store(at, tl.where(active, tl.where(den > 0, -1.0, 1.0), 0.0), mask=held)
            floor = tl.where(active, tl.abs(den), floor)
            floor = tl.reshape(tl.where(inside, floor, 1.0), (HEADS, CHUNK // L, L))
        else:
            tl.store(at, floor, mask=held)
    f = tl.reshape(exponent(f), (HEADS, CHUNK // L, L))
    i = tl.reshape(exponent(i), (HEADS, CHUNK // L, L))
    h = h[:, :, None]
    tile = tl.arange(0, CHUNK // L)[None, :, None]
    t = tl.arange(0, L)[None, None, :]
    held = (start + tile * L < length) & (h < H)
    b = tl.cumsum(f, 2)
    g = tl.sum(f, 2)[:, :, None]
    column = i - b
    update = tl.exp2((g + column).to(tl.float32))
    column += log_scale
    at = out + (h.to(tl.int64) * tiles + tile0 + tile) * VECTORS * L + t
    inter = tl.exp2(b.to(tl.float32)) * scale
    if FOLD:
        inter /= floor
        b -= tl.log2(floor).to(tl.float64)
    b_high = b.to(tl.float32)
    column_high = column.to(tl.float32)
    tl.store(at + ROW * L, b_high, mask=held)
    tl.store(at + COLUMN * L, column_high, mask=held)
    tl.store(at + INTER * L, inter, mask=held)
    tl.store(at + UPDATE * L, update, mask=held)
    tl.store(at + DECAY * L, tl.exp2(g.to(tl.float32)) + tl.zeros_like(b_high), mask=held)
    if EXACT:
        tl.store(at + ROW_LOW * L, (b - b_high.to(tl.float64)).to(tl.float32), mask=held)
        tl.store(at + COLUMN_LOW * L, (column - column_high.to(tl.float64)).to(tl.float32), mask=held)


@triton.jit(do_not_specialize=["sequences", "T", "tiles"])
def find_delta(
    gates, h_out, dh, cu, sequences, T, tiles, H, D_HV, hb, ht, hh, gb, gt, gh,
    L: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """DELTA_P, which is -u, times dh . h."""
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate(cu, sequences, T, tl.program_id(0), L, PACKED)
    t = start + tl.arange(0, L)
    inside = t < length
    at = gates + (h * tiles + first_tile(first, s, T, L, PACKED) + start // L) * VECTORS * L + tl.arange(0, L)
    if PACKED:
        row = first * 0
        t += first
    else:
        row = s.to(tl.int64)
    dot = tl.zeros([L], tl.float32)
    for v in range(0, D_HV, BLOCK_V):
        c = v + tl.arange(0, BLOCK_V)
        mask = inside[:, None] & (c < D_HV)[None, :]
        a = tl.load(h_out + row * hb + h * hh + (t * ht)[:, None] + c[None, :], mask, 0.0)
        b = tl.load(dh + row * gb + h * gh + (t * gt)[:, None] + c[None, :], mask, 0.0)
        dot += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    u = tl.load(at + DELTA_P * L)
    tl.store(at + DELTA_P * L, tl.where(u == 0.0, 0.0, u * dot), mask=inside)


@triton.jit
def _mark_dot(
    states, n, cotangents, dn, mark, there, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """<C, dC> of some marks, (HEADS, 1), of those that are there."""
    total = tl.zeros([mark.shape[0], BLOCK], tl.float32)
    for c in range(0, SIZE, BLOCK):
        e = c + tl.arange(0, BLOCK)[None, :]
        mask = there & (e < SIZE)
        state = tl.load(states + mark * SIZE + e, mask, 0.0).to(tl.float32)
        total += state * tl.load(cotangents + mark * SIZE + e, mask, 0.0).to(tl.float32)
    dot = tl.sum(total, 1).to(tl.float64)[:, None]
    if NORMALIZE:
        e = tl.arange(0, BLOCK_N)[None, :]
        mask = there & (e < SIZE_N)
        of_n = tl.load(n + mark * SIZE_N + e, mask, 0.0)
        dot += tl.sum(of_n * tl.load(dn + mark * SIZE_N + e, mask, 0.0), 1)[:, None]
    return dot


@triton.jit
def mark_dots(
    states, n, cotangents, dn, dots, SIZE, SIZE_N, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr
):  # fmt: skip
    """<C, dC> at each mark of each head."""
    mark = tl.zeros([1, 1], tl.int64) + tl.program_id(0)
    dot = _mark_dot(states, n, cotangents, dn, mark, mark >= 0, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
    tl.store(dots + mark, dot)


@triton.jit
def start_dot(
    C, n, dC, dn, dC_first, dn_first, s, slot, slot0, h, H, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """<C, dC> where a segment starts: there the one before it ends, or the sequence starts, with zero unless START.

    C, n are those before each segment, dC, dn those behind each, dC_first, dn_first those before each sequence.
    """
    row = H.to(tl.int64)  # of states
    mark = slot * row + h
    dot = tl.zeros([h.shape[0], 1], tl.float64)
    if slot > slot0:
        behind, n_behind = dC - row * SIZE, dn - row * SIZE_N  # in another dtype, maybe, than the cotangents below
        dot = _mark_dot(C, n, behind, n_behind, mark, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
    elif START:
        shift = (s - slot) * row
        dC_at, dn_at = dC_first + shift * SIZE, dn_first + shift * SIZE_N
        dot = _mark_dot(C, n, dC_at, dn_at, mark, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
    return dot


@triton.jit
def sum_of_parts(x, row, there, PARTS: tl.constexpr):
    parts = tl.load(x + row * PARTS + tl.arange(0, PARTS)[None, :], there, 0.0)
    return tl.sum(parts.to(tl.float64), 1)[:, None]


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "steps", "ib", "it", "ih", "fb", "ft", "fh"])
def gate_gradients(
    q_dq, k_dk, dots, C, n_start, dC, dn_end, dC_first, dn_first, cu, i_gate, f_gate, di, df,
    sequences, T, tiles, H, steps, SIZE, SIZE_N, ib, it, ih, fb, ft, fh,
    PARTS: tl.constexpr, NP: tl.constexpr, MARKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    L: tl.constexpr, HEADS: tl.constexpr, DOTS: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr,
    SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """dlog_i = k . dk; dlog_f falls by q . dq - k . dk from step to step, at each mark and where segments start
    starting again from <C, dC>.

    What rounding has added up to at the next mark or segment is taken off in even steps; behind a last step whose state
    nobody reads (no END) the sum is zero.

    q_dq, k_dk (PARTS, H, tiles, NP, L); dots (marks, H, DOTS); C to dn_first as in `start_dot`; outputs (B, T, H).
    """
    slot = tl.program_id(0)
    part = tl.program_id(1)
    if PACKED and not SEGMENTED:  # of a longest sequence that nobody knows most programs would have nothing
        slot, _, _, begin, _ = locate(cu, sequences, T, slot, MARKS, PACKED)
        part = (begin // MARKS).to(tl.int32)
    t = (part * MARKS + tl.arange(0, MARKS))[None, :]
    h = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    first, length, b, t_first, tile0 = segment(cu, sequences, T, slot, steps, L, SEGMENTED, PACKED)
    if part * MARKS < length:
        mark = (first // MARKS + part - 1) * H + h
        start = tl.zeros([HEADS, 1], tl.float64)
        if part > 0:
            start = sum_of_parts(dots, mark, h < H, DOTS)
        elif SEGMENTED:
            s, _, _, _, slot0 = locate(cu, sequences, T, slot, steps, PACKED)
            start = start_dot(
                C, n_start, dC, dn_end, dC_first, dn_first, s, slot, slot0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N,
                NORMALIZE, START,
            )  # fmt: skip
        elif START:
            row = slot * H + h
            start = _mark_dot(C, n_start, dC_first, dn_first, row, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
        size = H.to(tl.int64) * (NP * L) * tiles
        inside = (t < length) & (h < H)
        at = (h * tiles + tile0 + t // L) * NP * L + t % L
        f = tl.load(f_gate + b * fb + (t_first + t) * ft + h * fh, mask=inside, other=0.0)
        if INPUT_GATE:
            i = tl.load(i_gate + b * ib + (t_first + t) * it + h * ih, mask=inside, other=0.0)
        k = tl.zeros([HEADS, MARKS], tl.float32)
        q = tl.zeros([HEADS, MARKS], tl.float32)
        for n in tl.range(0, PARTS * NP, loop_unroll_factor=2):  # with more of them on their way registers run out
            each = n // NP * size + n % NP * L
            k += tl.load(k_dk + each + at, mask=inside, other=0.0)
            q += tl.load(q_dq + each + at, mask=inside, other=0.0)
        falls = (q - k).to(tl.float64)
        to = (first + t) * H + h
        if INPUT_GATE:
            tl.store(di + to, of_gate(k, i, SIGMOID_I), mask=inside)
        before = start - (tl.cumsum(falls, 1) - falls)
        end = tl.zeros([HEADS, 1], tl.float64)
        known = (part + 1) * MARKS < length
        if known:
            end = sum_of_parts(dots, mark + H, h < H, DOTS)
        elif SEGMENTED:
            s, _, whole, begin, slot0 = locate(cu, sequences, T, slot, steps, PACKED)
            known = begin + length < whole
            if known:
                end = start_dot(
                    C, n_start, dC, dn_end, dC_first, dn_first, s, slot + 1, slot0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N,
                    NORMALIZE, START,
                )  # fmt: skip
        if known or not END:
            rounding = start - tl.sum(falls, 1)[:, None] - end
            share = tl.arange(0, MARKS).to(tl.float64) / tl.minimum(length - part * MARKS, MARKS)
            before -= rounding * share[None, :]
        tl.store(df + to, of_gate(before.to(tl.float32), f, SIGMOID_F), mask=inside)


@triton.jit
def _added(states, decays, row, e, SIZE, there):
    """What a segment adds to a state, and its decay."""
    adds = tl.load(states + row * SIZE + e, mask=e < tl.where(there, SIZE, 0), other=0.0)
    return adds.to(tl.float32), tl.load(decays + row, mask=there, other=0.0)


@triton.jit(do_not_specialize=["T", "steps"])
def join(
    states, decays, given, final, cu, T, H, steps, SIZE,
    BLOCK: tl.constexpr, BACK: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Turns what each segment adds to the state into the state that it starts from, or walking back ends with."""
    s = tl.program_id(1)
    h = tl.program_id(2)
    if PACKED:
        first = tl.load(cu + s).to(tl.int64)
        count = tl.cdiv(tl.load(cu + s + 1).to(tl.int64) - first, steps)
        slot0 = first // steps + s
    else:
        count = tl.cdiv(T, steps).to(tl.int64)
        slot0 = s * count
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < SIZE
    S = tl.zeros([BLOCK], tl.float32)
    if GIVEN:
        S = tl.load(given + (s * H + h).to(tl.int64) * SIZE + e, mask=inside, other=0.0)
    row = (slot0 + (count - 1 if BACK else 0)) * H + h
    step = -H if BACK else H
    adds, decay = _added(states, decays, row, e, SIZE, count > 0)
    for c in range(0, count):
        # Read before what is written here, which for all the compiler knows might be the same.
        later, later_decay = _added(states, decays, row + step, e, SIZE, c + 1 < count)
        tl.store(states + row * SIZE + e, S.to(states.dtype.element_ty), mask=inside)
        S = S * decay + adds
        adds, decay = later, later_decay
        row += step
    if FINAL:
        tl.store(final + (s * H + h).to(tl.int64) * SIZE + e, S, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_of_groups(X, Out, rows, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[r, d] = the sum over g of x[r, g, d], added up in float32."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for g in tl.static_range(GROUP):
        total += tl.load(X + (r * GROUP + g) * D + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + r * D + d, total.to(Out.dtype.element_ty), mask=inside)
