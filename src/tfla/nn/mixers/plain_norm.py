"""The norm with an output gate by operations of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.layers import at_least_float32, summed


def gated_norm(
    eps: float, activation: Callable[[Tensor], Tensor], gate_first: bool, mesh: Any, h: Tensor, weight: Tensor,
    gate: Tensor | None, centered: bool = False,
) -> Tensor:  # fmt: skip
    """Return the value of :class:`~tfla.nn.mixers.norms.GatedNorm`, or with ``centered`` that with a LayerNorm.

    Args:
        eps, gate_first: as for the class.
        activation: the activation of the gate.
        mesh: the processes that share the last dimension, or None.
        h: (..., dim).
        weight: (dim,), or (heads, dim) where h is (..., heads, dim).
        gate: (..., dim) or None.
        centered: whether the norm is LayerNorm. Only RMSNorm has a mesh.
    """
    wide, weight = at_least_float32(h), at_least_float32(weight)
    factor = None if gate is None else activation(at_least_float32(gate))
    if factor is not None and gate_first:
        wide = wide * factor
    if mesh is None:
        norm = F.layer_norm if centered else F.rms_norm
        wide = norm(wide, wide.shape[-1:], eps=eps) * weight
    else:
        square = summed(wide.square().sum(-1, keepdim=True), mesh) / (wide.shape[-1] * mesh.size())
        wide = wide * torch.rsqrt(square + eps) * weight
    if factor is not None and not gate_first:
        wide = wide * factor
    return wide.to(h.dtype)
