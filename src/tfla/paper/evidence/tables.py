"""The tables of docs/evidence.md and docs/models.md, from stored results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError
from tfla._util.files import write_atomically
from tfla._util.markdown import table
from tfla.paper.evidence.models import LABELS, MODELS
from tfla.paper.evidence.plans import EXPERIMENTS
from tfla.paper.evidence.results import diverged
from tfla.paper.evidence.summary import Group, best, by_rate, groups, mean_text, setting
from tfla.paper.style import short

Row = dict[str, Any]
MARK = re.compile(r"(<!-- evidence: (\w+) -->)\n(?:[^\n<][^\n]*\n|\n(?=\||!\[|Diverged: |Not run: ))*")
NOT_RUN = "not run"
GROUP_NAMES = {"Z2": "parity", "Z5": "addition modulo 5", "S3": "permutations of 3", "S5": "permutations of 5"}


def recall(found: Row) -> str:
    """Return the fraction of right answers by state and number of pairs, and for the most pairs by learning rate."""
    lrs = sorted({row["run"]["lr"] for row in found["runs"]})
    pairs = found["runs"][0]["run"]["task"]["pairs"]
    rows = []
    for of_rate in sorted(by_rate(found), key=lambda of_rate: -best(of_rate).shape["state_dim"]):
        g = best(of_rate)
        if g.model == "attention" and g.shape["state_dim"] != _largest_state(found):
            continue
        most = [_last("pairs", "accuracy")(of_rate[lr]) or "-" if lr in of_rate else "-" for lr in lrs]
        rows.append([g.label, _state_text(g), *g.texts("pairs", "accuracy").values(), f"{g.lr:g}", *most])
    header = ["model", "numbers in the state", *(f"{n} pairs" for n in pairs), "learning rate"]
    return table([*header, *(f"{pairs[-1]} pairs at {lr:g}" for lr in lrs)], rows)


def _state_text(group: Group) -> str:
    """Return the numbers in the state of a model, or of a hybrid the channels of keys of its recurrent layers."""
    if state := group.runs[0]["state"]:
        return f"{state:,}"
    return "grows" if group.model == "attention" else f"grows, {group.shape['state_dim']} channels of keys a head"


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
    rows = [
        [g.label, f"{g.runs[0]['parameters']:,}", mean_text(g.bits_per_byte(), 3), f"{_median_rate(g):,.0f}"]
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


def mixers(results: dict[str, Row]) -> str:
    """Return a row for each model with one number of each experiment, mostly its last column, where it has been run.

    Of several sizes of the state the largest counts.
    """
    columns = []
    for name, header, made in ACROSS:
        if name in results:
            largest = _largest_state(results[name])
            every = [g for g in groups(results[name]) if g.shape["state_dim"] == largest]
            columns.append((header, {g.model: cell for g in every if (cell := made(g)) is not None}))
    rows = [[LABELS[model], *(cells.get(model, NOT_RUN) for _, cells in columns)] for model in MODELS]
    return table(["model", *(header for header, _ in columns)], rows)


def _last(key: str, value: str, digits: int = 2) -> Callable[[Group], str | None]:
    """Return the measurement of a group at the largest ``key``."""

    def made(g: Group) -> str | None:
        texts = g.texts(key, value, digits)
        return texts[max(texts)] if texts else None

    return made


def _tracked(group: str) -> Callable[[Group], str | None]:
    """Return the fractions of right answers of a group of runs, as :func:`tracking` does."""

    def made(g: Group) -> str | None:
        texts = g.texts("end", "accuracy")
        if g.task["group"] != group:
            return None
        return f"{texts.get(g.task['length'], '-')}, {texts.get(g.task['longest'], '-')}"

    return made


# The columns of :func:`mixers`: the experiment, the header, and what makes a cell or None from a group of runs.
ACROSS: tuple[tuple[str, str, Callable[[Group], str | None]], ...] = (
    ("recall", "recall, most pairs", _last("pairs", "accuracy")),
    *(("tracking", title, _tracked(group)) for group, title in GROUP_NAMES.items()),
    ("length", "bits per byte, 16 times the length", _last("end", "bits_per_byte", 3)),
    ("needle", "needles, longest text", _last("length", "accuracy")),
    ("language", "language, bits per byte", lambda g: mean_text(bits, 3) if (bits := g.bits_per_byte()) else None),
)


def _without_runs(name: str, found: Row) -> str:
    """Return a sentence that names the models of an experiment that have no runs, after an empty line; or nothing."""
    present = {row["run"]["model"] for row in found["runs"]}
    labels = [LABELS[model] for model in EXPERIMENTS[name].full.models if model not in present]
    return f"\n\nNot run: {'; '.join(labels)}." if labels else ""


def _diverged(found: Row) -> str:
    """Return a sentence that counts the runs of each model that diverged, after an empty line; or nothing."""
    ended: dict[str, list[bool]] = {}
    for g in groups(found):
        ended.setdefault(g.label, []).extend(map(diverged, g.runs))
    labels = [f"{sum(runs)} of {len(runs)} runs of {label}" for label, runs in ended.items() if any(runs)]
    return f"\n\nDiverged: {'; '.join(labels)}. The table has the other runs alone." if labels else ""


def block(name: str, results: dict[str, Row], folder: Path) -> str:
    """Return what stands under a mark: setting, table, runs that diverged, models that were not run, and figure.

    An experiment that has no results has the command that runs it instead.

    Args:
        name: an experiment, or "mixers" for a table across all of them.
        results: the results of experiments by name.
        folder: the folder of the page, of which `img` has the figures.
    """
    if name == "mixers":
        return mixers(results)
    if name not in results:
        return f"No results are stored: `tfla experiment {name} --size full`."
    notes = _diverged(results[name]) + _without_runs(name, results[name])
    text = f"{setting(results[name])}.\n\n{TABLES[name](results[name])}{notes}"
    image, title = f"img/evidence_{name}.png", EXPERIMENTS[name].title
    return f"{text}\n\n![{title[0].upper()}{title[1:]}]({image})" if (folder / image).exists() else text


def renew(page: Path, results: dict[str, Row]) -> None:
    """Replace what stands after each `<!-- evidence: NAME -->` of a page by what :func:`block` makes from the results.

    Raises:
        UserError: the page cannot be read, or has the name of no table.
    """

    def replaced(mark: re.Match[str]) -> str:
        if mark[2] not in ("mixers", *TABLES):
            raise UserError(f"page: {page} has a table of {mark[2]!r}, expected mixers, {', '.join(TABLES)}")
        return f"{mark[1]}\n{block(mark[2], results, page.parent)}\n"

    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"page: {page} cannot be read: {error.strerror}") from error
    whole = MARK.sub(replaced, text)
    if whole != text:
        write_atomically(page, lambda path: path.write_text(whole, encoding="utf-8"))
