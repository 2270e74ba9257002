"""The cross-entropy of soft-capped logits, on a GPU by one kernel in the forward and one in the backward.

The kernels and their equations are in :mod:`tfla.nn.loss_kernels`.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.triton import BACKEND
from tfla.nn.layers import at_least_float32
from tfla.nn.soft_cap import soft_cap
from tfla.ops.transforms import needs_dispatcher

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IGNORED = -100  # the target of a token without a loss, as `torch.nn.functional.cross_entropy` has it
COLUMNS = 4096  # logits of a token that a program reads at a time
# The kernels compute tanh from one exponential, with the rounding of 1 as its error, which the cap multiplies.
LARGEST_CAP = 1000.0


def losses(x: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Return the cross-entropy of each target in nats, (N,), in float32, or float64 where x is float64.

    Args:
        x: (N, vocabulary), the logits before the soft cap.
        targets: (N,) int64; a token with the target -100 has the loss 0.
        cap: c of equation (110) of the paper; with one above 1,000 PyTorch's operations compute the losses.
    """
    if unsupported(x, targets, cap) is None:
        found: Tensor = _CappedLoss.apply(x, targets, cap)
        return found
    return plain_losses(x, targets, cap)


def plain_losses(x: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Compute :func:`losses` by operations of PyTorch, whose intermediates are float32 tensors of the size of x."""
    return F.cross_entropy(soft_cap(at_least_float32(x), cap), targets, reduction="none", ignore_index=IGNORED)


def unsupported(x: Tensor, targets: Tensor, cap: float) -> str | None:
    """Return why the kernels do not take a call, or None if they do."""
    if cap > LARGEST_CAP:
        return f"they take caps of at most {LARGEST_CAP:,.0f}"
    if needs_dispatcher((x, targets)):
        return "a compiler, a transform or forward-mode AD takes part"
    if x.dtype not in DTYPES:
        return "they compute in float32"
    if not x.numel() or x.stride(1) != 1:
        return "they take rows whose columns are next to each other"
    return BACKEND.device_unsupported(x)


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels compute the losses of plain eager calls on a device, which is a GPU."""
    return device.type == "cuda" and BACKEND.device_unsupported(torch.empty(0, device=device)) is None


class _CappedLoss(torch.autograd.Function):
    """The losses by the kernels, for autograd: the forward keeps x, the targets and one number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, cap: float) -> Tensor:
        targets = targets.contiguous()
        found, sums = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        with _on_device(x):
            _kernels().capped_losses[(len(x),)](
                x, x.stride(0), targets, found, sums, x.shape[1], cap, IGNORED=IGNORED, COLUMNS=COLUMNS, num_warps=8
            )
        ctx.save_for_backward(x, targets, sums)
        ctx.cap = cap
        return found

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, targets, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated in turn, which the kernel does not support
            (dx,) = torch.autograd.grad(plain_losses(x, targets, ctx.cap), (x,), dloss, create_graph=True)
            return dx, None, None
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with _on_device(x):
            _kernels().capped_losses_backward[(len(x), -(-x.shape[1] // COLUMNS))](
                x, x.stride(0), targets, sums, dloss.contiguous(), dx, x.shape[1], ctx.cap, IGNORED=IGNORED,
                COLUMNS=COLUMNS, num_warps=8,
            )  # fmt: skip
        return dx, None, None


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _kernels() -> ModuleType:
    """Return the module of the kernels; it imports Triton and is therefore imported at the first use."""
    from tfla.nn import loss_kernels

    return loss_kernels
