"""Seconds and bytes of a candidate on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfla.bench.contenders import mlstm
from tfla.bench.memory import peak_bytes
from tfla.bench.problem import BOTH, Problem, call_of
from tfla.bench.timing import Sampling, clock_of, measure
from tfla.bench.worker import why
from tfla.ops.gates import InputGate
from tfla.tune.predict import Candidate


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


def measured(problem: Problem, gate: InputGate, candidate: Candidate, repeats: int) -> Measured:
    """Runs it; one that raises has its error."""
    at = replace(problem, chunk_size=candidate.chunk_size)
    try:
        call = call_of(mlstm(at, gate, candidate.backend, candidate.kernel), BOTH)
        sampling = Sampling(repeats=repeats, warmup=2, pause=0.005, patience=1.0, sustained=0.0)
        row = measure(call, clock_of(problem.device), sampling)
        return Measured(candidate, row["seconds"], peak_bytes(call, problem.device))
    except (RuntimeError, ValueError) as error:  # out of memory, too large for the kernel
        return Measured(candidate, float("inf"), None, why(error))
