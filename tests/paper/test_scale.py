"""`tfla analyze scale`: the model of the cost on many GPUs, and the measurements that it reads."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tfla.bench.suites import SUITES
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.paper.scale import measured
from tfla.paper.scale.costs import Cluster, Layout, Link, Work, best_layout, step_cost

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CLUSTER = Cluster("GPU", 3e14, 3e12, 80 * 2**30, Link(1e-5, 4e11), Link(2e-5, 5e10))
SMALL = ModelConfig(d_model=128, num_blocks=2, num_heads=2, vocab_size=512)
PAPERS = ModelConfig.named("1.4B")


def test_an_all_gather_is_as_slow_as_the_slowest_link() -> None:
    assert CLUSTER.all_gather_seconds(1e9, 1) == 0
    assert CLUSTER.all_gather_seconds(4e11, 8) == pytest.approx(3e-5 + 7 / 8)
    # 16 GPUs of two nodes: the eight links between them carry 4e11 together.
    assert CLUSTER.all_gather_seconds(4e11, 16) == pytest.approx(5e-5 + 15 / 16)
    # One GPU of each node, as data parallelism has them beside tensor parallelism over 8.
    assert CLUSTER.all_gather_seconds(5e10, 4, stride=8) == pytest.approx(4e-5 + 3 / 4)
    assert CLUSTER.all_gather_seconds(0, 2, stride=4) == pytest.approx(1e-5)


def test_flops_are_those_that_pytorch_counts() -> None:
    model, ids = LanguageModel(SMALL), torch.zeros(2, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model.losses(ids, ids).mean()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    (block, block_backward), (logits, logits_backward) = Work(SMALL, 256, 2).flops()
    assert 512 * (2 * block + logits) == pytest.approx(forward.get_total_flops(), rel=0.03)
    assert 512 * (2 * block_backward + logits_backward) == pytest.approx(backward.get_total_flops(), rel=0.03)


def test_one_gpu_computes_and_sends_nothing() -> None:
    work = Work(PAPERS, 8192, 4)
    cost = step_cost(work, Layout(), CLUSTER)
    assert (cost.fsdp, cost.cp, cost.tp) == (0, 0, 0)
    again = step_cost(work, Layout(checkpointing=True), CLUSTER)
    assert 1.25 < again.compute / cost.compute < 4 / 3
    assert again.memory < 0.5 * cost.memory


def test_what_is_sent_grows_as_the_page_says() -> None:
    def cost(T: int, sequences: int, **sizes: int) -> Any:
        return step_cost(Work(PAPERS, T, sequences), Layout(**sizes), CLUSTER)

    # States have one size whatever the length, and there are as many as sequences.
    assert cost(2**17, 1, cp=8).cp == cost(2**20, 1, cp=8).cp
    # The exponential gate has two collectives in each direction.
    sent = 8 * (2 * 8 + 4 * (128 * 257 + 3) + 4 * (128 * 256 + 3) + 4 * (128 + 3))
    for sequences in (1, 4):
        expected = 24 * (4 * 3e-5 + 7 * sequences * sent / 4e11)
        assert cost(2**17, sequences, cp=8).cp == pytest.approx(expected)
    sigmoid = step_cost(Work(replace(PAPERS, mixer="mlstm_sig"), 2**17, 1), Layout(cp=8), CLUSTER)
    assert sigmoid.cp == pytest.approx(24 * 2 * (3e-5 + 7 * 8 * 4 * (128 * 256 + 2) / 4e11))
    # Weights arrive while a block computes, unless there is little of it.
    assert cost(8192, 64, dp_shard=8).fsdp < 0.02 * cost(8192, 64, dp_shard=8).compute
    assert cost(64, 8, dp_shard=8).fsdp > cost(64, 8, dp_shard=8).compute
    assert cost(8192, 8, tp=8).tp > 0
    # Passes send as often.
    assert cost(8192, 64, dp_shard=8, passes=4).fsdp > 3 * cost(8192, 64, dp_shard=8).fsdp


@given(
    model=st.sampled_from([PAPERS, ModelConfig.named("7B")]),
    length=st.integers(10, 24),
    more=st.integers(0, 6),
    gpus=st.integers(0, 10),
)
def test_the_best_layout_fits_and_is_no_faster_than_its_computation(
    model: ModelConfig, length: int, more: int, gpus: int
) -> None:
    work = Work(model, 2**length, 2**more)
    found = best_layout(work, 2**gpus, CLUSTER)
    if found is None:
        dp = min(2**gpus, work.sequences)
        smallest = Layout(dp, 2**gpus // dp, passes=work.sequences // dp, checkpointing=True)
        too_much = step_cost(work, smallest, CLUSTER).memory > 0.9 * CLUSTER.memory_bytes
        assert too_much or smallest.cp > work.T // 64
        return
    layout, cost = found
    assert layout.gpus == 2**gpus
    assert work.sequences % (layout.dp_shard * layout.passes) == 0
    assert cost.memory <= 0.9 * CLUSTER.memory_bytes
    one = step_cost(work, Layout(), replace(CLUSTER, memory_bytes=2**60))
    assert cost.seconds >= 0.999 * one.compute / 2**gpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the training steps of one GPU."""
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(RESULTS / "train.json", results)
    return results


def fake(folder: Path, suite: str, rows: list[dict[str, Any]]) -> None:
    """Write a result of two GPUs."""
    result = json.loads((RESULTS / "train.json").read_text())
    result |= {"suite": suite, "axis": "T", "rows": rows}
    result["rates"]["link"] = {"seconds": 3e-5, "bytes_per_second": 2e11}
    (folder / f"{suite}.json").write_text(json.dumps(result))


