"""Normalisation of the heads' outputs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn.numerics import at_least_float32


class HeadNorm(nn.Module):
    """NORM of equation (8): h (..., heads, head_dim), each head by itself, times one weight a channel, no bias.

    Runs in float32 or better and returns that dtype. ``kind`` "layer": LayerNorm; "rms": RMSNorm.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, kind: Literal["layer", "rms"]) -> None:
        super().__init__()
        self.eps, self.kind = eps, kind
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))

    def forward(self, h: Tensor) -> Tensor:
        norm = F.layer_norm if self.kind == "layer" else F.rms_norm
        return norm(at_least_float32(h), h.shape[-1:], eps=self.eps) * self.weight.view(h.shape[-2:])
