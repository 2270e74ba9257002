"""Fused scans: o, dv, dq and dk, each by one kernel that keeps the state on chip from tile to tile.

All four large results have one shape. In each tile of L steps x and y update the state, z reads it, and the product
P = z x^T (o, dv) or z y^T (dq, dk) inside the tile is multiplied by the gate matrix and masked to the past, or with
REVERSE to the future. Operands, with the equations of docs/mathematics.md:

    result | kernel     | order   | x, y, z  | state          | split over | a      | w      | equations
    o      | o_dv_scan  | forward | k, v, q  | C^T (dhv, dqk) | dhv        | INTER  | UPDATE | (T1), (T2), (T5)
    dv     | o_dv_scan  | REVERSE | q, do, k | dC^T           | dhv        | UPDATE | INTER  | (T11), (T12)
    dq     | dq_dk_scan | forward | k, v, do | C (dqk, dhv)   | dqk        | INTER  | UPDATE | (T8), (T9), (T5)
    dk     | dq_dk_scan | REVERSE | q, do, v | dC             | dqk        | UPDATE | INTER  | (T8), (T10), (T12)

a is the weight of the state in the output, w the weight of a step in the state. The kernels compute outputs transposed,
so that the state is the left operand of an MMA, from registers. One tile of `o_dv_scan`, and of `dq_dk_scan`:

    (1)  P^T <- x z^T * D^T                        (L, L), dq_dk_scan: (y z^T + delta) * D^T
    (2)  out^T <- (S z^T) * a + operand^T P^T      (dims of the output, L); operand is y, or x for dq_dk_scan
    (3)  S <- g S + y^T (x * w)                    the state, dq_dk_scan: (x * w)^T y
    (4)  N <- g N + x^T w                          the normalizer state n, dq_dk_scan only, (T6), (T13)

The programs that share a head split the output, so none needs partial results of another. `dq_dk_scan` also stores the
sums q . dq and k . dk, from which the gate gradients are computed, in float32 separately for pairs of steps in one tile
(:mod:`tfla.backends.gpu.gate_gradients`). The normalizer acts as one more column of v of all
ones, whose cotangent is delta, (T7).

A program scans one sequence, or one segment of a sequence from the state at the segment's start. The states at segment
starts come from `o_dv_scan` or `normalizer_scan` without outputs, which store what each segment adds to the state, and
from state passing. A wide state is held as two blocks of columns, S0 and S1 (BLOCKS = 2). Gates are loaded right before
their use, because registers are scarce.
"""

import inspect

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu import state_passing
from tfla.backends.gpu.checkpoints import new_checkpoints
from tfla.backends.gpu.config import SHORTEST_SEGMENT, ceil_div, power_of_two, processors
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
    TINY,
    UPDATE,
    VECTORS,
    first_tile,
    locate_chunk,
    locate_segment,
)
from tfla.backends.gpu.results import new_segment_n, new_segment_states
from tfla.backends.gpu.state_passing import rounded_product

MAX_N = 512  # elements of n of one program of `normalizer_scan`; float32 takes twice the shared memory


def without_unknown_options(kernel):
    """Remove the option disable_licm from the loops of a kernel where Triton, before 3.5, does not have it.

    With disable_licm loop invariants stay in the loop: the parts of an address take fewer registers than the address.
    IEEE float32 (EXACT) uses no MMAs and is compiled without it.
    """
    if isinstance(kernel, triton.JITFunction) and "disable_licm" not in inspect.signature(tl.range).parameters:
        kernel._unsafe_update_src(kernel.src.replace(", disable_licm=not EXACT", ""))
    return kernel


