"""An update of the weights that is enqueued, whose numbers the host reads one step late.

While the host waits for the numbers of a step, gathers and records them, the device computes the step after it. Without
that the host would begin to enqueue a forward when the device has little left to do, and the device would wait for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tfla.train.ranks import Ranks
from tfla.train.recipe import ClippedReading


class StepNumbers(NamedTuple):
    """The numbers of an update, of all processes together."""

    loss: float
    """The mean loss in nats per token."""
    grad_norm: float
    """The norm of all gradients before clipping."""
    max_input_gate: float | None
    """The largest input-gate pre-activation; None for a model without input gates."""
    peak_memory: int
    """The bytes that the process with most of them has held so far."""
    signal: int
    """The number of a signal that any process has caught before the numbers were read, else 0."""

    @property
    def finite(self) -> bool:
        """True if the loss and the norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class PendingStep(NamedTuple):
    """An update that is enqueued, and what the host needs to finish it."""

    step: int
    """The number of updates with this one."""
    lr: float
    """Its learning rate."""
    peak_memory: int
    """The bytes that this process had held when it was enqueued."""
    reading: ClippedReading
    """The mean loss of this process, the norm, and the largest input gate if there are any."""
    computed: float | None
    """The time after it was enqueued, by `time.perf_counter`, if the device had computed it by then, as a CPU has."""

    def read(self, ranks: Ranks, signal: int) -> StepNumbers:
        """Wait for the numbers of this process and gather those of all processes.

        Args:
            ranks: the processes.
            signal: the number of a signal that this process has caught, else 0.
        """
        loss, norm, *largest = self.reading.read()
        gathered = ranks.gather([loss, *(largest or [-math.inf]), float(signal), self.peak_memory])
        losses, gates, signals, peaks = zip(*gathered, strict=True)
        return StepNumbers(
            loss=math.fsum(losses) / len(losses), grad_norm=norm, max_input_gate=max(gates) if largest else None,
            peak_memory=int(max(peaks)), signal=int(max(signals)),
        )  # fmt: skip
