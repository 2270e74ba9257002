"""Gate kernels: the max state, the decays inside tiles, the denominator folded into them.

With F_t = log_f_t + m_{t-1} - m_t and I_t = log_i_t - m_t, (6) and (7), the stabilised operator is one without max
state, so the walks of :mod:`.walk` know none. Both are at most 0, but for the rounding of m, which is float32's: what
is below CLOSED is zero in float32 however the rest adds up. Sums are float64, exponents base 2. Gate vectors are (H,
tiles, VECTORS, L) float32: the tiles of all sequences in a row, the last of each filled up with steps that weigh
nothing, so that walks need no masks and one address.
"""

import triton
import triton.language as tl

from tfla.backends.gpu.scan import RUN, running_max, running_sum, step_indices, store_steps, total_sum
from tfla.backends.gpu.state_passing import rounded_product

LOG2E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-150.0)
TINY, HUGE = tl.constexpr(1.1754943508222875e-38), tl.constexpr(3.4028234663852886e38)  # of float32
# Rows of the gate vectors. The gate matrix of a tile is exp2(ROW_i + COLUMN_j); LOW parts are what float32 cuts off.
ROW = tl.constexpr(0)
COLUMN = tl.constexpr(1)
INTER = tl.constexpr(2)  # weight of the state before the tile in an output, times scale
UPDATE = tl.constexpr(3)  # weight of a step in the state behind the tile
DECAY = tl.constexpr(4)  # of the state over the whole tile, the same at each of its steps
TOTAL = tl.constexpr(4)  # its exponent, one word, in the place of DECAY where readers make that
ROW_LOW = tl.constexpr(5)
COLUMN_LOW = tl.constexpr(6)
FLOOR = tl.constexpr(7)  # exp(-m), the least denominator, neither 0 nor infinite
DELTA_P = tl.constexpr(7)  # what the normaliser adds to dP, in the place of what the backward has no more use for
VECTORS = tl.constexpr(8)


# As in tfla.ops.gates, for kernels.
LOWEST = tl.constexpr(-1e5)
HIGHEST = tl.constexpr(5e4)


@triton.jit
def clamp_gate(x):
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
    return clamp_gate(x)


@triton.jit
def base2_exponent(x):
    """That of exp(x), base 2, or CLOSED; unlike a maximum this keeps NaN."""
    return tl.where(x * LOG2E < CLOSED, CLOSED, x * LOG2E)


@triton.jit
def _exp2(x):
    """2^x in float32, of a float64 x."""
    high = x.to(tl.float32)
    return tl.exp2(high) * tl.exp2((x - high.to(tl.float64)).to(tl.float32))


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
def locate_chunk(cu, sequences, T, slot, chunk, IS_VARLEN: tl.constexpr):
    """Of a chunk slot: sequence, its first token, its length, the chunk's first step, the slot of its first chunk."""
    if IS_VARLEN:
        s = find_sequence(cu, sequences, slot, chunk)
        first = tl.load(cu + s).to(tl.int64)
        length = tl.load(cu + s + 1).to(tl.int64) - first
        slot0 = first // chunk + s
        # Slots before the first sequence have no steps of it: they begin behind all of them, in multiples of a chunk
        # as others, so that what is loaded from there on stays aligned for the compiler.
        count = slot - slot0
        start = tl.where(count < 0, T, count) * chunk
    else:
        chunks = tl.cdiv(T, chunk)
        s = slot // chunks
        first = s.to(tl.int64) * T
        length = T.to(tl.int64)
        slot0 = (s * chunks).to(tl.int64)
        start = (slot - slot0) * chunk
    return s, first, length, start, slot0


@triton.jit
def first_tile(first, s, T, L: tl.constexpr, IS_VARLEN: tl.constexpr):
    """The tile that sequence s begins with, its first token being `first`."""
    if IS_VARLEN:
        return first // L + s
    else:
        return s.to(tl.int64) * tl.cdiv(T, L)


@triton.jit
def locate_segment(cu, sequences, T, slot, steps, L: tl.constexpr, IS_SEGMENTED: tl.constexpr, IS_VARLEN: tl.constexpr):
    """What a walk covers, a whole sequence or `steps` steps of one: its first token, how many, batch row and step of
    the first, its first tile."""
    if IS_SEGMENTED:
        s, first, length, start, _ = locate_chunk(cu, sequences, T, slot, steps, IS_VARLEN)
        length = tl.maximum(tl.minimum(length - start, steps), 0)
    else:
        s = slot
        if IS_VARLEN:
            first = tl.load(cu + s).to(tl.int64)
            length = tl.load(cu + s + 1).to(tl.int64) - first
        else:
            first = s.to(tl.int64) * T
            length = T.to(tl.int64)
        start = first * 0
    tile0 = first_tile(first, s, T, L, IS_VARLEN) + start // L
    if IS_VARLEN:
        return first + start, length, first * 0, first + start, tile0
    else:
        return first + start, length, s.to(tl.int64), start, tile0


