"""Gate kernels: the max state m, the gate vectors of each tile, and the denominators that are folded into them.

With stabilized log-gates (equations (6) and (7) of arXiv 2503.14376)

    F_t = log_f_t + m_{t-1} - m_t,    I_t = log_i_t - m_t,    m_t = max(log_f_t + m_{t-1}, log_i_t)    (G1)

the stabilized operator is an operator without max state, so the fused scans need no max state. For step i of a tile and
the prefix sums b_i = F_1 + ... + F_i inside the tile, with g = b_L, all of the tile's gates follow from

    gate matrix    D_ij = exp(b_i - b_j + I_j) for j <= i, times the scale                             (G2)
    inter weight   exp(b_i), times the scale: the weight of the state before the tile in output i       (G3)
    update weight  exp(g - b_j + I_j), the weight of step j in the state after the tile                 (G4)
    decay          exp(g), of the state over the tile                                                   (G5)

These are D, a, w and g of docs/mathematics.md. Exponents are in base 2, sums are float64. F_t and I_t are at most 0 up
to the rounding of m to float32. Exponents below CLOSED are clamped to it, because exp2 of them is 0 in float32 whatever
is added. Without a normalizer m is 0.

Gate vectors are (H, tiles, VECTORS, L) float32, with the tiles of all sequences in a row. The last tile of a sequence
is padded with steps of weight 0, so that the scans need no masks and only one address.

The launches of a forward:

    chunk_aggregates    with a normalizer: what each chunk does to the max state, so that chunks can run in parallel
    chunk_gates         m before the chunk from the aggregates of earlier ones, m of each step, and the gate vectors
    compute_delta       in a backward: delta, (T7), where no scan computes it

A chunk is CHUNK steps here, several tiles, whatever the chunk_size of the call is.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.base import Outputs
from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext, time_strides
from tfla.backends.gpu.results import dense
from tfla.backends.gpu.scan import RUN, running_max, running_sum, step_indices, store_steps, total_sum
from tfla.backends.gpu.state_passing import rounded_product

LOG2E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-150.0)  # the smallest exponent in base 2
# The smallest positive normal number and the largest number of float32.
TINY, HUGE = tl.constexpr(1.1754943508222875e-38), tl.constexpr(3.4028234663852886e38)
# Indices of the gate vectors. The gate matrix (G2) of a tile is exp2(ROW_i + COLUMN_j). The LOW vectors hold what is
# cut off when ROW and COLUMN are rounded to float32.
ROW = tl.constexpr(0)
COLUMN = tl.constexpr(1)
INTER = tl.constexpr(2)  # (G3), times scale
UPDATE = tl.constexpr(3)  # (G4)
DECAY = tl.constexpr(4)  # (G5), repeated for each step of the tile
TOTAL = tl.constexpr(4)  # with TOTAL_ONLY: the exponent g of (G5), one number, in the place of DECAY
ROW_LOW = tl.constexpr(5)
COLUMN_LOW = tl.constexpr(6)
FLOOR = tl.constexpr(7)  # in the forward: exp(-m), the lower bound of the denominator, clamped to [TINY, HUGE]
DELTA_P = tl.constexpr(7)  # in the backward: delta[t], which the normalizer adds to dP (docs/mathematics.md)
VECTORS = tl.constexpr(8)  # the number of gate vectors


# The bounds of finite log-gates, the same as in tfla.ops.gates.
LOWEST = tl.constexpr(-1e5)
HIGHEST = tl.constexpr(5e4)


@triton.jit
def clamp_gate(x):
    """Return x clamped to [LOWEST, HIGHEST]; NaN stays NaN."""
    x = tl.where(x < LOWEST, LOWEST, x)
    return tl.where(x > HIGHEST, HIGHEST, x)


@triton.jit
def finite_log_gate(x, SIGMOID: tl.constexpr, SERIES: tl.constexpr = False):
    """Return the clamped log-gate; NaN stays NaN.

    Args:
        x: the log-gate, or with SIGMOID its pre-activation, of which logsigmoid is taken.
        SIGMOID: whether x is a pre-activation.
        SERIES: whether logsigmoid is computed by a series in place of a logarithm, which takes more instructions and
            mostly fewer registers.
    """
    if SIGMOID:
        x = x.to(tl.float32)
        e = tl.exp(-tl.abs(x))
        if SERIES:  # log(1 + e) = 2 artanh(z) = 2 (z + z^3 / 3 + ...) with z = e / (2 + e) <= 1/3
            z = e / (2.0 + e)
            zz = z * z
            series = 1 / 9 + zz * (1 / 11 + zz * (1 / 13))
            series = 1.0 + zz * (1 / 3 + zz * (1 / 5 + zz * (1 / 7 + zz * series)))
            x = tl.where(x > 0.0, 0.0, x) - 2.0 * z * series
        else:
            u = 1.0 + e  # log(1 + e), exact to the last digit for small e
            x = tl.where(x > 0.0, 0.0, x) - tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return clamp_gate(x)


@triton.jit
def base2_exponent(x):
    """Return the exponent of exp(x) in base 2, at least CLOSED. Unlike tl.maximum it keeps NaN."""
    return tl.where(x * LOG2E < CLOSED, CLOSED, x * LOG2E)


@triton.jit
def _exp2(x):
    """Return 2^x in float32 for a float64 x, of which float32 alone would cut off digits that 2^x shows."""
    high = x.to(tl.float32)
    return tl.exp2(high) * tl.exp2((x - high.to(tl.float64)).to(tl.float32))


@triton.jit
def find_sequence(cu, sequences, number, chunk):
    """Return the packed sequence of a chunk by bisection: the last s with cu[s] // chunk + s <= number."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle).to(tl.int64) // chunk + middle <= number:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def locate_chunk(cu, sequences, T, number, chunk, IS_VARLEN: tl.constexpr):
    """Return where the chunk with this number lies.

    Chunks of all sequences are numbered in a row. Packed sequence s starts with chunk number cu[s] // chunk + s, so
    some numbers have no steps.

    Args:
        cu: the offsets of packed sequences, (sequences + 1); read with IS_VARLEN.
        sequences: the number of sequences.
        T: the number of steps of a batch row.
        number: the number of the chunk; the functions below number tiles and segments likewise.
        chunk: the steps of a chunk.

    Returns:
        The sequence, its first token, its length, the first step of the chunk in it, the number of its first chunk.
    """
    if IS_VARLEN:
        s = find_sequence(cu, sequences, number, chunk)
        first = tl.load(cu + s).to(tl.int64)
        length = tl.load(cu + s + 1).to(tl.int64) - first
        first_number = first // chunk + s
        # Chunk numbers before the first sequence have no steps: they start after all steps, at a multiple of `chunk`,
        # so that the compiler still finds all starts aligned.
        count = number - first_number
        start = tl.where(count < 0, T, count) * chunk
    else:
        chunks = tl.cdiv(T, chunk)
        s = number // chunks
        first = s.to(tl.int64) * T
        length = T.to(tl.int64)
        first_number = (s * chunks).to(tl.int64)
        start = (number - first_number) * chunk
    return s, first, length, start, first_number


