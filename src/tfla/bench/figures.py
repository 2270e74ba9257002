"""The figures of docs/performance.md from stored results, in the form of the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfla.bench.gpu_report import ROOFLINES
from tfla.measure.problem import BOTH, FORWARD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colors, one for each library; implementations of one library differ in markers and dashes.
FAMILIES = {
    "tfla mLSTMsig": "#D55E00",
    "tfla mLSTMexp": "#0072B2",
    "tfla": "#0072B2",
    "mlstm_kernels": "#E69F00",
    "fla": "#009E73",
    "Mamba": "#CC79A7",
    "attention": "#56B4E9",
    "device copy": "#999999",
}
INK = "#333333"
LINEAR_RATIO = 5  # ratio of the largest to the smallest value below which an axis is linear and starts at 0
MARKERS, DASHES = "osD^vPX*", ("-", "--", ":", "-.")
LABELS = {FORWARD: "forward", BOTH: "forward and backward", "memory": "peak memory beyond inputs"}
Row = dict[str, Any]


def family(name: str) -> str:
    """Return the library of an implementation, a key of FAMILIES."""
    return next((family for family in FAMILIES if name.startswith(family)), "device copy")


def styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return color, marker and dashes of each name; the lines of this library are wider."""
    counts: dict[str, int] = {}
    found = {}
    for name in names:
        kind = family(name)
        n = counts[kind] = counts.get(kind, -1) + 1
        ours = name.startswith("tfla")
        found[name] = {
            "color": FAMILIES[kind], "marker": MARKERS[n % len(MARKERS)], "ls": DASHES[n % len(DASHES)],
            "lw": 2.2 if ours else 1.3, "ms": 6 if ours else 4.5, "zorder": 4 if ours else 3,
        }  # fmt: skip
    return found


def short(x: int) -> str:
    """Return a number as the label of an axis, 8192 as 8k."""
    return f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else str(x)


def _points(rows: list[Row], panel: str, name: str) -> tuple[list[int], list[float]]:
    """Return the points of one line in one panel, sorted by x: GiB in the panel of memory, else milliseconds."""
    if panel == "memory":
        found = [(r["x"], r["peak_bytes"] / 2**30) for r in rows if r["direction"] != FORWARD and "peak_bytes" in r]
    else:
        found = [(r["x"], r[name] * 1e3) for r in rows if r["direction"] == panel and name in r]
    found.sort()
    return [x for x, _ in found], [y for _, y in found]


def _draw_bars(axes: Any, rows: list[Row], panel: str, groups: list[str], look: dict[str, dict[str, Any]]) -> None:
    """Draw one panel of a result with one x: a bar for each implementation, block by block of the groups."""
    at, labels = 0.0, []
    for group in groups:
        here = [r for r in rows if r.get("group", "") == group]
        bounds = _points(
            [r for r in here if any(b.match(r["name"]) for b in ROOFLINES.values())], panel, "floor_seconds"
        )
        first = at
        for name in look:
            _, y = _points([r for r in here if r["name"] == name], panel, "seconds")
            if y:
                color, hatch = look[name]["color"], "//" if look[name]["ls"] != "-" else None
                axes.barh(at, y[0], 0.8, color=color, hatch=hatch, edgecolor="white", label=name)
                axes.annotate(f"{y[0]:.3g}", (y[0], at), (3, 0), textcoords="offset points", va="center", fontsize=7)
                at += 1
        if panel != "memory" and bounds[1]:
            axes.vlines(bounds[1][0], first - 0.5, at - 0.5, color=INK, lw=1.6, label="roofline")
        labels.append(((first + at - 1) / 2, group))
        at += 0.7
    axes.set(title=LABELS[panel], xlabel="GiB" if panel == "memory" else "ms", yticks=[y for y, _ in labels])
    axes.set_yticklabels([group for _, group in labels], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def figure_of(result: dict[str, Any]) -> Figure | None:
    """Return the figure of one result, or None where no row was measured.

    It has a row of panels for each group of implementations, with time and memory on logarithmic axes; one row of bars
    where several groups were measured at one x.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    timed = [r for r in result["rows"] if "seconds" in r]
    has_memory = any("peak_bytes" in r and r["direction"] != FORWARD for r in timed)
    panels = [p for p in result["panels"] if p != "memory" or has_memory]
    groups = list(dict.fromkeys(r.get("group", "") for r in timed))
    if not timed or not panels:
        return None
    names = list(dict.fromkeys(r["name"] for r in timed))
    look = styles(names)
    xs = sorted({r["x"] for r in timed})

    bars = len(xs) == 1 and len(groups) > 1
    blocks = 0.35 * len(groups) if bars else len(groups)
    height = 0.6 + max(3.4 * blocks, 0.2 * len(names))
    figure = Figure(figsize=(1.2 + 4.1 * len(panels) + 3.2, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1 if bars else len(groups), len(panels), squeeze=False)
    handles: dict[str, Any] = {}
    if bars:
        for axes, panel in zip(grid[0], panels, strict=True):
            _draw_bars(axes, timed, panel, groups, look)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
    for axes_row, group in zip([] if bars else grid, [] if bars else groups, strict=True):
        here = [r for r in timed if r.get("group", "") == group]
        for axes, panel in zip(axes_row, panels, strict=True):
            for name in names:
                selected = [r for r in here if r["name"] == name]
                x, y = _points(selected, panel, "seconds")
                if x:
                    handles.setdefault(name, axes.plot(x, y, label=name, **look[name])[0])
            if panel != "memory":
                for (label, bound), dashes in zip(ROOFLINES.items(), ((1, 1), (4, 1.5), (1, 1)), strict=True):
                    bounded = [r for r in here if bound.match(r["name"])]
                    x, y = _points(bounded, panel, "floor_seconds")
                    x, y = list(dict.fromkeys(x)), [dict(zip(x, y, strict=True))[at] for at in dict.fromkeys(x)]
                    if x:
                        line = axes.plot(x, y, color=INK, lw=1.2, dashes=dashes, label=label, zorder=2)[0]
                        handles.setdefault(label, line)
            title = LABELS[panel] + (f", {group}" if group else "")
            heights = [float(y) for line in axes.lines for y in line.get_ydata()]
            linear = not heights or max(heights) < LINEAR_RATIO * min(heights)
            axes.set(xscale="log", yscale="linear" if linear else "log", title=title, xlabel=result["axis"])
            axes.set_ylabel("GiB" if panel == "memory" else "ms")
            axes.xaxis.set_major_locator(FixedLocator(xs))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(round(x))))
            if linear:
                axes.set_ylim(0, 1.1 * max(heights, default=1.0))
            else:
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, color="#e6e6e6", lw=0.8)
            axes.set_axisbelow(True)
    dates = sorted({run["environment"]["date"] for run in result.get("runs", {"": result}).values()})
    figure.suptitle(f"{result['title']}\n{result['environment']['device']}, {' and '.join(dates)}", size=10)
    figure.legend(
        handles=list(handles.values()), loc="outside right center", frameon=False, fontsize=8, handlelength=3.2
    )
    return figure


def draw(result: dict[str, Any], target: Path) -> bool:
    """Write the figure of one result as PNG and return True; write nothing and return False if no row was measured."""
    figure = figure_of(result)
    if figure is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png", dpi=120)
    return True
