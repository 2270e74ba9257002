"""The benchmark of the operator on several processes, on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_on_processes

import tfla
from tfla.bench import parallel_operator
from tfla.bench.commands import bench
from tfla.bench.suites import SUITES
from tfla.measure.problem import Problem

PROBLEM = Problem(2, 24, 4, 8, 16, dtype="float64", device="cpu")


def whole(x: torch.Tensor) -> torch.Tensor:
    """The steps of all processes."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def errors() -> list[float]:
    """Return the relative errors of h and gradients of each implementation against those of one process."""
    found = []
    for gate in ("exp", "sigmoid"):
        works = [getattr(parallel_operator, name)(PROBLEM, gate) for name in ("context_parallel", "all_to_all")]
        inputs = [x.requires_grad_() for x in works[0].inputs]
        leaves = [whole(x.detach()).requires_grad_() for x in inputs]
        exact = tfla.mlstm(*leaves, input_gate=gate)
        cotangent = torch.randn_like(exact[:, :12]) + dist.get_rank()
        expected = [exact, *torch.autograd.grad(exact, leaves, whole(cotangent))]
        for work in works:
            h = work.run(*inputs)
            ours = [h, *torch.autograd.grad(h, inputs, cotangent)]
            found += [
                ((whole(a.detach()) - b.detach()).norm() / b.detach().norm()).item()
                for a, b in zip(ours, expected, strict=True)
            ]
    return found


def test_every_way_gives_the_results_of_one_process() -> None:
    found = run_on_processes(2, errors)
    assert len(found) == 2 * 2 * 6
    assert max(found) < 1e-12


def _refusals() -> list[str]:
    found = []
    for sizes in ({"T": 25}, {"H": 3}):
        with pytest.raises(ValueError, match="of the 2 processes") as refusal:
            parallel_operator.context_parallel(replace(PROBLEM, **sizes), "exp")
        found.append(str(refusal.value))
    return found


def test_sizes_that_cannot_be_shared_are_named() -> None:
    assert run_on_processes(2, _refusals) == [
        "T: got 25, expected a multiple of the 2 processes",
        "H: got 3, expected a multiple of the 2 processes",
    ]


def test_a_run_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tyro")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "results" / "smoke_context.json"
    words = ["--device", "cpu", "--repeats", "2", "--warmup", "1", "--pause", "0", "--sustained", "0"]
    words += ["--lengths", "64", "--only", "mLSTMsig"]
    assert bench(["gpu", "smoke_context", *words, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["direction"], row.get("processes", 1)) for row in rows] == [
        (f"tfla mLSTMsig, {name}", direction, count)
        for name, count in (("1 GPU", 1), ("2 GPUs", 2), ("2 GPUs, all-to-all over heads", 2))
        for direction in ("forward", "forward + backward")
    ]
    one, _, two, *_ = rows
    assert two["floor_seconds"] == pytest.approx(one["floor_seconds"] / 2)
    page = tmp_path / "docs" / "performance.md"
    assert bench(["report", "--results", str(out.parent), "--out", str(page)]) == 0
    text = page.read_text()
    assert "| forward, times as fast as one GPU, by T | 64 |" in text
    assert f"| tfla mLSTMsig, 2 GPUs | {one['seconds'] / two['seconds']:.2f} |" in text


def test_the_suite_has_every_entry_for_both_gates() -> None:
    suite = SUITES["context_parallel"]
    assert suite.xs == (65_536, 262_144, 1_048_576)
    for gate, entries in (("sig", suite.entries[:3]), ("exp", suite.entries[3:])):
        assert [entry.processes for entry in entries] == [1, 2, 2]
        assert all(entry.name.startswith(f"tfla mLSTM{gate}") and entry.ours for entry in entries)
        problems = {suite.problem(entry, 65_536, "meta") for entry in entries}
        assert problems == {Problem(1, 65_536, 16, 128, 256, device="meta")}
