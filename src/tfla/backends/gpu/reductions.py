"""Sums of partial results of the heads, or programs, that share one result."""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext


@triton.jit(do_not_specialize=["rows", "pitch", "first"])
def sum_head_groups(
    X, Out, rows, pitch, first, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Sum groups of heads: out[n, r, d] = sum over g of x[n, r, g, d], accumulated in float32.

    The grid is (rows / BLOCK, parts), x is (parts, rows, GROUP, D). The first part is stored from row `first` of `out`
    on, and each other one `pitch` rows after the one before it.
    """
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    part = tl.program_id(1).to(tl.int64)
    X += part * rows * GROUP * D
    Out += (part * pitch + first) * D
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for g in tl.static_range(GROUP):
        total += tl.load(X + (r * GROUP + g) * D + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + r * D + d, total.to(Out.dtype.element_ty), mask=inside)


def launch(ctx: LaunchContext, x: Tensor, group: int, out: Tensor | None = None, first_step: int = 0) -> Tensor:
    """Sum x, (B, T, groups * group, D) dense, over the heads of each group.

    Args:
        ctx: The context of the call.
        x: The partial results.
        group: The number of adjacent heads that are summed; for 1 the result is x.
        out: Output, (B, T, groups, D), or None for a new tensor. Batch rows may have more steps than x.
        first_step: The step of `out` that is the first one of x.

    Returns:
        The sums, (B, T, groups, D).
    """
    if group == 1 and out is None:
        return x
    B, T, heads, D = x.shape
    out = ctx.new(B, T, heads // group, D, dtype=x.dtype) if out is None else out
    rows, pitch = T * heads // group, out.stride(0) // D
    parts = 1 if pitch == rows else B
    rows, width = rows * B // parts, power_of_two(D)
    block = max(1, 4096 // width)
    ctx.launch(sum_head_groups, (ceil_div(rows, block), parts),
        x, out, rows, pitch, first_step * (heads // group), GROUP=group, D=D, BLOCK=block, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
    return out
