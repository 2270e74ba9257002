"""The delta rule and gates by channel: FLOPs by part, arithmetic intensity, measured times and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tfla.backends.base import TILE
from tfla.bench.stored import load
from tfla.measure.accelerators import ACCELERATORS
from tfla.measure.problem import BOTH, FORWARD
from tfla.measure.roofline import DeltaModel
from tfla.paper import style
from tfla.paper.algorithms.delta import TileForm, evaluate
from tfla.paper.algorithms.symbols import Direction, simplified
from tfla.paper.report_types import Figure, Missing, Options, write

COMMAND = "tfla analyze delta"
SUITE, LENGTH = "delta", 8192
NAMES: dict[DeltaModel, str] = {"gla": "GLA", "gdn": "Gated DeltaNet", "kda": "KDA"}
COLORS = dict(zip(NAMES, (style.GREEN, style.BLUE, style.RED), strict=True))
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
DIM = 128  # of the keys and values of a head in the published models
PART_COLORS = (*style.CYCLE, style.GREY, style.YELLOW, "#882255")


@dataclass
class Config(Options):
    """The options of `tfla analyze delta`: the delta rule and GLA in tiles, in theory and as measured."""


def parts(config: Config) -> Figure:
    """Draw the FLOPs of a tile by part."""
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.8, height=2.6)
    found = {
        (direction, model): {
            part: float(evaluate(simplified(count), L=TILE, dqk=DIM, dhv=DIM)) / 1e6
            for part, count in TileForm(model, direction).flop_parts.items()
        }
        for direction in DIRECTIONS
        for model in NAMES
    }
    rows = [
        {"direction": direction, "model": NAMES[model], "part": part, "MFLOP": x}
        for (direction, model), counts in found.items()
        for part, x in counts.items()
    ]
    colors = dict(zip(dict.fromkeys(row["part"] for row in rows), PART_COLORS, strict=True))
    for axes, direction in zip(axes_row, DIRECTIONS, strict=True):
        for place, model in enumerate(NAMES):
            left = 0.0
            for part, x in found[direction, model].items():
                axes.barh(place, x, 0.6, left, color=colors[part], label=part)
                left += x
        axes.set(title=direction, xlabel="MFLOP of a tile", yticks=range(len(NAMES)), yticklabels=NAMES.values())
        axes.grid(False, axis="y")
    axes_row[0].invert_yaxis()
    style.legend_beside(drawing, *axes_row)
    return write(
        config, "delta_parts", drawing, rows, title="The delta rule: FLOPs of a tile by part", command=COMMAND,
        caption=f"""FLOPs of a tile of {TILE} steps of one head, dqk = dhv = {DIM}; causal halves count half. The
correction of the delta rule costs one more read of the state, one more product of keys, one more product with values
and the solution for X, which is about 1 % of all. Gates by channel have the products of one gate a step; what they add
is elementwise: an exponential for each gate and two factors a level for each operand.""",
    )  # fmt: skip


def intensities(config: Config) -> Figure:
    """Draw the arithmetic intensity over the head dim."""
    dims = np.geomspace(32, 1024, 61)
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.4)
    rows: list[dict[str, Any]] = []
    for axes, direction in zip(axes_row, DIRECTIONS, strict=True):
        for model, name in NAMES.items():
            values = TileForm(model, direction).intensity(L=TILE, dqk=dims, dhv=dims)
            axes.plot(dims, values, color=COLORS[model], label=name)
            rows += [
                {"direction": direction, "model": name, "head dim": float(d), "FLOP/byte": float(y)}
                for d, y in zip(dims, values, strict=True)
            ]
        for (name, accelerator), dashes in zip(
            ((n, ACCELERATORS[n]) for n in ("A100", "H100", "H200")), style.DASHES, strict=False
        ):
            axes.axhline(accelerator.intensity, color=style.INK, ls=dashes, lw=1, label=name)
            rows.append({"accelerator": name, "FLOP/byte": accelerator.intensity})
        axes.set(yscale="log", title=direction)
        style.power_of_two_axis(axes, [2**n for n in range(5, 11)], "head dim, dqk = dhv")
    axes_row[0].set_ylabel("FLOP per byte")
    style.plain_ticks(axes_row[0].yaxis)
    style.legend_beside(drawing, axes_row[0])
    return write(
        config, "delta_intensity", drawing, rows, title="The delta rule: arithmetic intensity over the head dim",
        command=COMMAND,
        caption=f"""FLOPs of matrix products per byte, in tiles of {TILE} steps, where every tensor is moved once and
no state is. Above an accelerator's line matrix products bound the runtime, below it the memory does. At the head dims
of the published models ({DIM}) all forms are below the lines of H100 and H200: the fewest bytes bound them, and a fast
kernel moves no tensor twice. Gates by channel are a third tensor of the size of the keys, so that KDA is further below
the lines than Gated DeltaNet.""",
    )  # fmt: skip


def measured(config: Config) -> Figure | Missing:
    """Draw the measured times of the suite beside their rooflines."""
    title = "The delta rule: measured times beside their rooflines"
    result = next((r for r in load(config.results, complete=True).values() if r["suite"] == SUITE), None)
    rows = [
        {key: r[key] for key in ("group", "name", "direction", "seconds", "floor_seconds")}
        for r in (result["rows"] if result is not None else ())
        if r.get("x") == LENGTH and "seconds" in r and "floor_seconds" in r
    ]
    if result is None or not rows:
        path = config.results / f"{SUITE}.json"
        return Missing("delta_times", title, f"no measurement in {path}: `tfla bench gpu {SUITE} --out {path}`")
    groups = list(dict.fromkeys(r["group"] for r in rows))
    names = list(dict.fromkeys(r["name"] for r in rows))
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.8, height=3.4)
    for axes, direction in zip(axes_row, (FORWARD, BOTH), strict=True):
        selected = [r for r in rows if r["direction"] == direction]
        for n, r in enumerate(selected):
            place = groups.index(r["group"]) + 0.15 * (names.index(r["name"]) - (len(names) - 1) / 2)
            look = style.CYCLE[names.index(r["name"]) % len(style.CYCLE)]
            label = None if any(x["name"] == r["name"] for x in selected[:n]) else r["name"]
            axes.plot(r["seconds"] * 1e3, place, "D", color=look, ms=5, ls="", label=label)
            axes.plot([r["floor_seconds"] * 1e3] * 2, [place - 0.3, place + 0.3], color=style.INK, lw=1.2,
                      label=None if n else "roofline")  # fmt: skip
        axes.set(title=direction, xlabel="ms", yticks=range(len(groups)), yticklabels=groups, xscale="log")
        style.plain_ticks(axes.xaxis)
        axes.grid(False, axis="y")
    axes_row[0].invert_yaxis()
    style.legend_beside(drawing, *axes_row)
    environment = result["environment"]
    return write(
        config, "delta_times", drawing, rows, title=title, command=COMMAND,
        caption=f"""65,536 tokens in sequences of {LENGTH:,} ({environment["device"]}, {environment["date"]}). The
roofline is the longer of the fewest bytes at the rate of a device copy and the FLOPs at the rate of a large matrix
product, both measured in the same run, for each direction.""",
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw the FLOPs by part, the arithmetic intensity and the measured times."""
    return [parts(config), intensities(config), measured(config)]
