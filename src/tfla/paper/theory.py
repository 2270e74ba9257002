"""The theory of the runtime (appendix G): Figures 17 to 22, with measured points where the paper has some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np

from tfla._util.errors import UserError
from tfla.measure.accelerators import ACCELERATORS, Accelerator, measured
from tfla.paper import style
from tfla.paper.algorithms import get
from tfla.paper.algorithms.optimum import flop_optimal_chunk, runtime_optimal_chunk
from tfla.paper.chunk_timings import BATCH, SHAPE, TILE, H, missing_figure, sig_forward
from tfla.paper.report_types import Figure, Missing, Options, write
from tfla.paper.runtime import SIG, intensity, seconds
from tfla.paper.theory_claims import claims
from tfla.paper.time_bounds import draw_time_bounds

__all__ = ["Config", "claims", "figures"]

COMMAND = "tfla analyze theory"
HEADS = BATCH * H
SIZES = np.geomspace(16, 8192, 91)
TICKS = [2**n for n in range(4, 14, 2)]
COLORS = dict(zip(ACCELERATORS, (style.ORANGE, style.GREEN, style.BLUE, style.RED, style.PURPLE), strict=True))


@dataclass
class Config(Options):
    """The options of `tfla analyze theory`: the runtime of the forward of mLSTMsig in theory and as measured."""

    own: tuple[tuple[str, float, float], ...] = ()
    """Additional accelerators: name, FLOP/s in 16 bits, byte/s."""
    measure: Literal["cpu", "cuda"] | None = None
    """Measure the rates of this machine and add it to the figures."""


def accelerators(config: Config, names: Sequence[str]) -> dict[str, Accelerator]:
    """Return the accelerators of a figure: the named ones and those of the options.

    Raises:
        UserError: a rate of the options is not positive, or there is no device to measure.
    """
    found = {name: ACCELERATORS[name] for name in names}
    try:
        found |= {name: Accelerator(name, flops, moved, "given") for name, flops, moved in config.own}
        if config.measure is not None:
            here = measured(config.measure)
            found[here.name] = here
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from None
    return found


def line_styles(found: dict[str, Accelerator]) -> Iterator[tuple[Accelerator, dict[str, Any]]]:
    """Yield each accelerator with its color and dashes."""
    dashes = cycle(("--", ":", "-."))
    for name, accelerator in found.items():
        look = {"color": COLORS[name], "ls": "-"} if name in COLORS else {"color": style.INK, "ls": next(dashes)}
        yield accelerator, look


def marker_style(place: int) -> dict[str, Any]:
    """Return the marker of the measured implementation at that place of the legend."""
    return {
        "color": style.INK,
        "ls": "",
        "marker": style.MARKERS[place],
        "ms": 6,
        "mfc": "white" if place else style.INK,
    }


def runtime(config: Config) -> Figure:
    """Draw Figure 17: the runtime over the chunk size."""
    found, points = accelerators(config, ["A100", "H100", "H200", "B200"]), sig_forward(config)
    drawing, [[axes]] = style.panels(1, 1, width=8.4, height=4.0)
    rows: list[dict[str, Any]] = []
    for accelerator, look in line_styles(found):
        values = seconds(accelerator, HEADS, SIG, L=SIZES, **SHAPE)
        axes.plot(SIZES, values * 1e3, label=f"theory, {accelerator.name}", **look)
        best = float(runtime_optimal_chunk(SHAPE["dhv"], 0.5, accelerator.intensity))
        axes.plot(best, seconds(accelerator, HEADS, SIG, L=best, **SHAPE) * 1e3, "|", color=look["color"], ms=14, mew=2)
        rows += [
            {"what": f"theory, {accelerator.name}", "L": float(s), "seconds": float(y)}
            for s, y in zip(SIZES, values, strict=True)
        ]
    scan_seconds = seconds(ACCELERATORS["H200"], HEADS, get("segments", "sig"), L=TILE, segment=SIZES, **SHAPE)
    axes.plot(SIZES, scan_seconds * 1e3, color=COLORS["H200"], ls="--", label="theory of fused scans, H200")
    rows += [
        {"what": "theory of fused scans, H200", "L": float(s), "seconds": float(y)}
        for s, y in zip(SIZES, scan_seconds, strict=True)
    ]
    for place, (name, curve) in enumerate(points.curves.items()):
        axes.plot(list(curve), [y * 1e3 for y in curve.values()], label=f"measured, {name}", **marker_style(place))
        rows += [{"what": f"measured, {name}", "L": x, "seconds": y, "where": points.where} for x, y in curve.items()]
    axes.set(yscale="log", ylabel="forward, ms", title="mLSTMsig, 8 heads, dqk 256, dhv 512, T 8,192, batch 8")
    style.plain_ticks(axes.yaxis)
    style.power_of_two_axis(axes, TICKS, "chunk size L")
    style.legend_beside(drawing, axes)
    where = f"Points were measured ({points.where})." if points.curves else "There are no measured points here."
    return write(
        config, "fig17", drawing, rows, title="Figure 17: runtime over the chunk size", command=COMMAND,
        caption=f"""A line is the time of the FLOPs plus the time of the bytes (116), with states in float32; a tick
