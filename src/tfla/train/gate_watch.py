"""The largest pre-activation of the input gates, which grows before training with exponential gates fails (fig. 11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tfla.nn import GatePreactivation


class InputGateWatch:
    """Watches the input gates of a model through forward hooks; nothing waits for the device until :meth:`take`."""

    def __init__(self, model: nn.Module) -> None:
        self.largest: Tensor | None = None
        for name, module in model.named_modules():
            if isinstance(module, GatePreactivation) and name.endswith("input_gate"):
                module.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        largest = output.detach().amax()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def take(self) -> float | None:
        """The largest value since the last call; None if there was none, as in a model without such gates."""
        largest, self.largest = self.largest, None
        return None if largest is None else largest.item()
