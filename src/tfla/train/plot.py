"""The curves of a run as a picture."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tfla.nn.files import write_atomically
from tfla.train.metrics import read

TICKS = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20]
INK, TRAIN, HELDOUT = "#333333", "#7aa6c2", "#c1440e"


def plot_curves(run: Path, target: Path, *, clip: float, baselines: dict[str, float]) -> None:
    """Draw the metrics of a run: loss in training and held out, gradient norm, learning rate, input gates.

    Training losses are shown in bits per byte too: the run's held-out tokens say how many bytes a token stands for.

    Args:
        run: folder of the run.
        target: the PNG to write.
        clip: the gradient's largest norm, drawn as a line.
        baselines: name -> bits per byte, drawn as lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

    records = read(run)
    steps = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    if not steps or not evals:
        return
    bits = evals[-1]["tokens"] / max(evals[-1]["bytes"], 1) / np.log(2)
    x = _column(steps, "step")

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, *small = (
        figure.add_subplot(cell) for grid in [figure.add_gridspec(2, 3, height_ratios=(2, 1))]
        for cell in (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2])
    )  # fmt: skip

    y = _column(steps, "loss") * bits
    loss.plot(x, y, color=TRAIN, lw=0.6, alpha=0.5)
    smooth, width = _smooth(y)
    loss.plot(x, smooth, color=TRAIN, lw=1.8, label=f"training, mean of {width} steps" if width > 1 else "training")
    heldout = _column(evals, "bits_per_byte")
    loss.plot(
        _column(evals, "step"), heldout, color=HELDOUT, lw=1.8, marker="o", ms=3.5,
        label=f"held out, {heldout[-1]:.2f} at the end",
    )  # fmt: skip
    for (name, value), dashes in zip(baselines.items(), ("--", ":", "-.") * len(baselines), strict=False):
        loss.axhline(value, color=INK, lw=1, ls=dashes, label=f"{name}, {value:.2f}")
    loss.set(ylabel="loss (bits per byte)", xlabel="step", yscale="log", xlim=(0, x[-1] * 1.01))
    loss.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    loss.yaxis.set_major_locator(FixedLocator(TICKS))
    loss.yaxis.set_minor_locator(NullLocator())
    loss.yaxis.set_major_formatter(ScalarFormatter())
    legend = loss.legend(loc="upper right", bbox_to_anchor=(1, 0.93), fancybox=False, edgecolor="none", framealpha=1)
    legend.set_zorder(5)

    small[0].plot(x, _column(steps, "grad_norm"), color=TRAIN, lw=0.6)
    small[0].axhline(clip, color=INK, lw=1, ls="--", label=f"clipped above {clip:g}")
    small[0].set(ylabel="gradient norm", yscale="log")
    small[0].legend(frameon=False, fontsize="small")
    small[1].plot(x, _column(steps, "lr"), color=TRAIN, lw=1.2)
    small[1].set(ylabel="learning rate", ylim=(0, None))
    small[1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    small[2].plot(x, _column(steps, "max_input_gate"), color=TRAIN, lw=0.6)
    small[2].set(ylabel="largest input gate\npre-activation")
    for axes in small:
        axes.set(xlabel="step", xlim=(0, x[-1] * 1.01))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for axes in (loss, *small):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#eeeeee", lw=0.8)
        axes.set_axisbelow(True)

    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(target, lambda path: path.write_bytes(picture.getvalue()))


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if r[name] is None else r[name] for r in records], float)


def _smooth(y: np.ndarray) -> tuple[np.ndarray, int]:
    """Means of a 40th of the run, centred, fewer at the ends, and how many that is."""
    width = max(1, len(y) // 40)
    box = np.ones(width)
    return np.convolve(y, box, "same") / np.convolve(np.ones(len(y)), box, "same"), width
