"""Rows of n and m of a pool of states, read and overwritten by index.

All programs of a head read n and m, so that none of them may overwrite these in the pool while another one may still
have to read them. In a forward the kernel that bounds the offsets of packed sequences copies the rows, all other
kernels read the copies and write final n and m to tensors of the call, and `store_normalizers` puts these into the
pool. Decoding steps end with it too.
"""

import triton
import triton.language as tl

from tfla.backends.base import FinalRows, Outputs
from tfla.backends.gpu.config import power_of_two
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.gate_kernels import clamp_gate


@triton.jit
def copy_normalizers(
    n, m, rows, size, n_copy, m_copy, sequences, H, n_pitch, m_pitch, DK: tl.constexpr, POOL_DK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy n and m of some rows of a pool; the programs share them, BLOCK elements of n at a time.

    Copies of n with a larger DK than the pool, POOL_DK, end with zeros.

    Args:
        n, m: n, (H, POOL_DK), and m, (H), of row 0 of a pool of `size` rows, which are n_pitch and m_pitch apart.
        rows: the row of each sequence, (sequences); those that the pool does not have are read as zeros.
        n_copy, m_copy: the results, (sequences, H, DK) and (sequences, H) float32; m is clamped as gates are.
    """
    count = sequences * H * DK  # fits into 32 bits: as many C would not fit into the memory of a GPU
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = first + tl.arange(0, BLOCK)
        head, k = e // DK, e % DK
        row = tl.load(rows + head // H, mask=e < count, other=-1).to(tl.int64)
        found = (row >= 0) & (row < size)
        has_n = found
        if POOL_DK < DK:
            has_n = found & (k < POOL_DK)
        own = tl.load(n + row * n_pitch + head % H * POOL_DK + k, mask=has_n, other=0.0)
        tl.store(n_copy + e, own, mask=e < count)
        value = tl.load(m + row * m_pitch + head % H, mask=found & (k == 0), other=0.0).to(tl.float32)
        tl.store(m_copy + head, clamp_gate(value), mask=(e < count) & (k == 0))


@triton.jit(do_not_specialize=["H", "ROWS"])
def store_normalizers(
    N_new, M_new, indices, N, M, H, ROWS, nb, mb, DK: tl.constexpr, NEW_DK: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Store N_new, (B, H, NEW_DK), and M_new, (B, H), in the rows indices[b] of N and M; the grid is (B * H).

    Of NEW_DK elements of each N_new the first DK are stored.
    """
    row = tl.program_id(0).to(tl.int64)
    h = row % H
    state = tl.load(indices + row // H).to(tl.int64)
    rk = tl.arange(0, BK)
    stored = (rk < DK) & (state >= 0) & (state < ROWS)
    tl.store(N + state * nb + h * DK + rk, tl.load(N_new + row * NEW_DK + rk, stored, 0.0), stored)
    if (state >= 0) & (state < ROWS):
        tl.store(M + state * mb + h, tl.load(M_new + row))


def launch_store(ctx: LaunchContext, out: Outputs) -> None:
    """Store the final n and m of a forward, if it has them, in the rows of their pool."""
    x, spec = ctx.x, ctx.spec
    if not (spec.normalize and spec.final_state) or ctx.rows is None or x.C is None:
        return
    pool = ctx.final_rows or FinalRows(x.C, ctx.rows, x.n, x.m)
    assert pool.n is not None
    assert pool.m is not None
    ctx.launch(store_normalizers, (x.sequences * ctx.H,),
        out.n, out.m, pool.rows, pool.n, pool.m, ctx.H, pool.C.shape[0], pool.n.stride(0), pool.m.stride(0),
        DK=ctx.pool_dims[0], NEW_DK=ctx.K, BK=power_of_two(ctx.K), num_warps=1,
    )  # fmt: skip
