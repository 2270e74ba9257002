"""The runs of a file of results by task, shape and model, each with the learning rate at which it learned best."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tfla._util.errors import UserError
from tfla.bench import schema
from tfla.bench.results import read
from tfla.paper.evidence.models import LABELS, MODELS
from tfla.paper.evidence.results import KIND, diverged
from tfla.paper.training_runs import mean_text

Row = dict[str, Any]
LAST = 2  # points at the end of the curve of the loss, whose mean tells how well a run learned


class Group(NamedTuple):
    """The runs of a model on a task that differ by their seeds alone."""

    model: str
    task: Row
    shape: Row
    lr: float
    runs: list[Row]

    @property
    def label(self) -> str:
        """Return the name of the model."""
        return LABELS[self.model]

    def measured(self, key: str, value: str) -> dict[Any, list[float]]:
        """Return for each ``key`` of the measurements the values of all seeds, without those of runs that diverged."""
        found: dict[Any, list[float]] = {}
        for run in self.runs:
            for row in [] if diverged(run) else run["rows"]:
                if row[value] is not None:
                    found.setdefault(row[key], []).append(row[value])
        return found

    def texts(self, key: str, value: str, digits: int = 2) -> dict[Any, str]:
        """Return :meth:`measured` as texts: mean and standard deviation."""
        return {x: mean_text(values, digits) for x, values in self.measured(key, value).items()}

    def bits_per_byte(self) -> list[float]:
        """Return the mean over all positions of the seeds' bits per byte, without those of runs that diverged."""
        means = [mean_bits(run["rows"]) for run in self.runs if not diverged(run)]
        return [bits for bits in means if bits is not None]


def mean_bits(rows: list[Row]) -> float | None:
    """Return the mean over all positions of bits per byte by position; None where no number or not all are known.

    Args:
        rows: parts in order, each with its mean over the positions from the end of the part before to its own.
    """
    if not rows or any(row["bits_per_byte"] is None for row in rows):
        return None
    starts = [0, *(row["end"] for row in rows[:-1])]
    total = sum((row["end"] - start) * row["bits_per_byte"] for start, row in zip(starts, rows, strict=True))
    return total / rows[-1]["end"]


def load(path: Path) -> Row:
    """Return the results in a file.

    Raises:
        UserError: the file holds something else.
    """
    found = read(path)
    try:
        texts = dict.fromkeys(("kind", "experiment", "size"), schema.TEXT)
        schema.check_fields(found, "", {**texts, "environment": schema.OBJECT, "runs": schema.LIST})
        schema.check_fields(found["environment"], "environment.", schema.ENVIRONMENT)
        if found["kind"] != KIND:
            raise ValueError(f"kind: got {found['kind']!r}, expected {KIND!r}")
        for n, row in enumerate(found["runs"]):
            fields = dict.fromkeys(("run",), schema.OBJECT) | dict.fromkeys(("losses", "rows"), schema.LIST)
            schema.check_fields(row, f"runs[{n}].", {**fields, "parameters": schema.COUNT})
            if row["run"].get("model") not in MODELS:
                raise ValueError(f"runs[{n}].run.model: got {row['run'].get('model')!r}, expected {', '.join(MODELS)}")
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result of tfla experiment: {error}") from error
    return found


def groups(found: Row) -> list[Group]:
    """Return the groups of runs in the order of MODELS, at the learning rate with the lowest loss in training.

    The loss is the mean over seeds at the end of training, on sequences that the model has not seen before; learning
    rates with fewer seeds than others are left out.
    """
    return [best(of_rate) for of_rate in by_rate(found)]


def by_rate(found: Row) -> list[dict[float, Group]]:
    """Return the groups of each model, task, shape and number of steps by learning rate, in the order of MODELS."""
    rates: dict[str, dict[float, Group]] = {}
    for row in found["runs"]:
        run = row["run"]
        key = json.dumps([run["model"], run["task"], run["shape"], run["steps"]])
        group = Group(run["model"], run["task"], run["shape"], run["lr"], [])
        rates.setdefault(key, {}).setdefault(run["lr"], group).runs.append(row)
    return sorted(rates.values(), key=lambda of_rate: list(MODELS).index(next(iter(of_rate.values())).model))


def best(of_rate: dict[float, Group]) -> Group:
    """Return the group with the lowest loss at the end, among those with the most seeds."""
    most = max(len(group.runs) for group in of_rate.values())
    return min((group for group in of_rate.values() if len(group.runs) == most), key=_final_loss)


def _final_loss(group: Group) -> float:
    """Return the mean loss of a group at the end of training; infinity where a run diverged."""
    losses = [loss for run in group.runs for loss in run["losses"][-LAST:]]
    return float("inf") if None in losses else statistics.mean(losses)


def setting(found: Row) -> str:
    """Return the setting of the runs as a sentence: sizes, tokens, seeds, learning rates, device and date."""
    runs = [row["run"] for row in found["runs"]]
    shape = runs[0]["shape"]
    lengths = sorted({run["task"]["length"] for run in runs})
    seeds = [len(group.runs) for group in groups(found)]
    parts = [
        f"{shape['num_blocks']} blocks of width {shape['d_model']}, {shape['num_heads']} heads, "
        f"{_range(row['parameters'] for row in found['runs'])} parameters",
        f"{_range(run['steps'] for run in runs)} steps of {_range(run['batch_size'] for run in runs)} sequences of "
        f"{_range(lengths)} tokens",
        f"{_range(seeds)} seed{'s' * (max(seeds) > 1)}",
        f"learning rates {', '.join(f'{lr:g}' for lr in sorted({run['lr'] for run in runs}))}",
        *[f"{device}, {' and '.join(sorted(dates))}" for device, dates in machines(found).items()],
    ]
    if "text" in found:
        source = found["text"]["source"]
        name = source if isinstance(source, str) else ", ".join(source)
        parts.append(f"{name}, {found['text']['train_bytes']:,} bytes to train on")
    return "; ".join(parts)


def machines(found: Row) -> dict[str, set[str]]:
    """Return the devices of the runs, each with its dates; a run that names none is of the file's."""
    environment = found["environment"]
    devices: dict[str, set[str]] = {}
    for row in found["runs"]:
        devices.setdefault(row.get("device", environment["device"]), set()).add(row.get("date", environment["date"]))
    return devices


def _range(values: Iterator[int] | list[int]) -> str:
    """Return the smallest and the largest of some numbers as text, one number where all are equal."""
    given = list(values)
    low, high = min(given), max(given)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
