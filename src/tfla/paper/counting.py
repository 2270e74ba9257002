"""The counted FLOPs and bytes of every algorithm (appendix F): Figures 15 and 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tfla._util.options import check_count
from tfla.paper import style
from tfla.paper.algorithms import get
from tfla.paper.algorithms.optimum import flop_optimal_chunk
from tfla.paper.algorithms.symbols import Direction, Gate
from tfla.paper.counting_claims import claims
from tfla.paper.profiled_traffic import draw_profiled_traffic
from tfla.paper.report_types import Figure, Missing, Options, write

__all__ = ["Config", "claims", "figures"]

COMMAND = "tfla analyze counting"
TILE = 64  # steps of a tile of this library's fused scans
LARGEST = 2**30
COMPARED = {  # algorithm -> its label, and its sizes besides T, dqk, dhv
    "recurrent": ("recurrent", {}),
    "parallel": ("parallel", {}),
    "chunkwise": ("chunkwise, L 128", {"L": 128}),
    "fused": ("tfla fused", {"L": TILE}),
    "segments": ("tfla in segments", {"L": TILE, "segment": 1024}),
    "segmented": ("tfla on a CPU", {"L": TILE, "segment": 1024}),
}


@dataclass
class Config(Options):
    """The options of `tfla analyze counting`: the sizes for which the algorithms are compared."""

    T: int = 8192
    """Steps of the sequence."""
    dqk: int = 128
    """Head dim of q and k in the comparison of all algorithms."""
    dhv: int = 256
    """Head dim of v in the comparison of all algorithms."""

    def check(self) -> None:
        """Raise UserError where a value is out of range."""
        super().check()
        for name in ("T", "dqk", "dhv"):
            check_count(name, getattr(self, name), 1, LARGEST)


def over_chunk_size(config: Config) -> Figure:
    """Draw Figure 15: FLOPs over the chunk size."""
    heads = ((256, 512), (128, 256), (64, 128))
    sizes = 2 ** np.arange(0, int(np.log2(config.T)) + 1)
    drawing, [axes_row] = style.panels(1, len(heads), sharey=True, width=3.6)
    rows: list[dict[str, Any]] = []
    for axes, (dqk, dhv) in zip(axes_row, heads, strict=True):
        shape = {"T": config.T, "dqk": dqk, "dhv": dhv}
        curves = {c: get("chunkwise", "sig").flops(L=sizes.astype(float), causal=c, **shape) for c in (0.5, 0.66, 1.0)}
        axes.fill_between(sizes, curves[0.5], curves[1.0], color=style.SKY, alpha=0.35, lw=0)
        for c, dashes in ((0.5, "-"), (0.66, "--"), (1.0, ":")):
            axes.plot(sizes, curves[c], color=style.BLUE, ls=dashes, label=f"chunkwise, F_causal {c:g}")
        flat = {
            "recurrent": (get("recurrent", "sig").flops(**shape), style.ORANGE),
            "parallel, F_causal 0.5": (get("parallel", "sig").flops(**shape), style.PURPLE),
            "tfla fused, at any chunk size": (get("fused", "sig").flops(L=TILE, **shape), style.RED),
        }
        for label, (value, color) in flat.items():
            axes.axhline(value, color=color, label=label)
        rows += [
            {"dqk": dqk, "dhv": dhv, "algorithm": "chunkwise", "F_causal": c, "L": int(s), "flops": float(y)}
            for c, values in curves.items()
            for s, y in zip(sizes, values, strict=True)
        ]
        rows += [
            {"dqk": dqk, "dhv": dhv, "algorithm": label, "F_causal": 0.5, "flops": float(value)}
            for label, (value, _) in flat.items()
        ]
        axes.set(yscale="log", title=f"dqk {dqk}, dhv {dhv}")
        style.power_of_two_axis(axes, [1, 8, 64, 512, 4096], "chunk size L")
    axes_row[0].set_ylabel(f"FLOPs of one head, T = {config.T:,}")
    style.legend_beside(drawing, axes_row[0])
    return write(
        config, "fig15", drawing, rows, title="Figure 15: FLOPs over the chunk size", command=COMMAND,
        caption="""FLOPs of the forward of mLSTMsig. The chunkwise algorithm has the FLOPs of the recurrent one at
L = 1, a shallow minimum near L = 16, and the FLOPs of the parallel one at L = T. Beyond the minimum the quadratic part
dominates, which is proportional to the causal factor (the computed part of each square). Smaller heads shift all curves
down.

