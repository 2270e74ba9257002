"""Memory for the intermediate results of blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b over the two leading dims, which are one batch dim where strides allow it without a copy."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))


class Workspace:
    """Buffers by name, kept from block to block: first touching fresh memory can cost more than the arithmetic."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size, dtype=dtype or self.dtype)
        return self.buffers[name][:size].view(shape)

    def mul(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a * b, with a and b broadcast against each other but for the last dim, which a has."""
        return torch.mul(a, b, out=self(name, *b.shape[:3], a.shape[3]) if a.shape[2] == 1 else self(name, *a.shape))

    def bmm(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b over the two leading dims; they are one batch dim where strides allow it without a copy."""
        out = self(name, *a.shape[:3], b.shape[3])
        bmm_into(out, a, b)
        return out