@triton.jit
def tile_access(base, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Return a TMA descriptor of a (length, width) matrix in tiles (L, W), or without TMA its address."""
    if TMA:
        return tl.make_tensor_descriptor(base, [length.to(tl.int32), width], [stride, 1], [L, W])
    else:
        return base


@triton.jit
def load_tile(at, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Load the tile (L, W) at row t and column c; elements outside of the matrix are 0."""
    if TMA:
        return at.load([t, c])
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        return tl.load(
            at + r.to(tl.int64)[:, None] * stride + w[None, :], (r < length)[:, None] & (w < width)[None, :], 0.0
        )


@triton.jit
def store_tile(at, x, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Store the tile x, (L, W), at row t and column c; elements outside of the matrix are left out."""
    if TMA:
        at.store([t, c], x)
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        tl.store(at + r.to(tl.int64)[:, None] * stride + w[None, :], x, (r < length)[:, None] & (w < width)[None, :])


@triton.jit
def count_tiles(
    cu, sequences, T, slot, length, steps, L: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
    SKIP_LAST: tl.constexpr,
):  # fmt: skip
    """Return the number of tiles of a scan.

    With SKIP_LAST it is 0 for the segment that the scan of a sequence reaches last, whose final state is not read.
    """
    tiles = tl.cdiv(steps, L).to(tl.int32)
    if SKIP_LAST:
        _, _, whole, start, _ = locate_chunk(cu, sequences, T, slot, length, IS_VARLEN)
        if start + steps >= whole and not REVERSE:
            tiles *= 0
        if start == 0 and REVERSE:
            tiles *= 0
    return tiles


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """Return the matrix product a b, (M, N).

    IEEE float32 has no MMAs: a thread loads whole rows of a and columns of b into registers. The product is therefore
    summed over slices of the contracted dim.
    """
    M: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    N: tl.constexpr = b.shape[1]
    SLICE: tl.constexpr = 64 if K <= 256 else 32
    if PRECISION == "ieee" and K > SLICE:
        a = tl.permute(tl.reshape(a, (M, K // SLICE, SLICE)), (1, 0, 2))
        return tl.sum(tl.dot(a, tl.reshape(b, (K // SLICE, SLICE, N)), input_precision=PRECISION), 0)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def split_rounding(w, place, dtype: tl.constexpr):
    """Return w, (L), as an MMA operand (16, L): row 0 is w rounded to `dtype`, row 1 the rounding error, the rest 0."""
    high = w.to(dtype)
    low = (w - high).to(dtype)
    return tl.where(place == 0, high[None, :], tl.where(place == 1, low[None, :], 0.0)).to(dtype)


@triton.jit
def scale_to_range(w, dtype: tl.constexpr, DELTA: tl.constexpr):
    """Return w and 1, or with DELTA and float16 w / max |w| and max |w|: weights times delta can exceed float16."""
    if DELTA and dtype == tl.float16:
        top = tl.maximum(tl.max(tl.abs(w), 0), TINY)
        return w / top, top
    else:
        return w, 1.0


@triton.jit
def gate_matrix(gate, r, L: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Return the transposed gate matrix, [updating step, reading step], (L, L); 0 where the update comes later."""
    update: tl.constexpr = ROW if REVERSE else COLUMN
    read: tl.constexpr = COLUMN if REVERSE else ROW
    e = tl.load(gate + update * L + r)[:, None] + tl.load(gate + read * L + r)[None, :]
    if EXACT:
        u = tl.load(gate + (ROW_LOW if REVERSE else COLUMN_LOW) * L + r)
        e += u[:, None] + tl.load(gate + (COLUMN_LOW if REVERSE else ROW_LOW) * L + r)[None, :]
    if REVERSE:
        return tl.where(r[:, None] >= r[None, :], tl.exp2(e), 0.0)
    else:
        return tl.where(r[:, None] <= r[None, :], tl.exp2(e), 0.0)


# WGMMA arranges `dq_dk_scan` so that it needs at most half of the shared memory and of the registers of a Hopper
# multiprocessor, which then runs two programs. Triton gives a tile that only MMAs read one buffer more than its
# pipeline needs; touch_tile() is another read and avoids it. wait_for_mma() completes the MMAs before the next load.
# load_opaque() keeps the scaled tile out of the registers.


@triton.jit
def _take_first(a, b):
    """Return the first of two values, for a reduction that only has to read them."""
    return a


@triton.jit
def touch_tile(x):
    """Read a tile (rows, columns) outside of MMAs and return one number a row."""
    return tl.reduce(x, 1, _take_first)


@triton.jit
def wait_for_mma(x):
    """Return the accumulator of an MMA unchanged, after the MMA is complete."""
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def load_opaque(p):
    """Load float32 values through inline assembly, which Triton does not rearrange."""
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [p], dtype=tl.float32, is_pure=True, pack=1)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def o_dv_scan(
    X, Y, Z, Out, gates, cu, state_in, state_out, decays,
    sequences, T, tiles_of_head, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, ob, ot, oh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    REVERSE: tl.constexpr, OUTPUT: tl.constexpr, IS_VARLEN: tl.constexpr, IS_SEGMENTED: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, SKIP_LAST: tl.constexpr,
):  # fmt: skip
    """Compute o, or with REVERSE dv: a program computes BLOCKS * BV columns of dhv of one head of one segment.

    The grid is (dhv / (BLOCKS * BV), segments * H). Operands and equations are in the module docstring.

    Args:
        X, Z: x and z, (B, T, H / GROUP, DK).
        Y: y, (B, T, H, DV).
        Out: the output, (B, T, H, DV); written with OUTPUT.
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1).
        state_in: the states that scans start from, (segments, H, DK, DV); read with USE_INITIAL_STATE.
        state_out: the states that scans end with, of the same shape; written with STORE_FINAL_STATE.
        decays: the decay over each segment, (segments, H) float32; written without OUTPUT.
        length: the number of steps of a segment.
        NEGATIVE: whether the scale is negative; the gate vectors hold its absolute value.
        SKIP_LAST: see `count_tiles`.
    """
    part = tl.program_id(0)
    slot = tl.program_id(1) // H
    h = tl.program_id(1) % H
    _, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, slot, length, L, IS_SEGMENTED, IS_VARLEN)
    col = part * BV * BLOCKS
    hx = (h // GROUP).to(tl.int64)
    hv = h.to(tl.int64)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hx * zh, steps, DK, zt, L, BK, TMA)
    y_at = tile_access(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    o_at = tile_access(Out + b * ob + t_first * ot + hv * oh, steps, DV, ot, L, BV, TMA)
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    state_row = tl.program_id(1).to(tl.int64)
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    state_at = (state_row * DK + rk[None, :]) * DV + rv[:, None]
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    inside1 = (rv + BV < DV)[:, None] & (rk < DK)[None, :]
    S0 = tl.zeros([BV, BK], tl.float32)  # a block of C^T or dC^T
    S1 = tl.zeros([BV, BK], tl.float32)
    if USE_INITIAL_STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0).to(tl.float32)
    r = tl.arange(0, L)
    tiles = count_tiles(cu, sequences, T, slot, length, steps, L, REVERSE, IS_VARLEN, SKIP_LAST)
    total = 1.0
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        t = (tiles - 1 - step if REVERSE else step) * L
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, 0, steps, DK, xt, L, BK, TMA)  # (L, BK)
        if OUTPUT:
            z = load_tile(z_at, t, 0, steps, DK, zt, L, BK, TMA)  # (L, BK)
        y0 = load_tile(y_at, t, col, steps, DV, yt, L, BV, TMA)  # (L, BV)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, col + BV, steps, DV, yt, L, BV, TMA)
        decay = tl.load(gate + DECAY * L)
        wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)  # (L), w
        x_up = (x * wx[:, None]).to(x.dtype)
        if OUTPUT:
            # (1) P^T <- x z^T * D^T
            P = matmul(x, tl.trans(z), PRECISION)  # (L, L)
            P = P * gate_matrix(gate, r, L, REVERSE, EXACT)
            if NEGATIVE:
                P = -P
            P = P.to(x.dtype)
            # (2) out^T <- (S z^T) * a + y^T P^T
            out = matmul(S0.to(x.dtype), tl.trans(z), PRECISION)  # (BV, L)
            wz = tl.load(gate + (UPDATE if REVERSE else INTER) * L + r)  # (L), a
            out = tl.dot(tl.trans(y0), P, out * wz[None, :], input_precision=PRECISION)
            store_tile(o_at, tl.trans(out).to(x.dtype), t, col, steps, DV, ot, L, BV, TMA)
            if BLOCKS == 2:
                out = matmul(S1.to(x.dtype), tl.trans(z), PRECISION)
                out = tl.dot(tl.trans(y1), P, out * wz[None, :], input_precision=PRECISION)
                store_tile(o_at, tl.trans(out).to(x.dtype), t, col + BV, steps, DV, ot, L, BV, TMA)
        else:
            total *= decay
        # (3) S <- g S + y^T (x * w)
        S0 = tl.dot(tl.trans(y0), x_up, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(tl.trans(y1), x_up, S1 * decay, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if not OUTPUT and part == 0:
            tl.store(decays + state_row, total)


@triton.jit
def store_checkpoint(checkpoints, at, S, rk, rv, DK: tl.constexpr, DV: tl.constexpr):
    """Store the block S of a state, rows rk and columns rv, in `checkpoints`, (rows, DV), from row `at`."""
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    tl.store(checkpoints + (at + rk[:, None]) * DV + rv[None, :], S.to(checkpoints.dtype.element_ty), mask=inside)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def dq_dk_scan(
    X, Y, Z, W, Out, gates, cu, w_out, state_in, state_out, n_in, n_out, checkpoints, n_checkpoints,
    sequences, T, tiles_of_head, H, GROUP, length,
    xb, xt, xh, yb, yt, yh, zb, zt, zh, wb, wt, wh, ob, ot, oh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr,
    NP: tl.constexpr, REVERSE: tl.constexpr, NORMALIZE: tl.constexpr, DELTA: tl.constexpr, IS_VARLEN: tl.constexpr,
    IS_SEGMENTED: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, WGMMA: tl.constexpr,
    CHECKPOINT_STEPS: tl.constexpr,
):  # fmt: skip
    """Compute dq, or with REVERSE dk: a program computes BK of the dims of dqk of one head of one segment.

    The grid is (dqk / BK, segments * H). Operands and equations are in the module docstring.

    Args:
        X, W: x, and the operand w of the sums w . out, which is q for dq and k for dk, (B, T, H / GROUP, DK).
        Y, Z: y and z, (B, T, H, DV).
        Out: the output, (B, T, H, DK).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32.
        cu: the offsets of packed sequences, (sequences + 1).
        w_out: the sums w . out over NP parts of the BK dims of each program, (dqk / BK, H, tiles, NP, L) float32. With
            EXACT only terms of other tiles (NP = 1), for dk beside those of the tile's pairs of steps (NP = PAIR_SUMS).
        state_in, n_in: the states that scans start from, (segments, H, DK, DV) and (segments, H, DK).
        state_out, n_out: the states that scans end with, of the same shapes.
        checkpoints, n_checkpoints: the state before, or with REVERSE its cotangent at, every CHECKPOINT_STEPS-th step
            of the segment but the first, (checkpoints, H, DK, DV) and (checkpoints, H, DK).
        length: the number of steps of a segment.
        DELTA: whether the normalizer adds delta to P.
        WGMMA: see above.
    """
    part = tl.program_id(0)
    slot = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, slot, length, L, IS_SEGMENTED, IS_VARLEN)
    col = part * BK
    hx = (h // GROUP).to(tl.int64)
    hv = h.to(tl.int64)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    w_at = tile_access(W + b * wb + t_first * wt + hx * wh, steps, DK, wt, L, BK, TMA)
    y_at = tile_access(Y + b * yb + t_first * yt + hv * yh, steps, DV, yt, L, BV, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hv * zh, steps, DV, zt, L, BV, TMA)
    o_at = tile_access(Out + b * ob + t_first * ot + hv * oh, steps, DK, ot, L, BK, TMA)
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    w_out += ((part * H + hv) * tiles_of_head + tile0) * NP * L
    checkpoint0 = first // CHECKPOINT_STEPS - 1
    state_row = tl.program_id(1).to(tl.int64)
    rk = col + tl.arange(0, BK)
    rv = tl.arange(0, BV)
    state_at = (state_row * DK + rk[:, None]) * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    inside1 = (rk < DK)[:, None] & (rv + BV < DV)[None, :]
    n_at = state_row * DK + rk
    S0 = tl.zeros([BK, BV], tl.float32)  # a block of C or dC
    S1 = tl.zeros([BK, BV], tl.float32)
    rc = tl.arange(0, 16)
    N = tl.zeros([BK, 16], tl.float32)  # n is the sum of the columns: an MMA has at least 16 columns
    if USE_INITIAL_STATE:
        S0 = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS == 2:
            S1 = tl.load(state_in + state_at + BV, mask=inside1, other=0.0).to(tl.float32)
        if NORMALIZE:
            N = tl.where(rc[None, :] == 0, tl.load(n_in + n_at, mask=rk < DK, other=0.0)[:, None], 0.0)
    r = tl.arange(0, L)
    if not EXACT:
        rp = tl.arange(0, NP)
    tiles = tl.cdiv(steps, L).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        # T is never smaller. The minimum hides the induction variable from LLVM, which otherwise steps each address in
        # registers of its own.
        t = tl.minimum((tiles - 1 - step if REVERSE else step) * L, T)
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, col, steps, DK, xt, L, BK, TMA)  # (L, BK)
        if EXACT and REVERSE:  # before y and z take shared memory
            pairs = matmul(x, tl.trans(load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)), PRECISION)  # (L, L), q k^T
        y0 = load_tile(y_at, t, 0, steps, DV, yt, L, BV, TMA)  # (L, BV)
        z0 = load_tile(z_at, t, 0, steps, DV, zt, L, BV, TMA)  # (L, BV)
        if BLOCKS == 2:
            y1 = load_tile(y_at, t, BV, steps, DV, yt, L, BV, TMA)
            z1 = load_tile(z_at, t, BV, steps, DV, zt, L, BV, TMA)
        decay = tl.load(gate + DECAY * L)
        if WGMMA:
            u = touch_tile(y0 + z0)
            if BLOCKS == 2:
                u += touch_tile(y1 + z1)
            if T < 0:  # never true: it keeps the reads of touch_tile()
                decay += tl.sum(u.to(tl.float32), 0)
        if WGMMA:
            wx = load_opaque(gate + (INTER if REVERSE else UPDATE) * L + r)
        else:
            wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)
        x_up = (tl.trans(x) * wx[None, :]).to(x.dtype)
        # (1) P^T <- (y z^T + delta) * D^T
        P = matmul(y0, tl.trans(z0), PRECISION)  # (L, L)
        if BLOCKS == 2:
            P += matmul(y1, tl.trans(z1), PRECISION)
        if DELTA:
            if REVERSE:
                P += tl.load(gate + DELTA_P * L + r)[:, None]
            else:
                P += tl.load(gate + DELTA_P * L + r)[None, :]
        P = P * gate_matrix(gate, r, L, REVERSE, EXACT)
        if NEGATIVE:
            P = -P
        P = P.to(x.dtype)
        # (2) out^T <- (S z^T) * a + x^T P^T
        out = matmul(S0.to(x.dtype), tl.trans(z0), PRECISION)  # (BK, L)
        if BLOCKS == 2:
            out += matmul(S1.to(x.dtype), tl.trans(z1), PRECISION)
        if NORMALIZE:
            n = tl.sum(N, 1)  # (BK)
            before = t + L if REVERSE else t
            if before % CHECKPOINT_STEPS == 0 and before > 0 and before < steps:
                tl.store(
                    n_checkpoints + ((checkpoint0 + before // CHECKPOINT_STEPS) * H + h) * DK + rk, n, mask=rk < DK
                )
            n = n[:, None]
            if REVERSE:
                out += n
            elif DELTA:
                out += n * tl.load(gate + DELTA_P * L + r)[None, :]
        out = out * tl.load(gate + (UPDATE if REVERSE else INTER) * L + r)[None, :]
        if EXACT:
            w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)  # (L, BK)
            sum_at = w_out + t * NP + r
            tl.store(sum_at + OTHER_TILES * L, tl.sum(rounded_product(out, tl.trans(w)), 0))
            if REVERSE:
                pairs = rounded_product(P, pairs)
                same = r[:, None] == r[None, :]
                tl.store(sum_at + SAME_STEP * L, tl.sum(tl.where(same, pairs, 0.0), 0))
                pairs = tl.where(same, 0.0, pairs)
                tl.store(sum_at + ROW_SUM * L, tl.sum(pairs, 1))
                tl.store(sum_at + COLUMN_SUM * L, tl.sum(pairs, 0))
        out = tl.dot(tl.trans(x), P, out, input_precision=PRECISION)
        out = tl.trans(out)
        store_tile(o_at, out.to(Out.dtype.element_ty), t, col, steps, DK, ot, L, BK, TMA)
        if not EXACT:
            w = load_tile(w_at, t, col, steps, DK, wt, L, BK, TMA)  # (L, BK)
            sums = tl.sum(tl.reshape(rounded_product(out, w), (L, NP, BK // NP)), 2)
            tl.store(w_out + t * NP + r[:, None] + rp[None, :] * L, sums)
        # (4) N <- g N + x^T w
        if NORMALIZE:
            N = N * decay
            if DELTA or not REVERSE:
                wn = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)
                if REVERSE:
                    wn *= tl.load(gate + DELTA_P * L + r)
                wn, top = scale_to_range(wn, x.dtype, REVERSE)
                W_n = tl.trans(split_rounding(wn, rc[:, None], x.dtype))
                N += top * tl.dot(tl.trans(x), W_n, input_precision=PRECISION)
        # (3) S <- g S + (x * w)^T y
        S0 = tl.dot(x_up, y0, S0 * decay, input_precision=PRECISION)
        if BLOCKS == 2:
            S1 = tl.dot(x_up, y1, S1 * decay, input_precision=PRECISION)
        if WGMMA:
            S0 = wait_for_mma(S0)
            if BLOCKS == 2:
                S1 = wait_for_mma(S1)
        seen = t if REVERSE else t + L
        if seen % CHECKPOINT_STEPS == 0 and seen > 0 and seen < steps:
            at = ((checkpoint0 + seen // CHECKPOINT_STEPS) * H + h) * DK
            store_checkpoint(checkpoints, at, S0, rk, rv, DK, DV)
            if BLOCKS == 2:
                store_checkpoint(checkpoints, at, S1, rk, rv + BV, DK, DV)
    if STORE_FINAL_STATE:
        tl.store(state_out + state_at, S0, mask=inside)
        if BLOCKS == 2:
            tl.store(state_out + state_at + BV, S1, mask=inside1)
        if NORMALIZE:
            tl.store(n_out + n_at, tl.sum(N, 1), mask=rk < DK)


@triton.jit
def fold_denominators(gate, r, inter, d, L: tl.constexpr, EXACT: tl.constexpr):
    """Divide the gate matrix of a tile and INTER by the denominators max(|d|, exp(-m)), d (L), in the gate vectors."""
    D = tl.maximum(tl.abs(d), tl.load(gate + FLOOR * L + r))
    row_at = gate + (ROW_LOW if EXACT else ROW) * L + r  # ROW can be so large that adding to it loses digits
    tl.store(row_at, tl.load(row_at) - tl.log2(D))
    tl.store(gate + INTER * L + r, inter / D)


@triton.jit(do_not_specialize=["sequences", "T", "tiles"])
def sum_denominators(
    parts, gates, d_out, cu, sequences, T, tiles, H,
    PARTS: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr, SAVE_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum the partial denominators of :func:`normalizer_scan` and fold them into the gate vectors.

    The grid is (tiles, H). parts is (PARTS, H, tiles, L) float32, d_out (B, T, H), written with SAVE_D.
    """
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, tl.program_id(0), L, IS_VARLEN)
    if start < length:
        r = tl.arange(0, L)
        row = h * tiles + first_tile(first, s, T, L, IS_VARLEN) + start // L
        d = tl.zeros([L], tl.float32)
        for part in tl.static_range(PARTS):
            d += tl.load(parts + (part * H * tiles + row) * L + r)
        if SAVE_D:
            tl.store(d_out + (first + start + r) * H + h, d, mask=start + r < length)
        gate = gates + row * VECTORS * L
        fold_denominators(gate, r, tl.load(gate + INTER * L + r), d, L, EXACT)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "length"])
def normalizer_scan(
    X, Z, gates, cu, parts, d_out, n_in, n_out, sequences, T, tiles_of_head, H, GROUP, length, xb, xt, xh, zb, zt, zh,
    DK: tl.constexpr, DN: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, REVERSE: tl.constexpr, OUTPUT: tl.constexpr,
    DELTA: tl.constexpr, IS_VARLEN: tl.constexpr, IS_SEGMENTED: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, SAVE_D: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, SKIP_LAST: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Compute the denominators d, (T3), fold them into the gate vectors, and compute the states n, (T6), or dn, (T13).

    The grid is (segments * H, DN / BK). Without OUTPUT the kernel computes only what a segment adds to n, or with
    REVERSE to dn, and with DECAYS stores the decay over each segment in `parts`.

    N, (16, BK), holds n as a sum of rows, because an MMA takes at least 16 rows. Rows 0 and 1 are updated with the
    weights rounded to the inputs' dtype and with the rounding errors of the weights. Rows 8 and 9 are the same again:
    rows below 8 are read rounded, the others as the rounding errors of n.

    Args:
        X, Z: x (k, or q with REVERSE) and z (q), (B, T, H / GROUP, DK).
        gates: the gate vectors, (H, tiles, VECTORS, L) float32, updated in place.
        cu: the offsets of packed sequences, (sequences + 1).
        parts: partial denominators, (DN / BK, H, tiles, L) float32, where several programs share the keys (BK < DN);
            :func:`sum_denominators` sums them.
        d_out: d, (B, T, H); written with SAVE_D.
        n_in, n_out: the states n before and after the scans, (segments, H, DN); zero from DK on.
        length: the number of steps of a segment.
        DELTA: whether updates are weighted by delta as well, as those of dn are.
    """
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    first, steps, b, t_first, tile0 = locate_segment(cu, sequences, T, slot, length, L, IS_SEGMENTED, IS_VARLEN)
    hx = (h // GROUP).to(tl.int64)
    x_at = tile_access(X + b * xb + t_first * xt + hx * xh, steps, DK, xt, L, BK, TMA)
    z_at = tile_access(Z + b * zb + t_first * zt + hx * zh, steps, DK, zt, L, BK, TMA)
    gates += (h.to(tl.int64) * tiles_of_head + tile0) * VECTORS * L
    k0 = 0
    if BK < DN:
        k0 = tl.program_id(1) * BK
    rk = k0 + tl.arange(0, BK)
    row = tl.arange(0, 16)[:, None]
    n_at = tl.program_id(0).to(tl.int64) * DN + rk
    N = tl.zeros([16, BK], tl.float32)
    if USE_INITIAL_STATE:
        N = tl.where(row % 8 == 0, tl.load(n_in + n_at, mask=rk < DN, other=0.0)[None, :], 0.0)
    r = tl.arange(0, L)
    total = 1.0
    tiles = count_tiles(cu, sequences, T, slot, length, steps, L, REVERSE, IS_VARLEN, SKIP_LAST)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=not EXACT):
        t = (tiles - 1 - step if REVERSE else step) * L
        gate = gates + t * VECTORS
        x = load_tile(x_at, t, k0, steps, DK, xt, L, BK, TMA)
        wx = tl.load(gate + (INTER if REVERSE else UPDATE) * L + r)
        if DELTA:
            wx *= tl.load(gate + DELTA_P * L + r)
        if OUTPUT:
            z = load_tile(z_at, t, k0, steps, DK, zt, L, BK, TMA)
            inter = tl.load(gate + INTER * L + r)
            P = rounded_product(tl.dot(z, tl.trans(x), input_precision=PRECISION), gate_matrix(gate, r, L, True, EXACT))
            if NEGATIVE:
                P = -P
            high = N.to(x.dtype)
            low = (N - high).to(x.dtype)
            read_n = matmul(z, tl.trans(tl.where(row < 8, high, low)), PRECISION)
            d = tl.sum(P, 1) + tl.sum(read_n, 1) * inter
            if BK < DN:
                tl.store(parts + ((tl.program_id(1) * H + h).to(tl.int64) * tiles_of_head + tile0) * L + t + r, d)
            else:
                if SAVE_D:
                    tl.store(d_out + (first + t + r) * H + h, d, mask=t + r < steps)
                fold_denominators(gate, r, inter, d, L, EXACT)
        decay = tl.load(gate + DECAY * L)
        N = N * decay
        if DECAYS:
            total *= decay
        wx, top = scale_to_range(wx, x.dtype, DELTA)
        N += top * tl.dot(split_rounding(wx, row % 8, x.dtype), x, input_precision=PRECISION)
    if STORE_FINAL_STATE:
        tl.store(n_out + n_at, tl.sum(tl.where(row < 8, N, 0.0), 0), mask=rk < DN)
    if DECAYS:
        tl.store(parts + tl.program_id(0), total, mask=k0 == 0)


def describable(*tensors: Tensor) -> bool:
    """Return whether TMA descriptors can address these tensors: addresses and strides are multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0
        and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        and t.shape[-1] * t.element_size() >= 16
        for t in tensors
    )


def launch_o_dv(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, z: Tensor, out: Tensor | None, *, reverse: bool,
    initial: Tensor | None, final: Tensor | None, decays: Tensor | None = None, skip_last: bool = False,
) -> None:  # fmt: skip
    """Launch `o_dv_scan`: compute o or dv into `out`; with None only the final states of segments and their decays.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z: The operands, in the table of the module: k, v, q for o; q, do, k for dv.
        out: Output, (B, T, H, dhv), or None.
        reverse: Whether the scan runs against time.
        initial: The states C or dC that scans start from, (segments, H, K, V), or None for zeros.
        final: Output for the states that scans end with, or None.
        decays: Output for the decays over segments, (segments, H), without `out`.
        skip_last: Whether the segments that end a scan are left out.
    """
    tiles = ctx.config.o_dv
    written = y if out is None else out
    ctx.launch(o_dv_scan, (ceil_div(ctx.V, tiles.split), ctx.segments * ctx.H),
        x, y, z, written, gates, ctx.cu_seqlens, gates if initial is None else initial,
        gates if final is None else final, gates if decays is None else decays, ctx.x.sequences, ctx.T, ctx.tiles,
        ctx.H, ctx.group, ctx.segment_steps,
        *time_strides(x), *time_strides(y), *time_strides(z), *time_strides(written),
        DK=ctx.K, DV=ctx.V, BK=power_of_two(ctx.K), BV=tiles.block, BLOCKS=tiles.blocks, L=ctx.L, REVERSE=reverse,
        OUTPUT=out is not None, IS_VARLEN=ctx.packed, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=initial is not None, STORE_FINAL_STATE=final is not None, EXACT=ctx.exact,
        NEGATIVE=ctx.spec.scale < 0, PRECISION=ctx.precision,
        TMA=ctx.config.descriptors and describable(x, y, z, written), STAGES=tiles.stages, SKIP_LAST=skip_last,
        num_warps=tiles.num_warps, tunable=True,
    )  # fmt: skip


def launch_segment_states(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, *, reverse: bool, skip_last: bool
) -> tuple[Tensor, Tensor]:
    """Return what each segment adds to C, or with `reverse` to dC, and the decays over segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y: k and v, or with `reverse` q and do.
        reverse: Whether the scan runs against time.
        skip_last: Whether the segments that end a scan are left out: the states after them are not read.

    Returns:
        The states, (segments, H, K, V), and the decays, (segments, H) float32.
    """
    states, decays = new_segment_states(ctx), ctx.new(ctx.segments, ctx.H)
    launch_o_dv(
        ctx, gates, x, y, x, None, reverse=reverse, initial=None, final=states, decays=decays, skip_last=skip_last
    )  # fmt: skip
    return states, decays


def launch_dq_dk(
    ctx: LaunchContext, gates: Tensor, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, *, reverse: bool,
    delta: bool, initial: Pair, final: Pair, memory: Tensor, offset: int = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Launch `dq_dk_scan`: compute dq or dk into `out`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z: The operands, in the table of the module: k, v, do for dq; q, do, v for dk.
        w: q for dq, k for dk.
        out: Output, (B, T, H, dqk).
        reverse: Whether the scan runs against time.
        delta: Whether the normalizer adds delta to P.
        initial: The states that scans start from, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for the states that scans end with, or None.
        memory: A tensor whose memory holds checkpoints, see `new_checkpoints`.
        offset: Elements of `memory` that are in use.

    Returns:
        The sums w . out, (programs of a head, H, tiles, NP, L), and the checkpoints of the state and of n.
    """
    config, normalize = ctx.config, ctx.spec.normalize
    tiles = config.dq_dk if normalize else config.dq_dk_unnormalized or config.dq_dk
    programs = ceil_div(ctx.K, tiles.split)
    # Sums over the 16 dims of one warp need no exchange between warps.
    parts = tiles.split // 16 if config.wgmma_dq_dk else 1
    if ctx.exact and reverse:
        parts = PAIR_SUMS.value
    sums = ctx.new(programs, ctx.H, ctx.tiles, parts, ctx.L)
    checkpoints = new_checkpoints(ctx, sums, memory, offset)
    (C, n), (C_final, n_final) = initial, final
    ctx.launch(dq_dk_scan, (programs, ctx.segments * ctx.H),
        x, y, z, w, out, gates, ctx.cu_seqlens, sums, *(gates if t is None else t for t in (C, C_final, n, n_final)),
        *checkpoints, ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.group, ctx.segment_steps,
        *time_strides(x), *time_strides(y), *time_strides(z), *time_strides(w), *time_strides(out),
        DK=ctx.K, DV=ctx.V, BK=tiles.split, BV=tiles.block, BLOCKS=tiles.blocks, L=ctx.L, NP=parts, REVERSE=reverse,
        NORMALIZE=normalize, DELTA=delta, IS_VARLEN=ctx.packed, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=C is not None, STORE_FINAL_STATE=C_final is not None, EXACT=ctx.exact,
        NEGATIVE=ctx.spec.scale < 0, PRECISION=ctx.precision,
        TMA=config.wgmma_dq_dk and describable(x, y, z, w, out), STAGES=tiles.stages, WGMMA=config.wgmma_dq_dk,
        CHECKPOINT_STEPS=ctx.checkpoint_steps, num_warps=tiles.num_warps, tunable=True,
    )  # fmt: skip
    return sums, checkpoints


def programs_per_n(ctx: LaunchContext) -> int:
    """Return how many programs of `normalizer_scan` share the elements of one n."""
    return ceil_div(ctx.K, MAX_N // 2 if ctx.exact else MAX_N)


def launch_normalizer(
    ctx: LaunchContext, gates: Tensor, x: Tensor, z: Tensor, *, reverse: bool, initial: Tensor | None,
    final: Tensor | None, d: Tensor | None = None, output: bool = True, skip_last: bool = False, steps: int = 0,
    decays: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `normalizer_scan`: fold the denominators into the gate vectors; without `output` only compute n or dn.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, z: k and q, or for dn q twice.
        reverse: Whether the scan runs against time, for dn.
        initial: The states n that scans start from, (segments, H, K), or None for zeros.
        final: Output for the states that scans end with, or None.
        d: Output for the denominators, (B, T, H), or None.
        output: Whether denominators are computed.
        skip_last: Whether the segments that end a scan are left out.
        steps: The number of steps of a segment, if it is not that of the context.
        decays: Output for the decays over segments, (segments, H), or None.
    """
    segmented, segments = (True, ctx.count(steps)) if steps else (ctx.segmented, ctx.segments)
    stages = 1 if ctx.exact else 2  # limited by registers and shared memory
    if ctx.config.descriptors:
        stages = 3 if ctx.K <= 256 else 1
    most = 128 if output and not ctx.config.descriptors else 256  # keys for which four warps have registers
    programs = programs_per_n(ctx)
    partial = output and programs > 1
    parts = ctx.new(programs, ctx.H, ctx.tiles, ctx.L) if partial else gates
    ctx.launch(normalizer_scan, (segments * ctx.H, programs),
        x, z, gates, ctx.cu_seqlens, parts if decays is None else decays,
        *(gates if t is None else t for t in (d, initial, final)), ctx.x.sequences, ctx.T, ctx.tiles, ctx.H, ctx.group,
        steps or ctx.segment_steps, *time_strides(x), *time_strides(z),
        DK=x.shape[3], DN=ctx.K, BK=power_of_two(ctx.K) // programs, L=ctx.L, REVERSE=reverse, OUTPUT=output,
        DELTA=reverse, IS_VARLEN=ctx.packed, IS_SEGMENTED=segmented, USE_INITIAL_STATE=initial is not None,
        STORE_FINAL_STATE=final is not None, SAVE_D=d is not None, EXACT=ctx.exact, NEGATIVE=ctx.spec.scale < 0,
        PRECISION=ctx.precision, TMA=ctx.config.descriptors and describable(x, z), STAGES=stages, SKIP_LAST=skip_last,
        DECAYS=decays is not None, num_warps=8 if ctx.exact or most < ctx.K else 4,
    )  # fmt: skip
    if partial:
        ctx.launch(sum_denominators, (ctx.tiles, ctx.H),
            parts, gates, gates if d is None else d, ctx.cu_seqlens, ctx.x.sequences, ctx.T, ctx.tiles, ctx.H,
            PARTS=programs, L=ctx.L, IS_VARLEN=ctx.packed, SAVE_D=d is not None, EXACT=ctx.exact, num_warps=2,
        )  # fmt: skip


def launch_segment_n(ctx: LaunchContext, gates: Tensor, x: Tensor, *, reverse: bool, skip_last: bool) -> Tensor:
    """Return what each segment adds to n, or with `reverse` to dn, (segments, H, K); x is k, or with `reverse` q."""
    n = new_segment_n(ctx)
    launch_normalizer(
        ctx, gates, x, x, reverse=reverse, initial=None, final=n, output=False, skip_last=skip_last
    )  # fmt: skip
    return n


def launch_denominators(
    ctx: LaunchContext, gates: Tensor, initial: Tensor | None, final: Tensor | None, d: Tensor | None
) -> None:
    """Compute the denominators (T3) and fold them into the gate vectors.

    Where whole sequences leave most multiprocessors idle, this scan alone is cut into segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        initial: The states n that scans start from, (segments, H, K), or None for zeros.
        final: Output for the states that scans end with, or None.
        d: Output for the denominators, (B, T, H), or None.
    """
    k, q = ctx.x.k, ctx.x.q
    programs, available = ctx.B * ctx.H * programs_per_n(ctx), processors(q.device)
    if ctx.segmented or (ctx.packed and 2 * programs > available):
        launch_normalizer(ctx, gates, k, q, reverse=False, initial=initial, final=final, d=d)
        return
    steps = ceil_div(max(ceil_div(ctx.T * programs, available), SHORTEST_SEGMENT), ctx.L) * ctx.L
    if 2 * steps > ctx.T and not ctx.packed:  # one segment, with the kernel for segments
        starts = ctx.zeros(ctx.B, ctx.H, ctx.K) if initial is None else initial
        steps = ceil_div(ctx.T, ctx.L) * ctx.L
        launch_normalizer(ctx, gates, k, q, reverse=False, initial=starts, final=final, d=d, steps=steps)
        return
    segments = ctx.count(steps)
    starts, decays = ctx.new(segments, ctx.H, ctx.K), ctx.new(segments, ctx.H)
    launch_normalizer(
        ctx, gates, k, k, reverse=False, initial=None, final=starts, output=False, skip_last=final is None,
        steps=steps, decays=decays,
    )  # fmt: skip
    state_passing.launch(ctx, starts, decays, initial, final, reverse=False, steps=steps)
    ends = None if final is None else ctx.new(segments, ctx.H, ctx.K)  # written but not read
    launch_normalizer(ctx, gates, k, q, reverse=False, initial=starts, final=ends, d=d, steps=steps)
