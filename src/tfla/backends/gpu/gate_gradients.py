"""The gradients of the gates, from sums that the scans for dq and dk leave.

For every head, with the notation and numbers of docs/mathematics.md,

    dlog_i_t = k_t . dk_t                                                                         (D1)
    dlog_f_{t+1} = dlog_f_t - q_t . dq_t + k_t . dk_t                                             (D2), from (B5)
    dlog_f_{t+1} = X_t = <C_t, dC_t> (+ <n_t, dn_t> with a normalizer)                            (D3), from (B4)

Here dC_t is the cotangent of the state after step t that comes from later steps only. C_t and dC_t are stored at
checkpoints, at segment starts and at the starts and ends of sequences; there the sum (D2) starts again from (D3).

q . dq and k . dk both contain what a step reads of its own write. These terms cancel in (D2) except for their rounding,
and where gates are closed that would be all of dlog_f. Float32 kernels (EXACT) therefore leave separate sums for pairs
of steps in different tiles, for pairs of different steps of one tile, and for a step with itself, which only dlog_i
contains. From these follow (B6) and (B7).

The launches of a backward: `checkpoint_dots` where states and cotangents at checkpoints are both in memory (the Hopper
scan for dk leaves <C, dC> itself), then `gate_gradients`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.gate_kernels import HIGHEST, LOWEST, finite_log_gate, locate_chunk, locate_segment
from tfla.backends.gpu.results import Gradients
from tfla.backends.gpu.rounded_sums import pass_rounded_tiles
from tfla.backends.gpu.state_passing import rounded_product

# Indices of the sums that the float32 kernels for dk leave for each step. W is the lower triangular matrix of the terms
# of pairs of steps in one tile, [reading step, writing step]. The kernels for dq leave only OTHER_TILES.
OTHER_TILES = tl.constexpr(0)  # k . dk of all later tiles, or q . dq of all earlier ones
ROW_SUM = tl.constexpr(1)  # the sum of the step's row of W below the diagonal
COLUMN_SUM = tl.constexpr(2)  # the sum of the step's column of W below the diagonal
SAME_STEP = tl.constexpr(3)  # the step's element of the diagonal of W
PAIR_SUMS = tl.constexpr(4)  # the number of these sums
# A bound of the rounding of a float32 sum, relative to the root of its terms' sum of squares.
ROUNDING = tl.constexpr(2.0**-21)


@triton.jit
def gate_gradient_of(grad, x, SIGMOID: tl.constexpr):
    """Return the gradient of gate x from the gradient of its log-gate; it is 0 where the log-gate was clamped.

    With SIGMOID x is a pre-activation, and the derivative of logsigmoid(x) is 1 / (1 + e^x).
    """
    x = x.to(tl.float32)
    if SIGMOID:
        grad = grad / (1.0 + tl.exp(x))
    return tl.where((x < LOWEST) | (x > HIGHEST), 0.0, grad)


@triton.jit
def checkpoint_dot(
    states, n, cotangents, dn, index, there, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, C_AS: tl.constexpr = tl.float32,
    DC_AS: tl.constexpr = tl.float32,
):  # fmt: skip
    """Return <C, dC>, with NORMALIZE plus <n, dn>, of checkpoints `index`, (HEADS, 1) float64; 0 where not `there`.

    states and cotangents are (checkpoints, SIZE), n and dn (checkpoints, SIZE_N). C and dC are rounded to C_AS and
    DC_AS before the products.
    """
    total = tl.zeros([index.shape[0], BLOCK], tl.float32)
    for c in range(0, SIZE, BLOCK):
        e = c + tl.arange(0, BLOCK)[None, :]
        mask = there & (e < SIZE)
        state = tl.load(states + index * SIZE + e, mask, 0.0).to(C_AS).to(tl.float32)
        total += state * tl.load(cotangents + index * SIZE + e, mask, 0.0).to(DC_AS).to(tl.float32)
    dot = tl.sum(total, 1).to(tl.float64)[:, None]
    if NORMALIZE:
        e = tl.arange(0, BLOCK_N)[None, :]
        mask = there & (e < SIZE_N)
        of_n = tl.load(n + index * SIZE_N + e, mask, 0.0)
        dot += tl.sum(rounded_product(of_n, tl.load(dn + index * SIZE_N + e, mask, 0.0)), 1)[:, None]
    return dot


@triton.jit
def checkpoint_dots(
    states, n, cotangents, dn, dots, SIZE, SIZE_N, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr,
    ROUND_C: tl.constexpr,
):  # fmt: skip
    """Store <C, dC> of each checkpoint of each head; the grid is (checkpoints * H).

    The states are (checkpoints, H, SIZE), dots is (checkpoints, H). With ROUND_C the states are rounded to the dtype of
    n, which is not read, before the products.
    """
    C_AS: tl.constexpr = n.dtype.element_ty if ROUND_C else tl.float32
    index = tl.zeros([1, 1], tl.int64) + tl.program_id(0)
    dot = checkpoint_dot(states, n, cotangents, dn, index, index >= 0, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, C_AS)
    tl.store(dots + index, dot)


@triton.jit
def segment_start_dot(
    C, n, dC, dn, dC_first, dn_first, s, segment, segment0, h, H, SIZE, SIZE_N,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    C_AS: tl.constexpr = tl.float32,
):  # fmt: skip
    """Return <C, dC> at the start of segment `segment`, (HEADS, 1) float64.

    C and n are the states before each segment, dC and dn the cotangents of the states after each segment, dC_first and
    dn_first the cotangents of the initial states of the sequences. At the first segment of a sequence the result is 0
    without an initial state (USE_INITIAL_STATE).
    """
    row = H.to(tl.int64)  # states of one segment
    index = segment * row + h
    dot = tl.zeros([h.shape[0], 1], tl.float64)
    if segment > segment0:
        dC_after, dn_after = dC - row * SIZE, dn - row * SIZE_N  # dtype may differ from that of dC_first
        dot = checkpoint_dot(C, n, dC_after, dn_after, index, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, C_AS)
    elif USE_INITIAL_STATE:
        shift = (s - segment) * row
        dC_at, dn_at = dC_first + shift * SIZE, dn_first + shift * SIZE_N
        dot = checkpoint_dot(C, n, dC_at, dn_at, index, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, C_AS)
    return dot


@triton.jit
def sum_parts(x, row, there, PARTS: tl.constexpr):
    """Return the sums of rows `row`, (HEADS, 1), of x, (rows, PARTS), as (HEADS, 1) float64; 0 where not `there`."""
    parts = tl.load(x + row * PARTS + tl.arange(0, PARTS)[None, :], there, 0.0)
    return tl.sum(parts.to(tl.float64), 1)[:, None]


@triton.jit
def pair_sums(q_dq, k_dk, at, size, inside, PARTS: tl.constexpr, L: tl.constexpr):
    """Load the sums that float32 kernels leave, added up over the parts of dqk.

    Args:
        q_dq: (PARTS, H, tiles, L) float32.
        k_dk: (PARTS, H, tiles, PAIR_SUMS, L) float32.
        at: the places of the steps of whole tiles in (H, tiles, L), (HEADS, STEPS).
        size: the number of these places, H * tiles * L.
        inside: whether a step is one of the sequence.

    Returns:
        k . dk, (HEADS, STEPS) float32, and as (HEADS, STEPS / L, L) float64: what each step reads of earlier tiles,
        what later tiles read of each step, and ROW_SUM - COLUMN_SUM. Over a tile the latter adds up to 0, after its
        rounding has been spread over the steps.
    """
    HEADS: tl.constexpr = at.shape[0]
    TILES: tl.constexpr = at.shape[1] // L
    reads = tl.zeros(at.shape, tl.float32)
    writes = tl.zeros(at.shape, tl.float32)
    rows = tl.zeros(at.shape, tl.float32)
    columns = tl.zeros(at.shape, tl.float32)
    same_step = tl.zeros(at.shape, tl.float32)
    for part in tl.range(0, PARTS):
        of_k = k_dk + (part * size + at // L * L) * PAIR_SUMS + at % L
        reads += tl.load(q_dq + part * size + at, mask=inside, other=0.0)
        writes += tl.load(of_k + OTHER_TILES * L, mask=inside, other=0.0)
        rows += tl.load(of_k + ROW_SUM * L, mask=inside, other=0.0)
        columns += tl.load(of_k + COLUMN_SUM * L, mask=inside, other=0.0)
        same_step += tl.load(of_k + SAME_STEP * L, mask=inside, other=0.0)
    in_tile = tl.reshape(rows.to(tl.float64) - columns, (HEADS, TILES, L))
    in_tile -= (tl.sum(in_tile, 2) / L)[:, :, None]
    reads_of = tl.reshape(reads.to(tl.float64), (HEADS, TILES, L))
    writes_of = tl.reshape(writes.to(tl.float64), (HEADS, TILES, L))
    return writes + columns + same_step, reads_of, writes_of, in_tile


@triton.jit
def _follow(a, b, c, d):
    """Return x -> a x + b followed by x -> c x + d in the same form."""
    return a * c, b * c + d


@triton.jit
def pass_tiles(start, squares, reads, writes, ROUNDING: tl.constexpr):
    """Return for each tile what later tiles read of earlier ones, and the sum X = <C, dC> after the last tile, by (B7).

    The former is X before the tile minus what the tile reads. Where this difference is within its rounding it is 0, so
    that rounding does not pass through closed gates to steps where dlog_f is smaller.

    Args:
        start: X before the first tile, (HEADS, 1) float64.
        squares: the sum of the squares of the terms of `start`, (HEADS, 1) float64.
        reads: what each step reads of earlier tiles, (HEADS, TILES, L) float64.
        writes: what later tiles read of each step, of the same shape.
        ROUNDING: a bound of the rounding of a sum, relative to the root of its terms' sum of squares.

    Returns:
        The terms of earlier with later tiles, (HEADS, TILES); X, the sum of squares of its terms, and 0 where some
        difference was taken for 0, else 1, each (HEADS, 1). All are float64.
    """
    read = tl.sum(reads, 2)
    written = tl.sum(writes, 2)
    squares = squares + tl.cumsum(tl.sum(reads * reads + writes * writes, 2), 1)
    differences = start + tl.cumsum(written - read, 1) - written
    kept = tl.where(tl.abs(differences) < tl.sqrt(squares) * ROUNDING, 0.0, 1.0).to(tl.float64)
    factor, added = tl.associative_scan((kept, written - kept * read), 1, _follow)
    after = factor * start + added
    last = tl.arange(0, reads.shape[1])[None, :] == reads.shape[1] - 1
    end = tl.sum(tl.where(last, after, 0.0), 1)[:, None]
    return after - written, end, tl.max(squares, 1)[:, None], tl.min(kept, 1)[:, None]


@triton.jit
def forget_gate_gradients(across, reads, writes, in_tile):
    """Return dlog_f by (B6), (HEADS, TILES * L) float64, from the results of `pass_tiles` and `pair_sums`."""
    steps = writes - reads - in_tile
    found = (across + tl.sum(reads, 2))[:, :, None] + (tl.cumsum(steps, 2) - steps)
    return tl.reshape(found, (found.shape[0], found.shape[1] * found.shape[2]))


@triton.jit(do_not_specialize=["sequences", "T", "tiles", "H", "steps", "ib", "it", "ih", "fb", "ft", "fh"])
def gate_gradients(
    q_dq, k_dk, dots, C, n_start, dC, dn_end, dC_first, dn_first, cu, i_gate, f_gate, di, df,
    sequences, T, tiles, H, steps, SIZE, SIZE_N, ib, it, ih, fb, ft, fh,
    PARTS: tl.constexpr, NP: tl.constexpr, CHECKPOINT_STEPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    L: tl.constexpr, HEADS: tl.constexpr, DOTS: tl.constexpr, START_DOTS: tl.constexpr, IS_SEGMENTED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    NORMALIZE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, USE_FINAL_STATE: tl.constexpr, BY_PAIRS: tl.constexpr,
    ROUNDING: tl.constexpr, LOW: tl.constexpr, READ_ERROR: tl.constexpr,
    INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the gates, (D1) to (D3).

    A program computes the steps of HEADS heads between two checkpoints. The rounding errors that (D2) has accumulated
    at the next checkpoint or segment start are distributed evenly over the steps. After the last step of a sequence
    whose final state has no cotangent (no USE_FINAL_STATE) the sum is 0.

    The grid is (segments, checkpoints of a segment, H / HEADS), for packed whole sequences (checkpoint intervals, 1,
    H / HEADS).

    Args:
        q_dq: sums of q . dq over parts of dqk, (PARTS, H, tiles, NP, L) float32: PARTS programs of the scan for dq
            share dqk, and each leaves NP sums for a step.
        k_dk: sums of k . dk, of the same shape. With BY_PAIRS the two are as `pair_sums` has them.
        dots: <C, dC> of the checkpoints as DOTS partial sums, (checkpoints, H, DOTS).
        C: the states before each segment, see `segment_start_dot`, which also describes n_start to dn_first; with
            START_DOTS <C, dC> at the start of each sequence as START_DOTS partial sums, (sequences, H, START_DOTS).
        cu: the offsets of packed sequences, (sequences + 1).
        i_gate: the input gate as the caller gave it, (B, T, H).
        f_gate: the forget gate, (B, T, H).
        di: the gradient of i_gate, (B, T, H).
        df: the gradient of f_gate, (B, T, H).
        steps: the number of steps of a segment.
        SIZE, SIZE_N: the numbers of elements of C and of n.
        ib, it, ih, fb, ft, fh: the strides of the gates by batch row, step and head.
        BY_PAIRS: whether (B6) and (B7) are computed, else (D2).
        ROUNDING: see `pass_tiles`; read with BY_PAIRS.
        LOW: the rounding of 16-bit inputs, see `pass_rounded_tiles`, 0 for others; read with BY_PAIRS.
        READ_ERROR: see `pass_rounded_tiles`; read with LOW.
    """
    segment = tl.program_id(0)
    part = tl.program_id(1)
    if IS_VARLEN and not IS_SEGMENTED:  # the grid has no axis for the unknown longest length
        segment, _, _, begin, _ = locate_chunk(cu, sequences, T, segment, CHECKPOINT_STEPS, IS_VARLEN)
        part = begin // CHECKPOINT_STEPS
    t = (part * CHECKPOINT_STEPS + tl.arange(0, CHECKPOINT_STEPS))[None, :]
    h = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    first, length, b, t_first, tile0 = locate_segment(cu, sequences, T, segment, steps, L, IS_SEGMENTED, IS_VARLEN)
    if part * CHECKPOINT_STEPS < length:
        checkpoint = (first // CHECKPOINT_STEPS + part - 1) * H + h
        start = tl.zeros([HEADS, 1], tl.float64)  # (D3) before the first step of this program
        if part > 0:
            start = sum_parts(dots, checkpoint, h < H, DOTS)
        elif IS_SEGMENTED:
            s, _, _, _, segment0 = locate_chunk(cu, sequences, T, segment, steps, IS_VARLEN)
            start = segment_start_dot(
                C, n_start, dC, dn_end, dC_first, dn_first, s, segment, segment0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N,
                NORMALIZE, USE_INITIAL_STATE,
            )  # fmt: skip
        elif START_DOTS > 0:
            start = sum_parts(C, segment * H + h, h < H, START_DOTS)
        elif USE_INITIAL_STATE:
            row = segment * H + h
            start = checkpoint_dot(C, n_start, dC_first, dn_first, row, h < H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE)
        size = H.to(tl.int64) * (NP * L) * tiles
        inside = (t < length) & (h < H)
        at = (h * tiles + tile0 + t // L) * NP * L + t % L
        f = tl.load(f_gate + b * fb + (t_first + t) * ft + h * fh, mask=inside, other=0.0)
        if INPUT_GATE:
            i = tl.load(i_gate + b * ib + (t_first + t) * it + h * ih, mask=inside, other=0.0)
        # (1) <k, dk> and <q, dq> of each step, (HEADS, CHECKPOINT_STEPS).
        if BY_PAIRS:
            k_dk_t, reads, writes, in_tile = pair_sums(q_dq, k_dk, at, size, inside, PARTS, L)
        else:
            k_dk_t = tl.zeros([HEADS, CHECKPOINT_STEPS], tl.float32)
            q_dq_t = tl.zeros([HEADS, CHECKPOINT_STEPS], tl.float32)
            for n in tl.range(0, PARTS * NP, loop_unroll_factor=2):  # more loads in flight need too many registers
                each = n // NP * size + n % NP * L
                k_dk_t += tl.load(k_dk + each + at, mask=inside, other=0.0)
                q_dq_t += tl.load(q_dq + each + at, mask=inside, other=0.0)
            falls = (q_dq_t - k_dk_t).to(tl.float64)  # dlog_f of a step less that of the next one, (D2)
        # (2) dlog_i, (D1).
        to = (first + t) * H + h
        if INPUT_GATE:
            tl.store(di + to, gate_gradient_of(k_dk_t, i, SIGMOID_I), mask=inside)
        # (3) dlog_f of each step, `before`, by a prefix sum of (D2) from `start`, (D3).
        if not BY_PAIRS:
            before = start - (tl.cumsum(falls, 1) - falls)
        end = tl.zeros([HEADS, 1], tl.float64)  # (D3) after the last step of this program
        has_end = (part + 1) * CHECKPOINT_STEPS < length  # a checkpoint or segment starts there and has its value
        if has_end:
            end = sum_parts(dots, checkpoint + H, h < H, DOTS)
        elif IS_SEGMENTED:
            s, _, whole, begin, segment0 = locate_chunk(cu, sequences, T, segment, steps, IS_VARLEN)
            has_end = begin + length < whole
            if has_end:
                end = segment_start_dot(
                    C, n_start, dC, dn_end, dC_first, dn_first, s, segment + 1, segment0, h, H, SIZE, SIZE_N, BLOCK,
                    BLOCK_N, NORMALIZE, USE_INITIAL_STATE,
                )  # fmt: skip
        # (4) Subtract the accumulated rounding error evenly; with BY_PAIRS dlog_f follows from (B6) and (B7) instead,
        # and with LOW the error has the places where it is most likely.
        if BY_PAIRS:
            if LOW > 0.0:
                log_gate = finite_log_gate(f.to(tl.float32), SIGMOID_F)  # a sum of 16-bit numbers would be rounded
                total = tl.sum(tl.reshape(tl.where(inside, log_gate, 0.0), reads.shape), 2)
                decay = tl.exp(2.0 * tl.minimum(total, 0.0).to(tl.float32)).to(tl.float64)  # squared; at most 1
                is_known = has_end or not USE_FINAL_STATE
                across = pass_rounded_tiles(start, end, reads, writes, decay, is_known, LOW, READ_ERROR)
            else:
                across, after, _squares, kept = pass_tiles(start, start * start, reads, writes, ROUNDING)
                if has_end or not USE_FINAL_STATE:
                    tile = tl.arange(0, CHECKPOINT_STEPS // L).to(tl.float64)
                    count = tl.cdiv(tl.minimum(length - part * CHECKPOINT_STEPS, CHECKPOINT_STEPS), L)
                    across -= tl.where(kept > 0.0, after - end, 0.0) * (tile / count)[None, :]
            before = forget_gate_gradients(across, reads, writes, in_tile)
        elif has_end or not USE_FINAL_STATE:
            rounding = start - tl.sum(falls, 1)[:, None] - end
            share = tl.arange(0, CHECKPOINT_STEPS).to(tl.float64) / tl.minimum(
                length - part * CHECKPOINT_STEPS, CHECKPOINT_STEPS
            )
            before -= rounding * share[None, :]
        tl.store(df + to, gate_gradient_of(before.to(tl.float32), f, SIGMOID_F), mask=inside)


def launch_checkpoint_dots(
    ctx: LaunchContext, states: tuple[Tensor, Tensor], cotangents: tuple[Tensor, Tensor], round_states: bool = False
) -> Tensor:
    """Return <C, dC> + <n, dn> at the checkpoints, (checkpoints * H, 1) float64.

    Args:
        ctx: The context of the call.
        states: C and n at the checkpoints, (checkpoints, H, K, V) and (checkpoints, H, K).
        cotangents: dC and dn at the checkpoints, of the same shapes.
        round_states: Whether to round C to the dtype of n, which then stands for no normalizer state.
    """
    count = states[0].shape[0] * states[0].shape[1]
    dots = ctx.new(count, 1, dtype=torch.float64)
    if count:
        ctx.launch(checkpoint_dots, (count,),
            *states, *cotangents, dots, ctx.K * ctx.V, ctx.K, BLOCK=4096, BLOCK_N=power_of_two(ctx.K),
            NORMALIZE=ctx.spec.normalize, ROUND_C=round_states, num_warps=8,
        )  # fmt: skip
    return dots


def launch(
    ctx: LaunchContext, gates: Tensor, q_dq: Tensor, k_dk: Tensor, dots: Tensor, starts: Pair, ends: Pair,
    grads: Gradients, *, final_cotangent: bool, by_pairs: bool | None = None, start_dots: int = 0,
    read_error: float = 0.0,
) -> None:  # fmt: skip
    """Compute the gradients of the gates.

    Args:
        ctx: The context of the call.
        gates: Any tensor, which stands for those that are None.
        q_dq: Sums of q . dq over parts of dqk, (PARTS, H, tiles, NP, L) float32.
        k_dk: Sums of k . dk, of the same shape. With BY_PAIRS the two are as `pair_sums` has them.
        dots: Partial sums of <C, dC> at the checkpoints, (checkpoints * H, DOTS).
        starts: C and n at the starts of segments or sequences, or None.
        ends: dC and dn at the ends of segments or sequences, or None.
        grads: The gradients, of which di and df are written; dC0 and dn0 are read.
        final_cotangent: Whether the final states have cotangents.
        by_pairs: Whether q_dq and k_dk are as `pair_sums` has them; None: for float32.
        start_dots: The number of partial sums of <C, dC> that `starts` has in place of C, or 0 where it has C.
        read_error: READ_ERROR of `pass_rounded_tiles`.
    """
    x, spec = ctx.x, ctx.spec
    by_pairs = ctx.exact if by_pairs is None else by_pairs
    states = (gates if t is None else t for t in (*starts, *ends, grads.dC0, grads.dn0))
    # Segments, and intervals between checkpoints in each. The longest packed sequence is not known on the host.
    steps = ctx.checkpoint_steps
    intervals = ctx.segments, ceil_div(min(ctx.segment_steps, ctx.T), steps)
    if ctx.packed and not ctx.segmented:
        intervals = ctx.count(steps), 1
    heads = ctx.heads_per_program(min(8, (2048 if by_pairs else 4096) // steps))  # sums by pairs take more registers
    num_warps = max(4, heads * steps // 256)
    ctx.launch(gate_gradients, (*intervals, ceil_div(ctx.H, heads)),
        q_dq, k_dk, dots, *states, ctx.cu_seqlens, *ctx.gate_inputs, gates if grads.di is None else grads.di, grads.df,
        x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.segment_steps, ctx.K * ctx.V, ctx.K, *ctx.gate_strides,
        PARTS=q_dq.shape[0], NP=q_dq.shape[3], CHECKPOINT_STEPS=steps, BLOCK=256 * num_warps // heads,
        BLOCK_N=power_of_two(ctx.K), L=ctx.L, HEADS=heads, DOTS=dots.shape[1], START_DOTS=start_dots,
        IS_SEGMENTED=ctx.segmented, IS_VARLEN=ctx.packed, NORMALIZE=spec.normalize, USE_INITIAL_STATE=x.C is not None,
        USE_FINAL_STATE=final_cotangent, BY_PAIRS=by_pairs,
        ROUNDING=ROUNDING.value if ctx.exact else 0.0,
        LOW=0.0 if ctx.exact else torch.finfo(x.q.dtype).eps / 2, READ_ERROR=read_error, **ctx.gate_forms,
        num_warps=num_warps,
    )  # fmt: skip
