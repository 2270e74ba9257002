"""The gradients of the gates from the states at the starts of chunks."""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import power_of_two
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.gate_gradients import (
    ROUNDING,
    checkpoint_dot,
    forget_gate_gradients,
    gate_gradient_of,
    pair_sums,
    pass_tiles,
    segment_start_dot,
)
from tfla.backends.gpu.gate_kernels import first_tile, load_gate, locate_chunk
from tfla.backends.gpu.results import Gradients

MAX_STEPS = 1024  # steps that a program loads at once


@triton.jit
def _falls(q_dq, k_dk, at, size, inside, PARTS: tl.constexpr):
    """Return q . dq and k . dk of steps, (1, STEPS), summed over the parts of the head dim."""
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
    EXACT: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the gates of one chunk of one head, by (D1) to (D3) of tfla.backends.gpu.gate_gradients.

    The sum (D2) starts from <C, dC> at the start of the chunk. Its difference from <C, dC> at the end, which is
    rounding, is distributed evenly over the steps. dq is computed from C, and dk from dC, rounded to the dtype of q. C
    at the start and dC at the end are therefore rounded in the same way; otherwise the differences would add up from
    step to step.

    At the end of a sequence <C, dC> is 0 unless the final state has a cotangent (USE_FINAL_STATE). The grid is
    (chunks * H).

    Args:
        q_dq, k_dk: the sums q . dq and k . dk, (PARTS, H, tiles, L) float32, with EXACT as `pair_sums` has them.
        C, n, dC, dn, dC_first, dn_first: states and cotangents, see `segment_start_dot`.
        di, df: the gradients, (B, T, H).
    """
    chunk = tl.program_id(0) // H
    h = tl.zeros([1, 1], tl.int64) + tl.program_id(0) % H
    s, first, length, start, chunk0 = locate_chunk(cu, sequences, T, chunk, steps, IS_VARLEN)
    count = tl.maximum(tl.minimum(length - start, steps), 0).to(tl.int32)
    if count <= 0:
        return
    index = chunk.to(tl.int64) * H + h
    row = H.to(tl.int64)  # states of one chunk
    top = segment_start_dot(
        C, n, dC, dn, dC_first, dn_first, s, chunk, chunk0, h, H, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE,
        USE_INITIAL_STATE, q.dtype.element_ty,
    )  # fmt: skip
    end = top * 0
    has_end = start + steps < length  # the next chunk starts there: its state is stored
    if has_end:
        C_at, n_at = C + row * SIZE, n + row * SIZE_N
        end = checkpoint_dot(
            C_at, n_at, dC, dn, index, index >= 0, SIZE, SIZE_N, BLOCK, BLOCK_N, NORMALIZE, DC_AS=q.dtype.element_ty
        )  # fmt: skip
    at = (h * tiles + first_tile(first, s, T, L, IS_VARLEN)) * L + start
    to = (first + start) * H + h
    r = tl.arange(0, STEPS)[None, :]
    size = H.to(tl.int64) * tiles * L
    total = tl.zeros([1, STEPS], tl.float64)
    after = top
    squares = top * top
    kept = top * 0 + 1.0
    for t in range(0, count, STEPS):
        if EXACT:
            _, reads, writes, _ = pair_sums(q_dq, k_dk, at + t + r, size, t + r < count, PARTS, L)
            _across, after, squares, here = pass_tiles(after, squares, reads, writes, ROUNDING)
            kept *= here
        else:
            of_q, of_k = _falls(q_dq, k_dk, at + t + r, size, t + r < count, PARTS)
            total += (of_q - of_k).to(tl.float64)
    rounding = top * 0
    if has_end or not USE_FINAL_STATE:
        if EXACT:
            rounding = tl.where(kept > 0.0, after - end, 0.0) / tl.cdiv(count, L)  # of each tile
        else:
            rounding = (top - tl.sum(total, 1)[:, None] - end) / count
    squares = top * top
    for t in range(0, count, STEPS):
        inside = t + r < count
        if EXACT:
            of_k, reads, writes, in_tile = pair_sums(q_dq, k_dk, at + t + r, size, inside, PARTS, L)
            across, top, squares, _here = pass_tiles(top, squares, reads, writes, ROUNDING)
            across -= rounding * (t // L + tl.arange(0, STEPS // L))[None, :].to(tl.float64)
            before = forget_gate_gradients(across, reads, writes, in_tile)
        else:
            of_q, of_k = _falls(q_dq, k_dk, at + t + r, size, inside, PARTS)
            falls = (of_q - of_k).to(tl.float64)
            before = top - (tl.cumsum(falls, 1) - falls) - rounding * (t + r).to(tl.float64)
        f = load_gate(f_gate + h * fh, s, first, start + t + r, fb, ft, inside, IS_VARLEN)
        tl.store(df + to + (t + r) * H, gate_gradient_of(before.to(tl.float32), f, SIGMOID_F), mask=inside)
        if INPUT_GATE:
            i = load_gate(i_gate + h * ih, s, first, start + t + r, ib, it, inside, IS_VARLEN)
            tl.store(di + to + (t + r) * H, gate_gradient_of(of_k, i, SIGMOID_I), mask=inside)
        if not EXACT:
            top -= tl.sum(falls, 1)[:, None]


def launch(
    ctx: LaunchContext, gates: Tensor, q_dq: Tensor, k_dk: Tensor, starts: Pair, ends: Pair, grads: Gradients, *,
    final_cotangent: bool,
) -> None:  # fmt: skip
    """Compute the gradients of the gates.

    Args:
        ctx: The context of the call.
        gates: Any tensor, which stands for those that are None.
        q_dq, k_dk: The sums q . dq and k . dk, (PARTS, H, tiles, 1, L) float32, see `chunk_gate_gradients`.
        starts: C and n before the chunks, (chunks, H, dqk, dhv) and (chunks, H, dqk) or None.
        ends: dC and dn after the chunks, of the same shapes.
        grads: The gradients, of which di and df are written; dC0 and dn0 are read.
        final_cotangent: Whether the final states have cotangents.
    """
    x = ctx.x
    steps = min(MAX_STEPS, power_of_two(ctx.segment_steps))
    if ctx.exact:
        steps = max(
            steps, 8 * ctx.L
        )  # Triton 3.6 fails to compile a scan of fewer values than a thread holds, which are 8
    states = (gates if t is None else t for t in (*starts, *ends, grads.dC0, grads.dn0))
    ctx.launch(chunk_gate_gradients, (ctx.segments * ctx.H,),
        x.q, q_dq, k_dk, *states, ctx.cu_seqlens, *ctx.gate_inputs, gates if grads.di is None else grads.di, grads.df,
        x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.segment_steps, ctx.K * ctx.V, ctx.K, *ctx.gate_strides,
        PARTS=q_dq.shape[0], L=ctx.L, STEPS=steps, BLOCK=2048,
        BLOCK_N=power_of_two(ctx.K), IS_VARLEN=ctx.packed, NORMALIZE=ctx.spec.normalize,
        USE_INITIAL_STATE=x.C is not None, USE_FINAL_STATE=final_cotangent, EXACT=ctx.exact, **ctx.gate_forms,
        num_warps=4,
    )  # fmt: skip
