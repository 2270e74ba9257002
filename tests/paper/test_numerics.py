"""The measurement of errors against float64, and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfla.paper.numerics import run
from tfla.paper.numerics.figures import Config, claims, compare_with_the_paper, csv_rows, draw_errors, figures
from tfla.paper.numerics.measure import ROUNDING, Grid, implementations, measure
from tfla.paper.numerics.problem import REGIMES, Setting, draw, relative_errors, rounded, solve
from tfla.paper.report_types import Missing, stored

SMALL = Grid(T=96, chunk_sizes=(32, 64), lengths=(48, 96), heads=1, dqk=8, dhv=8)


def test_errors_of_a_dtype() -> None:
    """Check that every setting has all quantities, with errors of the size of the dtype's rounding."""
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 0.1)):
        rows = list(measure("chunkwise segmented", dtype, SMALL, "cpu"))
        assert not any("failed" in row for row in rows)
        assert {row["regime"] for row in rows} == set(REGIMES)
        assert {row["chunk_size"] for row in rows} == {None, 32, 64}
        assert {row["T"] for row in rows} == {48, 96}
        for row in rows:
            assert {"h", "dq", "dk", "dv", "di", "df"} <= set(row["error"])
            assert ("dn" in row["error"]) == (row["gate"] == "exp" and row["regime"] != "gaussian")
            assert bound * 1e-6 < row["error"]["h"] < bound, row


def test_the_truth_is_the_recurrence() -> None:
    for row in measure("chunkwise segmented", "float64", SMALL, "cpu"):
        assert max(row["error"].values()) < 1e-9, row


def test_rounding_alone() -> None:
    """Compare with a computation in float64 from rounded inputs to rounded outputs."""
    setting = Setting("sigmoid", "model", 32, 1, 4, 4)
    (row,) = [r for r in measure(ROUNDING, "bfloat16", Grid(32, (), (), 1, 4, 4), "cpu") if r["regime"] == "model"
              and r["gate"] == "sigmoid"]  # fmt: skip
    whole = draw(setting)
    truth = solve(whole, "sigmoid", "reference", "recurrent")
    x = {name: t.double() for name, t in rounded(whole, torch.bfloat16).items()}
    h = solve(x, "sigmoid", "reference", "recurrent")["h"].bfloat16()
    assert row["error"]["h"] == pytest.approx(relative_errors({"h": h}, {"h": truth["h"]})["h"], rel=1e-6)


def test_what_a_way_raises_is_its_row() -> None:
    rows = list(measure("hopper fused", "float32", Grid(32, (), (), 1, 4, 4), "cpu"))
    assert all("cannot run these inputs" in row["failed"] for row in rows)


def test_implementations() -> None:
    found = implementations("cpu")
    assert ("chunkwise segmented", "float64") in found
    assert (ROUNDING, "bfloat16") in found
    assert not any(implementation.startswith("hopper") for implementation, _ in found)


def test_run_writes_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run, "implementations", lambda device: [(ROUNDING, "bfloat16"), ("chunkwise segmented", "bfloat16")]
    )
    result = run.run("cpu", SMALL, 1)
    assert result["environment"]["device"]
    assert {row["implementation"] for row in result["rows"]} == {ROUNDING, "chunkwise segmented"}
    assert len(csv_rows(result["rows"])) == len(result["rows"])


def test_no_such_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--device", "nowhere", "--out", str(tmp_path / "x.json")])
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_figures_of_the_stored_result(tmp_path: Path) -> None:
    """Draw one figure of each kind, because drawing takes long."""
    config = Config(out=tmp_path)
    result = stored(config, "numerics")
    rows = [row for row in result["rows"] if row["regime"] == "model" and row["dtype"] == "bfloat16"]
    draw_errors(
        config, result, "lengths", rows, axis=lambda row: row["T"], places=[512, 2048, 8192, 32768, 65536], label="T",
        title="title", caption="caption",
    )  # fmt: skip
    assert len((tmp_path / "lengths.csv").read_text().splitlines()) == 1 + len(rows)
    compare_with_the_paper(config, result)
    assert "the paper's authors" in (tmp_path / "numerics_paper.csv").read_text()


def test_claims_of_the_stored_result() -> None:
    assert [c.title for c in claims(Config())] == ["The chunk size does not affect the accuracy", "Gradients"]


def test_no_stored_result(tmp_path: Path) -> None:
    (found,) = figures(Config(out=tmp_path, results=tmp_path))
    assert isinstance(found, Missing)
    assert "tfla.paper.numerics.run" in found.why
    assert claims(Config(results=tmp_path)) == []
