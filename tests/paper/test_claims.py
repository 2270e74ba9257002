"""Claims read stored results as they are, and say what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla.measure.accelerators import Accelerator
from tfla.paper import benchmark_claims, counting_claims, theory_claims
from tfla.paper.algorithms import get
from tfla.paper.report_types import Options
from tfla.paper.time_bounds import algorithm_of, bounds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_what_is_not_measured_is_said(tmp_path):
    absent = [c.here for c in benchmark_claims.claims(Options(results=tmp_path))]
    assert all(text.startswith("not measured: ") for text in absent)
    theory = theory_claims.claims(Options(results=tmp_path))
    assert [c.title for c in theory if c.here.startswith("not measured: ")] == [
        "The measured optimum lies below the theory's", "FLOP/s are not what to choose a chunk size by",
        "Theory and measurement",
    ]  # fmt: skip
    assert not any("not measured" in c.here for c in counting_claims.claims(Options(results=tmp_path)))


def result(suite, *rows):
    return {
        "suite": suite, "title": "t", "axis": "T", "panels": [], "config": {"repeats": 1},
        "environment": {"device": "a GPU", "date": "2026-01-01", "versions": {}}, "rows": list(rows),
    }  # fmt: skip


def timed(name, x, seconds, direction="forward", **more):
    return {"name": name, "x": x, "direction": direction, "seconds": seconds} | more


def test_ratios_are_those_of_the_rows(tmp_path):
    limit, xl = benchmark_claims.EXP_LIMIT, benchmark_claims.EXP_XL
    rows = [timed(limit, 512, 3.0), timed(xl, 512, 2.0), timed(limit, 1024, 5.0), timed(xl, 1024, 2.0)]
    rows += [timed(limit, 512, 4.0, "forward + backward")]
    rows += [{"name": xl, "x": 512, "direction": "forward + backward", "error": "RuntimeError: no: way"}]
    (tmp_path / "fig4.json").write_text(json.dumps(result("fig4", *rows)))
    here = benchmark_claims.claims(Options(results=tmp_path))[0].here
    assert "takes 1.50 to 2.50 times as long as xl_chunk forward" in here
    assert f"not measured for {limit} and {xl}, forward + backward: RuntimeError there" in here


def test_attention_is_beaten_from_where_on(tmp_path):
    both = "forward + backward"
    ours, theirs = benchmark_claims.SIG_XL, benchmark_claims.ATTENTION
    rows = [timed(theirs, T, T / 1024, both) for T in (512, 1024, 2048, 4096)]
    rows += [timed(ours, T, 1.5, both) for T in (512, 1024, 2048, 4096)]
    (tmp_path / "fig4.json").write_text(json.dumps(result("fig4", *rows)))
    here = next(c for c in benchmark_claims.claims(Options(results=tmp_path)) if "attention" in c.title).here
    assert f"{ours} from T = 2,048 on (3 times at 4,096)" in here


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"name": "tfla mLSTMsig", "way": "hopper fused", "details": {"tile": "64", "segment": "512"}},
         ("fused", {"L": 64, "segment": 512})),
        ({"name": "tfla mLSTMexp", "way": "triton fused", "details": {"tile": "32", "segment": "256"}},
         ("segments", {"L": 32, "segment": 256})),
        ({"name": "tfla mLSTMexp", "way": "triton tfla", "details": {"chunk": "256"}}, ("chunkwise", {"L": 256})),
        ({"name": "mlstm_kernels mLSTMsig xl_chunk 128"}, ("chunkwise", {"L": 128})),
        ({"name": "fla simple_gla chunk"}, None),
    ],
)  # fmt: skip
def test_contenders_are_counted_as_what_they_are(row, expected):
    row = row | {"T": 512}
    assert algorithm_of(row) == expected


def test_bounds_are_those_of_the_form():
    gpu = Accelerator("x", 1e12, 1e9, "test")
    row = {"name": "mlstm_kernels mLSTMsig xl_chunk 128", "direction": "forward + backward"}
    shape = {"T": 512, "dqk": 16, "dhv": 32}
    forms = [get("chunkwise", "sig", direction) for direction in ("forward", "backward")]
    least, most = bounds(row | shape | {"B": 3, "H": 5}, gpu)
    times = [(f.flops(L=128, **shape) / 1e12, f.bytes(L=128, **shape) / 1e9) for f in forms]
    assert least == pytest.approx(15 * sum(map(max, times)))
    assert most == pytest.approx(15 * sum(map(sum, times)))
