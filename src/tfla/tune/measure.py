"""Seconds and bytes of a candidate on this machine, and how long it takes to find them out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from tfla.measure.errors import describe_error
from tfla.measure.memory import peak_bytes
from tfla.measure.operator import mlstm
from tfla.measure.problem import BOTH, Problem, call_of
from tfla.measure.timing import FEWEST, Sampling, clock_of, measure
from tfla.ops.gates import InputGate
from tfla.tune.predict import Candidate

PATIENCE = 1.0  # seconds of samples after which five are enough
BEFORE = (
    3.3  # calls before the samples: a forward for the cotangent, one that compiles, one by which samples are planned
)
COMPILING = 10.0  # seconds, about, that the first call of a kernel on a GPU takes to compile
LEAST = 2.0  # calls below which a measurement is not begun


@dataclass(frozen=True)
class Measured:
    """Forward and backward of a candidate: the median; peak memory beyond the inputs, None where it is not counted."""

    candidate: Candidate
    seconds: float
    peak_bytes: int | None
    error: str | None = None

    @property
    def memory(self) -> int:
        """As measured, else as predicted."""
        return self.candidate.peak_bytes if self.peak_bytes is None else self.peak_bytes


def predicted_seconds(candidate: Candidate, repeats: int, device: str) -> float:
    """Return how long it should take to measure a candidate."""
    each = max(candidate.seconds, 1e-6)
    samples = min(repeats, max(FEWEST, PATIENCE / each))
    return (BEFORE + samples) * each + (COMPILING if device.startswith("cuda") else 0.0)


def measured(problem: Problem, gate: InputGate, candidate: Candidate, repeats: int, left: float = math.inf) -> Measured:
    """Run a candidate and take the median of its samples; one that raises has its error.

    Args:
        problem: the shape.
        gate: the input gate.
        candidate: kernel and chunk size.
        repeats: samples, fewer of long calls.
        left: seconds that it may take; there are fewer samples where they do not last, down to one.
    """
    end = time.monotonic() + left
    at = replace(problem, chunk_size=candidate.chunk_size)
    try:
        call, clock = call_of(mlstm(at, gate, candidate.backend, candidate.kernel), BOTH), clock_of(problem.device)
        first = clock.series(call, 1)  # compiles and tunes
        if time.monotonic() >= end and not problem.device.startswith("cuda"):
            return Measured(candidate, first, None)  # nothing is compiled on a CPU
        seconds = clock.series(call, 1)
        fitting = min((end - time.monotonic()) / max(seconds, 1e-6), 1e6)
        if fitting >= 3:  # one more beside the samples
            warm = 2 if fitting > FEWEST + 3 else 0
            sampling = Sampling(min(repeats, int(fitting) - 1 - warm), warm, 0.005, PATIENCE, sustained=0.0)
            seconds = measure(call, clock, sampling)["seconds"]
        return Measured(candidate, seconds, peak_bytes(call, problem.device))
    except (RuntimeError, ValueError, MemoryError) as error:  # out of memory, too large for the kernel
        return Measured(candidate, math.inf, None, describe_error(error))
