"""The theory of the runtime against the paper's equations, and its figures."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from tfla.bench import results
from tfla.cli import main
from tfla.measure.accelerators import ACCELERATORS, Accelerator, measured
from tfla.paper import theory
from tfla.paper.algorithms import get
from tfla.paper.algorithms.optimum import flop_optimal_chunk, runtime_optimal_chunk
from tfla.paper.report_types import Figure, Missing
from tfla.paper.runtime import intensity, least_seconds, seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIG = get("chunkwise", "sig")
GRID = [(dhv, p, c) for dhv in (64, 256, 512) for p in (0.5, 1.0) for c in (0.5, 0.66)]


def paper_flops(L, dhv, p, c):
    """Return the FLOPs in the bracket of (116)."""
    return (
        L**2 * c * (2 * dhv * p + 2 * dhv + 6)
        + L**2
        + L * (4 * dhv**2 * p + 2 * dhv * p + dhv + 11)
        + 2 * dhv**2 * p
        + 5
    )


@pytest.mark.parametrize(("dhv", "p", "c"), GRID)
def test_runtime_and_intensity_are_those_of_116_and_118(dhv, p, c):
    """Compare up to the error in the sum of Table 17: one FLOP a step too few, four FLOPs a chunk too many."""
    gpu, L, T = ACCELERATORS["H100"], 128, 8192
    flops, moved = paper_flops(L, dhv, p, c) + L - 4, 6 * L * dhv * (1 + p) + 8 * L + 2 * 4 * dhv**2 * p
    sizes = {"T": T, "L": L, "dqk": p * dhv, "dhv": dhv, "causal": c}
    expected = 64 * T / L * (flops / gpu.flops + moved / gpu.bandwidth)
    assert seconds(gpu, 64, SIG, **sizes) == pytest.approx(expected, rel=1e-12)
    assert intensity(SIG, **sizes) == pytest.approx(flops / moved, rel=1e-12)
    assert max(flops / gpu.flops, moved / gpu.bandwidth) * 64 * T / L == pytest.approx(
        least_seconds(gpu, 64, SIG, **sizes)
    )


@pytest.mark.parametrize(("dhv", "p", "c"), GRID)
def test_optimal_chunks_are_those_of_111_and_121(dhv, p, c):
    below = 2 * c * (dhv * (1 + p) + 3) + 1
    assert flop_optimal_chunk(dhv, p, c) == pytest.approx(math.sqrt((2 * dhv**2 * p + 5) / below), rel=1e-3)
    for bytes_ in (2, 4):
        above = 2 * dhv**2 * p + 5 + 2 * 295 * dhv**2 * p * bytes_
        assert runtime_optimal_chunk(dhv, p, 295, c, bytes_) == pytest.approx(math.sqrt(above / below), rel=1e-3)


def test_the_optimum_is_one():
    gpu, shape = ACCELERATORS["H200"], {"T": 8192, "dqk": 256, "dhv": 512}
    best = runtime_optimal_chunk(512, 0.5, gpu.intensity)
    at = seconds(gpu, 1, SIG, L=best * np.array([0.9, 1.0, 1.1]), **shape)
    assert at[1] < min(at[0], at[2])


def test_intensities_are_those_of_table_18():
    assert [round(ACCELERATORS[name].intensity) for name in ("V100", "A100", "H100", "B200")] == [133, 161, 295, 292]


def test_the_roof_has_two_sides():
    gpu = Accelerator("x", 100.0, 10.0, "test")
    assert gpu.attainable(np.array([1.0, 10.0, 50.0])).tolist() == [10.0, 100.0, 100.0]
    with pytest.raises(ValueError, match="bandwidth of x: got 0, it is above 0"):
        Accelerator("x", 1.0, 0, "test")


def test_this_machine_is_measured_on_the_spot():
    here = measured("cpu")
    assert here.flops > 1e9
    assert here.bandwidth > 1e8
    assert here.name.endswith(", measured")


def test_what_cannot_be_added_is_said(capsys, monkeypatch, tmp_path):
    assert main(["analyze", "theory", "--own", "mine", "0", "1e12", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "tfla: error: flops of mine: got 0.0, it is above 0\n"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["analyze", "theory", "--measure", "cuda", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "tfla: error: there is no cuda device here to measure\n"


def test_figures_have_the_stored_points_and_the_users_accelerator(tmp_path):
    config = theory.Config(out=tmp_path, results=RESULTS, own=(("mine", 4e14, 1e12),))
    found = theory.figures(config)
    assert [f.name for f in found] == [*(f"fig{n}" for n in range(17, 23)), "time_bounds"]
    assert all(isinstance(f, Figure) and f.path.exists() for f in found)
    with (tmp_path / "fig17.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(r["what"] == "theory, mine" for r in rows)
    points = {(r["what"], int(float(r["L"]))): float(r["seconds"]) for r in rows if r["what"].startswith("measured, ")}
    result = results.read(RESULTS / "fig5.json")
    named = {"tfla mLSTMsig", "tfla mLSTMsig, triton tfla"}
    stored = {
        r["x"]: r["seconds"]
        for r in result["rows"]
        if r["name"] in named and r["direction"] == "forward" and r.get("implementation") == "triton tfla"
    }
    assert stored
    assert all(points["measured, tfla mLSTMsig, triton tfla", x] == seconds for x, seconds in stored.items())


def test_without_measurements_their_figures_are_missing(tmp_path):
    config = theory.Config(out=tmp_path, results=tmp_path)
    for draw, name in ((theory.roofline, "fig19"), (theory.rate_and_time, "fig20")):
        found = draw(config)
        assert isinstance(found, Missing)
        assert found.name == name
        assert f"tfla bench gpu fig5 --out {tmp_path / 'fig5.json'}" in found.why
    assert "There are no measured points here" in theory.runtime(config).caption
