"""Benchmarks of several processes: `tfla bench gpu` with training steps that they share, on the CPU."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_on_processes

from tfla.bench import gpu, gpu_report, worker_group
from tfla.bench.commands import bench
from tfla.bench.entries import VARIANTS, Entry
from tfla.bench.options import GpuBench
from tfla.bench.parallel_training import step
from tfla.bench.stream_profile import Kernel, after_mark, length, summary, union
from tfla.bench.suites import SUITES, Suite
from tfla.measure.problem import FORWARD, STEP, Problem, Work
from tfla.nn import ModelConfig

QUICK = {"device": "cpu", "repeats": 2, "warmup": 1, "pause": 0.0, "sustained": 0.0}
TINY = {"mixer": "mlstm_exp", "blocks": 2, "vocab": 30}
PROBLEM = Problem(4, 48, 2, 8, 16, dtype="float32", device="cpu")
LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"dp_shard": 2}},
    {"layout": {"cp": 2}},
    {"layout": {"cp": 2}, "activation_checkpointing": True},
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a run starts use one thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def losses(options: dict[str, Any]) -> list[float]:
    """Return the losses of three steps."""
    return losses_of(step(PROBLEM, **TINY, **options))


def losses_of(work: Work) -> list[float]:
    """Return the losses of three steps, which are read one step late."""
    assert work.run(*work.inputs) is None
    return [work.run(*work.inputs) for _ in range(3)]


def _all_losses() -> list[list[float]]:
    return [losses(options) for options in LAYOUTS]


def test_every_layout_trains_the_model_of_one_process() -> None:
    expected = losses({})
    assert expected == sorted(expected, reverse=True)
    assert losses({"activation_checkpointing": True}) == pytest.approx(expected, rel=1e-5)
    for found in run_on_processes(2, _all_losses):
        assert found == pytest.approx(expected, rel=1e-5)


def _losses_of_variants() -> dict[str, list[float]]:
    """Return the losses of each variant of FSDP2, under autocast where weights are gathered in bfloat16."""
    found = {}
    for name, options in VARIANTS.items():
        problem = replace(PROBLEM, dtype="bfloat16") if "gathered" in name else PROBLEM
        work = step(problem, **TINY, layout={"dp_shard": 2}, **options)
        found[name] = losses_of(work)
    return found


def test_every_variant_of_fsdp_trains_the_model_of_one_process() -> None:
    expected = losses({})
    found = run_on_processes(2, _losses_of_variants)
    assert {entry.name.split(", ", 2)[-1] for entry in SUITES["train_fsdp"].entries} >= found.keys()
    for name, each in found.items():
        rounded = "bfloat16" in name
        assert each == pytest.approx(expected, rel=2e-2 if rounded else 1e-5), name
        assert (max(abs(a - b) for a, b in zip(each, expected, strict=True)) > 1e-7) or not rounded, name


def test_a_step_is_profiled_after_it_is_warm() -> None:
    work = step(PROBLEM, **TINY, profile=True)
    assert work.facts["streams"] == summary([])  # there is no GPU in this test
    assert work.run(*work.inputs) < losses({})[2]  # it is the loss of the fourth step


def test_the_profile_says_what_is_exposed() -> None:
    kernels = [
        Kernel("gemm", 7, 0.0, 4.0), Kernel("gemm", 7, 5.0, 6.0), Kernel("copy", 7, 9.0, 9.5),
        Kernel("ncclDevKernel_AllGather", 20, 3.0, 5.5), Kernel("ncclDevKernel_ReduceScatter", 24, 6.0, 7.0),
    ]  # fmt: skip
    found = summary(kernels)
    assert {name: found[name] for name in ("seconds", "computing", "sending", "exposed", "idle")} == {
        "seconds": 9.5, "computing": 5.5, "sending": 3.5, "exposed": 2.0, "idle": 2.0,
    }  # fmt: skip
    assert found["streams"]["7"] == {"busy": 5.5, "kernels": 3, "longest": {"gemm": 5.0, "copy": 0.5}}
    assert list(found["streams"]) == ["7", "20", "24"]
    rows = [{"name": "tfla", "x": n, "direction": "training step", "streams": found} for n in (2, 3)]
    assert gpu_report._other_tables(rows, "sequences")[-1].splitlines() == [
        "| one step by streams, ms | sequences | whole | computes | sends | sends without computing | does neither |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| tfla | 2 | 9,500.0 | 5,500.0 | 3,500.0 | 2,000.0 | 2,000.0 |",
        "| tfla | 3 | 9,500.0 | 5,500.0 | 3,500.0 | 2,000.0 | 2,000.0 |",
    ]


def test_the_profile_is_that_of_the_second_step() -> None:
    first = [Kernel("gemm", 7, 0.0, 4.0), Kernel("ncclDevKernel_AllGather", 20, 3.0, 4.5)]
    spin = [Kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 7, at, at + 0.5) for at in (-1.0, 5.0)]
    second = [Kernel("gemm", 7, 5.5, 9.0), Kernel("ncclDevKernel_AllGather", 20, 6.0, 7.0)]
    assert after_mark([*first, *spin, *second]) == second


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
def test_a_union_covers_each_moment_once(spans: list[tuple[int, int]]) -> None:
    found = union([(float(a), float(a + n)) for a, n in spans])
    covered = {t for a, n in spans for t in range(a, a + n)}
    assert length(found) == len(covered)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


def test_a_run_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tyro")
    out = tmp_path / "results" / "smoke_parallel.json"
    words = [
        "--device",
        "cpu",
        "--repeats",
        "2",
        "--warmup",
        "1",
        "--pause",
        "0",
        "--lengths",
        "64",
        "--only",
        "1 GPU",
        "FSDP",
    ]
    assert bench(["gpu", "smoke_parallel", *words, "--out", str(out)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["environment"]["devices"] == 2
    assert set(result["rates"]["link"]) == {"seconds", "bytes_per_second"}
    assert min(result["rates"]["link"].values()) > 0
    one, fsdp = result["rows"]
    assert [row.get("processes") for row in result["rows"]] == [None, 2]
    assert (one["B"], fsdp["B"]) == (2, 4)
    assert fsdp["tokens_per_second"] == pytest.approx(4 * 64 / fsdp["seconds"])

    page = tmp_path / "docs" / "performance.md"
    assert bench(["report", "--results", str(out.parent), "--out", str(page)]) == 0
    ratio = fsdp["tokens_per_second"] / one["tokens_per_second"]
    assert "| tokens per second, times those of one GPU, by T | 64 |" in page.read_text()
    assert f"| tfla mLSTMexp, 2 GPUs, FSDP | {ratio:.2f} |" in page.read_text()


def run_fake(**options: Any) -> list[dict[str, Any]]:
    entry = Entry("together", "fakes:together", options, needs="torch", processes=2)
    problem = Problem(1, 4, 1, 2, 2, dtype="float32")
    suite = Suite("Fakes", "T", (4,), lambda T: replace(problem, T=T), (entry,), directions=(FORWARD,))
    return gpu.run(GpuBench("fakes", **QUICK), suite)["rows"]


def test_a_row_is_that_of_the_slowest_process() -> None:
    (row,) = run_fake()
    assert row["seconds"] >= 0.01
    assert row["allocated_bytes"] == 101
    assert row["samples"] == 2
    assert row["processes"] == 2


class _Recorder:
    """A pool of workers that keep the place of each job, and that something else could take its port meanwhile."""

    def __init__(self) -> None:
        self.places: list[dict[str, Any]] = []

    def of(self, name: str) -> _Recorder:
        return self

    def ask(self, job: dict[str, Any], limit: float) -> Iterator[dict[str, Any]]:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", job["place"]["port"]))
        self.places.append(job["place"])
        yield {}


def test_groups_meet_at_a_port_that_nothing_else_can_take() -> None:
    pool = _Recorder()
    for _ in range(2):
        assert len(list(worker_group.ask_together(pool, "fakes", 2, {}, 60.0))) == 1  # type: ignore[arg-type]
    first, second = (
        [p for p in pool.places if p["group"] == name] for name in sorted({p["group"] for p in pool.places})
    )
    assert [sorted(p["rank"] for p in places) for places in (first, second)] == [[0, 1], [0, 1]]
    assert len({p["port"] for p in pool.places}) == 1


@pytest.mark.parametrize(("fails", "how", "error"), [(1, "raises", "out of memory"), (0, "aborts", "SIGABRT")])
def test_a_failing_process_is_the_row_and_ends_the_others(
    fails: int, how: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "GRACE_SECONDS", 1.0)
    began = time.monotonic()
    (row,) = run_fake(fails=fails, how=how)
    assert error in row["error"]
    assert time.monotonic() - began < 60


def test_the_suites_are_those_of_the_1_4b() -> None:
    for name, lengths in (("train_parallel", {8192}), ("train_long", {32_768, 131_072, 524_288})):
        suite = SUITES[name]
        assert suite.directions == (STEP,)
        one, two = suite.entries
        assert one.options == {k: v for k, v in two.options.items() if k != "layout"}
        assert lengths <= {suite.problem(one, x, "meta").T for x in suite.xs}
        for x in suite.xs:
            a, b = (suite.problem(entry, x, "meta") for entry in suite.entries)
            config = ModelConfig.named("1.4B", a.H, "mlstm_exp")
            assert (a.H * a.dhv, a.dhv, a.dqk) == (config.d_model, config.head_dim, config.qk_head_dim)
            assert a.B * two.options["layout"].get("dp_shard", 1) == b.B
