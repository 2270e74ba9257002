"""The plan of tuning: the candidates to measure for each shape, their order, and the time that they should take."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from tfla._util.errors import UserError
from tfla.measure.problem import Problem
from tfla.ops.gates import InputGate
from tfla.tune.choose import shortlist
from tfla.tune.measure import predicted_seconds
from tfla.tune.predict import Candidate

MOST = 3  # candidates of each kernel that are measured
ADDRESSABLE = 2**47


@dataclass(frozen=True)
class TuningPlan:
    """The candidates of one shape including the default, and the few that are measured, in their order."""

    problem: Problem
    gate: InputGate
    candidates: list[Candidate]
    default: tuple[str, int]
    few: list[Candidate]

    def seconds(self, repeats: int) -> float:
        """Return the predicted time to measure the candidates of the plan."""
        return sum(predicted_seconds(c, repeats, self.problem.device) for c in self.few)


def ordered(candidates: list[Candidate], default: tuple[str, int], limit: int | None) -> list[Candidate]:
    """Return the candidates to measure: the default first, the others by predicted time."""
    few = shortlist(candidates, default, limit, MOST)
    return sorted(few, key=lambda c: ((c.kernel, c.chunk_size) != default, c.seconds, c.peak_bytes))


def inputs_bytes(p: Problem) -> int:
    """Return the bytes of q, k, v and the gates."""
    return p.B * p.T * p.H * ((2 * p.dqk + p.dhv) * p.itemsize + 8)


def check_memory(p: Problem, total: int | None, name: str = "length") -> None:
    """Check that the inputs of a shape fit into memory.

    Args:
        p: the shape.
        total: bytes of the memory; None for any.
        name: the option of the length, for the message.

    Raises:
        UserError: the inputs alone do not fit.
    """
    needed, most = inputs_bytes(p), ADDRESSABLE if total is None else total
    if needed > most:
        raise UserError(
            f"{name}: got {p.T:,} with B {p.B}, {p.H} heads, dqk {p.dqk}, dhv {p.dhv}: the inputs alone take "
            f"{gib(needed)} GiB, expected at most {gib(most)}"
        )


def too_large(p: Problem, candidate: Candidate, total: int | None) -> str | None:
    """Return why a candidate does not fit into memory by prediction, or None."""
    needed = inputs_bytes(p) + candidate.peak_bytes
    return None if total is None or needed <= total else f"needs about {gib(needed)} GiB, there are {gib(total)}"


def gib(size: int) -> str:
    """Return a number of bytes in GiB as text."""
    return f"{size / 2**30:,.2f}"


def memory_of(device: str) -> int | None:
    """Return the bytes of a device's memory, or None where the system does not tell."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None


def duration(seconds: float) -> str:
    """Return a number of seconds as text, in s, min or h."""
    if math.isinf(seconds):
        return "no bound"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
