"""The soft cap of logits and gates."""

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), equation (110), in the shape and dtype of x: close to x near 0, within +-cap."""
    return cap * torch.tanh(x / cap)
