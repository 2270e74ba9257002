"""The kernels of context parallelism: the rows that a process gives to the others, and what it makes of theirs.

A span of steps acts on the state of a head by exp(g) and S, (S1) of docs/mathematics.md; two spans make one by (S2). In
a backward exp(g) and R act on its cotangent. Processes exchange a row for each span and head, `SIZE + 2` float32
numbers where SIZE = dqk dhv, or with n and m `SIZE + 3 + K`:

    S or R, dense | g as the sum of two numbers | what the span adds to n or dn | m

A process has S spans of each sequence of a batch, one or two. Of R processes and two spans each, process r has spans r
and 2 R - 1 - r in time, as attention layers need for balance. Span s of sequence b is sequence b S + s of the kernels
of a process, and rows are (S, B, H, width). In a backward with final states the rows of their cotangents follow, (B, H,
width). The cotangents of C and of n are exchanged one after the other: a row then has either as R, with K = 0 numbers
of n.

    forward     own_max, collective, join_max       the max states before the spans, with a normalizer alone
                own_rows, collective, join_spans    the states before the spans, and the final states
    backward    own_rows, collective, join_spans    the cotangents dC of the states after the spans
                own_rows, collective, join_spans    the same of dn, with a normalizer alone
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.base import Exchange, Starts
from tfla.backends.gpu import gate_kernels, results
from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.scan import running_sum, step_indices, total_sum

CLOSED = tl.constexpr(-1e30)  # the log-decay of a span whose decay is 0 in float32
BLOCK = 1024  # elements of a row that a program computes
CHUNK_BLOCK = 128  # chunks whose aggregates are read at once


@triton.jit
def own_max(aggregates, m0, places, rows, B, S, H, chunks, CHUNK_BLOCK: tl.constexpr, USE_M0: tl.constexpr):
    """Store the sum of log_f over each span of this process, g, and the max state that the span leaves, m of (S2).

    Only the first span of all contains the given max state before it; the others start from minus infinity.

    Args:
        aggregates: the chunk aggregates, (H, B S chunks, 2) float64; see :func:`.gate_kernels.chunk_aggregates`.
        m0: the given max states, (B S, H) float32; read with USE_M0, else 0.
        places: as in :func:`join_spans`.
        rows: sums and max states, (S, 2, B, H) float64.
        B, S, H, chunks: the numbers of sequences, of spans of each, of heads, and of chunks of a span.

    The grid is (B S, H).
    """
    r = tl.program_id(0)
    h = tl.program_id(1)
    b = r % B
    s = r // B
    sequence = b * S + s
    given = 0.0
    if USE_M0:
        given = tl.load(m0 + sequence * H + h)
    begins = (tl.load(places) == 0) & (s == 0)
    m = tl.where(begins, given, float("-inf")).to(tl.float64) + tl.zeros([1, 1], tl.float64)
    log_decay = tl.zeros([1, 1], tl.float64)
    for c in range(0, chunks, CHUNK_BLOCK):
        at = c + step_indices(CHUNK_BLOCK)
        inside = at < chunks
        at = aggregates + ((h * B * S + sequence) * chunks + at).to(tl.int64) * 2
        total = tl.load(at, mask=inside, other=0.0)
        top = tl.load(at + 1, mask=inside, other=float("-inf"))
        total_all = total_sum(total)[:, None]
        m = total_all + tl.maximum(m, tl.max(tl.max(top - running_sum(total), 2), 1)[:, None])
        log_decay += total_all
    at = rows + (s * 2 * B + b) * H + h + tl.zeros([1, 1], tl.int32)
    tl.store(at, log_decay)
    tl.store(at + B * H, m)


@triton.jit
def join_max(gathered, m0, places, out, R, B, S, H, BLOCK_H: tl.constexpr, USE_M0: tl.constexpr):
    """Store the max states before the spans of this process: m <- max(m + g, m of the span) over all earlier spans.

    Args:
        gathered: the rows of all processes, (R, S, 2, B, H) float64.
        m0: as in :func:`own_max`.
        places, R: as in :func:`join_spans`.
        out: the max states, (B S, H) float32.
        B, S, H: the numbers of sequences, of spans of each and of heads.

    The grid is (B S).
    """
    r = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    b = r % B
    s = r // B
    sequence = b * S + s
    position = tl.load(places + s)
    m = tl.full([BLOCK_H], float("-inf"), tl.float64)
    for span in range(0, position):
        rank = tl.where(span < R, span, 2 * R - 1 - span)
        index = tl.where(span < R, 0, 1)
        at = gathered + ((rank * S + index) * 2 * B + b) * H + h
        log_decay = tl.load(at, mask=inside, other=0.0)
        m = tl.maximum(m + log_decay, tl.load(at + B * H, mask=inside, other=0.0))
    given = tl.zeros([BLOCK_H], tl.float32)
    if USE_M0:
        given = tl.load(m0 + sequence * H + h, mask=inside, other=0.0)
    tl.store(out + sequence * H + h, tl.where(position == 0, given, m.to(tl.float32)), mask=inside)


@triton.jit(do_not_specialize=["T", "steps"])
def own_rows(
    states, states_n, decays, given, given_n, m, m0, final, final_m, rows, T, B, S, H, steps, SIZE, K, width,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, NORMALIZE: tl.constexpr, USE_GIVEN: tl.constexpr, USE_M0: tl.constexpr,
    USE_FINAL: tl.constexpr,
):  # fmt: skip
    """Store the rows of this process: what its spans add to the state, or with REVERSE to the cotangent before them.

    Args:
        states: what segments add to C or dC, (B S segments, H, SIZE).
        states_n: the same for n, (B S segments, H, K); read with NORMALIZE without REVERSE, whose states are dC or dn.
        decays: the decays over segments, (B S segments, H) float32.
        given, given_n: the given initial states, (B S, H, ...) float32; read with USE_GIVEN.
        m: the max states after the spans, (B S, H); read with NORMALIZE, but not with REVERSE.
        m0: the max states before the spans, (B S, H); read with USE_M0, else 0.
        final: the cotangents of the final states, (B, H, SIZE) float32; read with USE_FINAL.
        final_m: the max states of the final states, (B, H); read with NORMALIZE and REVERSE.
        rows: the rows, (S, B, H, width), with REVERSE followed by those of the final states.
        T, steps: the numbers of steps of a span and of a segment.
        B, S, H: the numbers of sequences, of spans of each and of heads.
        SIZE, K, width: the numbers of elements of a state C, of a state n, and of a row.

    The grid is (width / BLOCK, rows, H).
    """
    r = tl.program_id(1)
    h = tl.program_id(2)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # elements of a row, (BLOCK)
    of_C = e < SIZE
    at_n = e - SIZE - 2
    of_n = (at_n >= 0) & (at_n < K)
    b = r % B
    x = tl.zeros([BLOCK], tl.float32)
    # The two parts of g, and m.
    high = 0.0
    low = 0.0
    last_m = 0.0
    if r < S * B:
        # (1) The row of a span: pass what its segments add from segment to segment, (S2).
        sequence = (b * S + r // B).to(tl.int64)
        count = tl.cdiv(T, steps).to(tl.int64)
        if USE_GIVEN:
            x = tl.load(given + (sequence * H + h) * SIZE + e, mask=of_C, other=0.0)
            if NORMALIZE:
                x += tl.load(given_n + (sequence * H + h) * K + at_n, mask=of_n, other=0.0)
        total = 1.0
        for c in range(0, count):
            row = (sequence * count + (count - 1 - c if REVERSE else c)) * H + h
            adds = tl.load(states + row * SIZE + e, mask=of_C, other=0.0).to(tl.float32)
            if NORMALIZE and not REVERSE:
                adds += tl.load(states_n + row * K + at_n, mask=of_n, other=0.0)
            decay = tl.load(decays + row)
            x = x * decay + adds
            if not REVERSE:
                total *= decay
        # (2) The max state that R is scaled by, that before the span; or g, and the max state after the span. Decays of
        # stabilized segments are exp(g + m before - m after), which gives g.
        if REVERSE:
            if NORMALIZE and USE_M0:
                last_m = tl.load(m0 + sequence * H + h)
        else:
            log_decay = tl.where(total > 0.0, tl.log(tl.maximum(total, 1e-38)), CLOSED).to(tl.float64)
            if NORMALIZE:
                last_m = tl.load(m + sequence * H + h)
                log_decay += last_m.to(tl.float64)
                if USE_M0:
                    log_decay -= tl.load(m0 + sequence * H + h).to(tl.float64)
            high = log_decay.to(tl.float32)
            low = (log_decay - high.to(tl.float64)).to(tl.float32)
    else:
        # (1) and (2) of a row of a final state: its cotangents, and its max state.
        if USE_FINAL:
            x += tl.load(final + (b * H + h).to(tl.int64) * SIZE + e, mask=of_C, other=0.0)
        if NORMALIZE and REVERSE:
            last_m = tl.load(final_m + b * H + h)
    # (3) The row: S, g in two numbers, n and m.
    x = tl.where(e == SIZE, high, x)
    x = tl.where(e == SIZE + 1, low, x)
    if NORMALIZE:
        x = tl.where(e == SIZE + 2 + K, last_m, x)
    tl.store(rows + (r * H + h).to(tl.int64) * width + e, x, mask=e < width)


@triton.jit
def _row_of(gathered, span, b, h, R, ROWS, B, H, width):
    """Return the address of the row of a span: process `span` has it, or process 2 R - 1 - span as its second one."""
    rank = tl.where(span < R, span, 2 * R - 1 - span)
    index = tl.where(span < R, 0, 1)
    return gathered + (((rank * ROWS + index) * B + b) * H + h).to(tl.int64) * width


@triton.jit
def join_spans(
    gathered, given, given_n, m, places, log_decays, final_m, out, out_n, whole, whole_n, whole_m, R, ROWS, B, S, H,
    SIZE, K, width,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, NORMALIZE: tl.constexpr, USE_GIVEN: tl.constexpr, USE_M: tl.constexpr,
    FINAL_STATES: tl.constexpr,
):  # fmt: skip
    """Store the states before the spans of this process, or with REVERSE the cotangents of the states after them.

    The result is the sum over all earlier spans of exp(g between) S, or over all later ones of exp(g between) R, (S2),
    and of the given initial state, or of the cotangents of the final states. Each term has a max state of its own, and
    its weight contains the difference to that of the result.

    Args:
        gathered: the rows of all processes, (R, ROWS, B, H, width).
        given, given_n: the given initial states, (B S, H, ...) float32; read with USE_GIVEN by the first span.
        m: the max states of the results, (B S, H); read with USE_M, else 0.
        places: the places in time of the spans of this process, (S,) int32. They are read from memory, so that the
            same launch serves all devices of a mesh.
        log_decays: the sums of log-gates over all spans, (R S, B, H) float64; written, with REVERSE read.
        final_m: the max states of the final states, (B, H); read with NORMALIZE, REVERSE and FINAL_STATES.
        out, out_n: the results, (B S, H, ...) float32; n with NORMALIZE, but not with REVERSE.
        whole, whole_n, whole_m: the final states, (B, H, ...) float32; written with FINAL_STATES without REVERSE.
        R: the number of processes.
        ROWS: the rows of one of them for each sequence.
        B, S, H, SIZE, K, width: as in :func:`own_rows`.

    The grid is ((SIZE + K) / BLOCK, B S, H), with FINAL_STATES without REVERSE (..., B S + B, H).
    """
    r = tl.program_id(1)
    h = tl.program_id(2)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_C = e < SIZE
    of_n = (e >= SIZE) & (e < SIZE + K)
    # Where elements of C and n are in a row: those of n follow those of C and two more numbers.
    inside = e < SIZE + K if NORMALIZE else of_C
    place = tl.where(of_C, e, e + 2) if NORMALIZE else e
    b = r % B
    s = r // B
    sequence = (b * S + s).to(tl.int64)
    spans = R * S
    position = tl.load(places + s, mask=s < S, other=spans)  # s = S: the final state of a sequence
    # The spans to add up: [first, stop) in time.
    first = position + 1 if REVERSE else 0
    stop = spans if REVERSE else position
    x = tl.zeros([BLOCK], tl.float32)
    target_m = tl.zeros([], tl.float32)
    # (1) The first span of all starts from the given state.
    if USE_GIVEN:
        begins = position == 0
        x = tl.load(given + (sequence * H + h) * SIZE + e, mask=of_C & begins, other=0.0)
        if NORMALIZE:
            x += tl.load(given_n + (sequence * H + h) * K + e - SIZE, mask=of_n & begins, other=0.0)
    # (2) The max state of the result.
    if NORMALIZE:
        if s < S:
            if USE_M:
                target_m = tl.load(m + sequence * H + h)
        else:  # of a final state: the largest exponent of all terms
            target_m = tl.full([], float("-inf"), tl.float32)
            later = tl.zeros([], tl.float64)
            for c in range(0, spans):
                row = _row_of(gathered, spans - 1 - c, b, h, R, ROWS, B, H, width)
                target_m = tl.maximum(target_m, (later + tl.load(row + SIZE + 2 + K).to(tl.float64)).to(tl.float32))
                later += tl.load(row + SIZE).to(tl.float64) + tl.load(row + SIZE + 1).to(tl.float64)
    # (3) The sum over spans, from the nearest one on.
    between = tl.zeros([], tl.float64)  # the sum of log_f between a span and the result
    for c in range(0, stop - first):
        span = first + c if REVERSE else stop - 1 - c
        row = _row_of(gathered, span, b, h, R, ROWS, B, H, width)
        log_weight = between
        if NORMALIZE:
            part_m = tl.load(row + SIZE + 2 + K)
            if REVERSE:  # cotangents grow as states shrink
                log_weight += target_m.to(tl.float64) - part_m.to(tl.float64)
            else:
                log_weight += part_m.to(tl.float64) - target_m.to(tl.float64)
        x += tl.exp(log_weight.to(tl.float32)) * tl.load(row + place, mask=inside, other=0.0)
        if REVERSE:
            between += tl.load(log_decays + (span * B + b) * H + h)
        else:
            between += tl.load(row + SIZE).to(tl.float64) + tl.load(row + SIZE + 1).to(tl.float64)
    # (4) The cotangents of the final states from all processes; they come after the last span.
    if FINAL_STATES and REVERSE:
        log_weight = between
        if NORMALIZE:
            log_weight += target_m.to(tl.float64) - tl.load(final_m + b * H + h).to(tl.float64)
        weight = tl.exp(log_weight.to(tl.float32))
        for rank in range(0, R):
            row = gathered + (((rank * ROWS + S) * B + b) * H + h).to(tl.int64) * width
            x += weight * tl.load(row + place, mask=inside, other=0.0)
    # (5) The results, and the g of all spans for the backward, which one program of each sequence and head stores.
    if s < S:
        tl.store(out + (sequence * H + h) * SIZE + e, x, mask=of_C)
        if NORMALIZE and not REVERSE:
            tl.store(out_n + (sequence * H + h) * K + e - SIZE, x, mask=of_n)
    elif FINAL_STATES and not REVERSE:
        tl.store(whole + (b * H + h).to(tl.int64) * SIZE + e, x, mask=of_C)
        if NORMALIZE:
            tl.store(whole_n + (b * H + h).to(tl.int64) * K + e - SIZE, x, mask=of_n)
            if tl.program_id(0) == 0:
                tl.store(whole_m + b * H + h, target_m)
    if not REVERSE:
        once = (tl.program_id(0) == 0) & (s == 0)
        for span in range(0, tl.where(once, spans, 0)):
            row = _row_of(gathered, span, b, h, R, ROWS, B, H, width)
            log_decay = tl.load(row + SIZE).to(tl.float64) + tl.load(row + SIZE + 1).to(tl.float64)
            tl.store(log_decays + (span * B + b) * H + h, log_decay)


def _sizes(ctx: LaunchContext, exchange: Exchange) -> tuple[int, ...]:
    """Return B, S, H, SIZE, K and the width of rows."""
    size, S = ctx.K * ctx.V, len(exchange.positions)
    width = size + 2 + (1 + ctx.K if ctx.spec.normalize else 0)
    return ctx.B // S, S, ctx.H, size, ctx.K, width


def launch_max_states(ctx: LaunchContext, exchange: Exchange) -> Tensor:
    """Return the max states before the spans of this process, (B S, H), which all processes compute together."""
    B, S, H, _, _, _ = _sizes(ctx, exchange)
    chunks, m0 = ceil_div(ctx.T, gate_kernels.CHUNK), results.dense(ctx, ctx.x.m)
    aggregates = gate_kernels.launch_aggregates(ctx)
    rows, out = ctx.new(S, 2, B, H, dtype=torch.float64), ctx.new(B * S, H)
    places = ctx.do(exchange.places, rows)
    ctx.launch(own_max, (B * S, H),
        aggregates, _or(m0, out), places, rows, B, S, H, chunks, CHUNK_BLOCK=CHUNK_BLOCK, USE_M0=m0 is not None,
        num_warps=4,
    )  # fmt: skip
    gathered = ctx.do(exchange.finish, ctx.do(exchange.start, rows))
    ctx.launch(join_max, (B * S,),
        gathered, _or(m0, out), places, out, exchange.processes, B, S, H, BLOCK_H=power_of_two(H),
        USE_M0=m0 is not None, num_warps=1,
    )  # fmt: skip
    return out


def launch_own_states(
    ctx: LaunchContext, exchange: Exchange, C: Tensor, n: Tensor | None, decays: Tensor, initial: Pair, m: Tensor | None
) -> Tensor:
    """Return the rows of the spans of this process, (S, B, H, width) float32.

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        C, n, decays, initial, m: As in :func:`.exchanging.exchange_states`.
    """
    B, S, H, size, K, width = _sizes(ctx, exchange)
    rows, m0 = ctx.new(S, B, H, width), ctx.x.m
    ctx.launch(own_rows, (ceil_div(width, BLOCK), S * B, H),
        C, _or(n, C), decays, _or(initial[0], C), _or(initial[1], C), _or(m, C), _or(m0, C), C, C, rows, ctx.T, B, S,
        H, ctx.segment_steps, size, K, width, BLOCK=BLOCK, REVERSE=False, NORMALIZE=n is not None,
        USE_GIVEN=initial[0] is not None, USE_M0=m0 is not None, USE_FINAL=False, num_warps=4,
    )  # fmt: skip
    return rows


def launch_starts(ctx: LaunchContext, exchange: Exchange, gathered: Tensor, initial: Pair) -> Starts:
    """Return the states before the spans of this process, and the final states, from the rows of all processes.

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        gathered: The rows of all processes, (R, S, B, H, width).
        initial: The given initial states of whole sequences, or None.

    Returns:
        The states before the spans, (B S, H, K, V), (B S, H, K) and (B S, H), the sums of log_f over all spans,
        (R S, B, H) float64, and the final states, (B, H, ...). What is not needed is a tensor without elements.
    """
    B, S, H, size, K, width = _sizes(ctx, exchange)
    normalize, final, m = ctx.spec.normalize, exchange.final, ctx.x.m
    C = ctx.new(S * B, H, K, ctx.V)
    log_decays = ctx.new(exchange.processes * S, B, H, dtype=torch.float64)
    n = ctx.new(S * B, H, K) if normalize else None
    whole_C = ctx.new(B, H, K, ctx.V) if final else None
    whole_n, whole_m = (ctx.new(B, H, K), ctx.new(B, H)) if final and normalize else (None, None)
    none = ctx.placeholder(0)
    ctx.launch(join_spans, (ceil_div(size + (K if normalize else 0), BLOCK), S * B + (B if final else 0), H),
        gathered, _or(initial[0], C), _or(initial[1], C), _or(m, C), ctx.do(exchange.places, gathered), log_decays, C,
        C, _or(n, C), _or(whole_C, C), _or(whole_n, C), _or(whole_m, C), exchange.processes, S, B, S, H, size, K, width,
        BLOCK=BLOCK, REVERSE=False, NORMALIZE=normalize, USE_GIVEN=initial[0] is not None, USE_M=m is not None,
        FINAL_STATES=final, num_warps=4,
    )  # fmt: skip
    return Starts(C, *(_or(t, none) for t in (n, m, log_decays, whole_C, whole_n, whole_m)))


def launch_own_cotangents(
    ctx: LaunchContext, exchange: Exchange, adds: Tensor, decays: Tensor, final: Tensor | None, final_m: Tensor
) -> Tensor:
    """Return the rows of cotangents of the states before the spans of this process, and of the final states.

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        adds, decays: As in :func:`.exchanging.pass_cotangents`.
        final: The cotangents of the final states from this process, (B, H, K, V) or (B, H, K), or None.
        final_m: The max states of the final states, (B, H).

    Returns:
        The rows, (S, B, H, width) float32, or with final states (S + 1, B, H, width).
    """
    B, S, H, size, width = _cotangent_sizes(ctx, exchange, adds)
    count, normalize = S + 1 if exchange.final else S, ctx.spec.normalize
    rows, m0 = ctx.new(count, B, H, width), results.dense(ctx, ctx.x.m)
    ctx.launch(own_rows, (ceil_div(width, BLOCK), count * B, H),
        adds, adds, decays, adds, adds, adds, _or(m0, adds), _or(final, adds),
        final_m if exchange.final and normalize else _or(m0, adds), rows, ctx.T, B, S, H, ctx.segment_steps, size, 0,
        width,
        BLOCK=BLOCK, REVERSE=True, NORMALIZE=normalize, USE_GIVEN=False, USE_M0=m0 is not None,
        USE_FINAL=final is not None, num_warps=4,
    )  # fmt: skip
    return rows


def launch_ends(
    ctx: LaunchContext, exchange: Exchange, gathered: Tensor, adds: Tensor, last_m: Tensor, log_decays: Tensor,
    final_m: Tensor,
) -> Tensor:  # fmt: skip
    """Return the cotangents of the states after the spans of this process, (B S, H, K, V) or (B S, H, K).

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        gathered: The rows of all processes, (R, rows, B, H, width).
        adds: As in :func:`.exchanging.pass_cotangents`; only its shape is read.
        last_m: The max states after the spans, (B, S, H).
        log_decays: The sums of log-gates over all spans, (R S, B, H) float64.
        final_m: The max states of the final states, (B, H).
    """
    B, S, H, size, width = _cotangent_sizes(ctx, exchange, adds)
    normalize = ctx.spec.normalize
    ends = ctx.new(S * B, *adds.shape[1:])
    ctx.launch(join_spans, (ceil_div(size, BLOCK), S * B, H),
        gathered, ends, ends, last_m if normalize else ends, ctx.do(exchange.places, gathered),
        log_decays, final_m if normalize and exchange.final else ends, ends, ends, ends, ends, ends,
        exchange.processes, S + 1 if exchange.final else S, B, S, H, size, 0, width, BLOCK=BLOCK, REVERSE=True,
        NORMALIZE=normalize, USE_GIVEN=False, USE_M=normalize, FINAL_STATES=exchange.final, num_warps=4,
    )  # fmt: skip
    return ends


def _cotangent_sizes(ctx: LaunchContext, exchange: Exchange, adds: Tensor) -> tuple[int, ...]:
    """Return B, S, H, SIZE and the width of rows of cotangents of C, or of n, which have no further K numbers."""
    B, S, H, _, _, _ = _sizes(ctx, exchange)
    size = adds[0, 0].numel()
    return B, S, H, size, size + (3 if ctx.spec.normalize else 2)


def _or(x: Tensor | None, unread: Tensor) -> Tensor:
    """Return x, or for None a tensor that the kernel does not read."""
    return unread if x is None else x
