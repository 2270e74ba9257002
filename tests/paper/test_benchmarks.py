"""The paper's benchmark figures from stored results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tfla.bench.gpu_report import milliseconds
from tfla.paper import benchmarks
from tfla.paper.report_types import Figure, Missing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the results of one figure, as of two runs."""
    target = tmp_path / "results"
    target.mkdir()
    stored = json.loads((RESULTS / "fig4.json").read_text())
    for name, attention in (("fig4", False), ("fig4_attention", True)):
        rows = [r for r in stored["rows"] if r["name"].startswith("attention") == attention]
        (target / f"{name}.json").write_text(json.dumps(stored | {"rows": rows}))
    return target


def test_what_is_stored_is_drawn_and_what_is_not_is_said(tmp_path, folder):
    found = benchmarks.figures(benchmarks.Config(out=tmp_path, results=folder))
    assert [f.name for f in found] == list(benchmarks.CAPTIONS)
    (drawn,) = (f for f in found if isinstance(f, Figure))
    assert drawn.name == "fig4"
    missing = {f.name: f.why for f in found if isinstance(f, Missing)}
    assert f"tfla bench gpu fig12 --out {folder / 'fig12.json'}" in missing["fig12"]

    with drawn.data_path.open() as file:
        rows = {(r["name"], r["direction"], r["x"]): r for r in csv.DictReader(file)}
    for name in ("fig4", "fig4_attention"):
        timed = [r for r in json.loads((folder / f"{name}.json").read_text())["rows"] if "seconds" in r]
        assert timed
        assert all(float(rows[r["name"], r["direction"], str(r["x"])]["seconds"]) == r["seconds"] for r in timed)
        assert f"{name}.json: " in drawn.caption
    xs = sorted({int(at) for name, direction, at in rows if name == "tfla mLSTMsig" and direction == "forward"})
    x = xs[len(xs) // 2]
    ours = rows["tfla mLSTMsig", "forward", str(x)]
    assert f"forward at T = {x:,}, ms: tfla mLSTMsig {milliseconds(float(ours['seconds']))}; " in drawn.caption
    assert "mLSTMsig, triton fused" not in drawn.caption
