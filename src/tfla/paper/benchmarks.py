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
SEEN = {  # what to see in each figure, apart from its numbers
    "fig4": """The number of tokens is constant: what is linear in T is flat, attention doubles with T. mLSTM steps up
where there are too few sequences to give every multiprocessor whole walks, and walks are cut into segments.""",
    "fig5": """Kernels that are quadratic inside a chunk (`triton tfla`, `xl_chunk`) save memory with larger chunks
until the quadratic part costs too much time: the paper's trade-off. Walks lose nothing by larger chunks, neither time
nor memory.""",
    "fig12": """The head dims of the 7B model, 8 heads; the number of tokens is constant, so linear is flat.""",
    "fig13": """Lightning Attention has a constant decay for each head, mLSTM gates for each step. Two head dims, below
each other; the number of tokens is constant.""",
    "fig14": """dqk = dhv, with as many heads as make 4,096 in all: larger heads are fewer, larger states.""",
    "mamba": """Mamba-2's shape, with its own kernels and with this library behind the same interface.""",
    "decode": """One step of generation moves the state once in and out: the floor is a copy of it.""",
}  # fmt: skip


@dataclass
class Config(Options):
    """The paper's benchmark figures from stored measurements."""


def numbers(rows: list[dict[str, Any]]) -> list[Row]:
    """What was timed, one row a contender, direction and place on the axis."""
    first = ("name", "group", "direction", "x", "B", "T", "H", "dqk", "dhv", "way")
    return [{key: r[key] for key in (*first, *COLUMNS) if key in r} for r in rows if "seconds" in r]


def standing(result: dict[str, Any]) -> str:
    """What this library runs by default and its kernels of the paper's kind beside the fastest of each other library,
    in the middle of the axis."""
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
    """One for each suite and device that was measured."""
    found: list[Figure | Missing] = []
    results = load(config.results, complete=True)
    for suite, seen in SEEN.items():
        mine = {name: r for name, r in results.items() if r["suite"] == suite}
        if not mine:
            path = config.results / f"{suite}.json"
            found.append(Missing(suite, SUITES[suite].title, f"no {path}: `tfla bench gpu {suite} --out {path}`"))
        for name, result in mine.items():
            drawing = figure_of(result)
            if drawing is None:
                continue
            runs = "; ".join(
                f"{stem}.json: {run['environment']['device']}, {run['environment']['date']}"
                for stem, run in result["runs"].items()
            )
            peers = any("seconds" in r and not r["name"].startswith("tfla") for r in result["rows"])
            alone = "" if peers else " Only this library was timed: its peers' times are not there."
            found.append(
                write(
                    config, name, drawing, numbers(result["rows"]), title=result["title"], command=COMMAND,
                    caption=f"{seen}{alone}\n\n{standing(result)}\n\n"
                    f"Medians, resting before each sample. ChunkTimings: {runs}.",
                )
            )  # fmt: skip
    return found
