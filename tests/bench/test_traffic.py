"""The reading of a profiler's counters, and the counts of algorithms beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla.bench import traffic
from tfla.paper.algorithms import get
from tfla.paper.profiled_traffic import claim_values, compare_with_counts, draw_profiled_traffic
from tfla.paper.report_types import Missing, Options

REPORT = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","7","before","1","1"
"1","7","spin_kernel(long)","64","0"
"2","7","gates(float *)","1,000","24"
"3","7","scan","3000","2000.0"
"4","7","void spin_kernel(long)","64","0"
"""


def test_kernels_between_marks() -> None:
    first, second = traffic.kernels(REPORT)
    assert first == [{"name": "gates", "read": 1000, "written": 24}, {"name": "scan", "read": 3000, "written": 2000}]
    assert second == []


def test_reports_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="ncu counted nothing: ==ERROR== ERR_NVGPUCTRPERM"):
        traffic.kernels("==PROF== x\n==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(ValueError, match="got 2 calls, expected 1"):
        traffic.with_kernels([{}], REPORT)


def test_without_a_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert traffic.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "needs an NVIDIA GPU and ncu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def call(direction: str, details: dict[str, str], read: float, written: float) -> traffic.Row:
    kernels = [{"name": "a", "read": read, "written": 0}, {"name": "b", "read": 0, "written": written}]
    shape = {"B": 2, "T": 256, "H": 3, "dqk": 16, "dhv": 32}
    return {"gate": "exp", "direction": direction, "implementation": "triton fused", "details": details, **shape} | {
        "kernels": kernels
    }


def test_comparison(tmp_path: Path) -> None:
    """The count is that of the form which ran, times batch and heads."""
    sizes = {"T": 256, "L": 64, "segment": 128, "dqk": 16, "dhv": 32}
    parts = {"tile": "64", "segment": "128"}
    counted = {d: 6 * float(get("segments", "exp", d).bytes(**sizes)) for d in traffic.DIRECTIONS}
    rows = [call("forward", parts, counted["forward"], counted["forward"] / 2),
            call("backward", parts, counted["backward"], 0), call("forward", {}, 1, 1)]  # fmt: skip
    env = {"device": "a GPU", "date": "2026-01-01"}
    found = compare_with_counts({"rows": rows})
    assert [r["measured / counted"] for r in found] == pytest.approx([1.5, 1.0])
    assert [r["counted"] for r in found] == pytest.approx([counted["forward"], counted["backward"]])
    config = Options(out=tmp_path, results=tmp_path)
    assert isinstance(draw_profiled_traffic(config, "c"), Missing)
    assert not claim_values(config)["profiled"]
    (tmp_path / "traffic.json").write_text(json.dumps({"environment": env, "rows": rows}))
    assert claim_values(config)["table"].rows == [["triton fused", "1.50 to 1.50", "1.00 to 1.00"]]
    assert draw_profiled_traffic(config, "c").name == "traffic"
