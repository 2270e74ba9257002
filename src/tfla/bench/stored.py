"""Stored results of `tfla bench gpu`. What several runs measured of one setup on one device is one result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfla.bench.results import check_gpu_result, read
from tfla.bench.suites import SUITES

Row = dict[str, Any]


def _contender(row: Row) -> tuple[str, str]:
    return row["name"], row.get("group", "")


def _key(row: Row) -> tuple[Any, ...]:
    return *_contender(row), row.get("x"), row.get("direction")


def merge(runs: dict[str, Row]) -> Row:
    """One result from those of several runs by file name: as the first, with all contenders and the runs themselves.

    What was measured more than once is taken from the latest run, the last in order of names on one day. Rows have the
    number of samples that their run was asked for, and its environment.
    """
    ordered = sorted(runs.items(), key=lambda item: (item[1]["environment"]["date"], item[0]))
    place: dict[tuple[Any, ...], int] = {}  # what was measured -> the run that its row is from
    for n, (_, run) in enumerate(ordered):
        for row in run["rows"]:
            if "seconds" in row or _key(row) not in place:
                place[_key(row)] = n
    order = list(dict.fromkeys(_contender(row) for run in runs.values() for row in run["rows"]))
    there = {_contender(row) for run in runs.values() for row in run["rows"] if "x" in row}
    kept = [
        (n, row | {"asked": run["config"]["repeats"], "environment": run["environment"]})
        for n, (_, run) in enumerate(ordered)
        for row in run["rows"]
        if place[_key(row)] == n and ("x" in row or _contender(row) not in there)  # not installed is without x
    ]
    # What is picked by default is not timed once more by its own name: what has that is of an earlier run.
    picked = {(f"{row['name']}, {row['way']}", row.get("group", ""), row["x"]): n for n, row in kept if "way" in row}
    rows = [row for n, row in kept if n >= picked.get((*_contender(row), row.get("x")), 0)]
    rows.sort(key=lambda row: (order.index(_contender(row)), row.get("x", 0)))
    return next(iter(runs.values())) | {"rows": rows, "runs": runs}


def load(folder: Path, complete: bool = False) -> dict[str, Row]:
    """Return results of GPUs by name, in the order of the suites: that of the first file with a setup and a device.

    Args:
        folder: of the files.
        complete: whether all that a page or a figure shows has to be there, and not the times alone.

    Raises:
        UserError: a file is broken; the message names it.
    """
    groups: dict[tuple[int, str], dict[str, Row]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if isinstance(result.get("suite"), str) and result["suite"] in SUITES:
            check_gpu_result(path, result, complete)
            suite = SUITES[result["suite"]]  # as it is called and shown now
            result |= {"title": suite.title, "panels": suite.panels} | ({"note": suite.note} if suite.note else {})
            if suite.host:
                result["rows"] = [{key: x for key, x in row.items() if "floor" not in key} for row in result["rows"]]
            device = result["environment"]["device"]
            groups.setdefault((list(SUITES).index(result["suite"]), device), {})[path.stem] = result
    return {next(iter(runs)): merge(runs) for _, runs in sorted(groups.items())}
