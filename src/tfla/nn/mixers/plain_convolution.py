"""The short causal convolution in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tfla.nn.layers import at_least_float32


def convolve(
    silu: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None,
    carried: Tensor | None,
) -> Tensor:  # fmt: skip
    """Convolve in float32 or float64.

    Args:
        silu: the activation.
        x: (B, size - 1 + T, channels), the inputs after those before the first token.
        weight: (channels, size), the weight of the newest input last.
        bias: (channels,) or None.
        first: (B, T) or (1, T), the index of the first token of each token's document, or None.
        carried: (1, T, channels), to be added, or None.

    Returns:
        (B, T, channels) in x's dtype.
    """
    size = weight.shape[1]
    steps = x.shape[1] - size + 1
    wide, weight = at_least_float32(x), at_least_float32(weight)
    y = wide[:, size - 1 :] * weight[:, -1]
    token = None if first is None else torch.arange(steps, device=x.device)
    for j in range(1, size):
        term = wide[:, size - 1 - j : size - 1 - j + steps] * weight[:, size - 1 - j]
        if first is not None and token is not None:
            term = torch.where((token - j >= first)[..., None], term, 0)
        y = y + term
    if bias is not None:
        y = y + bias
    return silu(y if carried is None else y + carried).to(x.dtype)
