"""`tfla bench`: counts, a run at small size, the page it is rendered into."""

import json

import pytest

pytest.importorskip("tyro")
pytest.importorskip("tqdm")

from tfla._util.errors import UserError
from tfla.bench import cpu, report
from tfla.bench.commands import bench
from tfla.measure.roofline import backward_flops, forward_flops


def test_roofline_is_what_the_products_of_a_tile_cost():
    """Counted again product by product: rows x inner x columns, those inside a tile at half."""
    T, H, K, V, L = 128, 3, 5, 7, 64

    def product(rows, inner, columns, share=1.0):
        return 2 * rows * inner * columns * share

    tiles = T // L
    forward = product(L, K, L, 0.5) + product(L, L, V, 0.5) + product(L, K, V) + product(K, L, V)
    backward = (
        product(L, K, L, 0.5) + product(L, V, L, 0.5)  # P and dP
        + product(L, L, V, 0.5) + 2 * product(L, L, K, 0.5)  # dv; dq and dk
        + 2 * product(K, L, V)  # states and their cotangents
        + 3 * product(L, K, V)  # of dq, dk, dv with a state
    )  # fmt: skip
    assert forward_flops(T, H, K, V, L) == H * tiles * forward
    assert backward_flops(T, H, K, V, L) == H * tiles * backward


def test_a_run_and_its_page(tmp_path, capsys):
    out = tmp_path / "results" / "cpu.json"
    args = ["--lengths", "64", "100", "--repeats", "2", "--no-memory", "--threads", "1", "--out", str(out)]
    assert bench(["cpu", *args]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    timed = [r for r in rows if "seconds" in r]
    names = {"tfla mLSTMexp", "tfla mLSTMsig", "attention 8 x 128"}
    assert names <= {r["name"] for r in timed}
    assert all(r["min"] <= r["seconds"] <= r["max"] and r["samples"] == 2 for r in timed)
    assert all(r["ratio"] == pytest.approx(r["seconds"] / r["floor_seconds"]) for r in timed)
    assert "tfla mLSTMexp" in printed

    page = tmp_path / "performance.md"
    assert bench(["report", "--results", str(out.parent), "--out", str(page)]) == 0
    text = page.read_text()
    assert "T = 64" in text
    assert f"{timed[0]['seconds'] * 1e3:,.1f}" in text


def test_an_implementation_that_fails_is_a_row_that_says_how(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    found = {"broken": (broken, broken), "absent": "not installed (absent)"}
    monkeypatch.setattr(cpu, "implementations", lambda T, config: found)
    rows = cpu.measure(64, cpu.CpuBench(repeats=1), lambda text: None)
    assert {r["error"] for r in rows} == {"RuntimeError: no such kernel", "not installed (absent)"}


def test_unknown_benchmark_prints_usage(capsys):
    assert bench(["gpu?"]) == 2
    assert "usage: tfla bench" in capsys.readouterr().err


def test_report_without_results_says_which_file_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"tfla bench cpu.*cpu\.json"):
        report.run(report.Report(tmp_path, tmp_path / "out.md"))
