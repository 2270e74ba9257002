"""The recurrent kernel of the paper: states at the starts of chunks, (39) to (43), or with REVERSE their cotangents.

    direction | x, y  | weight of a step | stored for each chunk
    forward   | k, v  | UPDATE           | C, n before its first step
    REVERSE   | q, dh | INTER            | dC, dn after its last step

For each tile (docs/mathematics.md): C <- g C + (w k)^T v, (T5), and n <- g n + k^T w, (T6), or (T12) and (T13).
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext, Pair, time_strides
from tfla.backends.gpu.gate_kernels import DECAY, DELTA_P, INTER, UPDATE, VECTORS, locate_segment
from tfla.backends.gpu.results import new_segment_n, new_segment_states
from tfla.backends.triton.paper import block_sizes
from tfla.backends.triton.scan_tiles import load_tile


@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "steps"])
def chunk_states(
    X, Y, gates, cu, C_given, n_given, C_chunks, n_chunks, C_final, n_final,
    sequences, T, tiles_of_head, H, GROUP, steps, xb, xt, xh, yb, yt, yh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, DELTA: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Compute BK x BV of the states of one head of one sequence, chunk after chunk.

    The grid is (DK / BK * DV / BV * sequences * H). N, (L, BK), holds n as a sum of rows, so that a tile needs no sum
    over its steps.

    Args:
        X: x, (B, T, H / GROUP, DK).
        Y: y, (B, T, H, DV).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1). With INDEXED the indices of the rows of initial and of
            final states in their pools follow them, see `bound_sequences`.
        C_given, n_given: the initial states, (sequences, H, DK, DV) and (sequences, H, DK) float32. With INDEXED
            C_given is a pool.
        C_chunks, n_chunks: the results, (chunks, H, DK, DV) and (chunks, H, DK).
        C_final, n_final: the final states, of the shapes of C_given and n_given. With INDEXED C_final is a pool.
        steps: the number of steps of a chunk.
    """
    PARTS: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0) % (PARTS * ((DK + BK - 1) // BK))
    state = tl.program_id(0) // (PARTS * ((DK + BK - 1) // BK))
    s = state // H
    h = (state % H).to(tl.int64)
    k0 = part // PARTS * BK
    v0 = part % PARTS * BV
    first, length, b, t_first, tile0 = locate_segment(cu, sequences, T, s, steps, L, False, IS_VARLEN)
    if IS_VARLEN:
        chunk0 = first // steps + s
    else:
        chunk0 = s.to(tl.int64) * tl.cdiv(T, steps)
    x_at = X + b * xb + t_first * xt + h // GROUP * xh
    y_at = Y + b * yb + t_first * yt + h * yh
    gates += (h * tiles_of_head + tile0) * VECTORS * L
    r = tl.arange(0, L)
    rk = k0 + tl.arange(0, BK)
    rv = v0 + tl.arange(0, BV)
    at = rk.to(tl.int64)[:, None] * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    owner = (rk < DK) & (rk * 0 + v0 == 0)  # the programs that store n
    C = tl.zeros([BK, BV], tl.float32)
    N = tl.zeros([L, BK], tl.float32)
    if USE_INITIAL_STATE:
        if INDEXED:
            place = tl.load(cu + sequences + 1 + s).to(tl.int64)
            C = tl.load(C_given + (place * H + h) * DK * DV + at, mask=inside & (place >= 0), other=0.0)
            C = tl.where(place < -1, float("nan"), C.to(tl.float32))  # -2 stands for a row that the pool lacks
        else:
            C = tl.load(C_given + state.to(tl.int64) * DK * DV + at, mask=inside, other=0.0)
        if NORMALIZE:
            n = tl.load(n_given + state.to(tl.int64) * DK + rk, mask=rk < DK, other=0.0)
            N = tl.where(r[:, None] == 0, n[None, :], 0.0)
    chunks = tl.cdiv(length, steps).to(tl.int32)
    for c in range(0, chunks):
        chunk = chunk0 + (chunks - 1 - c if REVERSE else c)
        row = chunk * H + h
        tl.store(C_chunks + row * DK * DV + at, C, mask=inside)
        if NORMALIZE:
            tl.store(n_chunks + row * DK + rk, tl.sum(N, 0), mask=owner)
        begin = (chunk - chunk0) * steps
        tiles = tl.cdiv(tl.minimum(length - begin, steps), L).to(tl.int32)
        for step in tl.range(0, tiles, num_stages=STAGES):
            t = begin + (tiles - 1 - step if REVERSE else step) * L
            gate = gates + t * VECTORS
            x = load_tile(x_at, t, k0, length, DK, xt, L, BK, False)  # (L, BK)
            y = load_tile(y_at, t, v0, length, DV, yt, L, BV, False)  # (L, BV)
            decay = tl.load(gate + DECAY * L)
            w = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)
            x_up = (tl.trans(x) * w[None, :]).to(x.dtype)
            # C <- g C + (w x)^T y
            C = tl.dot(x_up, y, C * decay, input_precision=PRECISION)
            if NORMALIZE:
                N = N * decay
                if DELTA:
                    w *= tl.load(gate + DELTA_P * L + r)
                if DELTA or not REVERSE:
                    N += x * w[:, None]
    if STORE_FINAL_STATE:
        if INDEXED:  # the places of final states follow those of the initial ones
            place = tl.load(cu + 2 * sequences + 1 + s).to(tl.int64)
            rk = k0 + tl.arange(0, BK)  # computed again, so that the loop needs no registers for the addresses
            rv = v0 + tl.arange(0, BV)
            if place >= 0:
                at = (place * H + h) * DK * DV + rk[:, None] * DV + rv[None, :]
                tl.store(C_final + at, C, mask=(rk < DK)[:, None] & (rv < DV)[None, :])
        else:
            tl.store(C_final + state.to(tl.int64) * DK * DV + at, C, mask=inside)
        if NORMALIZE:
            tl.store(n_final + state.to(tl.int64) * DK + rk, tl.sum(N, 0), mask=owner)


def launch(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, *, reverse: bool, initial: Pair, final: Pair,
    delta: bool = False,
) -> Pair:  # fmt: skip
    """Compute C and n before every chunk, or with `reverse` dC and dn after it.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y: k and v, or with `reverse` q and do.
        reverse: Whether cotangents are computed.
        initial: The initial states of the sequences, or the cotangents of their final states, or None for zeros.
        final: Outputs for the states that scans end with, or None.
        delta: Whether dn is updated with delta.

    Returns:
        The states, (chunks, H, dqk, dhv) and (chunks, H, dqk), the latter None without a normalizer.
    """
    normalize = ctx.spec.normalize
    C = new_segment_states(ctx)
    n = new_segment_n(ctx) if normalize else None
    sizes = block_sizes.choose(ctx.x, ctx.spec.chunk_size)
    BK, BV = min(sizes.state_rows, block_sizes.padded(ctx.K)), min(sizes.state_columns, block_sizes.padded(ctx.V))
    blocks = ceil_div(ctx.K, BK) * ceil_div(ctx.V, BV)
    ctx.launch(chunk_states, (blocks * ctx.x.sequences * ctx.H,),
        x, y, gates, ctx.cu_seqlens, *(gates if t is None else t for t in (*initial, C, n, *final)), ctx.x.sequences,
        ctx.T, ctx.tiles, ctx.H, ctx.group, ctx.segment_steps, *time_strides(x), *time_strides(y),
        DK=ctx.K, DV=ctx.V, BK=BK, BV=BV, L=ctx.L, REVERSE=reverse, NORMALIZE=normalize, DELTA=delta,
        IS_VARLEN=ctx.packed, USE_INITIAL_STATE=initial[0] is not None, STORE_FINAL_STATE=final[0] is not None,
        PRECISION=ctx.precision, STAGES=sizes.stages, INDEXED=ctx.rows is not None, num_warps=sizes.num_warps,
        tunable=ctx.rows is None,
    )  # fmt: skip
    return C, n
