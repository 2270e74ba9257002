"""Pre-activations of the input and the forget gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn.numerics import at_least_float32, recomputed, soft_cap
from tfla.ops.signature import without_autocast

# Added nowhere, set in place of f~ at a document's first token: the forget gate is then 0 in every dtype.
RESET = -1e4


class GatePreactivation(nn.Linear):
    """x (..., d_model) -> softcap(W x + b) (..., heads), equations (5) and (110).

    Runs in float32 or better, also under autocast, and returns that dtype. A module of its
    own, so that a forward hook on it sees the pre-activations that the operator gets.

    Args:
        bias_range: first and last head's bias at the start; those between are equally spaced. Weights start at 0.
    """

    def __init__(self, d_model: int, num_heads: int, bias_range: tuple[float, float], cap: float) -> None:
        self.bias_range, self.cap = bias_range, cap  # nn.Linear's own constructor sets weight and bias
        super().__init__(d_model, num_heads)

    def reset_parameters(self) -> None:
        """Set weights to 0 and biases to their equally spaced values."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.linspace(*self.bias_range, self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        # A gate is exp'd or summed over the whole sequence: bfloat16 is too coarse for it.
        with without_autocast(x.device.type):
            return recomputed(self._float32_gate, x) if x.element_size() == 2 else self._float32_gate(x)

    def _float32_gate(self, x: Tensor) -> Tensor:
        x, weight, bias = map(at_least_float32, (x, self.weight, self.bias))
        return soft_cap(F.linear(x, weight, bias), self.cap)


def reset_forget_gate(f: Tensor, document_start: Tensor) -> Tensor:
    """f (B, T, heads), closed where document_start (B, T) bool is True: nothing is carried into those tokens."""
    return f.masked_fill(document_start[..., None], RESET)
