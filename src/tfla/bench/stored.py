"""The stored results of `tfla bench gpu`, with several runs of one setup on one device merged into one result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfla.bench.results import check_gpu_result, read
from tfla.bench.suites import SUITES

Row = dict[str, Any]


def _implementation(row: Row) -> tuple[str, str]:
    """Return the name and the group of the implementation of a row."""
    return row["name"], row.get("group", "")


def _key(row: Row) -> tuple[Any, ...]:
    """Return the key of a row's measurement: implementation, size and direction."""
    return *_implementation(row), row.get("x"), row.get("direction")


def merge(runs: dict[str, Row]) -> Row:
    """Merge the results of several runs, by file name, into one.

    It has the fields of the first run, the rows of all implementations, and the runs themselves. A row of several runs
    is taken from the latest of them; of runs of one day the one with the last name counts. Each row gets the number of
    samples in the options of its run, and its environment.
    """
    ordered = sorted(runs.items(), key=lambda item: (item[1]["environment"]["date"], item[0]))
    place: dict[tuple[Any, ...], int] = {}  # key of a row -> the run from which it is taken
    for n, (_, run) in enumerate(ordered):
        for row in run["rows"]:
            if "seconds" in row or _key(row) not in place:
                place[_key(row)] = n
    order = list(dict.fromkeys(_implementation(row) for run in runs.values() for row in run["rows"]))
    there = {_implementation(row) for run in runs.values() for row in run["rows"] if "x" in row}
    kept = [
        (n, row | {"asked": run["config"]["repeats"], "environment": run["environment"]})
        for n, (_, run) in enumerate(ordered)
        for row in run["rows"]
        if place[_key(row)] == n
        and ("x" in row or _implementation(row) not in there)  # a row without x says that it was not installed
    ]
    # A kernel that is chosen by default is not timed again under its own name, so such a row is of an earlier run.
    picked = {
        (f"{row['name']}, {row['implementation']}", row.get("group", ""), row["x"]): n
        for n, row in kept
        if "implementation" in row
    }
    rows = [row for n, row in kept if n >= picked.get((*_implementation(row), row.get("x")), 0)]
    rows.sort(key=lambda row: (order.index(_implementation(row)), row.get("x", 0)))
    return next(iter(runs.values())) | {"rows": rows, "runs": runs}


def load(folder: Path, complete: bool = False) -> dict[str, Row]:
    """Load the results of GPUs by name, in the order of the suites; a result has the name of the first of its files.

    Args:
        folder: the folder of the files.
        complete: whether it must have every field that pages and figures show, and not only the times.

    Raises:
        UserError: a file is broken; the message names it.
    """
    groups: dict[tuple[int, str], dict[str, Row]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if isinstance(result.get("suite"), str) and result["suite"] in SUITES:
            check_gpu_result(path, result, complete)
            suite = SUITES[result["suite"]]  # titles and panels of today
            result |= {"title": suite.title, "panels": suite.panels} | ({"note": suite.note} if suite.note else {})
            if suite.host:
                result["rows"] = [{key: x for key, x in row.items() if "floor" not in key} for row in result["rows"]]
            device = result["environment"]["device"]
            groups.setdefault((list(SUITES).index(result["suite"]), device), {})[path.stem] = result
    return {next(iter(runs)): merge(runs) for _, runs in sorted(groups.items())}
