"""The chunk size is a knob for memory: results do not depend on it."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, Way, check, problem, solve, truth


@pytest.mark.parametrize("chunk_size", [1, 3, 64, pytest.param(100, marks=pytest.mark.interpreter), 1000])
@pytest.mark.parametrize("lengths", [None, (0, 70, 1, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_any_chunk_size(way: Way, form: str, lengths: tuple[int, ...] | None, chunk_size: int) -> None:
    p = problem(form, dtype=way.widest, T=131, lengths=lengths, Hq=1, H=2)
    check(solve(p, way, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_small_chunks_in_bfloat16(way: Way, chunk_size: int) -> None:
    """States pass from chunk to chunk unrounded."""
    p = problem(dtype=torch.bfloat16, T=131)
    check(solve(p, way, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("lengths", [None, (0, 70, 1, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("form", "carried"), [pytest.param("exp", True, marks=pytest.mark.interpreter), ("exp", False), ("sigmoid", True)]
)
def test_chunk_size_picked_at_the_call(
    way: Way, form: str, carried: bool, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As traced graphs have it: no state is stored, the backward makes those of its segments again."""
    if way.backend not in ("triton", "hopper") or way.kernel != "fused":
        pytest.skip("has no segments picked by length")
    from tfla.backends import triton
    from tfla.backends.triton import launch

    picked = []
    monkeypatch.setattr(launch, "best_chunk_size", lambda x, kind: picked.append(kind) or 64)
    p = problem(form, dtype=way.widest, T=131, lengths=lengths, Hq=1, H=2, carried=carried)
    check(solve(p, way, chunk_size=triton.LATER), truth(p), p.dtype)
    assert len(picked) == 2  # forward and backward
