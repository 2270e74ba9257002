"""Which candidates are measured for which shape, in which order, and how long that should take."""

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

MOST = 3  # candidates of a kernel that are measured
ADDRESSABLE = 2**47


@dataclass(frozen=True)
class Plan:
    """The candidates of one shape, the default among them, and those that are worth measuring, in their order."""

    problem: Problem
    gate: InputGate
    candidates: list[Candidate]
    default: tuple[str, int]
    few: list[Candidate]

    def seconds(self, repeats: int) -> float:
        """Return how long measuring should take."""
        return sum(predicted_seconds(c, repeats, self.problem.device) for c in self.few)


def ordered(candidates: list[Candidate], default: tuple[str, int], limit: int | None) -> list[Candidate]:
    """Return the candidates worth measuring: the default, which the others have to beat, then by predicted merit."""
    few = shortlist(candidates, default, limit, MOST)
    return sorted(few, key=lambda c: ((c.kernel, c.chunk_size) != default, c.seconds, c.peak_bytes))


def inputs_bytes(p: Problem) -> int:
    """Return the bytes of q, k, v and of the gates."""
    return p.B * p.T * p.H * ((2 * p.dqk + p.dhv) * p.itemsize + 8)


def check_memory(p: Problem, total: int | None, name: str = "length") -> None:
    """Raise UserError, which names the option of the length, where the inputs alone do not fit the memory.

    Args:
        p: the shape.
        total: bytes of the memory; None is one of any size.
        name: of the option.
    """
    needed, most = inputs_bytes(p), ADDRESSABLE if total is None else total
    if needed > most:
        raise UserError(
            f"{name}: got {p.T:,} with B {p.B}, {p.H} heads, dqk {p.dqk}, dhv {p.dhv}: the inputs alone take "
            f"{gib(needed)} GiB, expected at most {gib(most)}"
        )


def too_large(p: Problem, candidate: Candidate, total: int | None) -> str | None:
    """Say that a candidate should take more memory than there is, or return None."""
    needed = inputs_bytes(p) + candidate.peak_bytes
    return None if total is None or needed <= total else f"needs about {gib(needed)} GiB, there are {gib(total)}"


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def memory_of(device: str) -> int | None:
    """Return the bytes of a device's memory; None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if math.isinf(seconds):
        return "no bound"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
