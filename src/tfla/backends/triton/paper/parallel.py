"""The parallel kernel of the paper, Table 1: two-level tiling inside a chunk, (44) to (56) and (101) to (103).

All four results have one shape, out = (A B^T * D) Y + (weight of the chunk's state) A S:

    result | A, B, Y   | parallel over | loops over | inner tiles      | S
    h      | q, k, v   | L_hq, dhv     | L_kv, dqk  | before           | C before the chunk
    dv     | k, q, dh  | L_kv, dhv     | L_hq, dqk  | after (REVERSE)  | dC after the chunk
    dq     | dh, v, k  | L_hq, dqk     | L_kv, dhv  | before           | C^T
    dk     | v, dh, q  | L_kv, dqk     | L_hq, dhv  | after (REVERSE)  | dC^T

A program computes L steps and BO columns of a result. It loops over inner tiles of LI steps, and over the contracted
dim in blocks of BA:

    (1)  out <- (A B^T * D) Y inside the program's own tile
    (2)  out <- out + (a A B^T * w) Y for the other tiles of the chunk
    (3)  out <- out + a A S for the steps outside of the chunk

Inside its own tile D is the exponential of a difference of sums, (G2). Between two tiles it is a product of the weights
a, w and the decays of the tiles in between, all at most 1, so nothing cancels. The max state is part of the gate
vectors, so neither loop of Algorithm 1 rescales, for either input gate.
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext, Pair, time_strides
from tfla.backends.gpu.gate_gradients import COLUMN_SUM, OTHER_TILES, PAIR_SUMS, ROW_SUM, SAME_STEP
from tfla.backends.gpu.gate_kernels import (
    COLUMN,
    COLUMN_LOW,
    DECAY,
    DELTA_P,
    FLOOR,
    INTER,
    ROW,
    ROW_LOW,
    UPDATE,
    VECTORS,
    locate_segment,
)
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.paper import block_sizes
from tfla.backends.triton.scan_tiles import load_tile, store_tile


@triton.jit
def gate_matrix(gate, i, j, L: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr):
    """Return rows i and columns j of the gate matrix of a tile, or with REVERSE of its transpose."""
    outer: tl.constexpr = COLUMN if REVERSE else ROW
    inner: tl.constexpr = ROW if REVERSE else COLUMN
    e = tl.load(gate + outer * L + i)[:, None] + tl.load(gate + inner * L + j)[None, :]
    if EXACT:
        low = tl.load(gate + (COLUMN_LOW if REVERSE else ROW_LOW) * L + i)
        e += low[:, None] + tl.load(gate + (ROW_LOW if REVERSE else COLUMN_LOW) * L + j)[None, :]
    D = tl.exp2(e)
    if NEGATIVE:
        D = -D
    if REVERSE:
        return tl.where(i[:, None] <= j[None, :], D, 0.0)
    else:
        return tl.where(i[:, None] >= j[None, :], D, 0.0)


@triton.jit
def matmul(
    a, A, B, t, u, steps, at, bt, L: tl.constexpr, LI: tl.constexpr, DA: tl.constexpr, BA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return A B^T, (L, LI), of the rows of A from t and of B from u. If BA >= DA, `a` is that block of A."""
    if BA >= DA:
        b = load_tile(B, u, 0, steps, DA, bt, LI, BA, False)
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)
    else:
        S = tl.zeros([L, LI], tl.float32)
        for c in tl.range(0, DA, BA, num_stages=STAGES):
            x = load_tile(A, t, c, steps, DA, at, L, BA, False)
            y = load_tile(B, u, c, steps, DA, bt, LI, BA, False)
            S = tl.dot(x, tl.trans(y), S, input_precision=PRECISION)
        return S


