"""The section `tfla analyze evidence`: what models with each mixer can and cannot do."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfla.paper import style
from tfla.paper.evidence.models import MODELS
from tfla.paper.evidence.plans import EXPERIMENTS
from tfla.paper.evidence.summary import Group, groups, load, mean_bits, setting
from tfla.paper.evidence.tables import GROUP_NAMES, renew
from tfla.paper.report_types import Figure, Missing, Options, write

COMMAND = "tfla analyze evidence"
PREFIX = "evidence_"
BITS = "bits_per_byte"
Row = dict[str, Any]


@dataclass
class Config(Options):
    """The options of `tfla analyze evidence`."""

    recall: Path | None = None
    """The file that `tfla experiment recall` wrote; None is evidence_recall.json among the stored measurements."""
    tracking: Path | None = None
    """The same of `tfla experiment tracking`."""
    length: Path | None = None
    """The same of `tfla experiment length`."""
    needle: Path | None = None
    """The same of `tfla experiment needle`."""
    language: Path | None = None
    """The same of `tfla experiment language`."""
    page: Path | None = None
    """A page whose tables after `<!-- evidence: NAME -->` are renewed, such as docs/evidence.md, with those of other
    pages in its folder."""

    def results_of(self, name: str) -> Path:
        """Return the file of an experiment."""
        given: Path | None = getattr(self, name)
        return self.results / f"{PREFIX}{name}.json" if given is None else given


def _look(model: str) -> dict[str, Any]:
    """Return the color, the dashes and the marker of a model's line."""
    n = list(MODELS).index(model)
    count = len(style.CYCLE)
    return {"color": style.CYCLE[n % count], "ls": style.DASHES[n // count], "marker": style.MARKERS[n % 8], "ms": 4}


def _line(axes: Any, group: Group, key: str, value: str, rows: list[Row], **more: Any) -> None:
    """Draw the mean over seeds of a group, with a band from the lowest to the highest, and add its numbers to rows."""
    found = dict(sorted(group.measured(key, value).items()))
    if not found:
        return
    look = _look(group.model)
    axes.plot(list(found), [statistics.mean(v) for v in found.values()], label=group.label, **look)
    lows, highs = [min(v) for v in found.values()], [max(v) for v in found.values()]
    axes.fill_between(list(found), lows, highs, color=look["color"], alpha=0.12, lw=0)
    rows += [
        {"model": group.model, "learning rate": group.lr, **more, key: x, "seed": n, value: y}
        for x, values in found.items()
        for n, y in enumerate(values)
    ]


def recall(config: Config, found: Row) -> Figure:
    """Draw the fraction of right answers over the number of pairs, for each size of the state."""
    every = groups(found)
    sizes = sorted({g.shape["state_dim"] for g in every})
    drawing, [axes_row] = style.panels(1, len(sizes), sharey=True, width=4.2)
    rows: list[Row] = []
    for axes, size in zip(axes_row, sizes, strict=True):
        for group in every:
            if group.shape["state_dim"] == size:
                _line(axes, group, "pairs", "accuracy", rows, state=group.runs[0]["state"])
        axes.set_title(f"{size} channels of keys a head")
        style.power_of_two_axis(axes, found["runs"][0]["run"]["task"]["pairs"], "pairs")
    axes_row[0].set_ylabel("right answers")
    style.legend_beside(drawing, axes_row[0])
    return write(
        config, "evidence_recall", drawing, rows, title="Recall: values of keys by number of pairs", command=COMMAND,
        caption=f"Lines are means over seeds, bands reach from the lowest to the highest. {setting(found)}.",
    )  # fmt: skip


def tracking(config: Config, found: Row) -> Figure:
    """Draw the fraction of right answers in the training length and beyond, for each group."""
    every = groups(found)
    names = [n for n in GROUP_NAMES if any(g.task["group"] == n for g in every)]
    models = [m for m in MODELS if any(g.model == m for g in every)]
    drawing, [axes_row] = style.panels(1, len(names), sharey=True, width=2.9, height=4.2)
    rows: list[Row] = []
    for axes, name in zip(axes_row, names, strict=True):
        for group in (g for g in every if g.task["group"] == name):
            place, look = models.index(group.model), _look(group.model)
            for end, fill, label in (
                (group.task["length"], "full", "to the training length"),
                (group.task["longest"], "none", "from 2 to 4 times it"),
            ):
                values = group.measured("end", "accuracy").get(end, [])
                axes.plot(values, [place] * len(values), ls="", marker="o", fillstyle=fill, color=look["color"])
                rows += [
                    {"group": name, "model": group.model, "positions": label, "seed": n, "accuracy": y}
                    for n, y in enumerate(values)
                ]
        axes.set(title=GROUP_NAMES[name], xlabel="right answers", xlim=(-0.03, 1.03))
        axes.set_yticks(range(len(models)), [next(g.label for g in every if g.model == m) for m in models])
    axes_row[0].invert_yaxis()
    return write(
        config, "evidence_tracking", drawing, rows, title="State tracking: products of group elements",
        command=COMMAND,
        caption="A dot is a seed: full up to the training length, hollow at positions from 2 to 4 times the training "
        f"length. {setting(found)}.",
    )  # fmt: skip


def _over_length(key: str, value: str, label: str, title: str, note: str) -> Callable[[Config, Row], Figure]:
    """Return a function that draws a line for each model over a length."""

    def drawn(config: Config, found: Row) -> Figure:
        name = found["experiment"]
        drawing, [[axes]] = style.panels(1, 1, width=6.4, height=4.0)
        rows: list[Row] = []
        for group in groups(found):
            _line(axes, group, key, value, rows)
        axes.axvline(found["runs"][0]["run"]["task"]["length"], color=style.INK, lw=1, ls=":", label="training length")
        style.power_of_two_axis(axes, sorted({row[key] for row in rows}), "tokens")
        axes.set_ylabel(label)
        if value == BITS:  # a model that fails would press all others into one line
            axes.set_yscale("log")
            axes.set_yticks(ticks := (1, 1.2, 1.5, 2, 3, 4, 6), [f"{y:g}" for y in ticks])
            axes.yaxis.minorticks_off()
        style.legend_beside(drawing, axes)
        caption = f"{note} Lines are means over seeds, bands reach from the lowest to the highest. {setting(found)}."
        return write(
            config, f"{PREFIX}{name}", drawing, rows, title=title, command=COMMAND, caption=caption
        )  # fmt: skip

    return drawn


def language(config: Config, found: Row) -> Figure:
    """Draw bits per byte over tokens per second, a dot for each run."""
    drawing, [[axes]] = style.panels(1, 1, width=6.4, height=4.0)
    rows: list[Row] = []
    for group in groups(found):
        look = _look(group.model) | {"ls": ""}
        dots = [
            (rate, bits, run["run"]["seed"])
            for run in group.runs
            if (rate := run["tokens_per_second"]) is not None and (bits := mean_bits(run["rows"])) is not None
        ]
        axes.plot([x / 1e3 for x, _, _ in dots], [y for _, y, _ in dots], label=group.label, **look)
        rows += [
            {"model": group.model, "seed": seed, "tokens per second": x, "bits per byte": y} for x, y, seed in dots
        ]
    axes.set(xlabel="thousands of tokens per second in training", ylabel="held-out bits per byte", xscale="log")
    style.plain_ticks(axes.xaxis)
    style.legend_beside(drawing, axes)
    return write(
        config, "evidence_language", drawing, rows, title="Language modelling: loss and speed", command=COMMAND,
        caption=f"Held-out text after equally many tokens, at equal parameters. {setting(found)}.",
    )  # fmt: skip


FIGURES: dict[str, Callable[[Config, Row], Figure]] = {
    "recall": recall,
    "tracking": tracking,
    "length": _over_length(
        "end", BITS, "held-out bits per byte", "Longer text than in training: loss by position",
        "Each point is the mean over the positions from the point before.",
    ),
    "needle": _over_length(
        "length", "accuracy", "right answers", "Needles: values from far back, by length of the sequence",
        "The state is carried from chunk to chunk.",
    ),
    "language": language,
}  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw a figure for each experiment that has results, and renew the tables of the page."""
    found: list[Figure | Missing] = []
    results: dict[str, Row] = {}
    for name, draw in FIGURES.items():
        path = config.results_of(name)
        if path.exists():
            results[name] = load(path)
        if name in results and results[name]["runs"]:
            found.append(draw(config, results[name]))
        else:
            why = f"no measurement in {path}: `tfla experiment {name} --size full --out {path}`"
            found.append(Missing(f"{PREFIX}{name}", EXPERIMENTS[name].title, why))
    if config.page is not None:
        beside = sorted(page for page in config.page.parent.glob("*.md") if page != config.page)
        for page in (config.page, *beside):
            renew(page, results)
    return found
