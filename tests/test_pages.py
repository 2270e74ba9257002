"""Pages that are generated are what their commands make of the stored results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from tfla.cli import main

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("claims.md", ["analyze", "claims", "--results", str(RESULTS), "--out", "."]),
        ("scale.md", ["analyze", "scale", "--results", str(RESULTS), "--out", "drawn", "--page", "scale.md"]),
    ],
)
def test_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert not main(command)
    assert (tmp_path / page).read_text() == (DOCS / page).read_text()


def test_report_and_its_tables_in_other_pages_are_current(tmp_path: Path) -> None:
    pages = {name: (DOCS / name).read_text() for name in ("mamba.md", "quickstart.md", "serving.md")}
    for name, page in pages.items():
        emptied = re.sub(r"(<!-- table: \w+ -->\n)(\|.*\n)+", r"\1", page)
        assert emptied != page
        (tmp_path / name).write_text(emptied)
    (tmp_path / "other.md").write_text("no table\n")
    assert not main(["bench", "report", "--results", str(RESULTS), "--out", str(tmp_path / "performance.md")])
    pages["performance.md"] = (DOCS / "performance.md").read_text()
    assert {name: (tmp_path / name).read_text() for name in pages} == pages
    assert (tmp_path / "other.md").read_text() == "no table\n"