The flat red line is that of this library's fused scans: the state is passed on from tile to tile on chip, so the
distance between stored states (`chunk_size`) does not affect the FLOPs.""",
    )  # fmt: skip


def optimal_chunk(config: Config) -> Figure:
    """Draw Figure 16: the chunk size with the fewest FLOPs over the head dim."""
    widths = np.linspace(32, 2048, 127)
    drawing, [axes_row] = style.panels(1, 2, sharey=True, width=4.0)
    rows: list[dict[str, Any]] = []
    for axes, p in zip(axes_row, (0.5, 1.0), strict=True):
        for c, color in ((0.5, style.BLUE), (0.66, style.GREEN), (1.0, style.RED)):
            best = np.array([flop_optimal_chunk(dhv, p, c) for dhv in widths])
            axes.plot(widths, best, color=color, label=f"F_causal {c:g}")
            rows += [
                {"pqk": p, "F_causal": c, "dhv": float(d), "L": float(y)} for d, y in zip(widths, best, strict=True)
            ]
        axes.set(title=f"dqk = {p:g} · dhv", xlabel="head dim dhv", xlim=(0, 2100), xticks=range(0, 2049, 512))
    axes_row[0].set(ylabel="FLOP-optimal chunk size", ylim=(0, None))
    axes_row[0].legend(loc="upper left")
    return write(
        config, "fig16", drawing, rows, title="Figure 16: the chunk size with the fewest FLOPs", command=COMMAND,
        caption="""It grows with the square root of the head dim and is small: near 16 for dhv = 512. Chunks of this
size would be too small to keep a GPU busy; the bytes are fewer with larger ones (Figures 17 to 22).

The curve is the minimum of the sum of the parts (Table 8), solved by sympy. Equation (111) comes from Table 17, whose
constant is 5 where the parts add up to 1, which makes no visible difference.""",
    )  # fmt: skip


def all_algorithms(config: Config) -> Figure:
    """Draw the FLOPs and bytes of every algorithm, forward and backward, for both gates."""
    shape = {"T": config.T, "dqk": config.dqk, "dhv": config.dhv}
    drawing, grid = style.panels(2, 2, width=5.0, height=3.0, sharey=True)
    rows: list[dict[str, Any]] = []
    labels = [label for label, _ in COMPARED.values()]
    directions: tuple[Direction, ...] = ("forward", "backward")
    for axes_row, direction in zip(grid, directions, strict=True):
        flops, moved = axes_row
        gates: tuple[tuple[Gate, str, float], ...] = (("sig", style.SIG, -0.2), ("exp", style.EXP, 0.2))
        for gate, color, shift in gates:
            for place, (name, (label, own)) in enumerate(COMPARED.items()):
                algorithm = get(name, gate, direction)
                sizes: dict[str, Any] = shape | own
                products, every = algorithm.matrix_flops(**sizes), algorithm.flops(**sizes)
                row: dict[str, Any] = {"algorithm": label, "gate": f"mLSTM{gate}", "direction": direction}
                row |= {"matrix product FLOPs": float(products), "FLOPs": float(every)}
                flops.barh(place + shift, every / 1e9, 0.36, color=color, label=f"mLSTM{gate}" if not place else None)
                text = f"{every / 1e9:.2f} ({100 * (1 - products / every):.1f} %)"
                flops.text(every / 1e9 * 1.1, place + shift, text, va="center", fontsize=7.5, color=style.INK)
                if algorithm.byte_parts is not None:
                    row["bytes"] = float(algorithm.bytes(**sizes))
                    mebibytes = row["bytes"] / 2**20
                    moved.barh(place + shift, mebibytes, 0.36, color=color)
                    moved.text(
                        mebibytes * 1.1, place + shift, f"{mebibytes:,.1f}", va="center", fontsize=7.5, color=style.INK
                    )
                rows.append(row)
        for axes in axes_row:
            axes.set(xscale="log", yticks=range(len(labels)), yticklabels=labels, title=direction)
            axes.grid(False, axis="y")
        flops.set_xlim(0.5, 500)
        moved.set_xlim(5, 15000)
    grid[0][0].invert_yaxis()
    grid[1][0].set_xlabel("GFLOP (part outside of matrix products)")
    grid[1][1].set_xlabel("MiB loaded and stored")
    style.legend_beside(drawing, grid[0][0])
    drawing.suptitle(f"One head, T = {config.T:,}, dqk {config.dqk}, dhv {config.dhv}, 16-bit inputs, float32 states")
    return write(
        config, "algorithms", drawing, rows, title="FLOPs and bytes of each algorithm", command=COMMAND,
        caption="""FLOPs and bytes of every algorithm that computes the operator, by the same counting rules; the
paper counts the forward pass alone. The recurrent algorithm, which stores its state after every step as in generation,
moves more than sixty times the bytes of the chunkwise one, and most of its FLOPs are outside of matrix products. The
parallel algorithm moves the fewest bytes and has by far the most FLOPs.

In the forward pass, the fused scans keep the state on chip and move hardly more bytes than the parallel algorithm, a
third of those of the chunkwise one. The backward pass consists of three scans (dv, dq, dk), which all read q or k, v
and dh, so that the gap is smaller: a faster backward pass has to move fewer bytes. The exponential gate adds few FLOPs;
its backward pass reads h and dh once more. Bytes on a CPU are not counted, because they depend on its caches.""",
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw Figures 15 and 16, the comparison of all algorithms, and counted beside measured bytes."""
    return [
        over_chunk_size(config),
        optimal_chunk(config),
        all_algorithms(config),
        draw_profiled_traffic(config, COMMAND),
    ]