marks the optimum (121). The valley gets flatter from one generation to the next. {where}

The kernels of the paper's algorithm (`triton tfla`, `xl_chunk`) are quadratic inside a chunk. They have the shape of
the theory and lie above it: small chunks cost time for states, large ones for the quadratic part. The fused scans are
another algorithm (dashed): none of their costs grows with the chunk, so their time only falls, and the chunk size
affects the memory alone.""",
    )  # fmt: skip


def arithmetic_intensity(config: Config) -> Figure:
    """Draw Figure 18: the arithmetic intensity over the chunk size."""
    found = accelerators(config, ["V100", "A100", "H100", "H200", "B200"])
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.4)
    rows: list[dict[str, Any]] = []
    for axes, (bytes_, what) in zip(axes_row, ((4, "float32"), (2, "bfloat16")), strict=True):
        for dhv, marker in ((128, "o"), (256, "s"), (512, "D"), (1024, "^")):
            values = intensity(L=SIZES, T=8192, dqk=dhv / 2, dhv=dhv, state_bytes=bytes_)
            axes.plot(SIZES, values, marker=marker, markevery=10, ms=4, color=style.INK, lw=1.2, label=f"dhv {dhv}")
            rows += [
                {"state bytes": bytes_, "dhv": dhv, "L": float(s), "FLOP/byte": float(y)}
                for s, y in zip(SIZES, values, strict=True)
            ]
        for accelerator, look in line_styles(found):
            shares = accelerator.name == "B200"  # its line is the H100's
            axes.axhline(
                accelerator.intensity, label=accelerator.name, **look | ({"ls": (0, (4, 4))} if shares else {})
            )
            rows.append({"accelerator": accelerator.name, "FLOP/byte": accelerator.intensity})
        axes.set(yscale="log", title=f"states in {what}")
        style.power_of_two_axis(axes, TICKS, "chunk size L")
    axes_row[0].set_ylabel("FLOP per byte")
    style.legend_beside(drawing, axes_row[0])
    return write(
        config, "fig18", drawing, rows, title="Figure 18: arithmetic intensity over the chunk size", command=COMMAND,
        caption="""FLOPs per byte of the forward of mLSTMsig (118), for dqk = dhv / 2. Where a curve is above an
