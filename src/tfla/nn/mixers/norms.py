"""The norms with an output gate at the end of the recurrent mixers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn import batch_invariance
from tfla.nn.layers import HeadNorm, at_least_float32, local, recomputed, sharding_mesh
from tfla.nn.mixers import fused_norm, plain_norm

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
        self, dim: int, eps: float, activation: fused_norm.Activation = "silu", gate_first: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.activation, self.gate_first = eps, activation, gate_first
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, h: Tensor, gate: Tensor | None = None, skip: fused_norm.Skip | None = None) -> Tensor:
        """Return the gated norm of h (..., dim) in h's dtype.

        Args:
            h: (..., dim).
            gate: (..., dim), or None for no gate.
            skip: a skip connection that is added to h before, or None.
        """
        weight, mesh = local(self.weight), sharding_mesh(self.weight)
        plain = self.batch_invariant or mesh is not None  # prefill and decoding have the same bits in PyTorch
        if not plain and fused_norm.unsupported(h, weight, gate, skip) is None:
            options = fused_norm.Options(self.eps, self.activation, self.gate_first)
            return fused_norm.gated_norm(h, weight, gate, options, skip)
        if skip is not None:
            h = skip.added_to(h)
        activation = (INVARIANT if self.batch_invariant else ACTIVATIONS)[self.activation]
        return recomputed(partial(plain_norm.gated_norm, self.eps, activation, self.gate_first, mesh), h, weight, gate)


def gated_head_norm(norm: HeadNorm, h: Tensor, gate: Tensor, batch_invariant: bool = False) -> Tensor:
    """Return sigmoid(gate) * NORM(h), equation (8) of the paper, in h's dtype.

    Args:
        norm: the norm of each head.
        h: (..., heads, head_dim).
        gate: (..., heads * head_dim).
        batch_invariant: whether the bits of a token must not depend on the number of tokens.

    Returns:
        (..., heads * head_dim).
    """
    if not batch_invariant and _computes_as_class(norm):
        weight, by_heads = norm.weight.view(h.shape[-2:]), gate.unflatten(-1, h.shape[-2:])
        if fused_norm.unsupported(h, weight, by_heads) is None:
            options = fused_norm.Options(norm.eps, "sigmoid", centered=norm.kind == "layer")
            return fused_norm.gated_norm(h, weight, by_heads, options).flatten(-2)
    sigmoid = (INVARIANT if batch_invariant else ACTIVATIONS)["sigmoid"]
    return recomputed(partial(_plain_gated_head_norm, norm, sigmoid), gate, h)


def _computes_as_class(norm: nn.Module) -> bool:
    """Return whether nothing would be left out that users, tensor parallelism or wrappers have added to a call."""
    if type(norm) is not HeadNorm or "forward" in norm.__dict__:
        return False
    return not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)


def _plain_gated_head_norm(norm: HeadNorm, sigmoid: Callable[[Tensor], Tensor], gate: Tensor, h: Tensor) -> Tensor:
    """Compute :func:`gated_head_norm` by operations of PyTorch."""
    return (sigmoid(at_least_float32(gate)) * norm(h).flatten(-2)).to(h.dtype)
