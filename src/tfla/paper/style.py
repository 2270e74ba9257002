"""The style of the figures: colors that color-blind readers can distinguish, sizes, axes, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colors.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#999999"
INK = "#333333"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, INK)  # yellow is too pale for lines
EXP, SIG = BLUE, RED  # mLSTMexp, mLSTMsig
MARKERS, DASHES = "osD^vPX*", ("-", "--", ":", "-.")
SEQUENTIAL, DIVERGING = "viridis", "PuOr"  # color maps
DPI = 130

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "savefig.dpi": DPI,
    "svg.hashsalt": "tfla",  # the same picture is the same file
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "image.cmap": SEQUENTIAL,
}


def panels(
    rows: int = 1, columns: int = 1, *, width: float = 4.4, height: float = 3.3, **more: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a grid of axes, without a window or global state.

    Args:
        rows: the rows of the grid.
        columns: the columns of the grid.
        width: the width of one panel in inches; legends add to the width of the figure.
        height: the height of one panel in inches.
        more: arguments of ``Figure.subplots`` (sharex, sharey, width_ratios).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False, **more)]


def power_of_two_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """Set a logarithmic x axis with a tick at each of the values, with thousands as k."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(round(x))))


def plain_ticks(axis: Axis) -> None:
    """Set the ticks of a logarithmic axis with data to 1, 2, 5, 10, or over many decades to 1, 10, 100, as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}" if y < 1 else f"{y:,.0f}"))
    axis.set_minor_formatter(NullFormatter())


def short(x: int) -> str:
    """Return a number as text, with 8192 as 8k."""
    return f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else str(x)


def legend_beside(figure: Figure, *axes: Axes) -> None:
    """Add one legend for all axes to the right of them, with each label once."""
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", handlelength=3)
