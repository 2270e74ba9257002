"""Numbers that the host reads from a device without waiting for what is enqueued after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Reading:
    """Numbers on their way from a device to the host.

    On a GPU the host waits for them alone when it reads them, so that it may enqueue an update of the weights and the
    next step before.

    Args:
        values: tensors of one element each.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._event = None
        self._values = [value.detach() for value in values]
        devices = [value.device for value in values if value.is_cuda]
        if devices:
            self._values = [self._start(value) for value in self._values]
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(devices[0]))  # the current device may be another one

    @staticmethod
    def _start(value: Tensor) -> Tensor:
        """Start the copy of a tensor to main memory."""
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)

    def arrived(self) -> bool:
        """Return whether the numbers can be read without waiting."""
        if self._event is not None:
            return self._event.query()
        return all(value.device.type == "cpu" for value in self._values)

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        if self._event is not None:
            self._event.synchronize()
        return [value.item() for value in self._values]