@triton.jit
def load_gate(gate, s, first, t, stride_b, stride_t, inside, IS_VARLEN: tl.constexpr):
    """Steps t of sequence s, which begins at token `first`, of the heads gate points to, as the model has them."""
    if IS_VARLEN:
        at = gate + (first + t) * stride_t
    else:
        at = gate + s.to(tl.int64) * stride_b + t * stride_t
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_log_gate(
    gate, s, first, t, stride_b, stride_t, inside, other, IS_VARLEN: tl.constexpr, SIGMOID: tl.constexpr
):
    x = load_gate(gate, s, first, t, stride_b, stride_t, inside, IS_VARLEN)
    return tl.where(inside, finite_log_gate(x, SIGMOID), other).to(tl.float64)


@triton.jit
def summaries_of(gates, H, tiles, L: tl.constexpr):
    """Where those of chunks are, (H, chunks, 2) float64: behind the gate vectors."""
    return (gates + H.to(tl.int64) * tiles * (VECTORS * L)).to(tl.pointer_type(tl.float64))


@triton.jit
def _heads(H, HEADS: tl.constexpr):
    """Of this program, several since (B, T, H) has them side by side; of more than there are the last one, again."""
    return tl.minimum(tl.program_id(1) * HEADS + tl.arange(0, HEADS), H - 1)


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "slots"])
def chunk_summary(
    i_gate, f_gate, cu, out, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, slots,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr, INPUT_GATE: tl.constexpr,
    SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the sum of log_f, and the max state behind it if it started from minus infinity."""
    slot = tl.program_id(0)
    heads = _heads(H, HEADS)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, slot, CHUNK, IS_VARLEN)
    h = heads[:, None, None]
    t = start + step_indices(CHUNK)
    inside = t < length
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, IS_VARLEN, SIGMOID_F)
    total = total_sum(f)
    i = tl.zeros_like(f)
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, 0.0, IS_VARLEN, SIGMOID_I)
    top = tl.where(inside, (i - running_sum(f)).to(tl.float32), float("-inf"))
    at = summaries_of(out, H, tiles, L) + (heads * slots + slot).to(tl.int64) * 2
    tl.store(at, total)
    tl.store(at + 1, total + tl.max(tl.max(top, 2), 1))


@triton.jit
def _max_before(summary, m, h, slot0, slot, slots, BLOCK: tl.constexpr):
    """The max state (HEADS, 1) before chunk `slot` from that before chunk `slot0` and the summaries between."""
    for c in range(slot0, slot, BLOCK):
        at = c + step_indices(BLOCK)
        inside = at < slot
        at = summary + (h * slots + at).to(tl.int64) * 2
        total = tl.load(at, mask=inside, other=0.0)
        top = tl.load(at + 1, mask=inside, other=float("-inf"))
        total_all = total_sum(total)[:, None]
        top = tl.max(top - running_sum(total), 2)
        m = total_all + tl.maximum(m, tl.max(top, 1)[:, None])
    return m


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "db", "dt", "slots"])
def chunk_gates(
    i_gate, f_gate, m0, cu, d, out, m_final, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, db, dt, dh,
    scale, log_scale, slots, CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr, NORMALIZE: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, FOLD_DENOMINATOR: tl.constexpr,
    EXACT: tl.constexpr, TOTAL_ONLY: tl.constexpr,
):  # fmt: skip
    """The gate vectors of one chunk of some heads; with a normaliser also the max state behind the sequence.

    TOTAL_ONLY: without INTER and UPDATE, and TOTAL for DECAY, of which with ROW and COLUMN readers make them.

    FOLD_DENOMINATOR, for the backward: rows of the gate matrix are divided by the denominator max(|d|, exp(-m)),
    and DELTA_P is -u, which times dh . h becomes delta, what is added to dP: -1 or 1 by the sign of d,
    and 0 where exp(-m) is larger.
    """
    slot = tl.program_id(0)
    heads = _heads(H, HEADS)[:, None]
    s, first, length, start, slot0 = locate_chunk(cu, sequences, T, slot, CHUNK, IS_VARLEN)
    h = heads[:, :, None]
    t = start + step_indices(CHUNK)
    inside = t < length
    tile0 = first_tile(first, s, T, L, IS_VARLEN) + start // L
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, IS_VARLEN, SIGMOID_F)
    if FOLD_DENOMINATOR:
        den = load_gate(d + h * dh, s, first, t, db, dt, inside, IS_VARLEN)
    i = tl.where(inside, tl.zeros_like(f), -1e9)
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, -1e9, IS_VARLEN, SIGMOID_I)
    step = tl.arange(0, CHUNK)[None, :]
    at = out + (heads.to(tl.int64) * tiles + tile0 + step // L) * (VECTORS * L) + step % L
    held = start + step // L * L < length
    if NORMALIZE:
        m_start = tl.zeros([HEADS, 1], tl.float64)
        if USE_INITIAL_STATE:
            m_start = tl.load(m0 + s * H + heads).to(tl.float64)
        m_start = _max_before(summaries_of(out, H, tiles, L), m_start, h, slot0, slot, slots, 128)
        # m less the sum of log_f since the chunk's start, and that of the step before.
        b = running_sum(f)
        # Any max state is as good as that in float64, if it is the same in all that follows and in the next chunk.
        before, upto = running_max((i - b).to(tl.float32), m_start)
        m = b + upto
        # The state leaves with m in float32, so that is the m to scale it by.
        last = t == length - 1
        m = tl.where(last, m.to(tl.float32).to(tl.float64), m)
        if STORE_FINAL_STATE:
            tl.store(m_final + s * H + h + t * 0, m.to(tl.float32), mask=last)
        f = tl.where(inside, b + before - m, 0.0)
        i = tl.where(inside, i - m, -1e9)
        floor = tl.minimum(tl.maximum(_exp2(m * -LOG2E), TINY), HUGE)
        if FOLD_DENOMINATOR:
            active = inside & (tl.abs(den) > floor)
            u = tl.where(active, tl.where(den > 0, -1.0, 1.0), 0.0)
            store_steps(at + DELTA_P * L, u, held)
            floor = tl.where(inside, tl.where(active, tl.abs(den), floor), 1.0)
            floor = tl.reshape(floor, (HEADS, CHUNK // L, L // RUN, RUN))
        else:
            store_steps(at + FLOOR * L, floor, held)
    f = tl.reshape(base2_exponent(f), (HEADS, CHUNK // L, L // RUN, RUN))
    i = tl.reshape(base2_exponent(i), (HEADS, CHUNK // L, L // RUN, RUN))
    b = running_sum(f)
    total = total_sum(f)
    g = total[:, :, None, None]
    column = i - b
    update = tl.exp2((g + column).to(tl.float32))
    column += log_scale
    inter = tl.exp2(b.to(tl.float32)) * scale
    if FOLD_DENOMINATOR:
        inter /= floor
        b -= tl.log2(floor).to(tl.float64)
    row_high = b.to(tl.float32)
    column_high = column.to(tl.float32)
    store_steps(at + ROW * L, row_high, held)
    store_steps(at + COLUMN * L, column_high, held)
    if TOTAL_ONLY:
        tile = tl.arange(0, CHUNK // L)[None, :]
        at_total = out + (heads.to(tl.int64) * tiles + tile0 + tile) * (VECTORS * L) + TOTAL * L
        tl.store(at_total, total.to(tl.float32), mask=start + tile * L < length)
    else:
        store_steps(at + INTER * L, inter, held)
        store_steps(at + UPDATE * L, update, held)
        decay = tl.exp2(g.to(tl.float32)) + tl.zeros_like(row_high)
        store_steps(at + DECAY * L, decay, held)
    if EXACT:
        row_low = (b - row_high.to(tl.float64)).to(tl.float32)
        column_low = (column - column_high.to(tl.float64)).to(tl.float32)
        store_steps(at + ROW_LOW * L, row_low, held)
        store_steps(at + COLUMN_LOW * L, column_low, held)


@triton.jit(do_not_specialize=["sequences", "T", "tiles"])
def find_delta(
    gates, h_out, dh, cu, sequences, T, tiles, H, D_HV, hb, ht, hh, gb, gt, gh,
    L: tl.constexpr, BLOCK_V: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """DELTA_P, which is -u, times dh . h."""
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, tl.program_id(0), L, IS_VARLEN)
    t = start + tl.arange(0, L)
    inside = t < length
    at = gates + (h * tiles + first_tile(first, s, T, L, IS_VARLEN) + start // L) * VECTORS * L + tl.arange(0, L)
    if IS_VARLEN:
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
        dot += tl.sum(rounded_product(a.to(tl.float32), b.to(tl.float32)), 1)
    u = tl.load(at + DELTA_P * L, mask=inside, other=0.0)
    tl.store(at + DELTA_P * L, tl.where(u == 0.0, 0.0, u * dot), mask=inside)
