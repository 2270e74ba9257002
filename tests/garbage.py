"""Garbage collection that takes less of the tests' time: a quarter of a session's start, without this."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Collect garbage after ten thousand new objects, not seven hundred, and never visit those that are there now.

    These are mostly modules and collected tests, close to a million objects that live to the end.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
