"""Sums of partial results of the heads, or programs, that share one result."""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext


@triton.jit(do_not_specialize=["rows"])
def sum_head_groups(X, Out, rows, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum groups of heads: out[r, d] = sum over g of x[r, g, d], with x (rows, GROUP, D), accumulated in float32."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for g in tl.static_range(GROUP):
        total += tl.load(X + (r * GROUP + g) * D + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + r * D + d, total.to(Out.dtype.element_ty), mask=inside)


def launch(ctx: LaunchContext, x: Tensor, group: int, out: Tensor | None = None) -> Tensor:
    """Sum x, (B, T, groups * group, D) dense, over the heads of each group.

    Args:
        ctx: The context of the call.
        x: The partial results.
        group: The number of adjacent heads that are summed; for 1 the result is x.
        out: Output, (B, T, groups, D), or None for a new tensor.

    Returns:
        The sums, (B, T, groups, D).
    """
    if group == 1 and out is None:
        return x
    B, T, heads, D = x.shape
    out = ctx.new(B, T, heads // group, D, dtype=x.dtype) if out is None else out
    rows, width = out.numel() // D, power_of_two(D)
    block = max(1, 4096 // width)
    ctx.launch(sum_head_groups, (ceil_div(rows, block),),
        x, out, rows, GROUP=group, D=D, BLOCK=block, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
    return out
