"""Two small functions that several layers share."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), equation (110): x near 0, never beyond +-cap. Any shape, dtype of x."""
    return cap * torch.tanh(x / cap)


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()
