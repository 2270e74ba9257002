"""A backward that computes batch rows one slice after the other has the bits of one that computes them at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import delta_problem
from test_hopper_delta import DTYPE, on_hopper, simulation, solve  # noqa: F401

from tfla._util import caching

batch_slices = pytest.importorskip("tfla.backends.gpu.batch_slices")
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper

PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "KDA": ("kda", {"T": 65}),
    "GLA": ("gla", {"T": 65, "V": 64}),
}


@pytest.mark.parametrize(("model", "sizes"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_same_bits_in_slices(model: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call replays the launches of the slices."""
    p = delta_problem(model, **{"B": 2, "H": 1, "Hq": 1, "K": 128, "V": 128, **sizes}, dtype=DTYPE)
    whole = solve(p, True)
    caching.clear_caches()
    rows: list[tuple[int, int]] = []

    class Slice(batch_slices.BatchSlice):  # type: ignore[misc, name-defined]
        def __init__(self, ctx: Any, start: int, stop: int) -> None:
            super().__init__(ctx, start, stop)
            rows.append((start, stop))

    monkeypatch.setattr(batch_slices, "SMALLEST", 0)
    monkeypatch.setattr(batch_slices, "processors", lambda device: 1)
    monkeypatch.setattr("tfla.backends.triton.channel_rule.BatchSlice", Slice)
    for _ in range(2):
        found = solve(p, True)
        assert all(torch.equal(x, found[name]) for name, x in whole.items())
    assert rows == [(0, 1), (1, 2)]
    caching.clear_caches()


class FakeContext:
    """What `batch_slices` reads of a context."""

    packed = False

    def __init__(self, B: int, H: int, one_pointer_each: bool = False) -> None:
        self.B, self.H = B, H
        self.x = self.recorder = self
        self.q = torch.zeros(0)
        self.one_pointer_each = one_pointer_each


def test_slices_take_no_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_slices, "processors", lambda device: 132)
    large = batch_slices.SMALLEST

    def sizes(B: int, H: int, shared_by: int, nbytes: int = large, plan: bool = False) -> list[int]:
        slices = batch_slices.batch_slices(FakeContext(B, H, plan), shared_by, nbytes)
        assert slices[0][0] == 0
        assert slices[-1][1] == B
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(slices))
        return [stop - start for start, stop in slices]

    assert sizes(8, 32, 1) == [2] * 4
    assert sizes(8, 8, 4) == [2] * 4
    assert sizes(16, 32, 1) == [2] * 8
    assert sizes(8, 16, 1) == [4, 4]
    assert sizes(5, 32, 1) == [2, 2, 1]
    assert sizes(1, 256, 1) == [1]
    assert sizes(3, 100, 1) == [3]  # 300 take 5 rounds, 100 take 2
    assert sizes(8, 32, 1, large - 1) == sizes(8, 32, 1, plan=True) == [8]
