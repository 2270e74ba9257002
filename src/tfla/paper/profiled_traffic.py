"""The counted bytes beside those that a GPU's memory moved, as a profiler measured them."""

from __future__ import annotations

from typing import Any

from tfla.paper import style
from tfla.paper.algorithms import get
from tfla.paper.claims_template import Values
from tfla.paper.report_types import Figure, Missing, Options, Table, stored, write
from tfla.paper.time_bounds import algorithm_of

NAME, TITLE = "traffic", "Counted bytes and what a profiler saw"
MEASURE = "python -m tfla.bench.traffic --out benchmarks/results/traffic.json"
Row = dict[str, Any]


def compare_with_counts(result: Row) -> list[Row]:
    """Return, for each call, the counted bytes of its algorithm and those that its kernels read and wrote."""
    found = []
    for row in result["rows"]:
        counted_as = algorithm_of(row | {"name": row["implementation"]})
        if counted_as is None:
            continue
        name, sizes = counted_as
        algorithm = get(name, "exp" if row["gate"] == "exp" else "sig", row["direction"])
        counted = row["B"] * row["H"] * float(algorithm.bytes(T=row["T"], dqk=row["dqk"], dhv=row["dhv"], **sizes))
        read, written = (sum(kernel[what] for kernel in row["kernels"]) for what in ("read", "written"))
        found.append(
            {key: row[key] for key in ("implementation", "gate", "direction")}
            | {"algorithm": name, "counted": counted, "read": read, "written": written,
               "measured / counted": (read + written) / counted}
        )  # fmt: skip
    return found


def draw_profiled_traffic(config: Options, command: str) -> Figure | Missing:
    """Draw the bytes read and written as bars, and the count as a line across them."""
    result = stored(config, NAME)
    if result is None:
        return Missing(NAME, TITLE, f"no {config.results / f'{NAME}.json'}: `{MEASURE}`")
    rows = compare_with_counts(result)
    labels = list(dict.fromkeys(f"{r['implementation']}, mLSTM{r['gate'][:3]}" for r in rows))
    drawing, [axes_row] = style.panels(1, 2, width=4.8, height=0.9 + 0.36 * len(labels), sharey=True)
    for axes, direction in zip(axes_row, ("forward", "backward"), strict=True):
        selected = [r for r in rows if r["direction"] == direction]
        for n, r in enumerate(selected):
            place = labels.index(f"{r['implementation']}, mLSTM{r['gate'][:3]}")
            read, written, counted = (r[key] / 2**30 for key in ("read", "written", "counted"))
            axes.barh(place, read, 0.6, color=style.SKY, label=None if n else "read")
            axes.barh(place, written, 0.6, read, color=style.ORANGE, label=None if n else "written")
            axes.plot(
                [counted] * 2, [place - 0.42, place + 0.42], color=style.INK, lw=2, label=None if n else "counted"
            )
            axes.text(
                max(read + written, counted), place, f"  {r['measured / counted']:.2f} ×", va="center", fontsize=8
            )
        axes.set(title=direction, xlabel="GiB")
        axes.margins(x=0.18)
        axes.set_yticks(range(len(labels)), labels)
        axes.grid(False, axis="y")
    axes_row[0].invert_yaxis()
    style.legend_beside(drawing, axes_row[0])
    env = result["environment"]
    row = result["rows"][0]
    return write(
        config, NAME, drawing, rows, title=TITLE, command=command,
        caption=f"""{row["B"]} sequences of {row["T"]:,} steps, {row["H"]} heads, dqk {row["dqk"]}, dhv {row["dhv"]},
16-bit inputs ({env["device"]}, {env["date"]}). Bars are the bytes that the memory read and wrote for all kernels of a
call, measured by Nsight Compute; lines are the counted bytes of the algorithm (Tables 8 to 13, and by their rules those
of the fused scans). The count has everything that a kernel loads or stores once. Caches save some of it; what a kernel
loads again adds to it.""",
    )  # fmt: skip


def claim_values(config: Options) -> Values:
    """Return the values of the claim `checked_counts`: the measured bytes as multiples of the counted ones."""
    result = stored(config, NAME)
    if result is None:
        return {"profiled": False, "device": None, "date": None}
    rows = compare_with_counts(result)
    table = []
    for implementation in dict.fromkeys(r["implementation"] for r in rows):
        cells = []
        for direction in ("forward", "backward"):
            ratios = [
                r["measured / counted"]
                for r in rows
                if (r["implementation"], r["direction"]) == (implementation, direction)
            ]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-")
        table.append([implementation, *cells])
    env = result["environment"]
    return {
        "profiled": True,
        "device": env["device"],
        "date": env["date"],
        "table": Table(["kernels", "forward", "backward"], table),
    }
