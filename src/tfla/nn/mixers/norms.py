"""The norms with an output gate at the end of the recurrent mixers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn import batch_invariance
from tfla.nn.layers import at_least_float32, local, recomputed, sharding_mesh, summed

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
INVARIANT: dict[str, Callable[[Tensor], Tensor]] = {"silu": batch_invariance.silu, "sigmoid": batch_invariance.sigmoid}


class GatedNorm(nn.Module):
    """An RMSNorm of the last dimension with an output gate: w * RMS(h) * activation(gate), in float32 or float64.

    Args:
        dim: size of the last dimension of h.
        eps: epsilon of the norm.
        activation: the activation of the gate, "silu" or "sigmoid".
        gate_first: w * RMS(h * activation(gate)) instead, as in Mamba-2.
    """

    batch_invariant = False

    def __init__(
        self, dim: int, eps: float, activation: Literal["silu", "sigmoid"] = "silu", gate_first: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.activation, self.gate_first = eps, activation, gate_first
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the gated norm of h (..., dim) in h's dtype; gate has h's shape, None is no gate."""
        activation = (INVARIANT if self.batch_invariant else ACTIVATIONS)[self.activation]
        norm = partial(_gated_norm, self.eps, activation, self.gate_first, sharding_mesh(self.weight))
        return recomputed(norm, h, local(self.weight), gate)


def _gated_norm(
    eps: float, activation: Callable[[Tensor], Tensor], gate_first: bool, mesh: Any, h: Tensor, weight: Tensor,
    gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the value of :class:`GatedNorm`; with a mesh, the last dimension is shared by its processes."""
    wide, weight = at_least_float32(h), at_least_float32(weight)
    factor = None if gate is None else activation(at_least_float32(gate))
    if factor is not None and gate_first:
        wide = wide * factor
    if mesh is None:
        wide = F.rms_norm(wide, wide.shape[-1:], weight, eps)
    else:
        square = summed(wide.square().sum(-1, keepdim=True), mesh) / (wide.shape[-1] * mesh.size())
        wide = wide * torch.rsqrt(square + eps) * weight
    if factor is not None and not gate_first:
        wide = wide * factor
    return wide.to(h.dtype)
