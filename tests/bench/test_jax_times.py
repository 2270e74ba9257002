"""The samples of `tfla.bench.jax_times`."""

from __future__ import annotations

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