accelerator's line, matrix products bound the runtime, below it the memory does. Curves of larger chunks are above the
line; with states in 16 bits they cross it at half the chunk size. The H200 has the arithmetic of the H100 and more
bandwidth, so that its line is lower and smaller chunks suffice. The B200 has the ratio of the H100.""",
    )  # fmt: skip


def roofline(config: Config) -> Figure | Missing:
    """Draw Figure 19: the roofline with measured points."""
    title = "Figure 19: roofline"
    points = sig_forward(config)
    if points.accelerator is None or not points.curves:
        return missing_figure(config, "fig19", title)
    found = accelerators(config, ["V100", "A100", "H100", "H200", "B200"])
    found[points.accelerator.name] = points.accelerator
    drawing, [[axes]] = style.panels(1, 1, width=8.4, height=4.2)
    x = np.geomspace(20, 4000, 200)
    rows: list[dict[str, Any]] = []
    for accelerator, look in line_styles(found):
        axes.plot(x, accelerator.attainable(x) / 1e12, label=f"roof of {accelerator.name}", **look)
        rows.append({"what": accelerator.name, "FLOP/s": accelerator.flops, "byte/s": accelerator.bandwidth})
    for place, (name, curve) in enumerate(points.curves.items()):
        quadratic = name in points.quadratic
        algorithm = SIG if quadratic else get("segments", "sig")
        at: list[tuple[float, float]] = []
        for L, time in curve.items():
            sizes: dict[str, Any] = SHAPE | ({"L": L} if quadratic else {"L": TILE, "segment": L})
            point = float(intensity(algorithm, **sizes)), float(algorithm.flops(**sizes)) * HEADS / time
            at.append(point)
            rows.append({"what": name, "L": L, "FLOP/byte": point[0], "FLOP/s": point[1], "where": points.where})
        axes.plot(
            [a for a, _ in at], [b / 1e12 for _, b in at], label=name, **marker_style(place) | {"ls": ":", "lw": 0.8}
        )
        for (a, b), L in zip(at, curve, strict=True):
            if L in (min(curve), max(curve)):
                axes.annotate(f"L {L}", (a, b / 1e12), (4, -11), textcoords="offset points", fontsize=7.5)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=f"Points: {points.where}")
    style.plain_ticks(axes.xaxis)
    style.plain_ticks(axes.yaxis)
    style.legend_beside(drawing, axes)
    return write(
        config, "fig19", drawing, rows, title=title, command=COMMAND,
        caption="""A point has the counted FLOPs of the forward of mLSTMsig over the measured seconds, for one chunk
size (8 heads, dqk 256, dhv 512, T 8,192, batch 8). The lines are the rooflines (119). Small chunks of the chunkwise
algorithm lie under the sloping, memory-bound part, large ones under the flat part and further from it. The paper's
kernels are far below the roofline too. The dashed roofline is that of the same GPU, with the rates of a large matrix
product and a device copy measured in the same run.""",
    )  # fmt: skip


def rate_and_time(config: Config) -> Figure | Missing:
    """Draw Figure 20: FLOP/s, FLOPs and runtime over the chunk size."""
    title = "Figure 20: FLOP/s, FLOPs and runtime over the chunk size"
    points = sig_forward(config)
    if not points.quadratic:
        return missing_figure(config, "fig20", title)
    drawing, [axes_row] = style.panels(1, 3, width=3.5)
    rows: list[dict[str, Any]] = []
    xs = sorted({x for curve in points.quadratic.values() for x in curve})
    flops = {x: float(SIG.flops(L=x, **SHAPE)) * HEADS for x in xs}
    axes_row[1].plot(xs, [flops[x] / 1e12 for x in xs], color=style.INK, marker=".", label="counted")
    for place, (name, curve) in enumerate(points.quadratic.items()):
        look: dict[str, Any] = {"color": style.CYCLE[place], "marker": style.MARKERS[place]}
        axes_row[0].plot(list(curve), [flops[x] / t / 1e12 for x, t in curve.items()], label=name, **look)
        axes_row[2].plot(list(curve), [t * 1e3 for t in curve.values()], **look)
        rows += [
            {"what": name, "L": x, "FLOPs": flops[x], "FLOP/s": flops[x] / t, "seconds": t, "where": points.where}
            for x, t in curve.items()
        ]
    for axes, label in zip(axes_row, ("TFLOP/s", "TFLOP in all", "forward, ms"), strict=True):
        axes.set(ylabel=label, ylim=(0, None))
        style.power_of_two_axis(axes, xs[::2], "chunk size L")
    style.legend_beside(drawing, *axes_row)
    return write(
        config, "fig20", drawing, rows, title=title, command=COMMAND,
        caption="""The kernels of the paper's algorithm, forward of mLSTMsig, as in Figure 19. FLOP/s rise with the