@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP_A", "GROUP_Y", "steps", "tiles_of_chunk"])
def chunk_outputs(
    A, B, Y, W, Out, gates, cu, states, n, d_out, w_out,
    sequences, T, tiles_of_head, H, GROUP_A, GROUP_Y, steps, tiles_of_chunk,
    ab, at, ah, bb, bt, bh, yb, yt, yh, wb, wt, wh, ob, ot, oh,
    DA: tl.constexpr, DO: tl.constexpr, BA: tl.constexpr, BO: tl.constexpr, L: tl.constexpr, LI: tl.constexpr,
    REVERSE: tl.constexpr, OF_QK: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, SAVE_D: tl.constexpr,
    IS_VARLEN: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h, with REVERSE dv, with OF_QK dq, or with both dk.

    The grid is (DO / BO * tiles of a chunk * chunks * H).

    Args:
        A, B: the operands of the first product, (B, T, heads, DA).
        Y: the right operand, (B, T, heads, DO).
        W: with OF_QK the operand of the sums w . out, q for dq and k for dk.
        Out: the result, (B, T, H, DO).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        states, n: the states or cotangents of the chunks, (chunks, H, dqk, dhv) and (chunks, H, dqk).
        d_out: the denominators, (B, T, H); written with SAVE_D.
        w_out: the sums w . out, (DO / BO, H, tiles, L) float32; written with OF_QK. With EXACT they are without the
            program's own tile, and those of dk are (DO / BO, H, tiles, PAIR_SUMS, L), with those of the tile's pairs.
        steps: the number of steps of a chunk.
    """
    PARTS: tl.constexpr = (DO + BO - 1) // BO
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS % tiles_of_chunk
    state = (tl.program_id(0) // PARTS // tiles_of_chunk).to(tl.int64)  # number of the chunk and head
    h = state % H
    first, length, b, t_first, tile0 = locate_segment(
        cu, sequences, T, (state // H).to(tl.int32), steps, L, True, IS_VARLEN
    )
    own = tile * L
    if own >= length:
        return
    o = part * BO
    a_at = A + b * ab + t_first * at + h // GROUP_A * ah
    b_at = B + b * bb + t_first * bt + h // GROUP_A * bh
    y_at = Y + b * yb + t_first * yt + h // GROUP_Y * yh
    o_at = Out + b * ob + t_first * ot + h * oh
    tile0 += h * tiles_of_head
    gates += tile0 * VECTORS * L
    gate = gates + own * VECTORS
    r = tl.arange(0, L)
    ri = tl.arange(0, LI)
    DENOMINATOR: tl.constexpr = NORMALIZE and not REVERSE and not OF_QK
    PAIRS: tl.constexpr = OF_QK and EXACT  # whether the sums are by pairs of steps
    outer = tl.load(gate + (UPDATE if REVERSE else INTER) * L + r)
    a = load_tile(a_at, own, 0, length, DA, at, L, BA, False)
    out = tl.zeros([L, BO], tl.float32)
    d = tl.zeros([L], tl.float32)
    if DELTA and not REVERSE:
        delta = tl.load(gate + DELTA_P * L + r)
    if PAIRS:
        w_at = W + b * wb + t_first * wt + h // GROUP_Y * wh
        sum_at = w_out + ((part * H * tiles_of_head + tile0) * L + own) * (PAIR_SUMS if REVERSE else 1)
        same_step = tl.zeros([L], tl.float32)
        column_sum = tl.zeros([L], tl.float32)
    # (1) The program's own tile.
    for u in tl.range(0, L, LI, num_stages=1):
        S = matmul(a, a_at, b_at, own, own + u, length, at, bt, L, LI, DA, BA, PRECISION, STAGES)
        if DELTA:
            S += tl.load(gate + DELTA_P * L + u + ri)[None, :] if REVERSE else delta[:, None]
        S = rounded_product(S, gate_matrix(gate, r, u + ri, L, REVERSE, EXACT, NEGATIVE))
        if DENOMINATOR:
            d += tl.sum(S, 1)
        y = load_tile(y_at, own + u, o, length, DO, yt, LI, BO, False)
        out = tl.dot(S.to(y.dtype), y, out, input_precision=PRECISION)
        if PAIRS and REVERSE:
            pairs = tl.zeros([L, LI], tl.float32)  # [step of k, step of q]
            for c in tl.range(o, o + BO, 32, num_stages=1):  # in parts, which take fewer registers
                key = load_tile(w_at, own, c, length, DO, wt, L, 32, False)
                query = load_tile(y_at, own + u, c, length, DO, yt, LI, 32, False)
                pairs = tl.dot(key, tl.trans(query), pairs, input_precision=PRECISION)
            pairs = rounded_product(S, pairs)
            same = r[:, None] == (u + ri)[None, :]
            same_step += tl.sum(tl.where(same, pairs, 0.0), 1)
            pairs = tl.where(same, 0.0, pairs)
            column_sum += tl.sum(pairs, 1)
            tl.store(sum_at + ROW_SUM * L + u + ri, tl.sum(pairs, 0))
    if PAIRS:
        if REVERSE:
            tl.store(sum_at + SAME_STEP * L + r, same_step)
            tl.store(sum_at + COLUMN_SUM * L + r, column_sum)
        inside_tile = out
        out = tl.zeros([L, BO], tl.float32)
    # (2) From there to the start, or with REVERSE to the end, of the chunk; `decay` is that of the tiles in between.
    decay = 1.0
    others = (tl.cdiv(length, L).to(tl.int32) - 1 - tile if REVERSE else tile) * (L // LI)
    for step in tl.range(0, others, num_stages=STAGES if BA >= DA else 1):
        u = own + L + step * LI if REVERSE else own - (step + 1) * LI
        far = gates + u // L * (VECTORS * L)
        S = matmul(a, a_at, b_at, own, u, length, at, bt, L, LI, DA, BA, PRECISION, STAGES)
        if DELTA:
            S += tl.load(far + DELTA_P * L + u % L + ri)[None, :] if REVERSE else delta[:, None]
        inner = tl.load(far + (INTER if REVERSE else UPDATE) * L + u % L + ri) * decay
        # Multiplied one after the other, since the product of both weights can exceed float32.
        S = rounded_product(S * outer[:, None], inner[None, :])
        if DENOMINATOR:
            d += tl.sum(S, 1)
        y = load_tile(y_at, u, o, length, DO, yt, LI, BO, False)
        out = tl.dot(S.to(y.dtype), y, out, input_precision=PRECISION)
        passed = u % L == (L - LI if REVERSE else 0)
        decay *= tl.where(passed, tl.load(far + DECAY * L), 1.0)
    # (3) The rest of the sequence, by the chunk's state, (dqk, dhv).
    rows = tl.zeros([L, BO], tl.float32)
    ro = o + tl.arange(0, BO)
    of_n = tl.zeros([L], tl.float32)
    for c in tl.range(0, DA, BA, num_stages=1):
        ra = c + tl.arange(0, BA)
        if BA < DA:
            a = load_tile(a_at, own, c, length, DA, at, L, BA, False)
        in_state = ro[None, :] * DA + ra[:, None] if OF_QK else ra[:, None] * DO + ro[None, :]
        inside = (ra < DA)[:, None] & (ro < DO)[None, :]
        S = tl.load(states + state * DA * DO + in_state, mask=inside, other=0.0)
        # In float32 `outer` is applied before and `decay` after the product, so that neither operand leaves its
        # range where states grow.
        weighted = a * outer[:, None] if EXACT else a
        rows = tl.dot(weighted, S.to(a.dtype), rows, input_precision=PRECISION)
        if DENOMINATOR:
            column = tl.load(n + state * DA + ra, mask=ra < DA, other=0.0)
            of_n += tl.sum(rounded_product(a, column[None, :]), 1)
    if OF_QK and NORMALIZE:
        column = tl.load(n + state * DO + ro, mask=ro < DO, other=0.0)[None, :]
        if EXACT:
            column = column * outer[:, None]
        if REVERSE:
            rows += column
        elif DELTA:
            rows += delta[:, None] * column
    if EXACT:
        out += rows * decay
    else:
        out += rows * (outer * decay)[:, None]
    if DENOMINATOR:
        d += of_n * (outer * decay)
        if SAVE_D:
            tl.store(d_out + (first + own + r) * H + h, d, mask=(own + r < length) & (r * 0 + part == 0))
        floor = tl.load(gate + FLOOR * L + r)
        out /= tl.where(tl.abs(d) < floor, floor, tl.abs(d))[:, None]  # unlike a maximum this keeps NaN
    if OF_QK:
        w = load_tile(W + b * wb + t_first * wt + h // GROUP_Y * wh, own, o, length, DO, wt, L, BO, False)
        if PAIRS:
            tl.store(sum_at + OTHER_TILES * L + r, tl.sum(rounded_product(out, w), 1))
            out += inside_tile
        else:
            tl.store(w_out + (part * H * tiles_of_head + tile0) * L + own + r, tl.sum(rounded_product(out, w), 1))
    store_tile(o_at, out.to(Out.dtype.element_ty), own, o, length, DO, ot, L, BO, False)


def launch_output(
    ctx: LaunchContext, gates: Tensor, a: Tensor, b: Tensor, y: Tensor, out: Tensor, *, reverse: bool, states: Pair,
    d: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute h, or with `reverse` dv, into `out`, (B, T, H, dhv).

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        a, b, y: The operands, in the table of the module: q, k, v for h; k, q, dh for dv.
        out: Output.
        reverse: Whether dv is computed.
        states: C and n before the chunks, or with `reverse` dC and dn after them.
        d: Output for the denominators, (B, T, H), or None.
    """
    _launch(ctx, gates, a, b, y, None, out, gates, reverse, states, False, d)


def launch_qk_gradient(
    ctx: LaunchContext, gates: Tensor, a: Tensor, b: Tensor, y: Tensor, w: Tensor, out: Tensor, *, reverse: bool,
    states: Pair, delta: bool,
) -> Tensor:  # fmt: skip
    """Compute dq, or with `reverse` dk, into `out`, (B, T, H, dqk).

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        a, b, y: The operands, in the table of the module: dh, v, k for dq; v, dh, q for dk.
        w: q for dq, k for dk.
        out: Output.
        reverse: Whether dk is computed.
        states: C and n before the chunks, or with `reverse` dC and dn after them.
        delta: Whether the normalizer adds delta.

    Returns:
        The sums w . out over blocks of dqk, (blocks, H, tiles, 1, L) float32, or for dk in float32
        (blocks, H, tiles, PAIR_SUMS, L).
    """
    blocks = ceil_div(ctx.K, block_sizes.choose(ctx.x, ctx.spec.chunk_size).output_block(ctx.K))
    sums = ctx.new(blocks, ctx.H, ctx.tiles, PAIR_SUMS.value if ctx.exact and reverse else 1, ctx.L)
    _launch(ctx, gates, a, b, y, w, out, sums, reverse, states, delta, None)
    return sums


def _launch(
    ctx: LaunchContext, gates: Tensor, a: Tensor, b: Tensor, y: Tensor, w: Tensor | None, out: Tensor, sums: Tensor,
    reverse: bool, states: Pair, delta: bool, d: Tensor | None,
) -> None:  # fmt: skip
    """Launch `chunk_outputs`, with w for dq or dk."""
    sizes, contracted, width = block_sizes.choose(ctx.x, ctx.spec.chunk_size), a.shape[3], out.shape[3]
    BO, of_qk = sizes.output_block(width), w is not None
    blocks, tiles = ceil_div(width, BO), ceil_div(min(ctx.segment_steps, ctx.T), ctx.L)
    group_a, group_y = (1, ctx.group) if of_qk else (ctx.group, 1)  # heads that share a and b, and y and w
    w = y if w is None else w
    ctx.launch(chunk_outputs, (blocks * tiles * ctx.segments * ctx.H,),
        a, b, y, w, out, gates, ctx.cu_seqlens, *(gates if t is None else t for t in (*states, d)), sums,
        ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, group_a, group_y, ctx.segment_steps, tiles, *time_strides(a),
        *time_strides(b), *time_strides(y), *time_strides(w), *time_strides(out),
        DA=contracted, DO=width, BA=sizes.contracted_block(contracted), BO=BO, L=ctx.L, LI=sizes.inner_steps,
        REVERSE=reverse, OF_QK=of_qk, NORMALIZE=ctx.spec.normalize, DELTA=delta, SAVE_D=d is not None,
        IS_VARLEN=ctx.packed, EXACT=ctx.exact, NEGATIVE=ctx.spec.scale < 0, PRECISION=ctx.precision,
        STAGES=sizes.stages, num_warps=sizes.num_warps, tunable=True,
    )  # fmt: skip
