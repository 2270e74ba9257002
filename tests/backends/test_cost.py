"""The cost model chooses the kernel that was measured to be faster."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# dqk, dhv, and which kernel took less time, forward and backward, on an H200: fig4 and fig5 in benchmarks/results.
MEASURED = [(128, 256, "fused"), (256, 512, "tfla")]


@pytest.mark.parametrize(("dqk", "dhv", "faster"), MEASURED)
def test_as_measured(dqk: int, dhv: int, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfla.backends.gpu import config
    from tfla.backends.triton import kernel_choice

    monkeypatch.setattr(config, "architecture", lambda device: 90)
    kernel_choice.cheapest.cache_clear()
    try:
        assert kernel_choice.cheapest(dqk, dhv, 2, 256, torch.device("cpu")) == faster
    finally:
        kernel_choice.cheapest.cache_clear()


def test_large_chunks_are_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfla.backends.triton import kernel_choice

    costs = [kernel_choice.paper_cost(256, 512, 2, chunk_size) for chunk_size in (256, 1024, 65536)]
    assert costs == sorted(costs)
    assert kernel_choice.paper_cost(256, 512, 2, 16) > costs[0]  # states
