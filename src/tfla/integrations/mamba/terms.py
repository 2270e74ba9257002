"""The terms of the recurrence that sequences and single steps share: step sizes, log-gates, the output, and checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.numerics import recomputed
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import cast

TINY = 1e-30  # added to |dt|, so that its gradient at 0 is that of dt B x^T and not 0 / 0


def check_operands(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> None:
    """Check the operands of a scan or a step: x ends in (nheads, headdim), B and C end in (ngroups, dstate)."""
    for name, t in {"x": x, "B": B, "C": C}.items():
        check_float(name, t)
    *batch, nheads, headdim = x.shape
    check_shape("B", B, (*batch, "ngroups", "dstate"))
    check_shape("C", C, tuple(B.shape))
    check_groups("B", B.shape[-2], nheads)
    if z is not None:
        check_float("z", z)
        check_shape("z", z, tuple(x.shape))
    if D is not None:
        check_float("D", D)
        if D.shape != (nheads, headdim):
            check_shape("D", D, (nheads,))


def check_groups(name: str, ngroups: int, nheads: int) -> None:
    if ngroups < 1 or nheads % ngroups:
        raise ValueError(f"{name}: got {ngroups} groups, expected a divisor of the {nheads} heads of x")


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the narrowest dtype that represents each of the tensors without rounding."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        if t.dtype != dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """Return dt with bias and softplus, in at least float32."""
    dt = dt if dt.dtype == torch.float64 else cast(dt, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias
    return F.softplus(dt) if dt_softplus else dt


def operands(x: Tensor, dt: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return v and log_i of the update dt B x^T, with x (..., nheads, headdim) and dt (..., nheads).

    Args:
        signed: whether dt may be negative. The sign then moves to v, where it is exact in every dtype.
    """
    if not signed:
        return x, torch.log(dt + TINY)
    sign = torch.where(dt < 0, -1.0, 1.0)
    return x * cast(sign, x.dtype)[..., None], torch.log(dt * sign + TINY)


def finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Return (y + D x) silu(z) in x's dtype. A D in float32 makes the sum, and so its own gradient, float32."""
    if z is None:
        return cast(_skipped(y, x, D), x.dtype)
    return recomputed(lambda y, x, z: cast(_gated(_skipped(y, x, D), z), x.dtype), y, x, z)


def _skipped(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return y if D is None else y + x * (D if D.dim() == 2 else D[:, None])


def _gated(y: Tensor, z: Tensor) -> Tensor:
    return y * F.silu(cast(z, common_dtype(y, z)))