def timed(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    row = {"name": name, "x": 2, "direction": "training step", "seconds": seconds, "samples": 5}
    return row | {"B": 2, "T": 8192, "H": 8, "dqk": 128, "dhv": 256, **more}


def test_the_rate_is_that_of_the_largest_measured_step(folder: Path) -> None:
    found = measured.read(folder)
    assert "batch 5" in found.source
    assert [p.expected.seconds / p.seconds for p in found.points if p.work.sequences == 5] == [pytest.approx(1)]
    assert all(0.9 < p.expected.seconds / p.seconds < 1.1 for p in found.points)
    assert found.cluster.inside == measured.NVLINK
    assert measured.read(folder, Link(0.0, 1e9)).cluster.inside == Link(0.0, 1e9)


def test_measured_steps_of_two_gpus_are_points_and_set_the_link(folder: Path, tmp_path: Path) -> None:
    two = timed("tfla mLSTMexp, 2 GPUs, FSDP", 0.5, B=4, processes=2, allocated_bytes=50 * 2**30)
    fake(folder, "train_parallel", [timed("tfla mLSTMexp, 1 GPU", 0.45), two])
    long = [timed("tfla mLSTMexp, 1 GPU", 1.0, x=2**17, B=1, T=2**17), {"name": "tfla mLSTMexp, 1 GPU", "error": "x"}]
    fake(folder, "train_long", long)
    found = measured.read(folder)
    assert found.source.startswith("tfla mLSTMexp, 1 GPU, T 8,192, batch 2")
    assert found.cluster.inside == Link(3e-5, 2e11)
    by_name = {(p.name, p.work.T): p for p in found.points}
    point = by_name["tfla mLSTMexp, 2 GPUs, FSDP", 8192]
    assert (point.gpus, point.layout, point.memory) == (2, Layout(dp_shard=2), 50 * 2**30)
    assert 0.42 < point.expected.seconds < 0.46  # half of AdamW, and what FSDP sends first and last
    assert by_name["tfla mLSTMexp, 1 GPU", 2**17].layout == Layout(checkpointing=True)
    page = tmp_path / "docs" / "scale.md"
    assert not main(["analyze", "scale", "--results", str(folder), "--out", str(tmp_path / "a"), "--page", str(page)])
    assert "| tfla mLSTMexp, 2 GPUs, FSDP | 8,192 × 4 | dp_shard 2 | 0.500 |" in page.read_text()
    assert "| link in a node | 30 µs, 200 GB/s | an all_gather of two GPUs, measured |" in page.read_text()
    assert (page.parent / "img" / "scale.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "a" / "scale.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "measured"]
    assert [row["seconds"] for row in rows if row["GPUs"] == "2"] == ["0.5"]


def test_the_operator_alone_is_compared_with_its_share_and_one_exchange() -> None:
    rows = [
        timed(name, seconds, direction=direction, x=2**16, B=1, T=2**16, H=16, **more)
        for direction, times in (("forward", (1e-3, 6e-4)), ("forward + backward", (3e-3, 2e-3)))
        for name, seconds, more in (
            ("tfla mLSTMsig, 1 GPU", times[0], {}),
            ("tfla mLSTMsig, 2 GPUs", times[1], {"processes": 2}),
            ("tfla mLSTMsig, 2 GPUs, all-to-all over heads", times[1], {"processes": 2}),
        )
    ]
    forward, both = measured._exchanges({"rows": rows}, CLUSTER)
    assert (forward.gpus, forward.one, forward.several) == (2, 1e-3, 6e-4)
    exchange = 1e-5 + 4 * 16 * (128 * 256 + 2) / 4e11
    assert forward.expected == pytest.approx(5e-4 + exchange)
    assert both.expected == pytest.approx(1.5e-3 + 2 * exchange)
    exp = [row | {"name": row["name"].replace("sig", "exp")} for row in rows]
    forward, both = measured._exchanges({"rows": exp}, CLUSTER)
    states = 2e-5 + 16 * (2 * 8 + 4 * (128 * 257 + 3)) / 4e11
    assert forward.expected == pytest.approx(5e-4 + states)
    assert both.expected == pytest.approx(1.5e-3 + states + 2e-5 + 4 * 16 * (128 * 257 + 6) / 4e11)
    assert measured._exchanges(None, CLUSTER) == []


def test_the_page_shows_the_operator_alone(folder: Path, tmp_path: Path) -> None:
    entries = SUITES["context_parallel"].entries
    one, two = (next(e for e in entries if e.processes == n and e.name.startswith("tfla mLSTMsig")) for n in (1, 2))
    sizes = {"direction": "forward", "x": 2**16, "B": 1, "T": 2**16, "H": 16}
    rows = [timed(one.name, 1e-3, **sizes), timed(two.name, 6e-4, **sizes, processes=2)]
    fake(folder, "context_parallel", rows)
    page = tmp_path / "scale.md"
    assert not main(["analyze", "scale", "--results", str(folder), "--out", str(tmp_path / "a"), "--page", str(page)])
    assert "| tfla mLSTMsig | 65,536 | forward | 2 | 1.00 | 0.60 | 1.67 | 0.5" in page.read_text()


def test_without_a_measured_step_it_says_what_measures_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    assert main(["analyze", "scale", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "a")]) == 1
    assert "tfla bench gpu train --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens: got 0, expected at least 1"),
        (["--between-bandwidth", "0"], "between_bandwidth: got 0.0"),
        (["--inside-seconds", "1e-5"], "inside_seconds, inside_bandwidth: got one of them"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    words = ["analyze", "scale", "--results", str(folder), "--out", str(tmp_path / "a"), *options]
    assert main(words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
