"""The file of an experiment's results, which is complete after every run that is added."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError
from tfla._util.files import write_atomically
from tfla.bench.results import read
from tfla.paper.evidence.training import Run

KIND = "evidence"
Row = dict[str, Any]


def description(value: Any) -> Any:
    """Return the fields of a run, or of a part of it, as JSON has them, without those that equality ignores."""
    if dataclasses.is_dataclass(value):
        return {f.name: description(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
    return list(value) if isinstance(value, tuple) else value


def diverged(run: Row) -> bool:
    """Return whether the loss of a run was infinite or NaN at the end of training."""
    return run["losses"][-1] is None


class Results:
    """The results of an experiment in a file, where a run is known by all of its fields.

    Args:
        path: the file; if it exists, its runs are kept.
        head: what is the same for all runs: experiment, size, environment and text.
        timed: whether speeds are compared, so that all runs must be of one device. Otherwise runs of another device
            than the file's say which one it was.

    Raises:
        UserError: the file holds something else, or results of another experiment, size or version, or of another
            device where speeds are compared.
    """

    def __init__(self, path: Path, head: Row, timed: bool = False) -> None:
        self.path, self.found = path, {"kind": KIND, **head, "runs": []}
        self.elsewhere: Row = {}
        """Device and date of the runs that are added, where the device is not the one that the file names."""
        if path.exists():
            old, new = read(path), self.found
            different = [name for name in ("kind", *head) if _compared(old, name, timed) != _compared(new, name, timed)]
            if different or not isinstance(old.get("runs"), list):
                raise UserError(
                    f"out: {path} holds other results, by its {', '.join(different) or 'runs'}; expected none, or "
                    f"those of the same experiment, size{', device' * timed} and versions"
                )
            here = head.get("environment", {})
            if here.get("device") != old.get("environment", {}).get("device"):
                self.elsewhere = {"device": here.get("device"), "date": here.get("date")}
            self.found = old

    def __contains__(self, run: Run) -> bool:
        """Return whether the results of a run are there."""
        return self._place(run) is not None

    def diverged(self, run: Run) -> bool:
        """Return whether the results of a run are there, and it diverged."""
        place = self._place(run)
        return place is not None and diverged(self.found["runs"][place])

    def add(self, run: Run, found: Row) -> None:
        """Add the results of a run, or replace those that are there, and write the file, which is replaced at once."""
        row, place = {"run": description(run)} | self.elsewhere | _finite(found), self._place(run)
        if place is None:
            self.found["runs"].append(row)
        else:
            self.found["runs"][place] = row
        self.write()

    def _place(self, run: Run) -> int | None:
        """Return the index of the results of a run, or None."""
        fields = description(run)
        return next((n for n, row in enumerate(self.found["runs"]) if row["run"] == fields), None)

    def write(self) -> None:
        """Write the file, with a line for each run."""
        head = json.dumps({name: value for name, value in self.found.items() if name != "runs"}, indent=1)
        runs = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in self.found["runs"])
        text = f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def _compared(found: Row, name: str, timed: bool) -> Any:
    """Return a field of a result in the form in which two results must have the same."""
    if name != "environment":
        return found.get(name)
    environment = found.get(name, {})
    versions = environment.get("versions", {})
    return environment.get("device") if timed else None, versions.get("torch"), versions.get("triton")


def _finite(value: Any) -> Any:
    """Return a value with None in place of every number that is infinite or NaN, as in a run that diverged."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
