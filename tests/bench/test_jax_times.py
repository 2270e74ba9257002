"""The samples of `tfla.bench.jax_times`."""

from __future__ import annotations

import argparse

import pytest

from tfla.bench import jax_times


@pytest.mark.parametrize(("seconds", "calls", "total"), [(1e-3, 20, 20 + 6 * 100), (0.05, 20, 7 * 20)])
def test_samples_are_long_enough(seconds: float, calls: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls are repeated more often, and two runs come before those that count."""
    now, waited = [0.0], []
    monkeypatch.setattr(jax_times.time, "perf_counter", lambda: now[0])

    def call() -> float:
        now[0] += seconds
        return now[0]

    found = jax_times._samples(call, waited.append, 5, calls)
    assert found["seconds"] == pytest.approx(seconds)
    assert found["samples"] == 5
    assert len(waited) == 7
    assert now[0] == pytest.approx(total * seconds)


def test_cases() -> None:
    """Lengths and head dims are those of the mLSTM; the delta rule has one problem for each model."""
    options = argparse.Namespace(
        models=["mlstm", "gdn"], head_dims=["64x128"], forms=["exp"], lengths=[512, 1024],
        names=["JAX", "mlstm_kernels.jax"],
    )  # fmt: skip
    found = jax_times._cases(options)
    assert [(case.name, case.model, case.T) for case in found] == [
        ("JAX", "mlstm", 512), ("mlstm_kernels.jax", "mlstm", 512), ("JAX", "mlstm", 1024),
        ("mlstm_kernels.jax", "mlstm", 1024), ("JAX", "gdn", 8192),
    ]  # fmt: skip
    assert found[0].shapes[2] == (jax_times.TOKENS // 512, 512, 16, 128)


@pytest.mark.parametrize("model", ["mlstm", "gdn", "kda", "gla"])
def test_small_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model runs on the CPU, by XLA, and gives a row for each direction."""
    pytest.importorskip("jax")
    monkeypatch.setattr(jax_times, "TOKENS", 32)
    monkeypatch.setattr(jax_times, "SAMPLE", 1e-9)
    form = "exp" if model == "mlstm" else ""
    rows = jax_times._from_jax(jax_times.Case("JAX", model, form, 1, 8, 16, 16), 1, 1, None, "chunkwise")
    assert [row["direction"] for row in rows] == list(jax_times.DIRECTIONS)
    assert all(row["seconds"] > 0 for row in rows)
