"""The measurement of a candidate's time and memory on this machine, and the time that this takes."""

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

PATIENCE = 1.0  # seconds of sampling after which five samples are enough
# Calls before the samples: a forward for the cotangent, one that compiles, one by which the samples are planned.
BEFORE = 3.3
COMPILING = 10.0  # approximate seconds that the first call of a kernel on a GPU takes to compile
LEAST = 2.0  # calls for which there must be time before a measurement begins


@dataclass(frozen=True)
class Measured:
    """The measurement of a candidate: the median time of forward and backward, and the peak memory beyond the inputs.

    The memory is None where the device does not count it.
    """

    candidate: Candidate
    seconds: float
    peak_bytes: int | None
    error: str | None = None

    @property
    def memory(self) -> int:
        """The measured memory, or the predicted one where it was not measured."""
        return self.candidate.peak_bytes if self.peak_bytes is None else self.peak_bytes


def predicted_seconds(candidate: Candidate, repeats: int, device: str) -> float:
    """Return the predicted time to measure a candidate."""
    each = max(candidate.seconds, 1e-6)
    samples = min(repeats, max(FEWEST, PATIENCE / each))
    return (BEFORE + samples) * each + (COMPILING if device.startswith("cuda") else 0.0)


def measured(problem: Problem, gate: InputGate, candidate: Candidate, repeats: int, left: float = math.inf) -> Measured:
    """Time a candidate and return the median of its samples, or the error that it raised.

    Args:
        problem: the shape.
        gate: the input gate.
        candidate: kernel and chunk size.
        repeats: the number of samples; fewer are taken of long calls.
        left: the seconds that this may take; where they do not suffice, fewer samples are taken, at least one.
    """
    end = time.monotonic() + left
    at = replace(problem, chunk_size=candidate.chunk_size)
    try:
        call, clock = call_of(mlstm(at, gate, candidate.backend, candidate.kernel), BOTH), clock_of(problem.device)
        first = clock.series(call, 1)  # compiles and autotunes
        if time.monotonic() >= end and not problem.device.startswith("cuda"):
            return Measured(candidate, first, None)  # nothing is compiled on a CPU
        seconds = clock.series(call, 1)
        fitting = min((end - time.monotonic()) / max(seconds, 1e-6), 1e6)
        if fitting >= 3:  # one call more than the samples
            warm = 2 if fitting > FEWEST + 3 else 0
            sampling = Sampling(min(repeats, int(fitting) - 1 - warm), warm, 0.005, PATIENCE, sustained=0.0)
            seconds = measure(call, clock, sampling)["seconds"]
        return Measured(candidate, seconds, peak_bytes(call, problem.device))
    except (RuntimeError, ValueError, MemoryError) as error:  # out of memory, too large for the kernel
        return Measured(candidate, math.inf, None, describe_error(error))
