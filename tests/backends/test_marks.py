"""The gradient of the forget gate starts again at marks: wherever they lie, results are the same."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from cases import Way, check, problem, solve, truth

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("chunk_size", [48, 80, 1000])
@pytest.mark.parametrize("lengths", [None, (64, 0, 90)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("form", "carried"),
    [pytest.param("exp", True, marks=pytest.mark.interpreter), ("exp", False), ("sigmoid", True), ("normalized", True)],
)
def test_any_place(
    way: Way, form: str, carried: bool, lengths: tuple[int, ...] | None, chunk_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In float32: they are kept in the inputs' dtype."""
    if (way.backend, way.kernel) != ("triton", "fused"):
        pytest.skip("has no marks")
    from tfla.backends.triton import marks

    monkeypatch.setattr(marks, "APART", {4: 32})
    p = problem(form, dtype=torch.float32, T=90, lengths=lengths, Hq=1, H=2, carried=carried)
    check(solve(p, way, chunk_size=chunk_size), truth(p), p.dtype)