chunk size, but so do the FLOPs. The time (right) has its minimum long before the rate has its maximum, so a chunk size
has to be chosen by its time.""",
    )  # fmt: skip


def over_head_dim(config: Config) -> Figure:
    """Draw Figure 21: the runtime-optimal chunk size over the head dim."""
    found = accelerators(config, ["A100", "H100", "H200", "B200"])
    widths = np.linspace(32, 2048, 127)
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.4)
    rows: list[dict[str, Any]] = []
    for axes, (bytes_, what) in zip(axes_row, ((4, "float32"), (2, "bfloat16")), strict=True):
        curves = [
            (a.name, runtime_optimal_chunk(widths, 0.5, a.intensity, 0.5, bytes_), look)
            for a, look in line_styles(found)
        ]
        fewest = ("fewest FLOPs (Figure 16)", flop_optimal_chunk(widths, 0.5), {"color": style.GREY, "ls": "--"})
        for name, best, look in [*curves, fewest]:
            axes.plot(widths, best, label=name, **look)
            rows += [
                {"state bytes": bytes_, "what": name, "dhv": float(d), "L": float(y)}
                for d, y in zip(widths, best, strict=True)
            ]
        axes.set(title=f"states in {what}", xlabel="head dim dhv", xlim=(0, 2100), xticks=range(0, 2049, 512))
    axes_row[0].set(ylabel="runtime-optimal chunk size", ylim=(0, None))
    points = sig_forward(config)
    for place, (name, curve) in enumerate(points.quadratic.items()):
        best_at = min((x for x in curve if x > TILE), key=lambda x: curve[x], default=None)
        if best_at is not None:
            axes_row[0].plot(SHAPE["dhv"], best_at, label=f"measured, {name}", **marker_style(place))
            rows.append({"what": f"measured, {name}", "dhv": SHAPE["dhv"], "L": best_at, "where": points.where})
    style.legend_beside(drawing, axes_row[0])
    return write(
        config, "fig21", drawing, rows, title="Figure 21: runtime-optimal chunk size over the head dim",
        command=COMMAND,
        caption="""The chunk size at which the forward of mLSTMsig takes the least time in theory (121), for
dqk = dhv / 2. It grows with the square root of the head dim and lies far above the chunk size of the fewest FLOPs. H100
and B200 share one line, because their ratios of arithmetic to bandwidth are equal.

The paper's kernels had their measured optimum at 256 on an H100, below that of the theory: real kernels come nearer to
the rate of the memory than to the peak of matrix products. Points are optima measured here, among chunks of several
tiles.""",
    )  # fmt: skip


def over_intensity(config: Config) -> Figure:
    """Draw Figure 22: the runtime-optimal chunk size over the accelerator's FLOP per byte."""
    found = accelerators(config, list(ACCELERATORS))
    x = np.linspace(0, 600, 121)
    drawing, [[axes]] = style.panels(1, 1, width=7.2, height=3.8)
    rows: list[dict[str, Any]] = []
    for dhv, color in ((128, style.SKY), (256, style.BLUE), (512, style.GREEN), (1024, style.RED)):
        best = runtime_optimal_chunk(dhv, 0.5, x)
        axes.plot(x, best, color=color, label=f"dhv {dhv}")
        rows += [{"dhv": dhv, "FLOP/byte": float(i), "L": float(y)} for i, y in zip(x, best, strict=True)]
    top = float(np.max(best)) * 1.08
    shared: dict[int, list[str]] = {}
    for accelerator in found.values():
        shared.setdefault(round(accelerator.intensity / 8), []).append(accelerator.name)
        rows.append({"accelerator": accelerator.name, "FLOP/byte": accelerator.intensity})
    for names in shared.values():
        at = sum(found[name].intensity for name in names) / len(names)
        axes.axvline(at, color=style.GREY, lw=1, ls=":")
        axes.text(at, top, ", ".join(names), rotation=90, ha="right", va="top", fontsize=8)
    axes.set(
        xlabel="FLOP per byte of the accelerator", ylabel="runtime-optimal chunk size", ylim=(0, top), xlim=(0, 600)
    )
    style.legend_beside(drawing, axes)
    return write(
        config, "fig22", drawing, rows, title="Figure 22: runtime-optimal chunk size over the accelerator",
        command=COMMAND,
        caption="""States in float32, dqk = dhv / 2. The optimal chunk size (121) grows with the square root of the
accelerator's FLOP per byte. Newer GPUs do not always have more of it: the H200 needs smaller chunks than the H100,
because its memory is faster and its arithmetic is the same.""",
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw Figures 17 to 22, and the measured times beside their bounds."""
    return [
        runtime(config),
        arithmetic_intensity(config),
        roofline(config),
        rate_and_time(config),
        over_head_dim(config),
        over_intensity(config),
        draw_time_bounds(config, COMMAND),
    ]