@triton.jit
def first_tile(first, s, T, L: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Return the number of the first tile of sequence s, whose first token is `first`."""
    if IS_VARLEN:
        return first // L + s
    else:
        return s.to(tl.int64) * tl.cdiv(T, L)


@triton.jit
def locate_segment(
    cu, sequences, T, segment, steps, L: tl.constexpr, IS_SEGMENTED: tl.constexpr, IS_VARLEN: tl.constexpr
):
    """Return what one scan covers: with IS_SEGMENTED a segment of `steps` steps, else the whole sequence `segment`.

    Returns:
        The first token, the number of steps, the batch row, the step of the first token in that row, the first tile.
    """
    if IS_SEGMENTED:
        s, first, length, start, _ = locate_chunk(cu, sequences, T, segment, steps, IS_VARLEN)
        length = tl.maximum(tl.minimum(length - start, steps), 0)
    else:
        s = segment
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
    """Load steps t of a gate of sequence s, whose first token is `first`, and 0 where not `inside`.

    `gate` points to the head in a tensor (B, T, H), and stride_b and stride_t are its strides.
    """
    if IS_VARLEN:
        at = gate + (first + t) * stride_t
    else:
        at = gate + s.to(tl.int64) * stride_b + t * stride_t
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_log_gate(
    gate, s, first, t, stride_b, stride_t, inside, other, IS_VARLEN: tl.constexpr, SIGMOID: tl.constexpr
):
    """Load steps t as :func:`load_gate` does, and return their finite log-gates in float64, `other` outside."""
    x = load_gate(gate, s, first, t, stride_b, stride_t, inside, IS_VARLEN)
    return tl.where(inside, finite_log_gate(x, SIGMOID), other).to(tl.float64)


@triton.jit
def aggregates_of(gates, H, tiles, L: tl.constexpr):
    """Return the address of the chunk aggregates, (H, chunks, 2) float64, which lie after the gate vectors."""
    return (gates + H.to(tl.int64) * tiles * (VECTORS * L)).to(tl.pointer_type(tl.float64))


@triton.jit
def _heads(H, HEADS: tl.constexpr):
    """Return the heads of this program, (HEADS); numbers past the last head repeat it.

    A program computes several heads because adjacent heads are adjacent in memory, (B, T, H).
    """
    return tl.minimum(tl.program_id(1) * HEADS + tl.arange(0, HEADS), H - 1)


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "num_chunks"])
def chunk_aggregates(
    i_gate, f_gate, cu, out, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, num_chunks,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr, INPUT_GATE: tl.constexpr,
    SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """Store the aggregate of each chunk, from which later chunks compute the max state before them.

    It is the sum of log_f, and the max state after the chunk if that before it is minus infinity. With a max state m
    before the chunk that after it is max(m + sum, aggregate). The aggregates are stored after the gate vectors `out`,
    see `aggregates_of`. The grid is (chunks, H / HEADS). The arguments are those of `chunk_gates`.
    """
    chunk = tl.program_id(0)
    heads = _heads(H, HEADS)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, chunk, CHUNK, IS_VARLEN)
    h = heads[:, None, None]
    t = start + step_indices(CHUNK)  # steps in the sequence, (1, CHUNK // RUN, RUN)
    inside = t < length
    # Values of the steps of all heads are (HEADS, CHUNK // RUN, RUN), see `scan.py`.
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, IS_VARLEN, SIGMOID_F)
    total = total_sum(f)
    i = tl.zeros_like(f)
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, 0.0, IS_VARLEN, SIGMOID_I)
    top = tl.where(inside, (i - running_sum(f)).to(tl.float32), float("-inf"))  # of each step, less the sum up to it
    at = aggregates_of(out, H, tiles, L) + (heads * num_chunks + chunk).to(tl.int64) * 2
    tl.store(at, total)
    tl.store(at + 1, total + tl.max(tl.max(top, 2), 1))


@triton.jit
def _max_before(aggregates, m, h, chunk0, chunk, num_chunks, BLOCK: tl.constexpr):
    """Return the max state before chunk `chunk`, (HEADS, 1), from m before chunk `chunk0` and the aggregates between.

    BLOCK aggregates are read at once, and joined as the steps of a chunk are.
    """
    for c in range(chunk0, chunk, BLOCK):
        at = c + step_indices(BLOCK)
        inside = at < chunk
        at = aggregates + (h * num_chunks + at).to(tl.int64) * 2
        total = tl.load(at, mask=inside, other=0.0)
        top = tl.load(at + 1, mask=inside, other=float("-inf"))
        total_all = total_sum(total)[:, None]
        top = tl.max(top - running_sum(total), 2)
        m = total_all + tl.maximum(m, tl.max(top, 1)[:, None])
    return m


@triton.jit(
    do_not_specialize=["sequences", "T", "tiles", "H", "ib", "it", "ih", "fb", "ft", "fh", "db", "dt", "num_chunks"]
)
def chunk_gates(
    i_gate, f_gate, m0, cu, d, out, m_final, sequences, T, tiles, H, ib, it, ih, fb, ft, fh, db, dt, dh,
    scale, log_scale, num_chunks, CHUNK: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr, NORMALIZE: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, FOLD_DENOMINATOR: tl.constexpr,
    EXACT: tl.constexpr, TOTAL_ONLY: tl.constexpr,
):  # fmt: skip
    """Store the gate vectors of one chunk of HEADS heads, and with NORMALIZE the max state after the sequence.

    The grid is (chunks, H / HEADS).

    Args:
        i_gate: log_i or its pre-activation, (B, T, H).
        f_gate: log_f or its pre-activation, (B, T, H).
        m0: the max states before the sequences, (sequences, H) float32; read with USE_INITIAL_STATE.
        cu: the offsets of packed sequences, (sequences + 1).
        d: the denominators d of the forward before the lower bound, (B, T, H); read with FOLD_DENOMINATOR.
        out: the gate vectors, (H, tiles, VECTORS, L) float32, and after them the chunk aggregates.
        m_final: the max states after the sequences, (sequences, H); written with STORE_FINAL_STATE.
        tiles: the number of tiles of one head.
        ib, it, ih: the strides of i_gate by batch row, step and head; fb, ft, fh those of f_gate; db, dt, dh of d.
        scale, log_scale: the scale and the logarithm of its absolute value in base 2.
        num_chunks: the number of chunks of all sequences.
        TOTAL_ONLY: whether INTER and UPDATE are left out and TOTAL is stored in place of DECAY. The Hopper kernels
            compute all three from ROW, COLUMN and TOTAL.
        FOLD_DENOMINATOR: whether ROW and INTER are divided by the denominator max(|d|, exp(-m)), for the backward.
            DELTA_P is then -u, with u the sign of d where |d| > exp(-m) and 0 elsewhere; `compute_delta`
            multiplies it by dh . h.
        EXACT: whether the LOW vectors are stored, for float32.
    """
    chunk = tl.program_id(0)
    heads = _heads(H, HEADS)[:, None]
    s, first, length, start, chunk0 = locate_chunk(cu, sequences, T, chunk, CHUNK, IS_VARLEN)
    h = heads[:, :, None]
    t = start + step_indices(CHUNK)
    inside = t < length
    tile0 = first_tile(first, s, T, L, IS_VARLEN) + start // L
    f = _load_log_gate(f_gate + h * fh, s, first, t, fb, ft, inside, 0.0, IS_VARLEN, SIGMOID_F)
    if FOLD_DENOMINATOR:
        den = load_gate(d + h * dh, s, first, t, db, dt, inside, IS_VARLEN)  # (HEADS, CHUNK // RUN, RUN)
    i = tl.where(inside, tl.zeros_like(f), -1e9)  # steps after the sequence have weight 0
    if INPUT_GATE:
        i = _load_log_gate(i_gate + h * ih, s, first, t, ib, it, inside, -1e9, IS_VARLEN, SIGMOID_I)
    step = tl.arange(0, CHUNK)[None, :]
    # Where ROW of each step goes, and whether the sequence has the step's tile, (HEADS, CHUNK) and (1, CHUNK).
    at = out + (heads.to(tl.int64) * tiles + tile0 + step // L) * (VECTORS * L) + step % L
    held = start + step // L * L < length
    if NORMALIZE:
        m_start = tl.zeros([HEADS, 1], tl.float64)
        if USE_INITIAL_STATE:
            m_start = tl.load(m0 + s * H + heads).to(tl.float64)
        m_start = _max_before(aggregates_of(out, H, tiles, L), m_start, h, chunk0, chunk, num_chunks, 128)
        # (1) Max state m_t = b_t + max(m_start, max over s <= t of i_s - b_s), with b the prefix sum of log_f. The scan
        # is in float32: the result does not depend on m, as long as every use of it has the same value.
        b = running_sum(f)
        before, upto = running_max((i - b).to(tl.float32), m_start)
        m = b + upto
        # The final state is stored with m in float32, so it is scaled by the rounded m.
        last = t == length - 1
        m = tl.where(last, m.to(tl.float32).to(tl.float64), m)
        if STORE_FINAL_STATE:
            tl.store(m_final + s * H + h + t * 0, m.to(tl.float32), mask=last)
        # (2) Stabilized log-gates F and I, (G1).
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
    # (3) Prefix sums b and their total g inside each tile, (HEADS, tiles of the chunk, L // RUN, RUN).
    f = tl.reshape(base2_exponent(f), (HEADS, CHUNK // L, L // RUN, RUN))
    i = tl.reshape(base2_exponent(i), (HEADS, CHUNK // L, L // RUN, RUN))
    b = running_sum(f)
    total = total_sum(f)
    g = total[:, :, None, None]
    # (4) Exponents and weights, (G2) to (G5): COLUMN = i - b + log scale, UPDATE, INTER and ROW = b.
    column = i - b
    update = tl.exp2((g + column).to(tl.float32))
    column += log_scale
    inter = tl.exp2(b.to(tl.float32)) * scale
    if FOLD_DENOMINATOR:  # D' and a': `floor` holds max(|d|, exp(-m)) now
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
def compute_delta(
    gates, h_out, dh, cu, sequences, T, tiles, H, D_HV, hb, ht, hh, gb, gt, gh,
    L: tl.constexpr, BLOCK_V: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Replace DELTA_P, which holds -u, by delta[t] = -u[t] <dh[t], h[t]>.

    The grid is (tiles, H); h_out and dh are (B, T, H, D_HV).
    """
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
        a = tl.load(h_out + row * hb + h * hh + (t * ht)[:, None] + c[None, :], mask, 0.0)  # (L, BLOCK_V)
        b = tl.load(dh + row * gb + h * gh + (t * gt)[:, None] + c[None, :], mask, 0.0)  # (L, BLOCK_V)
        dot += tl.sum(rounded_product(a.to(tl.float32), b.to(tl.float32)), 1)
    u = tl.load(at + DELTA_P * L, mask=inside, other=0.0)  # (L)
    tl.store(at + DELTA_P * L, tl.where(u == 0.0, 0.0, u * dot), mask=inside)


CHUNK, HEADS, WARPS = 128, 4, 4  # steps, heads and warps of a program of the gate kernels


def launch(
    ctx: LaunchContext, m_final: Tensor | None = None, d: Tensor | None = None, total_only: bool = False
) -> Tensor:
    """Compute the gate vectors.

    Args:
        ctx: The context of the call.
        m_final: Output for the max states after the sequences, (N, H), or None.
        d: The denominators of the forward, (B, T, H), for the gate vectors of the backward.
        total_only: Whether INTER, UPDATE and DECAY are left out, see TOTAL_ONLY of `chunk_gates`.

    Returns:
        The gate vectors, (H, tiles, VECTORS, L) float32 in a flat tensor, and after them the chunk aggregates.
    """
    x, spec = ctx.x, ctx.spec
    m = dense(ctx, x.m)
    chunks, heads = ctx.count(CHUNK), ctx.heads_per_program(HEADS)
    totals = 4 * ctx.H * chunks if spec.normalize else 0  # float64, (H, chunks, 2), after the gate vectors
    gates = ctx.new(ctx.H * ctx.tiles * VECTORS.value * ctx.L + totals)
    grid = (chunks, ceil_div(ctx.H, heads))
    shared: dict[str, Any] = {
        "CHUNK": CHUNK, "HEADS": heads, "L": ctx.L, "IS_VARLEN": ctx.packed, **ctx.gate_forms, "num_warps": WARPS
    }  # fmt: skip
    if spec.normalize and (ctx.packed or CHUNK < ctx.T):
        _launch_aggregates(ctx, gates, ctx.tiles)
    ctx.launch(chunk_gates, grid,
        *ctx.gate_inputs, gates if m is None else m, ctx.cu_seqlens, gates if d is None else d, gates,
        gates if m_final is None else m_final, x.sequences, ctx.T, ctx.tiles, ctx.H, *ctx.gate_strides,
        *time_strides(x.log_f if d is None else d), *ctx.scales, chunks,
        NORMALIZE=spec.normalize, USE_INITIAL_STATE=x.m is not None, STORE_FINAL_STATE=m_final is not None,
        FOLD_DENOMINATOR=d is not None, EXACT=ctx.exact, TOTAL_ONLY=total_only, **shared,
    )  # fmt: skip
    return gates


def _launch_aggregates(ctx: LaunchContext, out: Tensor, tiles: int) -> None:
    """Compute the chunk aggregates into `out` after the gate vectors of so many tiles."""
    chunks, heads = ctx.count(CHUNK), ctx.heads_per_program(HEADS)
    ctx.launch(chunk_aggregates, (chunks, ceil_div(ctx.H, heads)),
        *ctx.gate_inputs, ctx.cu_seqlens, out, ctx.x.sequences, ctx.T, tiles, ctx.H, *ctx.gate_strides, chunks,
        CHUNK=CHUNK, HEADS=heads, L=ctx.L, IS_VARLEN=ctx.packed, **ctx.gate_forms, num_warps=WARPS,
    )  # fmt: skip


def launch_aggregates(ctx: LaunchContext) -> Tensor:
    """Return the chunk aggregates alone, (H, chunks, 2) float64."""
    out = ctx.new(ctx.H, ctx.count(CHUNK), 2, dtype=torch.float64)
    _launch_aggregates(ctx, out, 0)
    return out


def launch_backward(ctx: LaunchContext, out: Outputs, dh: Tensor) -> Tensor:
    """Compute the gate vectors of a backward, with delta, (T7), where its gradients need it.

    Args:
        ctx: The context of the call.
        out: The results of the forward.
        dh: The cotangent of h, (B, T, H, dhv).

    Returns:
        The gate vectors, as :func:`launch` returns them.
    """
    spec = ctx.spec
    gates = launch(ctx, d=out.d if spec.normalize else None)
    if spec.normalize and spec.normalizer_grad:
        launch_delta(ctx, gates, out.h, dh)
    return gates


def launch_delta(ctx: LaunchContext, gates: Tensor, h: Tensor, dh: Tensor) -> None:
    """Compute delta, (T7), into the gate vectors; h and its cotangent dh are (B, T, H, dhv)."""
    V = h.shape[3]
    block = 128 if V % 16 == 0 else 32  # rows that are not aligned take more registers
    ctx.launch(compute_delta, (ctx.tiles, ctx.H),
        gates, h, dh, ctx.cu_seqlens, ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, V, *time_strides(h), *time_strides(dh),
        L=ctx.L, BLOCK_V=min(block, power_of_two(V)), IS_VARLEN=ctx.packed, num_warps=8,
    )  # fmt: skip
