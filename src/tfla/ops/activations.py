"""Activations whose value for an element does not depend on where it is in a tensor.

On a CPU torch's sigmoid, silu and softplus compute the last elements of a tensor, and elements with strides, by other
polynomials than the rest, so that their last bits depend on the number of elements before them. exp and logsigmoid do
not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in the dtype of x; the relative error grows as that of exp(x) where x is negative."""
    return torch.exp(F.logsigmoid(_wide(x))).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x) in the dtype of x."""
    wide = _wide(x)
    return (wide * torch.exp(F.logsigmoid(wide))).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) in the dtype of x."""
    return -F.logsigmoid(-x)


def _wide(x: Tensor) -> Tensor:
    """Return x in float64 or else float32."""
    return x if x.dtype == torch.float64 else x.float()
