"""README.md: its examples run as they stand, its tables are those of the stored results, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), str(README), "exec"), {})


def test_tables_are_those_of_the_results() -> None:
    pytest.importorskip("tyro")
    from tfla.bench import page_tables, stored
    from tfla.bench.results import read

    folder = README.parent / "benchmarks" / "results"
    results = stored.load(folder) | {"jax": read(folder / "jax.json")}
    assert page_tables.renew(TEXT, results) == TEXT
    stale = re.sub(r"(?<=mLSTMsig\*\* \| )[0-9.]+", "0.001", TEXT)
    assert stale != TEXT
    assert page_tables.renew(stale, results) == TEXT


def test_is_two_screens() -> None:
    assert len(TEXT.splitlines()) <= 100


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    assert len(links) > 8
    assert [link for link in links if not (README.parent / link).exists()] == []
