"""The parameters of a decay by softplus, as Mamba-2 has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tfla.nn.layers import local

STEP_SIZES = (1e-3, 1e-1)  # softplus(dt_bias) is drawn log-uniformly from these at first


class DecayParameters(nn.Module):
    """A rate and a bias of the gates -exp(A_log) softplus(f + dt_bias).

    Args:
        heads: number of heads.
        channels: number of biases of each head, for gates by channel; None is one bias without that
            dimension.
        rates: the range from which the initial exp(A_log) is drawn uniformly.
    """

    def __init__(self, heads: int, channels: int | None = None, rates: tuple[float, float] = (1.0, 16.0)) -> None:
        super().__init__()
        self.rates = rates
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads) if channels is None else torch.empty(heads, channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw both from torch's global generator."""
        self.A_log.uniform_(*self.rates).clamp_(min=1e-4).log_()
        size = self.dt_bias.uniform_(*map(math.log, STEP_SIZES)).exp_()
        self.dt_bias.copy_(size + torch.log(-torch.expm1(-size)))  # the inverse of softplus

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A_log (heads,) and dt_bias (heads,) or (heads, channels) of this process's heads."""
        return local(self.A_log), local(self.dt_bias)
