"""The claims: values from stored results, sentences for missing results, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla.measure.accelerators import Accelerator
from tfla.paper import benchmark_claims, claims, counting_claims, theory_claims
from tfla.paper.algorithms import get
from tfla.paper.claims_template import fill, insert, templates
from tfla.paper.report_types import Options
from tfla.paper.sections import SECTIONS
from tfla.paper.time_bounds import algorithm_of, bounds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


NOT_MEASURED = "This was not measured: "


def test_missing_measurements_are_named(tmp_path):
    absent = [c.here for c in benchmark_claims.claims(Options(results=tmp_path))]
    assert all(text.startswith(NOT_MEASURED) for text in absent)
    theory = theory_claims.claims(Options(results=tmp_path))
    assert [c.title for c in theory if c.here.startswith(NOT_MEASURED)] == [
        "The measured optimum lies below the theory's", "FLOP/s are not what to choose a chunk size by",
        "Theory and measurement",
    ]  # fmt: skip
    counting = counting_claims.claims(Options(results=tmp_path))
    assert not any(c.here.startswith(NOT_MEASURED) for c in counting)
    assert "have not been measured with a profiler" in counting[-1].here


def test_every_claim_of_the_page_is_filled():
    found = [claim for section in SECTIONS.values() for claim in section.claims(section.config(results=RESULTS))]
    assert [claim.title for claim in found] == [template.title for template in templates().values()]
    for claim in found:
        assert not claim.here.startswith(NOT_MEASURED)
        for text in (claim.paper, claim.here):
            assert text.endswith((".", ")."))
            assert "None" not in text
            assert "nan" not in text
            assert not set("{}[]") & set(text)


def test_the_page_in_docs_is_that_of_the_stored_results(tmp_path):
    page = claims.write(Options(out=tmp_path, results=RESULTS)).read_text(encoding="utf-8")
    assert page == (RESULTS.parents[1] / "docs" / "claims.md").read_text(encoding="utf-8")


def test_lines_depend_on_their_values():
    text = "It takes {seconds} s.\n[fast] It is fast,\n  with {share} %.\n[not fast] It is slow.\nIt holds."
    assert insert(text, {"seconds": "1", "fast": True, "share": "9"}) == "It takes 1 s. It is fast, with 9 %. It holds."
    assert insert(text, {"seconds": None, "fast": None, "share": None}) == "It is slow. It holds."
    with pytest.raises(KeyError, match="share"):
        insert(text, {"seconds": "1", "fast": True})
    with pytest.raises(KeyError, match="no claims nosuch"):
        fill({"nosuch": {}})


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
    assert "limit_chunk of mlstm_kernels takes 1.50 to 2.50 times as long as its xl_chunk in the forward pass" in here
    assert "Forward and backward together were not measured, because one of the two raises RuntimeError." in here


def test_attention_is_beaten_from_where_on(tmp_path):
    both = "forward + backward"
    ours, theirs = benchmark_claims.SIG_XL, benchmark_claims.ATTENTION
    rows = [timed(theirs, T, T / 1024, both) for T in (512, 1024, 2048, 4096)]
    rows += [timed(ours, T, 1.5, both) for T in (512, 1024, 2048, 4096)]
    (tmp_path / "fig4.json").write_text(json.dumps(result("fig4", *rows)))
    claim = next(c for c in benchmark_claims.claims(Options(results=tmp_path)) if "attention" in c.title)
    assert claim.table.rows == [[ours, "2,048", "4,096", "3"]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"name": "tfla mLSTMsig", "implementation": "hopper fused", "details": {"tile": "64", "segment": "512"}},
         ("fused", {"L": 64, "segment": 512})),
        ({"name": "tfla mLSTMexp", "implementation": "triton fused", "details": {"tile": "32", "segment": "256"}},
         ("segments", {"L": 32, "segment": 256})),
        ({"name": "tfla mLSTMexp", "implementation": "triton tfla", "details": {"chunk": "256"}},
         ("chunkwise", {"L": 256})),
        ({"name": "mlstm_kernels mLSTMsig xl_chunk 128"}, ("chunkwise", {"L": 128})),
        ({"name": "fla simple_gla chunk"}, None),
    ],
)  # fmt: skip
def test_implementations_are_counted_by_their_algorithms(row, expected):
    row = row | {"T": 512}
    assert algorithm_of(row) == expected


def test_bounds_are_those_of_the_form():
    gpu = Accelerator("x", 1e12, 1e9, "test")
    row = {"name": "mlstm_kernels mLSTMsig xl_chunk 128", "direction": "forward + backward"}
    shape = {"T": 512, "dqk": 16, "dhv": 32}
    algorithms = [get("chunkwise", "sig", direction) for direction in ("forward", "backward")]
    least, most = bounds(row | shape | {"B": 3, "H": 5}, gpu)
    times = [(f.flops(L=128, **shape) / 1e12, f.bytes(L=128, **shape) / 1e9) for f in algorithms]
    assert least == pytest.approx(15 * sum(map(max, times)))
    assert most == pytest.approx(15 * sum(map(sum, times)))
