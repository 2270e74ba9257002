"""X of the delta rule by blocks, (R1) of :mod:`.delta_kernels`: one warp computes a tile.

`solve_tiles` there has all of a tile in one matrix, half of which is 0, and inverts it by products of such matrices.
Here each block of the lower triangle has a product of its own, and blocks of one size are a batch:

    (1)   four of 16 x 16 on the diagonal          row by row
    (2)   two of 16 x 16 below these, in pairs     X21 <- Y - X22 B2 Y with Y = M21 - M21 B1 X11
    (3)   one of 32 x 32                           the same

Products of such blocks have work for one warp, so there are no barriers, and eight tiles fit a multiprocessor. Blocks
above the diagonal are stored as zeros, because the scans multiply by all of X.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import power_of_two
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_kernels import COLUMN, ROW, VECTORS, first_tile, locate_chunk
from tfla.backends.triton.correction_dtype import correction_dtype
from tfla.backends.triton.delta_kernels import solve_diagonal, solve_precision
from tfla.backends.triton.precise_products import nearest_tf32
from tfla.backends.triton.scan_tiles import locate_tile

if TYPE_CHECKING:
    from tfla.backends.triton.delta import DeltaContext


@triton.jit
def block_steps(BLOCKS: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr):
    """Return the steps of BLOCKS blocks, (BLOCKS, SIDE), whose first steps are STRIDE apart."""
    return tl.arange(0, BLOCKS)[:, None] * STRIDE + tl.arange(0, SIDE)[None, :]


@triton.jit
def decayed_products(R, K, gate, i, j, steps, rt, kt, DK: tl.constexpr, BK: tl.constexpr, L: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return r_i . k_j D_ij for blocks of steps i and j, (blocks, SIDE) each, as (blocks, SIDE, SIDE), unmasked."""
    c = tl.arange(0, BK)[None, None, :]
    r = tl.load(R + i[:, :, None] * rt + c, (i < steps)[:, :, None] & (c < DK), 0.0)  # (blocks, SIDE, BK)
    k = tl.load(K + j[:, :, None] * kt + c, (j < steps)[:, :, None] & (c < DK), 0.0)  # (blocks, SIDE, BK)
    M = tl.dot(r, tl.permute(k, (0, 2, 1)), input_precision=PRECISION)
    if GATED:
        M *= tl.exp2(tl.load(gate + ROW * L + i)[:, :, None] + tl.load(gate + COLUMN * L + j)[:, None, :])
    return M


@triton.jit
def every_second(x):
    """Return the matrices 0, 2, ... and the matrices 1, 3, ... of x, (2 n, a, b)."""
    x = tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1], x.shape[2]))
    return tl.split(tl.permute(x, (0, 2, 3, 1)))


@triton.jit
def lower_matrix(x11, x21, x22):
    """Return [[x11, 0], [x21, x22]] of matrices (n, s, s), as (n, 2 s, 2 s)."""
    x = tl.join(tl.join(x11, tl.zeros_like(x11)), tl.join(x21, x22))  # [.., row, column, half of columns, of rows]
    return tl.reshape(tl.permute(x, (0, 4, 1, 3, 2)), (x11.shape[0], 2 * x11.shape[1], 2 * x11.shape[2]))


@triton.jit
def store_blocks(X, x, i, j, steps, stride):
    """Store blocks of X, (blocks, SIDE, SIDE), whose steps are i and j."""
    tl.store(X + i[:, :, None] * stride + j[:, None, :], x.to(X.dtype.element_ty), (i < steps)[:, :, None])


@triton.jit
def blocks_below(x, R, K, beta, gate, X, steps, rt, kt, bt, xt, SIDE: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    L: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr):  # fmt: skip
    """Compute and store the blocks below the diagonal blocks x of X, (L / SIDE, SIDE, SIDE), in pairs, (2) and (3).

    Returns:
        The upper diagonal blocks, the blocks below them, and the lower diagonal blocks.
    """
    j = block_steps(L // (2 * SIDE), 2 * SIDE, SIDE)
    i = j + SIDE
    M21 = decayed_products(R, K, gate, i, j, steps, rt, kt, DK, BK, L, GATED, PRECISION)
    b1 = tl.load(beta + j * bt, j < steps, 0.0).to(tl.float32)
    b2 = tl.load(beta + i * bt, i < steps, 0.0).to(tl.float32)
    x11, x22 = every_second(x)
    left = nearest_tf32(M21 * b1[:, None, :], SOLVE_PRECISION)
    Y = M21 - tl.dot(left, nearest_tf32(x11, SOLVE_PRECISION), input_precision=SOLVE_PRECISION)
    right = nearest_tf32(Y * b2[:, :, None], SOLVE_PRECISION)
    x21 = Y - tl.dot(nearest_tf32(x22, SOLVE_PRECISION), right, input_precision=SOLVE_PRECISION)
    store_blocks(X, x21, i, j, steps, xt)
    store_blocks(X, tl.zeros_like(x21), j, i, steps, xt)
    return x11, x21, x22


@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP"])
def solve_blocks(
    K, R, beta, gates, cu, X, sequences, T, tiles_of_head, H, GROUP, kb, kt, kh, rb, rt, rh, bb, bt, bh,
    DK: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr, IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute X of every tile. The grid is (tiles, H), L is 64; the arguments are those of `solve_tiles`."""
    h = tl.program_id(1).to(tl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, tl.program_id(0), L, IS_VARLEN)
    if start < length:
        hx = h // GROUP
        row, t0, steps = locate_tile(s, first, length, start, IS_VARLEN)
        t0 = t0.to(tl.int64)
        K += row * kb + hx * kh + t0 * kt
        R += row * rb + hx * rh + t0 * rt
        beta += row * bb + h * bh + t0 * bt
        gate = gates + (h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L) * VECTORS * L
        X += ((first + start) * H + h) * L
        i = block_steps(4, 16, 16)
        M = decayed_products(R, K, gate, i, i, steps, rt, kt, DK, BK, L, GATED, PRECISION)
        M = tl.where(i[:, None, :] < i[:, :, None], M, 0.0)
        x = solve_diagonal(M, tl.load(beta + i * bt, i < steps, 0.0).to(tl.float32), 16)
        store_blocks(X, x, i, i, steps, H * L)
        x11, x21, x22 = blocks_below(
            x, R, K, beta, gate, X, steps, rt, kt, bt, H * L, 16, DK, BK, L, GATED, PRECISION, SOLVE_PRECISION
        )
        blocks_below(
            lower_matrix(x11, x21, x22), R, K, beta, gate, X, steps, rt, kt, bt, H * L, 32, DK, BK, L, GATED, PRECISION,
            SOLVE_PRECISION,
        )  # fmt: skip


def launch(ctx: DeltaContext, gates: Tensor) -> Tensor:
    """Return X, (B, T, H, L)."""
    base, x = ctx.base, ctx.x
    X = base.new(base.B, base.T, base.H, base.L, dtype=correction_dtype(x))
    base.launch(solve_blocks, (base.tiles, base.H),
        x.k, ctx.read_key, ctx.beta, gates, base.cu_seqlens, X, x.sequences, base.T, base.tiles, base.H, base.group,
        *time_strides(x.k), *time_strides(ctx.read_key), *time_strides(ctx.beta),
        DK=base.K, BK=power_of_two(base.K), L=base.L, GATED=ctx.gated, IS_VARLEN=base.packed, PRECISION=base.precision,
        SOLVE_PRECISION=solve_precision(x.q.dtype), num_warps=1,
    )  # fmt: skip
    return X
