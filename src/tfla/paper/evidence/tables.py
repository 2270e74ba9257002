"""The tables of docs/evidence.md, from stored results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError
from tfla._util.files import write_atomically
from tfla._util.markdown import table
from tfla.paper.evidence.summary import Group, groups, mean_text, setting
from tfla.paper.style import short

Row = dict[str, Any]
MARK = re.compile(r"(<!-- evidence: (\w+) -->)\n(?:[^\n<][^\n]*\n|\n(?=\|))*")
GROUP_NAMES = {"Z2": "parity", "Z5": "addition modulo 5", "S3": "permutations of 3", "S5": "permutations of 5"}


def recall(found: Row) -> str:
    """Return the fraction of right answers by state and number of pairs."""
    rows = [
        [g.label, f"{g.runs[0]['state'] or 0:,}" if g.runs[0]["state"] else "grows", f"{g.lr:g}",
         *g.texts("pairs", "accuracy").values()]
        for g in sorted(groups(found), key=lambda g: -g.shape["state_dim"])
        if g.model != "attention" or g.shape["state_dim"] == _largest_state(found)
    ]  # fmt: skip
    pairs = found["runs"][0]["run"]["task"]["pairs"]
    return table(["model", "numbers in the state", "learning rate", *(f"{n} pairs" for n in pairs)], rows)


def _largest_state(found: Row) -> int:
    """Return the largest state_dim; attention has the same model for all of them."""
    return max(row["run"]["shape"]["state_dim"] for row in found["runs"])


def tracking(found: Row) -> str:
    """Return the fraction of right answers in the training length, and from twice to four times it, by group."""
    every = groups(found)
    names = [n for n in GROUP_NAMES if any(g.task["group"] == n for g in every)]

    def cell(model: str, group: str) -> str:
        for g in every:
            if (g.model, g.task["group"]) == (model, group):
                texts = g.texts("end", "accuracy")
                return f"{texts.get(g.task['length'], '-')}, {texts.get(g.task['longest'], '-')}"
        return "-"

    models = dict.fromkeys((g.model, g.label) for g in every)
    rows = [[label, *(cell(model, name) for name in names)] for model, label in models]
    return table(["model", *(GROUP_NAMES[name] for name in names)], rows)


def _by(key: str, value: str, digits: int, header: Callable[[int], str]) -> Callable[[Row], str]:
    """Return a table with a row for each model and a column for each ``key`` of the measurements."""

    def made(found: Row) -> str:
        every = groups(found)
        columns = sorted({x for g in every for x in g.measured(key, value)})
        rows = []
        for g in every:
            texts = g.texts(key, value, digits)
            rows.append([g.label, *(texts.get(x, "-") for x in columns)])
        return table(["model", *map(header, columns)], rows)

    return made


def language(found: Row) -> str:
    """Return bits per byte and tokens per second."""

    def bits(g: Group) -> list[float]:
        last = max(g.measured("end", "bits_per_byte"), default=None)
        return g.measured("end", "bits_per_byte").get(last, [])

    rows = [
        [g.label, f"{g.runs[0]['parameters']:,}", mean_text(bits(g), 3), f"{_median_rate(g):,.0f}"]
        for g in groups(found)
    ]
    return table(["model", "parameters", "bits per byte", "tokens per second"], rows)


def _median_rate(g: Group) -> float:
    """Return the median of the tokens per second of a group's runs."""
    rates = sorted(run["tokens_per_second"] or 0 for run in g.runs)
    return rates[len(rates) // 2]


TABLES: dict[str, Callable[[Row], str]] = {
    "recall": recall,
    "tracking": tracking,
    "length": _by("end", "bits_per_byte", 3, lambda end: f"to {end:,}"),
    "needle": _by("length", "accuracy", 2, short),
    "language": language,
}


def renew(page: Path, results: dict[str, Row]) -> None:
    """Replace the table after each `<!-- evidence: NAME -->` of a page by the one made from the results.

    Raises:
        UserError: the page cannot be read, or a table has no results.
    """

    def replaced(mark: re.Match[str]) -> str:
        name = mark[2]
        if name not in results:
            raise UserError(f"page: {page} has a table of {name!r}, of which there are no results")
        return f"{mark[1]}\n{setting(results[name])}.\n\n{TABLES[name](results[name])}\n"

    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"page: {page} cannot be read: {error.strerror}") from error
    whole = MARK.sub(replaced, text)
    write_atomically(page, lambda path: path.write_text(whole, encoding="utf-8"))
