"""The paper's benchmark figures 4, 5, 12, 13 and 14 from stored results of `tfla bench gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfla.bench.figures import figure_of
from tfla.bench.gpu_report import milliseconds
from tfla.bench.stored import load
from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH, FORWARD
from tfla.paper.benchmark_claims import claims
from tfla.paper.report_types import Figure, Missing, Options, Row, write

__all__ = ["Config", "claims", "figures"]

COMMAND = "tfla analyze benchmarks"
COLUMNS = ("seconds", "min", "max", "samples", "sustained_seconds", "floor_seconds", "peak_bytes", "state_bytes")
CAPTIONS = {  # by suite, apart from the numbers
    "fig4": """The number of tokens is constant: the time of linear RNNs is flat, that of attention doubles with T.
The time of mLSTM has a step where there are fewer sequences than multiprocessors and the sequences are cut into
segments.""",
    "fig5": """Kernels that are quadratic inside a chunk (`triton tfla`, `xl_chunk`) save memory with larger chunks
until the quadratic part costs too much time: this is the paper's trade-off. The fused scans save both time and memory
with larger chunks.""",
    "fig12": """The head dims of the 7B model, with 8 heads. The number of tokens is constant, so that the time of
linear RNNs is flat.""",
    "fig13": """Lightning Attention has a constant decay for each head, mLSTM has gates for each step. The rows are two
head dims; the number of tokens is constant.""",
    "fig14": """dqk = dhv, and all heads together have 4,096 dims: larger heads are fewer and have larger states.""",
    "mamba": """Mamba-2's shape, with its own kernels and with this library behind the same interface.""",
    "decode": """One step of generation loads and stores the state once: a copy of the state bounds its time.""",
}  # fmt: skip


@dataclass
class Config(Options):
    """The options of `tfla analyze benchmarks`, which draws the paper's benchmark figures."""


def numbers(rows: list[dict[str, Any]]) -> list[Row]:
    """Return the timed rows: one for each implementation, direction and place on the axis."""
    first = ("name", "group", "direction", "x", "B", "T", "H", "dqk", "dhv", "implementation")
    return [{key: r[key] for key in (*first, *COLUMNS) if key in r} for r in rows if "seconds" in r]


def describe_times(result: dict[str, Any]) -> str:
    """Return sentences with the times in the middle of the axis.

    They name what this library runs by default, its kernels of the paper's algorithm, and the fastest implementation of
    each other library.
    """
    sentences = []
    for group in dict.fromkeys(r.get("group", "") for r in result["rows"]):
        for direction in (FORWARD, BOTH):
            timed = [
                r for r in result["rows"]
                if r.get("direction") == direction and "seconds" in r and r.get("group", "") == group
            ]  # fmt: skip
            ours = [r for r in timed if r["name"].startswith("tfla")]
            if not ours:
                continue
            xs = sorted({r["x"] for r in ours})
            x = xs[len(xs) // 2]
            best: dict[str, dict[str, Any]] = {}
            for row in sorted((r for r in timed if r["x"] == x), key=lambda r: float(r["seconds"])):
                best.setdefault(row["name"] if row["name"].startswith("tfla mLSTM") else row["name"].split()[0], row)
            kept = [r for name, r in best.items() if "," not in name or name.endswith((" tfla", ","))]
            times = "; ".join(f"{r['name']} {milliseconds(r['seconds'])}" for r in kept)
            where = f"{group}, " if group else ""
            sentences.append(f"{where}{direction} at {result['axis']} = {x:,}, ms: {times}.")
    return "\n\n".join(sentences)


def figures(config: Config) -> list[Figure | Missing]:
    """Draw one figure for each measured suite and device."""
    found: list[Figure | Missing] = []
    results = load(config.results, complete=True)
    for suite, caption in CAPTIONS.items():
        selected = {name: r for name, r in results.items() if r["suite"] == suite}
        if not selected:
            path = config.results / f"{suite}.json"
            found.append(Missing(suite, SUITES[suite].title, f"no {path}: `tfla bench gpu {suite} --out {path}`"))
        for name, result in selected.items():
            drawing = figure_of(result)
            if drawing is None:
                continue
            runs = "; ".join(
                f"{stem}.json: {run['environment']['device']}, {run['environment']['date']}"
                for stem, run in result["runs"].items()
            )
            baselines = any("seconds" in r and not r["name"].startswith("tfla") for r in result["rows"])
            alone = "" if baselines else " Only this library was timed: there are no times of other libraries."
            found.append(
                write(
                    config, name, drawing, numbers(result["rows"]), title=result["title"], command=COMMAND,
                    caption=f"{caption}{alone}\n\n{describe_times(result)}\n\n"
                    f"Medians, with a rest before each sample. Measurements: {runs}.",
                )
            )  # fmt: skip
    return found
