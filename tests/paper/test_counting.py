"""The figures of `tfla analyze counting`."""

from __future__ import annotations

import csv

from tfla.paper import counting
from tfla.paper.report_types import Figure, Missing


def numbers(folder, name):
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_figures_and_their_numbers(tmp_path):
    found = counting.figures(counting.Config(out=tmp_path, results=tmp_path, T=1024))
    assert [f.name for f in found] == ["fig15", "fig16", "algorithms", "traffic"]
    assert isinstance(found.pop(), Missing)  # no results are there
    assert all(isinstance(f, Figure) and f.path.exists() for f in found)

    rows = [r for r in numbers(tmp_path, "fig15") if r["dhv"] == "512"]
    chunkwise = {
        int(r["L"]): float(r["flops"]) for r in rows if r["algorithm"] == "chunkwise" and r["F_causal"] == "0.5"
    }
    flat = {r["algorithm"]: float(r["flops"]) for r in rows if r["algorithm"] != "chunkwise"}
    assert min(chunkwise, key=lambda L: chunkwise[L]) == 16
    assert abs(chunkwise[1] / flat["recurrent"] - 1) < 0.05
    assert chunkwise[1024] > 0.9 * flat["parallel, F_causal 0.5"]

    curve = {
        float(r["dhv"]): float(r["L"])
        for r in numbers(tmp_path, "fig16")
        if (r["pqk"], r["F_causal"]) == ("0.5", "0.66")
    }
    near = min(curve, key=lambda d: abs(d - 512))
    assert round(curve[near]) == 16  # the paper's example

    rows = numbers(tmp_path, "algorithms")
    assert {(r["gate"], r["direction"]) for r in rows} == {
        (f"mLSTM{gate}", direction) for gate in ("exp", "sig") for direction in ("forward", "backward")
    }
    moved = {
        r["algorithm"]: float(r["bytes"])
        for r in rows
        if r["gate"] == "mLSTMsig" and r["direction"] == "forward" and r["bytes"]
    }
    assert moved["tfla fused"] < moved["chunkwise, L 128"] < moved["recurrent"]
