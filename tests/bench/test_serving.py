"""The benchmarks of speculative decoding and of first calls, and their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tfla.bench import first_calls, gpu_report, page_tables, schema, speculation, stored
from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH, FORWARD, Problem, call_of
from tfla.ops.warmup import FORMS

ROOT = Path(__file__).parents[2]
PLACE = {"environment": {"device": "a device", "date": "2026-01-01"}}


def test_every_draft_gives_the_same_text() -> None:
    assert [e.options["draft"] for e in SUITES["speculate"].entries] == list(get_args(speculation.Draft))
    problem, texts = Problem(2, 12, 2, 8, 16, dtype="float32", device="cpu"), []
    for draft in speculation.DRAFTS:
        torch.manual_seed(0)
        work = speculation.text(problem, draft, blocks=1, vocab=40)
        assert work.facts["tokens_per_second"] > 0
        texts.append(call_of(work, FORWARD)())
    assert texts[0].shape == (2, 12)
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_operators_have_gradients(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "first_calls", lambda *_: [])
    problem = Problem(2, 6, 2, 8, 16, dtype="float32", device="cpu")
    work = first_calls.operator(problem, form)
    assert call_of(work, FORWARD)().shape == (2, 6, 2, 16)
    assert all(gradient.isfinite().all() for gradient in call_of(work, BOTH)())


def test_first_calls_are_those_of_another_process() -> None:
    assert first_calls.first_calls(Problem(1, 4, 1, 4, 4, dtype="float32", device="cpu"), "gla") == []


def test_pages_have_the_tables_of_the_stored_results() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert page_tables.renew(text, stored.load(ROOT / "benchmarks" / "results")) == text
    assert {"speculate", "first_calls"} <= {mark[2] for mark in page_tables.MARK.finditer(text)}


def test_tables() -> None:
    empty = page_tables.speculate({})
    assert empty.splitlines()[2] == "| none | not run | not run |"
    rows = [{"name": "tfla mLSTMexp, draft: none", "x": 8, "direction": FORWARD, "tokens_per_second": 1234.5}]
    found = page_tables.speculate({"speculate": {**PLACE, "rows": rows}})
    assert found.splitlines()[0].startswith("| draft (a device, 2026-01-01) | tokens/s, batch 1 |")
    assert found.splitlines()[2] == "| none | not run | 1,234 |"
    assert "| `gla` | not run | - | - | - |" in page_tables.first_calls({})
    calls = [{"seconds": seconds, "kernels": n} for n, seconds in enumerate((2.04, 5.0, 0.5), 1)]
    row = {"name": "tfla gla", "x": 4096, "direction": FORWARD, "seconds": 0.1, "first_calls": calls}
    schema.check_fields(row, "", {}, schema.ROW)
    assert "| `gla` | a device, 2026-01-01 | 2.0 (1) | 5.0 (2) | 0.5 (3) |" in page_tables.first_calls(
        {"first_calls": {**PLACE, "rows": [row]}}
    )
    (own,) = gpu_report._other_tables([row], "T")
    assert own.splitlines()[2] == "| tfla gla | 2.0 (1) | 5.0 (2) | 0.5 (3) |"
