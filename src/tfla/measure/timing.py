"""The seconds of a call: rested, with a pause before each sample, and sustained, back to back."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tfla.measure.problem import Call

FEWEST = 5  # samples of a call, however long it takes
LEAD_SECONDS = 2e-3  # the lead of the host over the device, so that the time of the host is not measured
LEAD = int(LEAD_SECONDS * 2e9)  # in cycles of the GPU


@dataclass(frozen=True)
class Sampling:
    """The number of samples of a call, and the pauses between them."""

    repeats: int = 30
    """Samples."""
    warmup: int = 10
    """Calls before the samples."""
    pause: float = 0.02
    """Seconds of rest before a sample."""
    patience: float = 3.0
    """Seconds of samples after which FEWEST of them suffice."""
    sustained: float = 1.0
    """Seconds of the run back to back that follows the samples; 0 for none."""
    in_a_row: int = 1
    """Calls of a sample, back to back; a sample is their mean."""


class Clock(Protocol):
    """A clock of one kind of device."""

    def now(self) -> float:
        """Return the seconds of the host, which bound the number of samples."""

    def rest(self, seconds: float) -> None:
        """Leave the device idle for so many seconds."""

    def series(self, call: Call, count: int) -> float:
        """Return the seconds of so many calls back to back."""


class HostClock:
    """The clock of calls that run on the CPU."""

    def now(self) -> float:
        """Return the seconds of the host's performance counter."""
        return time.perf_counter()

    def rest(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def series(self, call: Call, count: int) -> float:
        """Return the seconds from before the first call to after the last."""
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start


class CudaClock(HostClock):
    """The clock of a GPU: CUDA events around the calls. The GPU spins first, so that the host enqueues ahead of it."""

    def before(self) -> None:
        """Enqueue what the GPU does before the first call of a series."""
        torch.cuda._sleep(LEAD)

    def series(self, call: Call, count: int) -> float:
        """Return the seconds between an event before the first call and one after the last."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.before()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class CommonClock(HostClock):
    """The clock of calls that several processes make together on the CPU: they start at the same time."""

    def series(self, call: Call, count: int) -> float:
        """Return the seconds of the calls after all processes have come."""
        dist.barrier()
        return super().series(call, count)


class CommonCudaClock(CudaClock):
    """The clock of calls that several processes make together on their GPUs, which start at the same time."""

    def before(self) -> None:
        """Let the GPUs wait for one another, after the host's lead."""
        super().before()
        dist.all_reduce(torch.zeros(1, device="cuda"))


class EnqueueingClock(HostClock):
    """The clock of the host's time to enqueue calls on a GPU that has little to do."""

    def series(self, call: Call, count: int) -> float:
        """Return the seconds in which the host enqueues the calls, with an idle GPU before them."""
        torch.cuda.synchronize()
        seconds = super().series(call, count)
        torch.cuda.synchronize()
        return seconds


def clock_of(device: str, host: bool = False, together: bool = False) -> Clock:
    """Return the clock of a device.

    Args:
        device: the device.
        host: whether to time the host, which enqueues calls on it.
        together: whether the processes of the default group make the calls together.
    """
    if not device.startswith("cuda"):
        return CommonClock() if together else HostClock()
    if host:
        return EnqueueingClock()
    return CommonCudaClock() if together else CudaClock()


def _in_a_row(call: Call, clock: Clock, seconds: float) -> float:
    """Estimate the seconds of a call back to back: for short calls the host can be slower than the device."""
    if seconds > 2 * LEAD_SECONDS:
        return seconds
    count = min(100, math.ceil(0.02 / max(seconds, 1e-6)))
    start = clock.now()
    clock.series(call, count)
    return max(seconds, (clock.now() - start) / count)


def measure(call: Call, clock: Clock, sampling: Sampling, sustained: bool = True) -> dict[str, Any]:
    """Return the median, minimum, maximum and number of the samples, and the mean of a sustained run."""
    clock.series(call, 1)  # compiles and tunes
    start, warm = clock.now(), 0
    while warm < sampling.warmup and (warm < 2 or clock.now() - start < sampling.patience / 3):
        clock.series(call, 1)
        warm += 1
    start, samples = clock.now(), list[float]()
    while len(samples) < sampling.repeats and (len(samples) < FEWEST or clock.now() - start < sampling.patience):
        clock.rest(sampling.pause)
        samples.append(clock.series(call, sampling.in_a_row) / sampling.in_a_row)
    middle = statistics.median(samples)
    row = {"seconds": middle, "min": min(samples), "max": max(samples), "samples": len(samples), "warmup": warm}
    if sustained and sampling.sustained > 0:
        count = max(2, math.ceil(sampling.sustained / _in_a_row(call, clock, middle)))
        row |= {"sustained_seconds": clock.series(call, count) / count, "sustained_calls": count}
    return row
