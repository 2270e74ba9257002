"""The measured times beside the bounds by counted FLOPs and bytes, at rates measured in the same run."""

from __future__ import annotations

from typing import Any

from tfla.bench.schema import SHAPE
from tfla.bench.stored import load
from tfla.measure.accelerators import Accelerator, of_result
from tfla.measure.problem import BOTH, FORWARD
from tfla.paper import style
from tfla.paper.algorithms import Algorithm, get
from tfla.paper.algorithms.symbols import Direction, Gate
from tfla.paper.report_types import Figure, Missing, Options, write
from tfla.paper.runtime import least_seconds, seconds

SUITE, LENGTH = "fig4", 8192
SECONDS = ("overlapped", "not overlapped", "seconds")
Row = dict[str, Any]


def algorithm_of(row: Row) -> tuple[str, dict[str, int]] | None:
    """Return the counted algorithm of an implementation and its sizes; None where it is not counted."""
    details = row.get("details", {})
    if "chunk" in details:
        return "chunkwise", {"L": int(details["chunk"])}
    if row.get("implementation", "").endswith("fused") and {"segment", "tile"} <= set(details):
        segment = int(details["segment"])
        algorithm = "fused" if segment >= row["T"] else "segments"
        return algorithm, {"L": int(details["tile"]), "segment": segment}
    size = row["name"].rpartition(" ")[2]
    if row["name"].startswith("mlstm_kernels") and size.isdigit():
        return "chunkwise", {"L": int(size)}
    return None


def bounds(row: Row, accelerator: Accelerator) -> tuple[float, float] | None:
    """Return the seconds with full overlap of computation and memory traffic (114), and without overlap (113)."""
    counted_as = algorithm_of(row) if set(row) >= set(SHAPE) else None
    if counted_as is None:
        return None
    name, sizes = counted_as
    gate: Gate = "exp" if "mLSTMexp" in row["name"] else "sig"
    directions: tuple[Direction, ...] = ("forward",) if row["direction"] == FORWARD else ("forward", "backward")
    shape = {"T": row["T"], "dqk": row["dqk"], "dhv": row["dhv"], **sizes}
    algorithms: list[Algorithm] = [get(name, gate, direction) for direction in directions]
    least, most = (
        sum(float(rule(accelerator, row["B"] * row["H"], algorithm, **shape)) for algorithm in algorithms)
        for rule in (least_seconds, seconds)
    )
    return least, most


def compare_with_bounds(result: Row) -> list[Row]:
    """Return each timed row of a counted algorithm with its bounds."""
    rows = []
    for row in result["rows"]:
        found = bounds(row, of_result(result)) if "seconds" in row else None
        if found is not None:
            rows.append({key: row[key] for key in ("name", "direction", "x", "seconds")})
            rows[-1] |= {
                "overlapped": found[0],
                "not overlapped": found[1],
                "measured / overlapped": row["seconds"] / found[0],
            }
    return rows


def draw_time_bounds(config: Options, command: str) -> Figure | Missing:
    """Draw the bounds as bars and the measured times as points."""
    title = "Measured times beside their bounds by FLOPs and bytes"
    result = next((r for r in load(config.results, complete=True).values() if r["suite"] == SUITE), None)
    rows = compare_with_bounds(result) if result is not None else []
    if result is None or not any(r["x"] == LENGTH for r in rows):
        path = config.results / f"{SUITE}.json"
        return Missing("time_bounds", title, f"no measurement in {path}: `tfla bench gpu {SUITE} --out {path}`")
    drawing, [axes_row] = style.panels(1, 2, width=5.4, height=3.6, sharey=True)
    names = list(dict.fromkeys(r["name"] for r in rows if r["x"] == LENGTH))
    for axes, direction in zip(axes_row, (FORWARD, BOTH), strict=True):
        selected = [r for r in rows if r["x"] == LENGTH and r["direction"] == direction]
        for n, r in enumerate(selected):
            place, (low, high, at) = names.index(r["name"]), (r[key] * 1e3 for key in SECONDS)
            axes.barh(place, high - low, 0.55, low, color=style.SKY, label=None if n else "counted, overlapped to not")
            axes.plot(at, place, "D", color=style.RED, ms=5, ls="", label=None if n else "measured")
            axes.text(at * 1.06, place - 0.3, f"{r['measured / overlapped']:.2f} ×", va="center", fontsize=7.5)
        least, most = (pick(r[key] * 1e3 for key in SECONDS for r in selected) for pick in (min, max))
        axes.set_xlim(least * 0.8, most * 1.4)
        axes.set(title=direction, xlabel="ms", yticks=range(len(names)), yticklabels=names, xscale="log")
        style.plain_ticks(axes.xaxis)
        axes.grid(False, axis="y")
    axes_row[0].invert_yaxis()
    style.legend_beside(drawing, axes_row[0])
    env = result["environment"]
    return write(
        config, "time_bounds", drawing, rows, title=title, command=command,
        caption=f"""65,536 tokens in sequences of {LENGTH:,}, 16 heads, dqk 128, dhv 256 ({env["device"]},
{env["date"]}). A bar goes from the time of full overlap (114) to the time without overlap (113) of the algorithm's
counted FLOPs and bytes, at the rates of a matrix product and a device copy measured in the same run. A point is the
measured time; the number is its ratio to the lower end.

The bytes are those that an algorithm's kernels move, and not the least that any could move (the roofline bound of the
benchmarks). The fused scans run close to their lower bound, so that a faster scan has to move fewer bytes. The kernels
that are quadratic inside a chunk take a multiple of theirs.""",
    )  # fmt: skip
