"""Which candidates are worth measuring, and which one wins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from tfla.tune.measure import Measured
from tfla.tune.predict import Candidate

NOISE = 1.02  # times that are this close are equal: then less memory wins
C = TypeVar("C", Candidate, Measured)


def shortlist(
    candidates: Sequence[Candidate], default: tuple[str, int], limit: int | None, most: int
) -> list[Candidate]:
    """The fastest few of every kernel that should fit the limit, and the default, which they have to beat.

    A prediction may be a little wrong on memory, too, so what is up to a tenth over the limit is still tried.
    """
    fitting = [c for c in candidates if limit is None or c.peak_bytes <= 1.1 * limit]
    chosen = {(c.kernel, c.chunk_size): c for c in candidates if (c.kernel, c.chunk_size) == default}
    for _, group in groupby(sorted(fitting, key=lambda c: (c.kernel, c.seconds, c.peak_bytes)), key=lambda c: c.kernel):
        chosen |= {(c.kernel, c.chunk_size): c for c in list(group)[:most]}
    return [c for c in candidates if (c.kernel, c.chunk_size) in chosen]


def best(found: Sequence[C], limit: int | None) -> C | None:
    """The fastest within the limit, and of equally fast ones the smallest; None if none is within."""

    def memory(c: C) -> int:
        return c.memory if isinstance(c, Measured) else c.peak_bytes

    fitting = [c for c in found if c.seconds < float("inf") and (limit is None or memory(c) <= limit)]
    if not fitting:
        return None
    bound = min(c.seconds for c in fitting) * NOISE
    return min((c for c in fitting if c.seconds <= bound), key=lambda c: (memory(c), c.seconds))
