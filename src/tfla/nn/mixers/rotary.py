"""The rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.nn.layers import at_least_float32
from tfla.ops.transforms import needs_dispatcher

ROTARY_BASE = 10_000.0


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
    """The rotary embedding in four passes over halves of x, without casts of it; the backward rotates back."""

    @staticmethod
    def forward(x: Tensor, table: Tensor) -> Tensor:
        half = x.shape[-1] // 2
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


def rotate_both(q: Tensor, k: Tensor, position: Tensor, base: float = ROTARY_BASE) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to queries and keys (..., heads, d) at token positions (...)."""
    table = cos_sin(position, q.shape[-1] // 2, torch.promote_types(q.dtype, torch.float32), base)
    return rotate(q, table), rotate(k, table)
