"""The results of several runs of one setup are merged into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfla.bench import results
from tfla.bench.stored import load, merge

Row = dict[str, Any]


def run(date: str, *rows: Row) -> Row:
    return {"environment": {"date": date}, "config": {"repeats": 3}, "rows": list(rows)}


def cell(name: str, x: int, direction: str, **more: Any) -> Row:
    return {"name": name, "x": x, "direction": direction} | more


def test_the_latest_run_that_measured_a_cell_has_it() -> None:
    """Sizes that a later run did not finish are taken from the earlier run; a failure replaces no time."""
    old = run(
        "2026-01-01", cell("a", 1, "forward", seconds=1.0), cell("a", 1, "backward", seconds=2.0),
        cell("a", 4, "forward", seconds=3.0), {"name": "b", "error": "not installed (b)"},
        {"name": "c", "error": "not installed (c)"},
    )  # fmt: skip
    new = run(
        "2026-01-02", cell("a", 2, "forward", seconds=4.0), cell("a", 1, "forward", seconds=5.0),
        cell("a", 4, "forward", error="stopped"), cell("b", 1, "forward", seconds=6.0),
    )  # fmt: skip
    found = [(r["name"], r.get("x"), r.get("seconds")) for r in merge({"new": new, "old": old})["rows"]]
    assert [cell for cell in found if cell[0] == "a"] == [("a", 1, 2.0), ("a", 1, 5.0), ("a", 2, 4.0), ("a", 4, 3.0)]
    assert [cell for cell in found if cell[0] != "a"] == [("b", 1, 6.0), ("c", None, None)]


def test_what_is_picked_by_default_has_no_older_row_of_its_own() -> None:
    """Neither a time nor a refusal; one of the same run or a later one stays."""
    by_x, by_y = ({"implementation": f"{backend} fused"} for backend in "xy")
    refusal = {"error": "ValueError: backend: 'x' cannot run these inputs: why"}
    old = run(
        "2026-01-01", cell("a", 1, "forward", seconds=1.0, **by_y), cell("a, x fused", 1, "forward", **refusal),
        cell("a, x fused", 2, "forward", **refusal), cell("a, x fused", 3, "forward", seconds=3.0),
        cell("a", 4, "forward", seconds=4.0, **by_x),
    )  # fmt: skip
    new = run(
        "2026-01-02", cell("a", 1, "forward", seconds=2.0, **by_x),
        cell("a", 3, "forward", seconds=5.0, **by_x), cell("a, x fused", 4, "forward", seconds=6.0),
    )  # fmt: skip
    found = [(r["name"], r["x"], r.get("seconds")) for r in merge({"new": new, "old": old})["rows"]]
    assert sorted(found, key=str) == [
        ("a", 1, 2.0), ("a", 3, 5.0), ("a", 4, 4.0), ("a, x fused", 2, None), ("a, x fused", 4, 6.0)
    ]  # fmt: skip


@pytest.mark.parametrize(("suite", "bounded"), [("fig4", True), ("host", False)])
def test_rooflines_of_the_device_do_not_bound_the_host(suite: str, bounded: bool, tmp_path: Path) -> None:
    result = run("2026-01-01", cell("a", 1, "forward", seconds=1.0, floor_seconds=0.5, sustained_floor_seconds=0.5))
    result["environment"]["device"] = "a GPU"
    (tmp_path / "found.json").write_text(json.dumps(result | {"suite": suite}))
    (row,) = load(tmp_path)["found"]["rows"]
    assert ("floor_seconds" in row, "sustained_floor_seconds" in row) == (bounded, bounded)
    assert row["seconds"] == 1.0


def test_results_of_earlier_versions_have_the_keys_of_today(tmp_path: Path) -> None:
    row = cell("a", 1, "forward", seconds=1.0)
    old = {"config": {"peers": False, "repeats": 3}, "rows": [row | {"way": "triton fused"}, "broken"], "kind": "way"}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert results.read(tmp_path / "old.json") == {
        "config": {"baselines": False, "repeats": 3}, "rows": [row | {"implementation": "triton fused"}, "broken"],
        "kind": "way",
    }  # fmt: skip
