"""The benchmark of mixers times each of them as a layer and by steps, and docs/models.md shows its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from addresses import Addresses
from torch.utils._pytree import tree_leaves

from tfla.bench import mixers, page_tables, replay, stored, worker
from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH, FORWARD, Problem
from tfla.nn import KeyValues
from tfla.nn.config import Mixer
from tfla.nn.mixers import MIXERS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SMALL: dict[str, Any] = {"d_model": 32, "num_heads": 2, "mamba_head_dim": 16, "mamba_state_dim": 16}
PROBLEM = {"B": 2, "T": 12, "H": 1, "dqk": 1, "dhv": 1, "dtype": "float32", "device": "cpu"}


def timed(call: str, mixer: str, *directions: str) -> list[dict[str, Any]]:
    """Return the rows of a mixer's call, of its forward where nothing else is named."""
    rows: list[dict[str, Any]] = []
    job = {
        "kind": "time", "make": f"tfla.bench.mixers:{call}", "directions": directions or [FORWARD], "problem": PROBLEM,
        "options": {"mixer": mixer, **SMALL}, "only_compile": False, "sustained": False, "host": False,
        "sampling": {"repeats": 1, "warmup": 1, "pause": 0},
    }  # fmt: skip
    worker.serve(job, rows.append)
    assert rows.pop() == {"done": True}
    return rows


@pytest.mark.parametrize("call", ["layer", "step"])
@pytest.mark.parametrize("mixer", get_args(Mixer))
def test_each_is_timed(mixer: str, call: str) -> None:
    directions = [FORWARD, BOTH] if call == "layer" else [FORWARD]
    rows = timed(call, mixer, *directions)
    assert [row["direction"] for row in rows] == directions
    assert all(row.get("seconds", 0) > 0 for row in rows), rows


def test_a_step_of_attention_reads_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached token with the value 0 in place of another changes the output; a repeated step does not."""
    kept: list[KeyValues] = []
    reserve = KeyValues.reserve

    def kept_reserve(self: KeyValues, capacity: int) -> KeyValues:
        kept.append(reserve(self, capacity))
        return kept[-1]

    monkeypatch.setattr(KeyValues, "reserve", kept_reserve)
    work = mixers.step(Problem(**PROBLEM), "attention", **SMALL)
    first = work.run(*work.inputs)
    assert torch.equal(work.run(*work.inputs), first)
    kept[0].v[:, 3] = 0
    assert not torch.equal(work.run(*work.inputs), first)


@pytest.mark.parametrize("mixer", ["mlstm_exp", "kda", "mamba2", "attention"])  # each kind of state
def test_what_a_graph_reads_outlives_its_capture(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's weights and state are there at each replay, as long as the benchmark holds its work."""
    step, read = MIXERS[mixer].step, list[torch.Tensor]()

    def observed(self: torch.nn.Module, x: torch.Tensor, state: Any, **options: Any) -> Any:
        read.extend([x, *self.parameters(), *(t for t in tree_leaves(state) if t is not None)])
        return step(self, x, state, **options)

    def capture_graph(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[Addresses, torch.Tensor]:
        result = call()
        graph = Addresses(read)
        read.clear()
        return graph, result

    monkeypatch.setattr(MIXERS[mixer], "step", observed)
    monkeypatch.setattr(replay, "capture_graph", capture_graph)
    work = mixers.step(Problem(**PROBLEM | {"device": "cpu:0"}), mixer, **SMALL)  # a device that is not named "cpu"
    assert work.run(*work.inputs).shape == (2, 32)
    work.inputs.clear()
    assert work.run(torch.zeros(2, 32)).shape == (2, 32)


def test_a_call_that_fails_after_its_timing_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails when its memory is measured is a row with its error, and not with what came before."""

    def fails(*_: Any) -> int:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(worker, "peak_bytes", fails)
    assert timed("step", "mlstm_exp") == [{"direction": FORWARD, "error": "RuntimeError: an illegal memory access"}]


def test_layers_have_the_sizes_that_the_page_names() -> None:
    """Keys have 128 channels in each head, but for Mamba-2 it is its state; parameters are counted by hand."""
    assert set(mixers.HEADS) == set(get_args(Mixer))
    for name in mixers.HEADS:
        assert mixers.config_of(name).qk_head_dim == 128
    with torch.device("meta"):
        built, config = mixers.build(Problem(**PROBLEM | {"device": "meta"}), "attention")
        assert mixers._facts(built, config) == {"parameters": 4 * 2048 * 2048, "heads": "16 of 128 × 128"}
        built, config = mixers.build(Problem(**PROBLEM | {"device": "meta"}), "mamba2")
        assert mixers._facts(built, config)["heads"] == "64 of 128 × 64"
    for name in ("mixers", "mixers_decode"):
        assert [entry.options["mixer"] for entry in SUITES[name].entries] == list(get_args(Mixer))


def test_the_page_has_the_table_of_the_stored_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_tables.renew(text, stored.load(PAGE.parents[1] / "benchmarks" / "results")) == text
    facts = {"heads": "2 of 3 × 4", "parameters": 12_345_678}
    result = {
        "environment": {"device": "a device", "date": "2026-01-01"},
        "rows": [
            {"name": "tfla kda", "x": 8192, "direction": d, "seconds": s, **facts}
            for d, s in ((FORWARD, 0.001), (BOTH, 0.0035))
        ],
    }
    steps = {**result, "rows": [{"name": "tfla kda", "x": 64, "direction": FORWARD, "seconds": 2.5e-5, **facts}]}
    table = page_tables.mixers({"mixers": result, "mixers_decode": steps})
    assert table.startswith("| a device, 2026-01-01 | heads |")
    assert "| `kda` | 2 of 3 × 4 | 12.3 | 1.000 | 3.500 | not run | 25 |" in table
    assert "| `attention` | 16 of 128 × 128 | 16.8 | not run | not run | not run | not run |" in table
    assert "| `gated_delta_net` | 16 of 128 × 256 | " in table
