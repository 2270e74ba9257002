"""The largest input-gate pre-activation of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tfla.nn import GatePreactivation


class InputGateMonitor:
    """A record of the largest input-gate pre-activation, taken by forward hooks.

    Nothing synchronizes with the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.largest: Tensor | None = None
        for name, module in model.named_modules():
            if isinstance(module, GatePreactivation) and name.endswith("input_gate"):
                module.register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Update the largest value, as a forward hook."""
        largest = output.detach().amax()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def take(self) -> Tensor | None:
        """Return the largest value since the last call, and forget it; None for a model without input gates."""
        largest, self.largest = self.largest, None
        return largest
