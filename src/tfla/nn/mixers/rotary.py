"""The rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tfla.nn.layers import at_least_float32
from tfla.nn.mixers.eager_kernels import tensors_unsupported
from tfla.ops.transforms import needs_dispatcher

ROTARY_BASE = 10_000.0
ELEMENTS = 1024  # numbers of each half that a program has at a time


# A registered operator, since torch.compile would otherwise recompute the cosines for every head and in the backward.
@torch.library.custom_op("tfla::turns", mutates_args=())
def cos_sin(position: Tensor, half: int, dtype: torch.dtype, base: float = ROTARY_BASE) -> Tensor:
    """Return the cosines and sines of the rotary embedding at token positions (...): (2, ..., 1, half)."""
    frequency = base ** -(torch.arange(half, device=position.device, dtype=dtype) / half)
    angle = (position[..., None] * frequency)[..., None, :]
    return torch.stack([angle.cos(), angle.sin()])


@cos_sin.register_fake
def _(position: Tensor, half: int, dtype: torch.dtype, base: float = ROTARY_BASE) -> Tensor:
    return position.new_empty((2, *position.shape, 1, half), dtype=dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply the rotary embedding.

    Args:
        x: (B, T, heads, d), d even.
        table: what :func:`cos_sin` returns for positions (T,) or (B, T).
    """
    if x.is_cuda and not needs_dispatcher((x, table)):
        rotated: Tensor = _Rotation.apply(x, table)
        return rotated
    half = x.shape[-1] // 2
    wide = at_least_float32(x)
    cos, sin = table.unbind()
    a, b = wide[..., :half], wide[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """The rotary embedding by one kernel, or by four passes over halves of x; the backward rotates back."""

    @staticmethod
    def forward(x: Tensor, table: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        if tensors_unsupported(x, table) is None:
            return _rotated(x.contiguous(), table.contiguous())
        cos, sin = table.unbind()
        a, b, y = x[..., :half], x[..., half:], x.new_empty(x.shape)
        torch.addcmul(a * cos, b, sin, value=-1, out=y[..., :half])
        torch.addcmul(b * cos, a, sin, out=y[..., half:])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        cos, sin = ctx.saved_tensors[0].unbind()
        return _Rotation.apply(dy, torch.stack([cos, -sin])), None


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """Return x (B, T, heads, d), contiguous, rotated by a kernel."""
    from tfla.nn.mixers import rotary_kernels  # imports Triton

    y, half = torch.empty_like(x), x.shape[-1] // 2
    tokens, channels = x.shape[:-2].numel(), 1 << (half - 1).bit_length()
    at_once = max(1, ELEMENTS // channels)
    if y.numel():
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            rotary_kernels.rotate[(-(-tokens // at_once),)](
                x, table, y, tokens, table.numel() // (2 * half), x.shape[-2], HALF=half, TOKENS=at_once,
                CHANNELS=channels, num_warps=4,
            )  # fmt: skip
    return y


def rotate_both(q: Tensor, k: Tensor, position: Tensor, base: float = ROTARY_BASE) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to queries and keys (..., heads, d) at token positions (...)."""
    table = cos_sin(position, q.shape[-1] // 2, torch.promote_types(q.dtype, torch.float32), base)
    return rotate(q, table), rotate(k, table)
