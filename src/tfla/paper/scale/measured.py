"""The stored measurements of the model of the cost: the rate of one GPU, its link, and steps on two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tfla._util.errors import UserError
from tfla.bench.entries import Entry
from tfla.bench.stored import load
from tfla.bench.suites import SUITES
from tfla.nn import ModelConfig
from tfla.paper.scale.costs import Cluster, Cost, Layout, Link, Work, exchanged, step_cost

# Of an H100 or H200 in a node of eight: NVLink 4 in one direction, and a network of 400 Gbit/s for each GPU.
NVLINK = Link(10e-6, 450e9)
NETWORK = Link(20e-6, 50e9)
# Suites whose step on one GPU is the baseline: those that also ran on two GPUs, or else the one for a single GPU.
TOGETHER, ALONE = ("train_parallel", "train_long"), "train"
OPERATOR = "context_parallel"
ONE_GPU = "tfla mLSTMexp"
Row = dict[str, Any]


class Point(NamedTuple):
    """A measured training step and what the model says of it."""

    name: str
    gpus: int
    work: Work
    layout: Layout
    seconds: float
    memory: float | None
    """The most bytes of a GPU; None where they were not measured."""
    expected: Cost


class Exchange(NamedTuple):
    """A measured call of the operator on one GPU and on several that share its steps."""

    name: str
    """The operator, such as "tfla mLSTMsig"."""
    T: int
    direction: str
    gpus: int
    one: float
    """Seconds on one GPU."""
    several: float
    expected: float
    """Seconds of the model on as many GPUs: the share of one GPU, and the exchange of states."""


class Measured(NamedTuple):
    """The GPUs of the model, and the measurements that it can be compared with."""

    cluster: Cluster
    source: str
    """The training step of one GPU that sets the rate."""
    link_source: str
    points: list[Point]
    exchanges: list[Exchange]


def config_of(row: Row) -> ModelConfig:
    """Return the config of the 1.4B with the heads of a row."""
    return ModelConfig.named("1.4B", row["H"])


def _entry(suite: str, row: Row) -> Entry | None:
    """Return the entry of a suite that a row measures."""
    return next((e for e in SUITES[suite].entries if e.name == row["name"]), None)


def _layout(entry: Entry) -> Layout:
    """Return the layout of an entry."""
    return Layout(**entry.options.get("layout", {}), checkpointing=entry.options.get("activation_checkpointing", False))


def _step(suite: str, row: Row) -> tuple[Work, Layout] | None:
    """Return the batch and the layout of a row; None if it is not a training step of the mLSTM."""
    entry = _entry(suite, row)
    if entry is None or "seconds" not in row:
        return None
    return Work(config_of(row), row["T"], row["B"]), _layout(entry)


def _rate(work: Work, layout: Layout, seconds: float, memory_rate: float) -> float:
    """Return the FLOP/s of one GPU in a measured step, without the time of the optimizer."""
    one = Cluster("", 1.0, memory_rate, 0, NVLINK, NETWORK)
    cost = step_cost(work, layout, one)  # at 1 FLOP/s, so that its seconds are the FLOPs
    return cost.compute / (seconds - cost.optimizer)


def read(folder: Path, inside: Link | None = None, between: Link = NETWORK, per_node: int = 8) -> Measured:
    """Read the measurements of a folder.

    Args:
        folder: the folder of results.
        inside: the link between GPUs of a node; None is the measured one, or else NVLink of the data sheet.
        between: the link between nodes.
        per_node: the GPUs of a node.

    Raises:
        UserError: the folder has no training step of one GPU; the message names the command that measures it.
    """
    results = {r["suite"]: r for r in load(folder, complete=True).values()}
    base = next((s for s in (*TOGETHER, ALONE) if s in results and _baseline(results[s])), None)
    if base is None:
        path = folder / f"{ALONE}.json"
        raise UserError(f"results: no training step of one GPU in {folder}: `tfla bench gpu {ALONE} --out {path}`")
    row = _baseline(results[base])
    assert row is not None
    rates, env = results[base]["rates"], results[base]["environment"]
    work, layout = Work(config_of(row), row["T"], row["B"]), _layout(_entry(base, row) or SUITES[ALONE].entries[0])
    copy = rates["copy"]["rested"]
    device = env["device"].removeprefix("NVIDIA ")
    linked = next(
        (results[s]["rates"]["link"] for s in TOGETHER if "link" in results.get(s, {}).get("rates", {})), None
    )
    link_source = "given" if inside is not None else "an all_gather of two GPUs, measured"
    if inside is None and linked is not None:
        inside = Link(linked["seconds"], linked["bytes_per_second"])
    elif inside is None:
        inside, link_source = NVLINK, "NVLink 4, data sheet"
    cluster = Cluster(
        device, _rate(work, layout, row["seconds"], copy), copy, env["memory_bytes"], inside, between, per_node
    )
    points = []
    for suite in (*TOGETHER, ALONE):
        here = suite in results and results[suite]["environment"]["device"] == env["device"]  # the rate is that of one
        for found in results[suite]["rows"] if here else []:
            step = _step(suite, found) if found["name"].startswith(ONE_GPU) and "compile" not in found["name"] else None
            if step is not None:
                points.append(
                    Point(
                        found["name"], step[1].gpus, *step, found["seconds"], found.get("allocated_bytes"),
                        step_cost(*step, cluster),
                    )
                )  # fmt: skip
    source = f"{row['name']}, T {row['T']:,}, batch {row['B']}, {device}, {env['date']}"
    return Measured(cluster, source, link_source, points, _exchanges(results.get(OPERATOR), cluster))


def _baseline(result: Row) -> Row | None:
    """Return the timed row of one GPU with most tokens, in eager mode."""
    rows = [
        r for r in result["rows"]
        if r["name"].split(",")[0] == ONE_GPU and "compile" not in r["name"] and r.get("processes", 1) == 1
        and "seconds" in r
    ]  # fmt: skip
    return max(rows, key=lambda r: r["B"] * r["T"], default=None)


def _exchanges(result: Row | None, cluster: Cluster) -> list[Exchange]:
    """Return the calls of the operator that several GPUs share, beside those of one GPU in the same run."""
    rows = [r for r in (result or {"rows": []})["rows"] if "seconds" in r and r["name"].startswith("tfla")]
    found = []
    for row in rows:
        gate = row["name"].split(",")[0]
        one = next(
            (
                r for r in rows
                if r.get("processes", 1) == 1 and r["name"].split(",")[0] == gate
                and (r["x"], r["direction"]) == (row["x"], row["direction"])
            ),
            None,
        )  # fmt: skip
        gpus = row.get("processes", 1)
        if gpus > 1 and one is not None and "all-to-all" not in row["name"]:
            exchange = sum(
                cluster.all_gather_seconds(gpus * row["B"] * row["H"] * x, gpus)
                for backward in ((False, True) if "backward" in row["direction"] else (False,))
                for x in exchanged(row["dqk"], row["dhv"], gate == ONE_GPU, backward)
            )
            expected = one["seconds"] / gpus + exchange
            found.append(Exchange(gate, row["x"], row["direction"], gpus, one["seconds"], row["seconds"], expected))
    return found
