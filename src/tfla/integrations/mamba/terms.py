"""The parts of Mamba-2 that sequences and single steps share: checks, step sizes, log-gates and the output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.layers import recomputed
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import cast

TINY = 1e-30  # added to dt before the log: at dt = 0 the gradient would be 0 / 0


def check_operands(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> None:
    """Check the operands of a scan or a step: x, z (..., nheads, headdim), B, C (..., ngroups, dstate) and D."""
    for name, t in {"x": x, "B": B, "C": C}.items():
        check_float(name, t)
    if 0 in x.shape[1:]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected no empty dimension but the first")
    *batch, nheads, headdim = x.shape
    check_shape("B", B, (*batch, "ngroups", "dstate"))
    check_shape("C", C, tuple(B.shape))
    if not B.shape[-1]:
        raise ValueError(f"B: got shape {tuple(B.shape)}, expected no empty dimension but the first")
    check_groups("B", B.shape[-2], nheads)
    if z is not None:
        check_float("z", z)
        check_shape("z", z, tuple(x.shape))
    if D is not None:
        check_float("D", D)
        if D.shape != (nheads, headdim):
            check_shape("D", D, (nheads,))


def check_devices(x: Tensor, tensors: dict[str, Tensor | None], name: str = "x") -> None:
    """Check that all of `tensors` are on the device of x; messages call x by `name`, its name in the caller."""
    for other, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{other}: got {type(t).__name__}, expected a tensor")
        if t.device != x.device:
            raise ValueError(f"{other}: got device {t.device}, expected that of {name}, {x.device}")


def check_groups(name: str, ngroups: int, nheads: int) -> None:
    """Check that the number of groups divides the number of heads."""
    if not isinstance(ngroups, int | torch.SymInt) or isinstance(ngroups, bool):
        raise TypeError(f"{name}: got {type(ngroups).__name__}, expected an int")
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
    """Return dt + dt_bias, or softplus of it with `dt_softplus`, in at least float32."""
    dt = dt if dt.dtype == torch.float64 else cast(dt, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias
    return F.softplus(dt) if dt_softplus else dt


def log_input_gate(dt: Tensor) -> Tensor:
    """Return log dt; dt must not be negative."""
    return torch.log(dt + TINY)


def scale_by_dt(x: Tensor, dt: Tensor) -> Tensor:
    """Return dt x, (..., nheads, headdim), in at least float32, with dt (..., nheads).

    Where dt may be negative, dt x is the value and the input gate is 1, because log dt does not exist.
    """
    return x * dt[..., None]


def compute_output(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Return (y + D x) silu(z) in the dtype of x, with D (nheads,) or (nheads, headdim).

    The sum and the gradient of D are computed in the wider one of the dtypes of x and D.
    """
    if z is None:
        return cast(_add_skip(y, x, D), x.dtype)
    return recomputed(lambda y, x, z: cast(_add_skip(y, x, D) * _gate(z, x), x.dtype), y, x, z)


def _add_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """Return y + D x, or y without D."""
    return y if D is None else y + x * (D if D.dim() == 2 else D[:, None])


def _gate(z: Tensor, x: Tensor) -> Tensor:
    """Return silu(z) in the wider one of the dtypes of x and z."""
    return F.silu(cast(z, common_dtype(x, z)))
