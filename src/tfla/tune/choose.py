"""The choice of the candidates to measure, and of the best one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from tfla.tune.measure import Measured
from tfla.tune.predict import Candidate

NOISE = 1.02  # times within this factor count as equal, and the candidate with less memory is better
C = TypeVar("C", Candidate, Measured)


def shortlist(
    candidates: Sequence[Candidate], default: tuple[str, int], limit: int | None, most: int
) -> list[Candidate]:
    """Return the fastest candidates of every kernel by prediction, and the default.

    Predicted memory is not exact, so candidates up to a tenth over the limit are included.

    Args:
        candidates: all candidates, with predicted time and memory.
        default: kernel and chunk size of the default.
        limit: bytes of memory; None for any.
        most: the number of candidates of each kernel.
    """
    fitting = [c for c in candidates if limit is None or c.peak_bytes <= 1.1 * limit]
    chosen = {(c.kernel, c.chunk_size): c for c in candidates if (c.kernel, c.chunk_size) == default}
    for _, group in groupby(sorted(fitting, key=lambda c: (c.kernel, c.seconds, c.peak_bytes)), key=lambda c: c.kernel):
        chosen |= {(c.kernel, c.chunk_size): c for c in list(group)[:most]}
    return [c for c in candidates if (c.kernel, c.chunk_size) in chosen]


def best(found: Sequence[C], limit: int | None) -> C | None:
    """Return the fastest candidate within the limit, of equally fast ones that with the least memory, or None."""

    def memory(c: C) -> int:
        return c.memory if isinstance(c, Measured) else c.peak_bytes

    fitting = [c for c in found if c.seconds < float("inf") and (limit is None or memory(c) <= limit)]
    if not fitting:
        return None
    bound = min(c.seconds for c in fitting) * NOISE
    return min((c for c in fitting if c.seconds <= bound), key=lambda c: (memory(c), c.seconds))
