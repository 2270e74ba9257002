"""The summary at the top of docs/performance.md: one row for each setup, with a link to its section."""

from __future__ import annotations

from typing import Any

from tfla._util.markdown import table
from tfla.bench.gpu_report import milliseconds
from tfla.measure.problem import BOTH, FORWARD, STEP

Row = dict[str, Any]
CHUNK_SIZE = "chunk size"  # the axis whose value an implementation may choose, so that its best one counts
SIZE = 8192  # the size of a row where it was measured, else the largest one
DIRECTIONS = (STEP, BOTH, FORWARD)  # the first of them that was measured counts
COPY = "device copy"  # rows whose names begin so are a bound and no implementation
TEXT = """## Summary

Each row has one size and one direction of a setup: the fastest of this library, the fastest of all others that were
timed beside it, and how many times as long that one takes. The others need not compute the same function: attention
and other recurrences stand beside the mLSTM. The sections below have every size, form and kernel, the memory, and the
conditions."""


def summary(results: dict[str, Row]) -> str:
    """Return the summary of results of GPUs, by name.

    Args:
        results: the results as :func:`.stored.load` returns them.

    Returns:
        the heading, what the table shows, the table, and links to the setups of this library alone.
    """
    found = {name: _rows(name, result) for name, result in results.items()}
    parts = [TEXT]
    if body := [row for rows in found.values() for row in rows]:
        parts.append(table(["setup", "measured", "tfla, ms", "fastest other, ms", "ratio"], body))
    if alone := [_link(name, results[name]) for name, rows in found.items() if not rows]:
        parts.append("Of this library alone:\n\n" + "\n".join(f"- {link}" for link in alone))
    return "\n\n".join(parts)


def _link(name: str, result: Row) -> str:
    """Return the title of a result as a link to its section."""
    return f"[{result['title']}](#{name})"


def _rows(name: str, result: Row) -> list[list[str]]:
    """Return the rows of one result, one for each group that has implementations of this library and of others."""
    timed = [row for row in result["rows"] if "x" in row and "seconds" in row and not row["name"].startswith(COPY)]
    free = result["axis"] == CHUNK_SIZE
    found = []
    for group in dict.fromkeys(row.get("group", "") for row in timed):
        title = _link(name, result) + (f": {group}" if group else "")
        for direction in DIRECTIONS:
            rows = [row for row in timed if (row.get("group", ""), row["direction"]) == (group, direction)]
            ours, others = (_fastest([r for r in rows if _is_own(r) == own], free) for own in (True, False))
            if shared := ours.keys() & others.keys():
                size = SIZE if SIZE in shared else max(shared)
                best, other = ours[size], others[size]
                at = f"best {result['axis']}" if free else f"{result['axis']} {size:,}"
                device = (best.get("environment") or result["environment"])["device"]
                where = f"{direction}, {at}, {device}"
                ratio = f"{other['seconds'] / best['seconds']:.2f}"
                found.append([title, where, _cell(best), _cell(other), ratio])
                break
    return found


def _is_own(row: Row) -> bool:
    """Return whether a row is of this library."""
    return str(row["name"]).startswith("tfla")


def _fastest(rows: list[Row], free: bool) -> dict[int, Row]:
    """Return the fastest row of each size, or with `free` that of all sizes under the size 0."""
    return {0 if free else row["x"]: row for row in sorted(rows, key=_seconds, reverse=True)}


def _seconds(row: Row) -> float:
    """Return the time of a row."""
    seconds: float = row["seconds"]
    return seconds


def _cell(row: Row) -> str:
    """Return the time and the name of an implementation."""
    return f"{milliseconds(row['seconds'])} ({row['name'].removeprefix('tfla ')})"
