"""Sums of partial results of the heads, or programs, that share one result."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext


@triton.jit
def add_groups(total, X, r, d, inside, GROUP: tl.constexpr, D: tl.constexpr):
    """Return total[r, d] + sum over g of x[r, g, d], with x (rows, GROUP, D)."""
    for g in tl.static_range(GROUP):
        total += tl.load(X + (r * GROUP + g) * D + d, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def sum_head_groups(X, Out, rows, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum groups of heads: out[r, d] = sum over g of x[r, g, d], with x (rows, GROUP, D), accumulated in float32."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = add_groups(tl.zeros([BLOCK, BLOCK_D], tl.float32), X, r, d, inside, GROUP, D)
    tl.store(Out + r * D + d, total.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_three_parts(
    X, Y, Z, Out, rows, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Sum groups of heads of x + y + z, like `sum_head_groups`; `Out` may be X where GROUP is 1."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = add_groups(tl.zeros([BLOCK, BLOCK_D], tl.float32), X, r, d, inside, GROUP, D)
    total = add_groups(total, Y, r, d, inside, GROUP, D)
    total = add_groups(total, Z, r, d, inside, GROUP, D)
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
    _launch(ctx, sum_head_groups, (x,), group, out)
    return out


def launch_three_parts(ctx: LaunchContext, parts: tuple[Tensor, Tensor, Tensor], group: int) -> Tensor:
    """Sum three tensors, (B, T, groups * group, D) dense, in float32, and the heads of each group, like `launch`.

    Where `group` is 1 the sum overwrites the first of them, if a launch may read and write a tensor by two parameters.
    """
    B, T, heads, D = parts[0].shape
    overwrites = group == 1 and not ctx.recorder.one_pointer_each
    out = parts[0] if overwrites else ctx.new(B, T, heads // group, D, dtype=parts[0].dtype)
    _launch(ctx, sum_three_parts, parts, group, out)
    return out


def _launch(ctx: LaunchContext, kernel: Any, parts: tuple[Tensor, ...], group: int, out: Tensor) -> None:
    """Launch a kernel that sums groups of heads of `parts` into `out`."""
    D = parts[0].shape[3]
    rows, width = out.numel() // D, power_of_two(D)
    block = max(1, 4096 // width)
    ctx.launch(kernel, (ceil_div(rows, block),),
        *parts, out, rows, GROUP=group, D=D, BLOCK=block, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
